"""REINFORCE on a pole that has to be kept upright, thirty-two of which are simulated side by side in NumPy."""

import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical

CASE = {
    "generation": 13,
    "truth": "The discounted return of each moment is a sum over all rewards after it, in two nested Python loops with a power for each: 20,000 terms an episode, where one loop from behind would do.",
    "cause": "host-python",
    "also": ["small-operators"],
    "never": ["data-loading", "growth", "start-up", "logging", "evaluation", "checkpoint-writing"],
    "healthy": False,
    "place": [
        "G += gamma ** (k - t) * rewards[k]",
        "returns = discounted(rewards, gamma)",
        "for k in range(t, len(rewards)):",
    ],
    "remedy": "add up from behind: G = r + gamma * G",
    "without": [
        [
            "    for t in range(len(rewards)):\n        G = np.zeros(rewards.shape[1])\n        for k in range(t, len(rewards)):\n            G += gamma ** (k - t) * rewards[k]\n        returns.append(G)\n    return np.stack(returns)\n",
            "    G = np.zeros(rewards.shape[1])\n    for r in rewards[::-1]:\n        G = r + gamma * G\n        returns.append(G)\n    return np.stack(returns[::-1])\n",
        ]
    ],
}


class Poles:
    """Pole on a cart with the usual constants; a fallen pole begins anew."""

    def __init__(self, count, rng):
        self.rng, self.count = rng, count
        self.state = self.rng.uniform(-0.05, 0.05, (count, 4))

    def step(self, action):
        x, v, angle, turn = self.state.T
        force = np.where(action == 1, 10.0, -10.0)
        push = (force + 0.05 * turn**2 * np.sin(angle)) / 1.1
        spin = (9.8 * np.sin(angle) - np.cos(angle) * push) / (0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1))
        drive = push - 0.05 * spin * np.cos(angle) / 1.1
        self.state = np.stack([x + 0.02 * v, v + 0.02 * drive, angle + 0.02 * turn, turn + 0.02 * spin], 1)
        fallen = (np.abs(self.state[:, 2]) > 0.21) | (np.abs(self.state[:, 0]) > 2.4)
        self.state[fallen] = self.rng.uniform(-0.05, 0.05, (fallen.sum(), 4))
        return self.state, np.where(fallen, -10.0, 1.0)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 256)
        self.affine2 = nn.Linear(256, 256)
        self.action = nn.Linear(256, 2)

    def forward(self, x):
        return self.action(torch.relu(self.affine2(torch.relu(self.affine1(x)))))


def discounted(rewards, gamma):
    returns = []
    for t in range(len(rewards)):
        G = np.zeros(rewards.shape[1])
        for k in range(t, len(rewards)):
            G += gamma ** (k - t) * rewards[k]
        returns.append(G)
    return np.stack(returns)


def main(episodes=50, steps=200, gamma=0.99):
    torch.manual_seed(543)
    env = Poles(32, np.random.default_rng(543))
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for episode in range(1, episodes + 1):
        states, actions, rewards = [], [], []
        state = env.state
        with torch.no_grad():
            for _ in range(steps):
                states.append(state)
                action = Categorical(logits=policy(torch.from_numpy(state).float())).sample()
                state, reward = env.step(action.numpy())
                actions.append(action)
                rewards.append(reward)
        rewards = np.stack(rewards)
        returns = discounted(rewards, gamma)
        returns = torch.from_numpy((returns - returns.mean()) / (returns.std() + 1e-8)).float()
        logits = policy(torch.from_numpy(np.stack(states)).float())
        loss = -(Categorical(logits=logits).log_prob(torch.stack(actions)) * returns).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if episode % 10 == 0:
            print(f"Episode {episode}\tfallen poles: {int((rewards < 0).sum())}")


if __name__ == "__main__":
    main()
