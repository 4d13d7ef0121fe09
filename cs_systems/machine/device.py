"""The machine's one door: the only file that decides between cpu and cuda.

What a device cannot tell is None, never 0.
"""

from __future__ import annotations

import errno
import gc
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from cs_systems.config import Precision

# Faster than the clock of any data-centre GPU, so that `occupy` is never cut short there.
_SPIN_HZ = 2.2e9


class DeviceUnavailable(RuntimeError):
    """The device that was asked for is not here; the message names the remedy."""


@dataclass(frozen=True)
class Device:
    """A torch device with the questions that timing and memory ask of it."""

    torch: torch.device

    @property
    def is_cuda(self) -> bool:
        return self.torch.type == "cuda"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch) if self.is_cuda else cpu_name()

    @property
    def clock(self) -> str:
        return "cuda_event" if self.is_cuda else "monotonic"

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.torch)

    def mark(self) -> Any:
        """A point in the device's time, recorded without waiting for it."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_s(self, start: Any, end: Any) -> float:
        """Seconds of device time between two marks; on CUDA only after `synchronize`."""
        return float(start.elapsed_time(end) * 1e-3) if self.is_cuda else float(end - start)

    def occupy(self, seconds: float) -> None:
        """Keep the device busy for about so long, without waiting for it; nothing where host and device are one."""
        if self.is_cuda and seconds > 0:
            torch.cuda._sleep(int(seconds * _SPIN_HZ))

    def reset_peaks(self) -> None:
        if self.is_cuda:
            _parts_peaks.pop(self.torch, None)
            torch.cuda.reset_peak_memory_stats(self.torch)

    def new_part(self) -> None:
        """From here on `part_peaks` counts anew; the peaks of the whole go on."""
        if self.is_cuda:
            _parts_peaks[self.torch] = (self.peak_allocated_bytes() or 0, self.peak_reserved_bytes() or 0)
            torch.cuda.reset_peak_memory_stats(self.torch)

    def part_peaks(self) -> tuple[int | None, int | None]:
        """Peaks (allocated, reserved) since `new_part`."""
        if not self.is_cuda:
            return None, None
        return torch.cuda.max_memory_allocated(self.torch), torch.cuda.max_memory_reserved(self.torch)

    def peak_allocated_bytes(self) -> int | None:
        """None on a CPU, and where nothing counted: PYTORCH_NO_CUDA_MEMORY_CACHING leaves torch's counters at 0."""
        return max(self.part_peaks()[0] or 0, _parts_peaks.get(self.torch, (0, 0))[0]) or None if self.is_cuda else None

    def peak_reserved_bytes(self) -> int | None:
        return max(self.part_peaks()[1] or 0, _parts_peaks.get(self.torch, (0, 0))[1]) or None if self.is_cuda else None

    def allocated_bytes(self) -> int:
        """What tensors have right now; 0 on a CPU, whose allocations nobody counts."""
        return torch.cuda.memory_allocated(self.torch) if self.is_cuda else 0

    def memory(self) -> dict[str, int | None]:
        """Right now: what tensors have (`allocated_bytes`), what the allocator holds, what of the device is in use by
        anybody, and what of the host's memory this process has (None on CUDA, where it says nothing of the device)."""
        if not self.is_cuda:
            nothing = dict.fromkeys(("allocated_bytes", "reserved_bytes", "device_used_bytes"))
            return {**nothing, "resident_bytes": _resident_bytes()}
        free, total = torch.cuda.mem_get_info(self.torch)
        return {
            "allocated_bytes": torch.cuda.memory_allocated(self.torch),
            "reserved_bytes": torch.cuda.memory_reserved(self.torch),
            "device_used_bytes": total - free,
            "resident_bytes": None,
        }

    def device_mallocs(self) -> int | None:
        """cudaMalloc calls of the caching allocator so far."""
        return torch.cuda.memory_stats(self.torch).get("num_device_alloc") if self.is_cuda else None

    def total_memory_bytes(self) -> int | None:
        return torch.cuda.get_device_properties(self.torch).total_memory if self.is_cuda else None

    def uuid(self) -> str:
        """The GPU's name for NVML and nvidia-smi, whose numbers are not torch's under CUDA_VISIBLE_DEVICES."""
        return f"GPU-{torch.cuda.get_device_properties(self.torch).uuid}"

    def capability(self) -> tuple[int, int] | None:
        return torch.cuda.get_device_capability(self.torch) if self.is_cuda else None

    def limit_memory(self, limit_bytes: int | None) -> None:
        """Cap this process's memory on the device, to emulate a smaller card; None takes the cap off."""
        if self.is_cuda:
            total = torch.cuda.get_device_properties(self.torch).total_memory
            fraction = 1.0 if limit_bytes is None else min(1.0, limit_bytes / total)
            torch.cuda.set_per_process_memory_fraction(fraction, self.torch)
        elif limit_bytes is not None:
            raise DeviceUnavailable("nothing limits the memory of a CPU: leave out --memory-limit")

    def release_memory(self) -> None:
        """Hand cached blocks back, so that one cell's leftovers do not stand in the next cell's numbers; those too that
        only cycles keep: a model knows its hooks, and hooks their model."""
        gc.collect()
        if self.is_cuda:
            # cuBLAS keeps 32 MiB for each thread that called it, which would count in the next cell's peak.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def l2_clear_bytes(self) -> int:
        """Memory that `l2_clearer` holds: twice the L2 cache."""
        return 2 * torch.cuda.get_device_properties(self.torch).L2_cache_size if self.is_cuda else 0

    def l2_clearer(self) -> Callable[[], object]:
        """A function that fills more than the L2 cache with other data; on a CPU, one that does nothing."""
        if not self.is_cuda:
            return lambda: None
        buffer = torch.empty(self.l2_clear_bytes(), dtype=torch.int8, device=self.torch)
        return buffer.zero_

    def autocast(self, precision: Precision) -> AbstractContextManager[Any]:
        if not precision.is_autocast:
            return nullcontext()
        return torch.autocast(self.torch.type, torch.float16 if precision is Precision.FP16 else torch.bfloat16)


