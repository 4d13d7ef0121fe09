"""Policy gradient: an environment in pure Python is played before each update."""

import math
import random

import torch
from torch import nn
from torch.distributions import Categorical

CASE = {
    "truth": "Playing the environment in Python takes nearly all of the time between updates; the update takes 2 ms.",
    "cause": "host-python",
    "also": ["data-loading", "small-operators", "evaluation"],
    "never": ["start-up", "growth"],
    "healthy": False,
}


class CartPole:
    def reset(self):
        self.s = [random.uniform(-0.05, 0.05) for _ in range(4)]
        return self.s

    def step(self, action):
        x, v, a, w = self.s
        force = 10.0 if action else -10.0
        for _ in range(40):
            c, s = math.cos(a), math.sin(a)
            temp = (force + 0.05 * w * w * s) / 1.1
            acc = (9.8 * s - c * temp) / (0.5 * (4 / 3 - 0.1 * c * c / 1.1))
            x, v, a, w = x + 0.0005 * v, v + 0.0005 * temp, a + 0.0005 * w, w + 0.0005 * acc
        self.s = [x, v, a, w]
        return self.s, 1.0, abs(a) > 0.2


def play(env, policy, length=150):
    states, actions = [], []
    s = env.reset()
    for _ in range(length):
        with torch.no_grad():
            p = torch.softmax(policy(torch.tensor(s)), -1)
        a = Categorical(p).sample().item()
        states.append(s)
        actions.append(a)
        s, _, done = env.step(a)
        if done:
            s = env.reset()
    return torch.tensor(states), torch.tensor(actions)


if __name__ == "__main__":
    random.seed(0)
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for episode in range(40):
        states, actions = play(CartPole(), policy)
        returns = torch.arange(len(states), 0, -1.0)
        logp = Categorical(logits=policy(states)).log_prob(actions)
        loss = -(logp * (returns - returns.mean()) / returns.std()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
