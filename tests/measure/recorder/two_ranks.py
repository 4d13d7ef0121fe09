"""Loops on the ranks that torchrun started, with a slower and then a leaving rank 1: `two_ranks.py OUT`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cs_systems import Recorder
from tests.measure.recorder.loops import batches, loss_of, net


def main() -> None:
    dist.init_process_group("gloo")
    for mode in ("together", "apart"):
        loop(Path(sys.argv[1], mode), mode)
    dist.destroy_process_group()


def loop(out: Path, mode: str) -> None:
    rank = dist.get_rank()
    profile = "kineto" if mode == "together" else "none"
    model = DistributedDataParallel(net()) if mode == "together" else net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Recorder(
        model, optimizer, out=out, name="ranks", warmup=1, steps=4, profile=profile, patience_s=20
    ) as recorder:
        for i, batch in enumerate(batches(9)):
            if mode == "apart" and rank == 1 and i == 2:
                break
            with recorder.step():
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                with recorder.phase("slow"):
                    time.sleep(0.05 * rank)
                loss.backward()
                optimizer.step()
    # At once, as the other rank writes there too.
    os.write(1, f"rank {rank} wrote {len(recorder.records)} {mode}\n".encode())


if __name__ == "__main__":
    main()
