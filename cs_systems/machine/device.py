"""Device of a measurement, with its clocks and its memory; the only module that decides between cpu and cuda.

A quantity that a device cannot report is None, never 0.
"""

from __future__ import annotations

import errno
import gc
import os
import re
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from cs_systems.config import Precision
from cs_systems.core.units import counted
from cs_systems.formulas.memory.tables import MemoryInUse

# a clock faster than any data-center GPU's, so that `occupy` lasts at least as long as requested
_SPIN_HZ = 2.2e9


class DeviceUnavailable(RuntimeError):
    """Error for a requested device that does not exist here; the message names the remedy."""


@dataclass(frozen=True)
class Device:
    """A torch device with the operations that timing and memory measurement need."""

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
        """Record a time mark in the device's work queue, without waiting for it."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.torch))
        return event

    def between_s(self, start: Any, end: Any) -> float:
        """Return the seconds of device time between two marks; on CUDA only after `synchronize`."""
        return float(start.elapsed_time(end) * 1e-3) if self.is_cuda else float(end - start)

    def has_reached(self, mark: Any) -> bool:
        """Return whether the device has done all work before a mark; always True on a CPU."""
        return not self.is_cuda or bool(mark.query())

    def occupy(self, seconds: float) -> None:
        """Keep the device busy for about `seconds`, without waiting for it; do nothing on a CPU."""
        if self.is_cuda and seconds > 0:
            torch.cuda._sleep(int(seconds * _SPIN_HZ))

    def reset_peaks(self) -> None:
        if self.is_cuda:
            _earlier.pop(self.torch, None)
            torch.cuda.reset_peak_memory_stats(self.torch)

    def restart_peaks(self) -> None:
        """Begin a new interval for `peaks`; the peaks of the whole measurement continue."""
        if self.is_cuda:
            _earlier[self.torch] = (self.peak_allocated_bytes() or 0, self.peak_reserved_bytes() or 0)
            torch.cuda.reset_peak_memory_stats(self.torch)

    def peaks(self) -> tuple[int | None, int | None]:
        """Return the peaks (allocated, reserved) in bytes since `restart_peaks`; None on a CPU."""
        if not self.is_cuda:
            return None, None
        return torch.cuda.max_memory_allocated(self.torch), torch.cuda.max_memory_reserved(self.torch)

    def peak_allocated_bytes(self) -> int | None:
        """Return the peak of allocated memory; None on a CPU, and if the allocator counts nothing.

        PYTORCH_NO_CUDA_MEMORY_CACHING leaves torch's counters at 0.
        """
        return max(self.peaks()[0] or 0, _earlier.get(self.torch, (0, 0))[0]) or None if self.is_cuda else None

    def peak_reserved_bytes(self) -> int | None:
        return max(self.peaks()[1] or 0, _earlier.get(self.torch, (0, 0))[1]) or None if self.is_cuda else None

    def allocated_bytes(self) -> int:
        """Return the bytes of live tensors; 0 on a CPU, where allocations are not counted."""
        return torch.cuda.memory_allocated(self.torch) if self.is_cuda else 0

    def memory(self) -> MemoryInUse:
        """Return the current memory use."""
        if not self.is_cuda:
            return {
                "allocated_bytes": None,
                "reserved_bytes": None,
                "device_used_bytes": None,
                "resident_bytes": _resident_bytes(),
            }
        free, total = torch.cuda.mem_get_info(self.torch)
        return {
            "allocated_bytes": torch.cuda.memory_allocated(self.torch),
            "reserved_bytes": torch.cuda.memory_reserved(self.torch),
            "device_used_bytes": total - free,
            "resident_bytes": None,
        }

    def device_mallocs(self) -> int | None:
        """Return the number of cudaMalloc calls of the caching allocator so far; None on a CPU."""
        return torch.cuda.memory_stats(self.torch).get("num_device_alloc") if self.is_cuda else None

    def total_memory_bytes(self) -> int | None:
        return torch.cuda.get_device_properties(self.torch).total_memory if self.is_cuda else None

    def uuid(self) -> str:
        """Return the GPU's UUID for NVML and nvidia-smi.

        Under CUDA_VISIBLE_DEVICES their indices differ from torch's.
        """
        return f"GPU-{torch.cuda.get_device_properties(self.torch).uuid}"

    def capability(self) -> tuple[int, int] | None:
        return torch.cuda.get_device_capability(self.torch) if self.is_cuda else None

    def limit_memory(self, limit_bytes: int | None) -> None:
        """Limit this process's memory on the device, to emulate a smaller card; None removes the limit.

        Raises:
            DeviceUnavailable: the device is a CPU, which has no such limit.
        """
        if self.is_cuda:
            total = torch.cuda.get_device_properties(self.torch).total_memory
            fraction = 1.0 if limit_bytes is None else min(1.0, limit_bytes / total)
            torch.cuda.set_per_process_memory_fraction(fraction, self.torch)
        elif limit_bytes is not None:
            raise DeviceUnavailable("a memory limit requires a CUDA device; leave out the memory limit, or use a GPU")

    def set_allocator(self, name: str) -> None:
        """Set how the caching allocator takes memory from the device, for later allocations.

        Args:
            name: `default` keeps the environment's settings; `expandable_segments` lets segments grow, so that tensors
                of changing sizes leave fewer unusable gaps.

        Raises:
            DeviceUnavailable: the device is a CPU, which has no such allocator.
        """
        if self.is_cuda:
            switch_allocator(name)
        elif name != "default":
            raise DeviceUnavailable(
                f"the allocator {name} requires a CUDA device; leave out the allocator, or use a GPU"
            )

    def release_memory(self) -> None:
        """Return cached blocks to the device, so that one cell's memory is not counted in the next cell.

        It first collects reference cycles: a model and its hooks refer to each other.
        """
        gc.collect()
        if self.is_cuda:
            # cuBLAS keeps 32 MiB per calling thread, which would count in the next cell's peak
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def l2_clear_bytes(self) -> int:
        """Return the bytes that `l2_clearer` holds: twice the L2 cache; 0 on a CPU."""
        return 2 * torch.cuda.get_device_properties(self.torch).L2_cache_size if self.is_cuda else 0

    def l2_clearer(self) -> Callable[[], object]:
        """Return a function that overwrites the L2 cache with other data; on a CPU, one that does nothing."""
        if not self.is_cuda:
            return lambda: None
        buffer = torch.empty(self.l2_clear_bytes(), dtype=torch.int8, device=self.torch)
        return buffer.zero_

    def autocast(self, precision: Precision) -> AbstractContextManager[Any]:
        if not precision.is_autocast:
            return nullcontext()
        return torch.autocast(self.torch.type, torch.float16 if precision is Precision.FP16 else torch.bfloat16)


_allocator = "default"


def allocator() -> str:
    """Return the allocator's name that `switch_allocator` set last."""
    return _allocator