# Of each device, the peaks of the parts before the one that is counted now.
_parts_peaks: dict[torch.device, tuple[int, int]] = {}


def _resident_bytes() -> int | None:
    try:
        with open("/proc/self/statm") as numbers:  # noqa: PTH123
            return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def resolve(name: str) -> Device:
    """The device that `auto`, `cpu`, `cuda` or `cuda:N` means here. Raises DeviceUnavailable.

    Of the ranks of a machine each has the GPU of its LOCAL_RANK.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return Device(torch.device("cpu"))
    if not torch.cuda.is_available():
        why = "this torch is a CPU build" if torch.version.cuda is None else "torch sees no CUDA device"
        raise DeviceUnavailable(f"no CUDA: {why}; run with --device cpu, or `cs-systems doctor` for what is missing")
    index = int(name[5:]) if name.startswith("cuda:") else int(os.environ.get("LOCAL_RANK", 0))
    if index >= torch.cuda.device_count():
        raise DeviceUnavailable(f"there is no {name}: torch sees {torch.cuda.device_count()} GPU(s)")
    torch.cuda.set_device(index)
    return Device(torch.device("cuda", index))


def too_few(name: str, world_size: int) -> str | None:
    """Why so many ranks cannot have a device each on this machine, with the remedy; None where they can."""
    world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))  # of a job on several machines
    if world_size == 1 or not resolve(name).is_cuda or (count := torch.cuda.device_count()) >= world_size:
        return None
    return (
        f"{world_size} ranks need a GPU each, torch sees {count}: use a world size up to {count}, "
        "or --device cpu, or torchrun on several machines"
    )


def resolve_or_cpu(name: str) -> Device:
    """As `resolve`, and the CPU where that fails: for describing a cell that could not run."""
    try:
        return resolve(name)
    except DeviceUnavailable:
        return Device(torch.device("cpu"))


def host_memory_bytes() -> int | None:
    """The machine's own memory."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def set_float32_matmul(precision: Precision) -> str:
    """Switch TF32 on for `tf32` and off for all else, and return what torch then says: "tf32" or "ieee"."""
    torch.backends.cuda.matmul.fp32_precision = "tf32" if precision is Precision.TF32 else "ieee"
    return float32_matmul()


def float32_matmul() -> str:
    return str(torch.backends.cuda.matmul.fp32_precision)


# What PyTorch, the C++ library and the system say when the host's memory is exhausted.
_NO_HOST_MEMORY = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|std::bad_alloc|Cannot allocate memory|ENOMEM"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True where memory was exhausted, the device's or the host's."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _NO_HOST_MEMORY.search(str(error)) is not None


_ALLOCATION = re.compile(r"[Tt]ried to allocate ([0-9.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def failed_allocation_bytes(error: BaseException) -> int | None:
    """The allocation that could not be served, rounded as torch's message rounds it; None where that says nothing."""
    match = _ALLOCATION.search(str(error))
    return round(float(match[1]) * _UNITS[match[2]]) if match else None


def is_poisoned(error: BaseException) -> bool:
    """Whether the CUDA context is lost with this error, so that nothing more can run in this process."""
    if is_out_of_memory(error):
        return False
    return isinstance(error, getattr(torch, "AcceleratorError", ())) or "CUDA error" in str(error)


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:  # noqa: PTH123
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return sys.platform
