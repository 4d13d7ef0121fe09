"""A player of 2048 that learns the value of boards by temporal differences and looks one move ahead."""

import copy
import random

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 9,
    "truth": "To try each of the four moves, the whole game is copied by copy.deepcopy, with its board of lists and its random generator (a state of 625 integers).",
    "cause": "host-python",
    "also": [],
    "never": [
        "data-loading",
        "logging",
        "evaluation",
        "growth",
        "start-up",
        "padding",
        "no-update",
        "needless-copies",
        "model-copies",
        "small-operators",
    ],
    "healthy": False,
    "place": ["trial = copy.deepcopy(game)", "def options(game):"],
    "share": 62,
    "remedy": "copy only the rows of the board (a clone method), or make slide a function from board to board",
    "without": [
        [
            "        trial = copy.deepcopy(game)\n",
            "        trial = copy.copy(game)\n        trial.board = [row[:] for row in game.board]\n",
        ]
    ],
}


class Game:
    def __init__(self, seed):
        self.dice = random.Random(seed)
        self.restart()

    def restart(self):
        self.board = [[0] * 4 for _ in range(4)]
        self.score = 0
        self.add_tile()
        self.add_tile()

    def add_tile(self):
        free = [(r, c) for r in range(4) for c in range(4) if self.board[r][c] == 0]
        r, c = self.dice.choice(free)
        self.board[r][c] = 2 if self.dice.random() < 0.1 else 1

    def slide(self, direction):
        """Moves and merges the tiles (kept as exponents); returns what was won, or None if nothing moved."""
        rows = [list(col) for col in zip(*self.board)] if direction >= 2 else self.board
        won, result = 0, []
        for row in rows:
            tiles = [tile for tile in (row if direction % 2 == 0 else row[::-1]) if tile]
            line, i = [], 0
            while i < len(tiles):
                if i + 1 < len(tiles) and tiles[i] == tiles[i + 1]:
                    line.append(tiles[i] + 1)
                    won += 2 ** (tiles[i] + 1)
                    i += 2
                else:
                    line.append(tiles[i])
                    i += 1
            line += [0] * (4 - len(line))
            result.append(line if direction % 2 == 0 else line[::-1])
        board = [list(col) for col in zip(*result)] if direction >= 2 else result
        if board == self.board:
            return None
        self.board = board
        self.score += won
        return won


def options(game):
    found = []
    for direction in range(4):
        trial = copy.deepcopy(game)
        won = trial.slide(direction)
        if won is not None:
            found.append((direction, won, trial.board))
    return found


class Value(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.tile = nn.Embedding(18, 16)
        self.conv = nn.Sequential(nn.Conv2d(16, width, 2), nn.ReLU(), nn.Conv2d(width, width, 2), nn.ReLU())
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(4 * width, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, boards):
        return self.head(self.conv(self.tile(boards).permute(0, 3, 1, 2))).squeeze(1)


def play(steps=150, games=16, discount=0.99):
    torch.manual_seed(0)
    field = [Game(seed) for seed in range(games)]
    value = Value()
    optimizer = torch.optim.Adam(value.parameters(), lr=5e-4)
    before = None
    scores = []
    for step in range(steps):
        choices = [options(game) for game in field]
        boards = torch.tensor([board for moves in choices for _, _, board in moves])
        with torch.no_grad():
            worth = value(boards).tolist()

        after, target, at = [], [], 0
        for game, moves in zip(field, choices):
            if not moves:
                scores.append(game.score)
                game.restart()
                after.append(game.board)
                target.append(0.0)
                continue
            returns = [won / 16 + discount * worth[at + k] for k, (_, won, _) in enumerate(moves)]
            at += len(moves)
            best = max(range(len(moves)), key=returns.__getitem__)
            target.append(returns[best])
            game.slide(moves[best][0])
            after.append([row[:] for row in game.board])
            game.add_tile()

        if before is not None:
            loss = F.smooth_l1_loss(value(before), torch.tensor(target))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        before = torch.tensor(after)
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.3f}, games ended {len(scores)}")


if __name__ == "__main__":
    play()