def switch_allocator(name: str) -> None:
    """Set the caching allocator of this process, for later allocations; see `Device.set_allocator`."""
    global _allocator
    if name == _allocator:
        return
    torch.cuda.empty_cache()  # cached segments still have the other setting
    own = allocator_settings() or ""
    switched = ("expandable_segments:False", own) if name == "default" else (own, "expandable_segments:True")
    # of repeated settings, the later one counts
    torch._C._accelerator_setAllocatorSettings(",".join(filter(None, switched)))
    _allocator = name


def allocator_settings() -> str | None:
    """Return the settings of the caching allocator in this process's environment; None if there are none."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or None


# Peaks (allocated, reserved) of each device before the last `restart_peaks`, which resets torch's counters.
_earlier: dict[torch.device, tuple[int, int]] = {}


def _resident_bytes() -> int | None:
    try:
        with open("/proc/self/statm") as numbers:  # noqa: PTH123
            return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def resolve(name: str) -> Device:
    """Return the device for `auto`, `cpu`, `cuda` or `cuda:N`.

    Each rank on a machine gets the GPU with the index LOCAL_RANK.

    Raises:
        DeviceUnavailable: this machine has no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return Device(torch.device("cpu"))
    if not torch.cuda.is_available():
        why = "this torch is a build without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
        raise DeviceUnavailable(f"no CUDA: {why}; see cs-systems doctor, or use device cpu where a CPU is enough")
    index = int(name[5:]) if name.startswith("cuda:") else int(os.environ.get("LOCAL_RANK", 0))
    if index >= (count := torch.cuda.device_count()):
        sees = f"torch sees {counted(count, 'GPU')}"
        if name == "cuda":
            most = counted(count, "rank")
            raise DeviceUnavailable(
                f"local rank {index} needs a GPU of its own, but {sees}; start at most {most} on each machine, or use "
                "device cpu"
            )
        up_to = f" to cuda:{count - 1}" if count > 1 else ""
        raise DeviceUnavailable(f"cuda:{index} does not exist, because {sees}; use cuda:0{up_to}")
    torch.cuda.set_device(index)
    return Device(torch.device("cuda", index))


