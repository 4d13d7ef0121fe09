"""Functions that treat this process as one rank of a process group; without a group, they do nothing.

Steps of N ranks begin together, after a barrier that no timing includes. If a rank takes longer than the others in one
phase, they wait for it in the next phase that synchronizes all of them: see `runtime.stragglers`.
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
    """Join the process group of RANK and WORLD_SIZE, with NCCL on GPUs and gloo on CPUs.

    Args:
        device: the device of this rank.
        patience_s: timeout of a collective that waits for a missing rank.
        store: file for the rendezvous of ranks on one machine, without a network; None uses torchrun's rendezvous.
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
    """Return the durations of this rank's start; None if it joined no group or the system does not report them.

    `start_s` is from the start of the process (Python, torch, the device) to `join`. `init_process_group_s` is the time
    to join, on a GPU with the communicator.
    """
    return dict(_set_up)


def _alive_s() -> float | None:
    """Return the seconds since this process started; None except on Linux."""
    try:
        words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(words[19]) / os.sysconf("SC_CLK_TCK")  # field 22, in ticks since boot
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
    """Wait until every rank is here and the device has finished its work."""
    if joined():
        dist.barrier(device_ids=[device.torch.index] if device.is_cuda else None)
    device.synchronize()


def agreed(answer: bool, device: Device) -> bool:
    """Return rank 0's answer on every rank.

    Clocks differ between ranks, and ranks that took different branches would deadlock.
    """
    if size() == 1:
        return answer
    shared = torch.tensor(answer, device=device.torch)
    dist.broadcast(shared, 0)
    return bool(shared)


# Messages of gloo's errors, which C++ raises as plain RuntimeError.
_LOST_A_PEER = re.compile(r"gloo/transport|Application timeout caused pair closure|Connection (closed|reset) by peer")
_RAISES = frozenset(dis.opmap[name] for name in ("RAISE_VARARGS", "RERAISE") if name in dis.opmap)


def is_of_peers(error: BaseException) -> bool:
    """Return True if a collective failed because another rank was lost or missing, which is then the cause.

    An error raised by Python code is this rank's own, whatever its message.
    """
    if isinstance(error, dist.DistError):
        return True
    from_library = joined() and type(error) is RuntimeError and not _raised_by_python(error)
    return from_library and _LOST_A_PEER.search(str(error)) is not None


def _raised_by_python(error: BaseException) -> bool:
    """Return True if the innermost frame ran a raise statement, rather than a failing call into C++."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_code[trace.tb_lasti] in _RAISES
