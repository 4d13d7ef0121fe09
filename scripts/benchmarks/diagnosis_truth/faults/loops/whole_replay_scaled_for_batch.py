"""Deep Q-learning of a ball-catching game from its frames, with a replay memory of bytes."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 10,
    "truth": "Each draw of a batch converts the whole replay memory from bytes to floats and divides it by 255, before 32 of its frames are picked.",
    "cause": "casts",
    "also": ["data-loading", "elementwise-chain"],
    "never": [
        "logging",
        "evaluation",
        "growth",
        "host-python",
        "no-update",
        "start-up",
        "padding",
        "checkpoint-writing",
    ],
    "healthy": False,
    "place": ["self.frames.float()", "self.frames.float() / 255", "memory.draw(", "def draw("],
    "share": 50,
    "remedy": "pick the frames first, convert them afterwards",
    "without": [
        ["        scaled = self.frames.float() / 255\n", ""],
        [
            "        return scaled[pick], self.moves[pick], self.rewards[pick], self.ends[pick], scaled[pick + 1]\n",
            "        scaled = self.frames[torch.cat([pick, pick + 1])].float() / 255\n        return scaled[:batch], self.moves[pick], self.rewards[pick], self.ends[pick], scaled[batch:]\n",
        ],
    ],
}


class Catch:
    """A ball falls over 30 rows; the paddle moves left, stays or moves right."""

    side = 30

    def __init__(self):
        self.rng = np.random.default_rng(3)
        self.reset()

    def reset(self):
        self.row, self.column, self.paddle = 0, int(self.rng.integers(self.side)), self.side // 2
        return self.frame()

    def frame(self):
        picture = np.zeros((2, self.side, self.side), np.uint8)
        picture[0, self.row, max(0, self.column - 1) : self.column + 2] = 255
        picture[1, -2:, max(0, self.paddle - 2) : self.paddle + 3] = 255
        return picture

    def step(self, move):
        self.paddle = int(np.clip(self.paddle + 2 * (move - 1), 0, self.side - 1))
        self.row += 2
        end = self.row >= self.side - 2
        reward = (1.0 if abs(self.paddle - self.column) <= 3 else -1.0) if end else 0.0
        return self.frame(), reward, end


class Memory:
    def __init__(self, size, shape):
        self.frames = torch.zeros(size, *shape, dtype=torch.uint8)
        self.moves = torch.zeros(size, dtype=torch.long)
        self.rewards, self.ends = torch.zeros(size), torch.zeros(size)
        self.size, self.count = size, 0

    def add(self, frame, move, reward, end):
        i = self.count % self.size
        self.frames[i] = torch.from_numpy(frame)
        self.moves[i], self.rewards[i], self.ends[i] = move, reward, float(end)
        self.count += 1

    def draw(self, batch):
        pick = torch.randint(min(self.count, self.size) - 1, (batch,))
        scaled = self.frames.float() / 255
        return scaled[pick], self.moves[pick], self.rewards[pick], self.ends[pick], scaled[pick + 1]


def q_network(moves=3):
    return nn.Sequential(
        nn.Conv2d(2, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 8 * 8, 256), nn.ReLU(), nn.Linear(256, moves),
    )  # fmt: skip


def main(updates=350, batch=32, gamma=0.95, warm=1000, capacity=2000):
    torch.manual_seed(3)
    game, net, target = Catch(), q_network(), q_network()
    target.load_state_dict(net.state_dict())
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-4)
    memory = Memory(capacity, (2, game.side, game.side))
    frame, caught = game.reset(), []
    for t in range(warm + updates):
        greedy = t >= warm and game.rng.random() > 0.1
        with torch.no_grad():
            move = int(net(torch.from_numpy(frame)[None] / 255).argmax()) if greedy else int(game.rng.integers(3))
        following, reward, end = game.step(move)
        memory.add(frame, move, reward, end)
        if end:
            caught.append(reward > 0)
        frame = game.reset() if end else following
        if t < warm:
            continue
        states, moves, rewards, ends, next_states = memory.draw(batch)
        with torch.no_grad():
            goal = rewards + gamma * (1 - ends) * target(next_states).max(1).values
        loss = F.smooth_l1_loss(net(states).gather(1, moves[:, None]).squeeze(1), goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if t % 70 == 0:
            target.load_state_dict(net.state_dict())
            print(f"{t - warm} updates: loss {loss.item():.4f}, caught {np.mean(caught[-20:]):.2f}")


if __name__ == "__main__":
    main()
