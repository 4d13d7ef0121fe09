"""This process as one of N ranks, or alone: then nothing here does anything.

Steps of N ranks begin together, behind a barrier that no time counts. What a rank then takes longer than its peers in
one phase, they wait for in the next one that needs all of them: see `slowest`.
"""

from __future__ import annotations

import dis
import os
import re
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from cs_systems.machine.device import Device

_set_up: dict[str, float | None] = {"start_s": None, "init_process_group_s": None}


def join(device: Device, patience_s: float, store: Path | None = None) -> None:
    """Join the process group of RANK and WORLD_SIZE: by NCCL on GPUs, by gloo on CPUs.

    patience_s: for how long a collective waits for a rank that does not come, before it fails.
    store: the file through which ranks of one machine meet, without a network; None meets as torchrun says.
    """
    started = time.perf_counter()
    _set_up["start_s"] = _alive_s()
    dist.init_process_group(
        "nccl" if device.is_cuda else "gloo",
        init_method=None if store is None else f"file://{store}",
        rank=-1 if store is None else int(os.environ["RANK"]),
        world_size=-1 if store is None else int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=patience_s),
        device_id=device.torch if device.is_cuda else None,
    )
    _set_up["init_process_group_s"] = time.perf_counter() - started


def set_up() -> dict[str, float | None]:
    """What it took until this process was a rank: `start_s` from its start on (Python, torch, the device), then
    `init_process_group_s`, on a GPU with the communicator. None where nobody joined or the system does not tell."""
    return dict(_set_up)


def _alive_s() -> float | None:
    """Seconds since this process was started; known on Linux."""
    try:
        words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(words[19]) / os.sysconf("SC_CLK_TCK")  # field 22, in ticks since the machine's start
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError, ValueError, IndexError):
        return None


def leave() -> None:
    if joined():
        dist.destroy_process_group()


def joined() -> bool:
    return dist.is_available() and dist.is_initialized()


def size() -> int:
    return dist.get_world_size() if joined() else 1


def rank() -> int:
    return dist.get_rank() if joined() else 0


def wait_for_all(device: Device) -> None:
    """Go on when every rank is here, and what was asked of the device is done."""
    if joined():
        dist.barrier(device_ids=[device.torch.index] if device.is_cuda else None)
    device.synchronize()


def agreed(answer: bool, device: Device) -> bool:
    """What rank 0 answers, on every rank: clocks differ, and ranks that took other ways would wait for each other."""
    if size() == 1:
        return answer
    told = torch.tensor(answer, device=device.torch)
    dist.broadcast(told, 0)
    return bool(told)


# What gloo raises as a plain RuntimeError, from C++.
_LOST_A_PEER = re.compile(r"gloo/transport|Application timeout caused pair closure|Connection (closed|reset) by peer")
_RAISES = frozenset(dis.opmap[name] for name in ("RAISE_VARARGS", "RERAISE") if name in dis.opmap)


def is_of_peers(error: BaseException) -> bool:
    """Return True where a collective failed because another rank was lost or did not come: the cause is there.

    An error that somebody's Python raised is that rank's own, whatever it says.
    """
    if isinstance(error, dist.DistError):
        return True
    from_library = joined() and type(error) is RuntimeError and not _raised_by_python(error)
    return from_library and _LOST_A_PEER.search(str(error)) is not None


def _raised_by_python(error: BaseException) -> bool:
    """Return True where the innermost frame ran a raise statement, and not a call into C++ that failed."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_code[trace.tb_lasti] in _RAISES
