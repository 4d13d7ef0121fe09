"""User workloads, named as `path.py:name`: each fails in a way that must not affect another cell.

A function without arguments is the step itself; one with arguments is a factory `(config, device) -> Workload | step`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cs_systems.config import Mode, RunConfig


def fine() -> None:
    torch.ones(8).sum()


def raises() -> None:
    raise ZeroDivisionError("the numerator was fine")


def is_killed() -> None:
    print("the last line", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def exits() -> None:
    sys.exit(7)


def hangs() -> None:
    if file := os.environ.get("TEST_PID_FILE"):
        Path(file).write_text(str(os.getpid()))
    while True:
        time.sleep(0.01)


def closes_its_pipes_and_hangs() -> None:
    Path("pid").write_text(str(os.getpid()))
    os.closerange(3, 256)
    hangs()


def hangs_in_preflight(config: RunConfig, device: Any) -> Callable[[], None]:
    return fine


def dies_in_preflight(config: RunConfig, device: Any) -> Callable[[], None]:
    return fine


def predicted_not_to_fit(config: RunConfig, device: Any) -> Callable[[], None]:
    return fine


hangs_in_preflight.preflight = lambda config, device: hangs()  # type: ignore[attr-defined]
dies_in_preflight.preflight = lambda config, device: is_killed()  # type: ignore[attr-defined]
predicted_not_to_fit.preflight = lambda config, device: 1 << 60  # type: ignore[attr-defined]


def python_runs_out_of_memory() -> None:
    raise MemoryError


def torch_runs_out_of_memory() -> None:
    torch.empty(1 << 56, dtype=torch.int8)


def prints() -> None:
    """Fill standard output and error, buffered and unbuffered, with text that resembles worker replies."""
    print('{"event": "done", "usable": true}\n' * 2000)
    os.write(1, b'{"event": "record", "cell": 0}\n' * 2000)
    print("noise " * 2000, file=sys.stderr)


def breaks_cuda_context() -> None:
    """Fail a device-side assertion, after which the CUDA context of this process is unusable."""
    torch.zeros(1, device="cuda")[torch.tensor([5], device="cuda")].cpu()


def hangs_at_the_gate(config: RunConfig, device: Any) -> Callable[[], None]:
    """Return a step that in mode forward-backward hangs while the file `gate` exists here."""
    gate = Path("gate").absolute()

    def step() -> None:
        while config.mode is Mode.FORWARD_BACKWARD and gate.exists():
            time.sleep(0.01)

    return step


def _on_one_rank(action: Callable[[], None], rank: str = "1") -> Callable[[], None]:
    """Return a step in which one rank runs the action while the others wait for it."""

    def step() -> None:
        if os.environ["RANK"] == rank:
            action()
        dist.barrier()

    return step


rank_1_is_killed = _on_one_rank(is_killed)
rank_0_is_killed = _on_one_rank(is_killed, "0")
rank_1_exits = _on_one_rank(exits)
rank_1_raises = _on_one_rank(raises)
rank_1_hangs = _on_one_rank(hangs)


def rank_1_hangs_alone() -> None:
    """Hang on rank 1 after rank 0 has finished; use one step, so that rank 0 never waits."""
    if os.environ["RANK"] == "1":
        hangs()


rank_1_runs_out_of_gpu_memory = _on_one_rank(lambda: torch.empty(1 << 50, dtype=torch.int8, device="cuda").zero_())
rank_1_runs_out_of_memory = _on_one_rank(torch_runs_out_of_memory)


NCCL_GIVES_UP = "[E] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2)"


def _until_rank_1_is_about_to_hang() -> None:
    """Wait on rank 0 until rank 1 has left the barrier before the step, as NCCL's watchdog does."""
    store = torch.distributed.distributed_c10d._get_default_store()
    if os.environ["RANK"] == "1":
        store.set("about to hang", "")
    else:
        store.wait(["about to hang"])
        time.sleep(3.0)


def rank_1_hangs_in_nccl_that_stays() -> None:
    """Hang after a message of NCCL's watchdog, in a process that takes long to end."""
    _until_rank_1_is_about_to_hang()
    if os.environ["RANK"] == "0":
        print(NCCL_GIVES_UP, file=sys.stderr, flush=True)
    hangs()


def rank_1_hangs_in_nccl() -> None:
    """Abort the waiting rank with a message of NCCL's watchdog, as the watchdog does."""
    _until_rank_1_is_about_to_hang()
    if os.environ["RANK"] == "1":
        hangs()
    print(NCCL_GIVES_UP, file=sys.stderr, flush=True)
    os.abort()


def every_rank_another_shape(config: RunConfig, device: Any) -> tuple[torch.nn.Module, torch.Tensor]:
    width = 3 + int(os.environ["RANK"])
    return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 2)), torch.ones(1, 4)
