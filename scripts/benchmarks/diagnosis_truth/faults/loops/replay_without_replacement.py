"""Q-learning on a ring buffer, with minibatches that NumPy draws without replacement."""

import argparse

import numpy as np
import torch
from torch import nn

CASE = {
    "generation": 3,
    "truth": "choice(replace=False) permutes all 400,000 indices of the buffer to draw 128 of them: most of each step.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": ["start-up", "evaluation", "small-operators", "growth", "periodic-pause", "logging"],
    "healthy": False,
    "place": ["np.random.choice(", "memory.sample("],
    "share": 73,
    "remedy": "draw with np.random.randint, or with a Generator, whose choice does not permute",
    "without": [["np.random.choice(self.count, n, replace=False)", "np.random.randint(0, self.count, n)"]],
}


class ReplayMemory:
    def __init__(self, capacity, obs_dim):
        self.obs = np.zeros((capacity, obs_dim), np.float32)
        self.next_obs = np.zeros((capacity, obs_dim), np.float32)
        self.action = np.zeros(capacity, np.int64)
        self.reward = np.zeros(capacity, np.float32)
        self.done = np.zeros(capacity, np.float32)
        self.capacity, self.position, self.count = capacity, 0, 0

    def push(self, obs, action, reward, next_obs, done):
        i = self.position
        self.obs[i], self.action[i], self.reward[i], self.next_obs[i], self.done[i] = (
            obs,
            action,
            reward,
            next_obs,
            done,
        )
        self.position = (i + 1) % self.capacity
        self.count = min(self.count + 1, self.capacity)

    def sample(self, n):
        rows = np.random.choice(self.count, n, replace=False)
        fields = (self.obs, self.action, self.reward, self.next_obs, self.done)
        return [torch.from_numpy(field[rows]) for field in fields]


def q_network(obs_dim, actions):
    return nn.Sequential(nn.Linear(obs_dim, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, actions))


class Agent:
    def __init__(self, args):
        self.gamma = args.gamma
        self.online, self.target = q_network(24, 6), q_network(24, 6)
        self.target.load_state_dict(self.online.state_dict())
        self.optim = torch.optim.Adam(self.online.parameters(), lr=args.lr)

    def act(self, obs):
        with torch.no_grad():
            return self.online(torch.from_numpy(obs)).argmax().item()

    def learn(self, batch):
        obs, action, reward, next_obs, done = batch
        with torch.no_grad():
            best = self.target(next_obs).amax(1)
            goal = reward + self.gamma * (1 - done) * best
        q = self.online(obs).gather(1, action[:, None]).squeeze(1)
        loss = nn.functional.smooth_l1_loss(q, goal)
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()
        return loss


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=250)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--gamma", type=float, default=0.98)
    parser.add_argument("--lr", type=float, default=5e-4)
    return parser.parse_args()


if __name__ == "__main__":
    args = parse()
    torch.manual_seed(0)
    np.random.seed(0)
    memory, agent = ReplayMemory(400_000, 24), Agent(args)
    memory.obs[:] = np.random.randn(400_000, 24)
    memory.next_obs[:] = memory.obs + 0.1
    memory.action[:] = np.random.randint(0, 6, 400_000)
    memory.reward[:] = memory.obs[:, 0]
    memory.count = memory.capacity
    obs = np.random.randn(24).astype(np.float32)
    for update in range(args.updates):
        action = agent.act(obs)
        next_obs = (0.9 * obs + 0.1 * action + 0.1 * np.random.randn(24)).astype(np.float32)
        memory.push(obs, action, float(next_obs[0]), next_obs, 0.0)
        obs = next_obs
        loss = agent.learn(memory.sample(args.batch))
        if update % 100 == 0:
            agent.target.load_state_dict(agent.online.state_dict())
            print(update, round(loss.item(), 4))
