"""Denoising of signals: a line in a log every step, and a test with a file of weights once at the end."""

import argparse
import json
import logging
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

CASE = {
    "generation": 4,
    "truth": "Each step writes one short line, and the test and the file of weights come once; convolutions take the time.",
    "cause": None,
    "also": ["evaluation"],
    "never": ["logging", "checkpoint-writing", "host-python", "host-sync", "growth", "periodic-pause"],
    "healthy": True,
}

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
log = logging.getLogger("denoise")


class JsonLines:
    def __init__(self, path):
        self.file = path.open("w", buffering=1)

    def write(self, **values):
        self.file.write(json.dumps({k: round(v, 6) for k, v in values.items()}) + "\n")


class UNet1d(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv1d(1, width, 9, padding=4), nn.SiLU(), nn.Conv1d(width, width, 9, padding=4))
        self.down2 = nn.Sequential(nn.Conv1d(width, 2 * width, 9, 2, 4), nn.SiLU())
        self.middle = nn.Sequential(nn.Conv1d(2 * width, 2 * width, 9, padding=4), nn.SiLU())
        self.up = nn.ConvTranspose1d(2 * width, width, 8, 2, 3)
        self.out = nn.Conv1d(2 * width, 1, 9, padding=4)

    def forward(self, x):
        a = self.down1(x)
        b = self.up(self.middle(self.down2(a)))
        return x + self.out(torch.cat([a, b], 1))


def signals(batch, length=512):
    t = torch.linspace(0, 1, length)
    frequency = torch.rand(batch, 3, 1) * 40 + 2
    clean = torch.sin(6.283 * frequency * t).mean(1, keepdim=True)
    return clean + 0.3 * torch.randn(batch, 1, length), clean


@torch.no_grad()
def test(model, batches):
    model.eval()
    error = 0.0
    for noisy, clean in batches:
        error += (model(noisy) - clean).square().mean().item()
    return error / len(batches)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        lines = JsonLines(Path(folder) / "train.jsonl")
        model = UNet1d()
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps)
        started = time.perf_counter()
        for step in range(1, args.steps + 1):
            noisy, clean = signals(args.batch_size)
            loss = nn.functional.mse_loss(model(noisy), clean)
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            lines.write(step=step, loss=loss.item(), norm=norm.item(), lr=scheduler.get_last_lr()[0])
            if step % 10 == 0:
                log.info("step %d loss %.4f (%.1f steps/s)", step, loss.item(), step / (time.perf_counter() - started))
        log.info("test error %.4f", test(model, [signals(16) for _ in range(4)]))
        torch.save(model.state_dict(), Path(folder) / "model.pt")


if __name__ == "__main__":
    main()