def too_few(name: str, world_size: int) -> str | None:
    """Return an error message if the machine has fewer devices than ranks, else None."""
    world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))  # ranks of a job on several machines
    if world_size == 1 or not resolve(name).is_cuda or (count := torch.cuda.device_count()) >= world_size:
        return None
    return (
        f"{world_size} ranks need one GPU each, but torch sees {count}; use a world size up to {count}, "
        "or device cpu, or torchrun on several machines"
    )


def resolve_or_cpu(name: str) -> Device:
    """Return the result of `resolve`, or the CPU if that fails, for describing a cell that could not run."""
    try:
        return resolve(name)
    except DeviceUnavailable:
        return Device(torch.device("cpu"))


def host_memory_bytes() -> int | None:
    """Return the host's total memory in bytes; None if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def set_float32_matmul(precision: Precision) -> str:
    """Switch TF32 on for `tf32` and off otherwise, in matrix products, convolutions and recurrent layers.

    Returns the setting of matrix products read back from torch: "tf32" or "ieee".
    """
    is_on = precision is Precision.TF32
    torch.backends.cuda.matmul.fp32_precision = "tf32" if is_on else "ieee"
    set_cudnn_tf32(is_on)
    return float32_matmul()


def set_cudnn_tf32(is_on: bool) -> None:
    """Switch TF32 on or off in convolutions and recurrent layers."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # deprecated in some versions of torch
        torch.backends.cudnn.allow_tf32 = is_on  # the newer settings would make torch's `cudnn.flags()` raise


def float32_matmul() -> str:
    return str(torch.backends.cuda.matmul.fp32_precision)


# Messages of PyTorch, the C++ library and the system when the host's memory is exhausted.
_NO_HOST_MEMORY = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|std::bad_alloc|Cannot allocate memory|ENOMEM"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the error means that memory was exhausted, on the device or the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _NO_HOST_MEMORY.search(str(error)) is not None


_ALLOCATION = re.compile(r"[Tt]ried to allocate ([0-9.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def failed_allocation_bytes(error: BaseException) -> int | None:
    """Return the size of the failed allocation, rounded as in torch's message; None if the message lacks it."""
    match = _ALLOCATION.search(str(error))
    return round(float(match[1]) * _UNITS[match[2]]) if match else None


def is_poisoned(error: BaseException) -> bool:
    """Return True if the error destroyed the CUDA context, so that nothing more can run in this process."""
    if is_out_of_memory(error):
        return False
    return isinstance(error, getattr(torch, "AcceleratorError", ())) or "CUDA error" in str(error)


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:  # noqa: PTH123
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return sys.platform
