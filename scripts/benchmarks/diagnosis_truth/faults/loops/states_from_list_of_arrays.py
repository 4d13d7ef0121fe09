"""A collector in a small maze learns Q values from pictures of what is around it."""

import random
from collections import deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 16,
    "truth": "torch.tensor turns a list of arrays into the batch number by number, twice a step: 70% of the loop's time.",
    "cause": "data-loading",
    "also": ["host-python", "needless-copies"],
    "never": ["growth", "evaluation", "logging", "checkpoint-writing", "start-up", "launch-bound"],
    "healthy": False,
    "place": [
        "states = torch.tensor([move[0] for move in moves])",
        "after = torch.tensor([move[3] for move in moves])",
        "states, actions, rewards, after = memory.sample(batch)",
    ],
    "share": 70,
    "remedy": "join the arrays with numpy first: torch.from_numpy(np.stack(...))",
    "without": [
        ["torch.tensor([move[0] for move in moves])", "torch.from_numpy(np.stack([move[0] for move in moves]))"],
        ["torch.tensor([move[3] for move in moves])", "torch.from_numpy(np.stack([move[3] for move in moves]))"],
    ],
}

VIEW = 21
MOVES = ((0, 1), (1, 0), (0, -1), (-1, 0))


class Maze:
    """Field with walls and coins, of which the collector sees a square around itself."""

    def __init__(self, size=60):
        self.size = size
        self.reset()

    def reset(self):
        edge = VIEW // 2
        self.field = np.zeros((2, self.size + 2 * edge, self.size + 2 * edge), np.float32)
        self.field[0] = 1
        inner = (slice(edge, -edge), slice(edge, -edge))
        self.field[0][inner] = np.random.rand(self.size, self.size) < 0.2
        self.field[1][inner] = np.random.rand(self.size, self.size) < 0.1
        self.place = [self.size // 2, self.size // 2]
        return self.view()

    def view(self):
        x, y = self.place
        return self.field[:, x : x + VIEW, y : y + VIEW].copy()

    def step(self, action):
        edge = VIEW // 2
        x, y = self.place[0] + MOVES[action][0], self.place[1] + MOVES[action][1]
        reward = -0.05
        if self.field[0, x + edge, y + edge] == 0:
            self.place = [x, y]
            reward += self.field[1, x + edge, y + edge]
            self.field[1, x + edge, y + edge] = 0
        else:
            reward -= 0.2
        return self.view(), float(reward)


class Memory:
    def __init__(self, room=3000):
        self.moves = deque(maxlen=room)

    def push(self, *move):
        self.moves.append(move)

    def sample(self, count):
        moves = random.sample(self.moves, count)
        states = torch.tensor([move[0] for move in moves])
        actions = torch.tensor([move[1] for move in moves])
        rewards = torch.tensor([move[2] for move in moves])
        after = torch.tensor([move[3] for move in moves])
        return states, actions, rewards, after


def make_net():
    return nn.Sequential(
        nn.Conv2d(2, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 6 * 6, 64), nn.ReLU(), nn.Linear(64, len(MOVES)),
    )  # fmt: skip


def main(steps=200, batch=48, ahead=0.95):
    torch.manual_seed(65)
    random.seed(65)
    np.random.seed(65)
    maze, memory = Maze(), Memory()
    net, target = make_net(), make_net()
    target.load_state_dict(net.state_dict())
    optimizer = torch.optim.RMSprop(net.parameters(), lr=5e-4)
    state, total = maze.reset(), 0.0
    for _ in range(batch * 2):
        action = random.randrange(len(MOVES))
        after, reward = maze.step(action)
        memory.push(state, action, reward, after)
        state = after
    for step in range(steps):
        with torch.no_grad():
            action = int(net(torch.from_numpy(state)[None]).argmax())
        if random.random() < max(0.1, 1 - step / 60):
            action = random.randrange(len(MOVES))
        seen, reward = maze.step(action)
        memory.push(state, action, reward, seen)
        state, total = seen, total + reward
        states, actions, rewards, after = memory.sample(batch)
        with torch.no_grad():
            wanted = rewards + ahead * target(after).amax(1)
        found = net(states).gather(1, actions[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(found, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            target.load_state_dict(net.state_dict())
            print(f"step {step}: loss {loss.item():.4f}, reward so far {total:.2f}")


if __name__ == "__main__":
    main()
