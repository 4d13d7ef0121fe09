"""Anomaly detection in a table of sensors by an autoencoder, with a log file."""

import argparse
import logging
from pathlib import Path

import torch
from torch import nn

CASE = {
    "generation": 5,
    "truth": "get_logger adds one more handler in each step, so that each message is written as often as there were steps.",
    "cause": "growth",
    "also": ["logging", "host-python"],
    "never": ["start-up", "data-loading", "evaluation", "periodic-pause", "small-operators", "checkpoint-writing"],
    "healthy": False,
    "place": [
        "logger.addHandler(",
        "handler = ",
        "get_logger(",
        "logger.info(",
        "handler.setFormatter(",
    ],
    "share": 73,
    "remedy": "add the handler once, if not logger.handlers",
    "without": [
        [
            "    handler = logging.FileHandler(path)\n",
            "    if logger.handlers:\n        return logger\n    handler = logging.FileHandler(path)\n",
        ]
    ],
}


def get_logger(name, path="sensors.log"):
    logger = logging.getLogger(name)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    return logger


class SensorAE(nn.Module):
    def __init__(self, sensors, widths=(256, 96, 16)):
        super().__init__()
        sizes = (sensors, *widths)
        encoder = [nn.Sequential(nn.Linear(a, b), nn.ELU()) for a, b in zip(sizes, sizes[1:])]
        decoder = [nn.Sequential(nn.Linear(b, a), nn.ELU()) for a, b in zip(sizes, sizes[1:])][::-1]
        self.net = nn.Sequential(*encoder, *decoder[:-1], nn.Linear(widths[0], sensors))

    def forward(self, x):
        return self.net(x)


class Experiment:
    def __init__(self, args):
        self.args = args
        self.table = self.make_table(args.rows, args.sensors)
        self.model = SensorAE(args.sensors)
        self.optim = torch.optim.Adam(self.model.parameters(), lr=args.lr, fused=True)
        self.iteration = 0

    @staticmethod
    def make_table(rows, sensors):
        hidden = torch.randn(rows, 12).cumsum(0)
        hidden = (hidden - hidden.mean(0)) / hidden.std(0)
        return torch.tanh(hidden @ torch.randn(12, sensors) / 3) + 0.05 * torch.randn(rows, sensors)

    def training_step(self, rows):
        logger = get_logger("sensors.train")
        noisy = rows * (torch.rand_like(rows) > 0.1)
        error = (self.model(noisy) - rows).square()
        loss = error.mean()
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()
        self.iteration += 1
        worst = error.detach().mean(0).topk(4)
        logger.info("iteration %d loss %.5f", self.iteration, loss.item())
        for value, sensor in zip(*(part.tolist() for part in worst)):
            logger.info("iteration %d sensor %d error %.5f", self.iteration, sensor, value)

    def run(self):
        for epoch in range(self.args.epochs):
            for index in torch.randperm(len(self.table)).split(self.args.batch_size):
                self.training_step(self.table[index])
            print(f"epoch {epoch}: {Path('sensors.log').stat().st_size} bytes of log")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="denoising autoencoder of sensors")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--sensors", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=1e-3)
    torch.manual_seed(2)
    Experiment(parser.parse_args()).run()
