"""Double Q-learning with prioritised replay: a boat crosses a river with a current that changes."""

import random
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 15,
    "truth": "The replay buffer collects the priorities of all its transitions from Python objects into an array, each time that it draws a batch: 49% of the loop's time.",
    "cause": "host-python",
    "also": ["data-loading"],
    "never": ["evaluation", "logging", "checkpoint-writing", "start-up", "duplicate-forward", "no-update", "padding"],
    "healthy": False,
    "place": [
        "weights = np.array([t.priority for t in self.memory])",
        "def sample(self, count):",
        "picked, old, action, reward, new = replay.sample(batch)",
    ],
    "share": 49,
    "remedy": "keep the priorities in one array, or in a sum tree, and change only the entries of the batch",
    "without": [
        ["        self.memory = []\n", "        self.memory, self.priorities = [], np.ones(size)\n"],
        [
            "        weights = np.array([t.priority for t in self.memory])\n",
            "        weights = self.priorities[: len(self.memory)]\n",
        ],
        [
            "            self.memory[index].priority = abs(error) + 1e-2\n",
            "            self.priorities[index] = abs(error) + 1e-2\n",
        ],
        [
            "            self.memory[random.randrange(self.size)] = transition\n",
            "            index = random.randrange(self.size)\n"
            "            self.memory[index] = transition\n"
            "            self.priorities[index] = 1.0\n",
        ],
    ],
}


@dataclass
class Transition:
    old: np.ndarray
    action: int
    reward: float
    new: np.ndarray
    priority: float = 1.0


class PrioritizedReplay:
    def __init__(self, size=60000):
        self.size = size
        self.memory = []

    def add(self, transition):
        if len(self.memory) < self.size:
            self.memory.append(transition)
        else:
            self.memory[random.randrange(self.size)] = transition

    def sample(self, count):
        weights = np.array([t.priority for t in self.memory])
        picked = np.random.choice(len(self.memory), count, p=weights / weights.sum())
        chosen = [self.memory[i] for i in picked]
        old = torch.from_numpy(np.stack([t.old for t in chosen]))
        new = torch.from_numpy(np.stack([t.new for t in chosen]))
        action = torch.tensor([t.action for t in chosen])
        reward = torch.tensor([t.reward for t in chosen])
        return picked, old, action, reward, new

    def update(self, picked, errors):
        for index, error in zip(picked, errors, strict=True):
            self.memory[index].priority = abs(error) + 1e-2


def cross(boats, actions):
    """Move the boats; each has a position, a speed, the current and the width that is left."""
    new = boats.copy()
    new[:, 1] = 0.9 * boats[:, 1] + 0.1 * (actions - 1) + 0.05 * boats[:, 2]
    new[:, 0] = boats[:, 0] + new[:, 1]
    new[:, 2] = (boats[:, 2] + 0.1 * np.random.randn(len(boats))).clip(-1, 1)
    new[:, 3] = np.where(boats[:, 3] < 0.05, 1.0, boats[:, 3] - 0.04)
    return new.astype(np.float32), (-np.abs(new[:, 0]) - 0.01 * (actions != 1)).clip(-3).tolist()


def network(width=256):
    layers = [nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)]
    return nn.Sequential(*layers)


def main(steps=300, batch=192, discount=0.97):
    torch.manual_seed(8), np.random.seed(8), random.seed(8)
    replay, online, target = PrioritizedReplay(), network(), network().requires_grad_(False)
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
    boats = np.random.uniform(-1, 1, (500, 4)).astype(np.float32)
    for _ in range(120):
        actions = np.random.randint(0, 3, len(boats))
        new, rewards = cross(boats, actions)
        for entry in zip(boats, actions.tolist(), rewards, new, strict=True):
            replay.add(Transition(*entry))
        boats = new
    boats = boats[:8]
    for step in range(steps):
        with torch.no_grad():
            actions = online(torch.from_numpy(boats)).argmax(1).numpy()
        actions = np.where(np.random.rand(8) < 0.1, np.random.randint(0, 3, 8), actions)
        moved, rewards = cross(boats, actions)
        for entry in zip(boats, actions.tolist(), rewards, moved, strict=True):
            replay.add(Transition(*entry))
        boats = moved
        picked, old, action, reward, new = replay.sample(batch)
        with torch.no_grad():
            best = online(new).argmax(1, keepdim=True)
            goal = reward + discount * target(new).gather(1, best).squeeze(1)
        guess = online(old).gather(1, action[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(guess, goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        replay.update(picked, (goal - guess.detach()).tolist())
        if step % 50 == 49:
            target.load_state_dict(online.state_dict())
            print(f"step {step + 1}: loss {loss.item():.4f}, mean reward {sum(rewards) / 8:.3f}")


if __name__ == "__main__":
    main()
