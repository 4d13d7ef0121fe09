"""Deep Q-learning of a vectorised cart with a frozen copy of the network for the targets."""

import copy
from collections import namedtuple
from dataclasses import dataclass

import torch
from torch import nn

CASE = {
    "generation": 5,
    "truth": "The targets are computed with gradients, so that each backward also goes through the frozen copy, whose gradients nobody uses.",
    "cause": "unused-gradients",
    "also": ["gradients-not-cleared"],
    "never": ["start-up", "data-loading", "evaluation", "growth", "periodic-pause", "small-operators", "logging"],
    "healthy": False,
    "place": [
        "self.frozen(batch.after)",
        "best = ",
        "target = ",
        "loss.backward()",
    ],
    "share": 24,
    "remedy": "compute the targets under torch.no_grad(), and let the copy need no gradients",
    "without": [
        [
            "        best = self.frozen(batch.after).max(dim=1).values\n",
            "        with torch.no_grad():\n            best = self.frozen(batch.after).max(dim=1).values\n",
        ]
    ],
}

Transition = namedtuple("Transition", "state action reward after done")


@dataclass(frozen=True)
class Settings:
    carts: int = 16
    capacity: int = 20_000
    batch: int = 384
    width: int = 384
    gamma: float = 0.99
    lr: float = 2.5e-4
    sync_every: int = 100
    frames: int = 300
    epsilon: float = 0.2


class Carts:
    """Carts on a hilly road, which must reach its end."""

    def __init__(self, count):
        self.count = count
        self.state = self.fresh()

    def fresh(self):
        return torch.stack([-0.5 + 0.1 * torch.randn(self.count), torch.zeros(self.count)], 1)

    def observe(self):
        place, speed = self.state.unbind(1)
        return torch.stack([place, 10 * speed, torch.sin(3 * place), torch.cos(3 * place)], 1)

    def step(self, action):
        place, speed = self.state.unbind(1)
        speed = (speed + 0.001 * (action - 1) - 0.0025 * torch.cos(3 * place)).clamp(-0.07, 0.07)
        place = (place + speed).clamp(-1.2, 0.6)
        done = place >= 0.5
        self.state = torch.where(done[:, None], self.fresh(), torch.stack([place, speed], 1))
        return done.float() + 10 * speed.abs(), done.float()


class Memory:
    def __init__(self, capacity):
        self.fields = Transition(*(torch.zeros(capacity, n).squeeze(-1) for n in (4, 1, 1, 4, 1)))
        self.at, self.capacity, self.full = 0, capacity, False

    def push(self, transition):
        count = len(transition.state)
        index = (self.at + torch.arange(count)) % self.capacity
        for field, value in zip(self.fields, transition):
            field[index] = value.to(field.dtype)
        self.full |= self.at + count >= self.capacity
        self.at = (self.at + count) % self.capacity

    def draw(self, count):
        index = torch.randint(self.capacity if self.full else self.at, (count,))
        return Transition(*(field[index] for field in self.fields))


class Agent:
    def __init__(self, settings):
        self.settings = s = settings
        self.online = nn.Sequential(
            nn.Linear(4, s.width), nn.ReLU(), nn.Linear(s.width, s.width), nn.ReLU(),
            nn.Linear(s.width, s.width), nn.ReLU(), nn.Linear(s.width, 3),
        )  # fmt: skip
        self.frozen = copy.deepcopy(self.online)
        self.optimizer = torch.optim.RMSprop(self.online.parameters(), lr=s.lr, alpha=0.95, eps=1e-2)
        self.criterion = nn.HuberLoss()
        self.updates = 0

    @torch.no_grad()
    def act(self, observation):
        greedy = self.online(observation).argmax(1)
        explore = torch.rand(len(greedy)) < self.settings.epsilon
        return torch.where(explore, torch.randint_like(greedy, 3), greedy)

    def update(self, batch):
        value = self.online(batch.state).gather(1, batch.action.long()[:, None]).squeeze(1)
        best = self.frozen(batch.after).max(dim=1).values
        target = batch.reward + self.settings.gamma * best * (1 - batch.done)
        loss = self.criterion(value, target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.updates += 1
        if self.updates % self.settings.sync_every == 0:
            self.frozen.load_state_dict(self.online.state_dict())
        return loss


def main(settings=Settings()):
    torch.manual_seed(9)
    carts, memory, agent = Carts(settings.carts), Memory(settings.capacity), Agent(settings)
    for frame in range(settings.frames + 64):
        before = carts.observe()
        action = agent.act(before)
        reward, done = carts.step(action)
        memory.push(Transition(before, action, reward, carts.observe(), done))
        if frame >= 64:
            loss = agent.update(memory.draw(settings.batch))
            if frame % 60 == 0:
                print(f"frame {frame}: loss {loss.item():.4f}, reward {reward.mean().item():.3f}")


if __name__ == "__main__":
    main()
