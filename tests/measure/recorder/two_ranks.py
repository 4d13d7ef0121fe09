"""Loop on the ranks that torchrun started, with a slower or failing rank 1: `two_ranks.py OUT MODE`."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cs_systems import Recorder
from tests.measure.recorder.loops import batches, loss_of, net


def main() -> None:
    out, mode = sys.argv[1:]
    dist.init_process_group("gloo")
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
    os.write(1, f"rank {rank} wrote {len(recorder.records)}\n".encode())  # at once, as the other rank writes there too
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
