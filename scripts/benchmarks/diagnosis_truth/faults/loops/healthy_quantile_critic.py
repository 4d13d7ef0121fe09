"""Distributional Q-learning of when to sell from a store of energy: the critic gives quantiles of the return."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 11,
    "truth": "Quantile regression pairs each predicted quantile with each target quantile on purpose; the target network is copied every 20 steps as it should be, and products of the two networks take most of the time.",
    "cause": None,
    "also": ["unfused-optimizer"],
    "never": [
        "broadcast-loss",
        "duplicate-forward",
        "periodic-pause",
        "unused-gradients",
        "growth",
        "no-update",
        "data-loading",
    ],
    "healthy": True,
}


class Critic(nn.Module):
    def __init__(self, state=8, actions=3, quantiles=24, width=224):
        super().__init__()
        self.shape = actions, quantiles
        self.net = nn.Sequential(
            nn.Linear(state, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, actions * quantiles),
        )  # fmt: skip

    def forward(self, state):
        return self.net(state).view(-1, *self.shape)


class Store:
    """Price wanders around a daily rhythm; one may charge, wait or sell."""

    def __init__(self, count):
        self.price, self.level = torch.ones(count), torch.rand(count)
        self.hour = torch.randint(24, (count,)).float()

    def observe(self):
        angle = self.hour * (2 * torch.pi / 24)
        wave = [torch.sin(angle), torch.cos(angle), torch.sin(2 * angle), torch.cos(2 * angle)]
        return torch.stack([self.price, self.level, self.price * self.level, self.level**2, *wave], 1)

    def act(self, action):
        change = torch.minimum(torch.maximum((1 - action.float()) * 0.2, -self.level), 1 - self.level)
        reward = -change * self.price - 0.02 * change.abs()
        self.level = self.level + change
        self.hour = (self.hour + 1) % 24
        usual = 1 + 0.5 * torch.sin(self.hour * (2 * torch.pi / 24))
        self.price = self.price + 0.3 * (usual - self.price) + 0.1 * torch.randn_like(self.price)
        return reward


class Memory:
    def __init__(self, size=8192, state=8):
        self.size, self.filled, self.at = size, 0, 0
        self.old, self.new = torch.zeros(size, state), torch.zeros(size, state)
        self.action, self.reward = torch.zeros(size, dtype=torch.long), torch.zeros(size)

    def add(self, old, action, reward, new):
        where = (self.at + torch.arange(len(old))) % self.size
        self.old[where], self.action[where], self.reward[where], self.new[where] = old, action, reward, new
        self.at = (self.at + len(old)) % self.size
        self.filled = min(self.filled + len(old), self.size)

    def draw(self, count):
        pick = torch.randint(self.filled, (count,))
        return self.old[pick], self.action[pick], self.reward[pick], self.new[pick]


def quantile_loss(guess, target):
    count = guess.shape[1]
    level = (torch.arange(count) + 0.5) / count
    error = target[:, None, :] - guess[:, :, None]
    huber = F.smooth_l1_loss(guess[:, :, None].expand_as(error), target[:, None, :].expand_as(error), reduction="none")
    return ((level[None, :, None] - (error.detach() < 0).float()).abs() * huber).mean(2).sum(1).mean()


def learn(steps=400, batch=128, discount=0.95):
    store, memory = Store(32), Memory()
    critic, delayed = Critic(), Critic().requires_grad_(False)
    delayed.load_state_dict(critic.state_dict())
    optimizer = torch.optim.Adam(critic.parameters(), lr=5e-4)
    earned = 0.0
    for step in range(1, steps + 1):
        with torch.no_grad():
            state = store.observe()
            greedy = critic(state).mean(2).argmax(1)
            action = torch.where(torch.rand(32) < max(0.1, 1 - step / 200), torch.randint(3, (32,)), greedy)
            reward = store.act(action)
            memory.add(state, action, reward, store.observe())
            earned += reward.mean().item()
        old, action, reward, new = memory.draw(batch)
        with torch.no_grad():
            ahead = delayed(new)
            best = ahead.mean(2).argmax(1)
            target = reward[:, None] + discount * ahead[torch.arange(batch), best]
        loss = quantile_loss(critic(old)[torch.arange(batch), action], target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            delayed.load_state_dict(critic.state_dict())
        if step % 80 == 0:
            print(f"step {step}: loss {loss.item():.4f}, earned per hour {earned / 80:.4f}")
            earned = 0.0


if __name__ == "__main__":
    torch.manual_seed(33)
    learn()
