"""State of a worker process that a cell must leave unchanged: `ProcessState()` before the cell, `restore()` after it.

Reversible changes are undone after each cell; if there are irreversible ones, `restore` names them and the worker is
replaced.
"""

from __future__ import annotations

import decimal
import gc
import locale
import os
import random
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cs_systems.machine import device as devices
from cs_systems.machine.device import set_cudnn_tf32
from cs_systems.measure.runtime.guardian import descendants


@dataclass(frozen=True)
class _Setting:
    """Piece of global state; `write(value)` restores it, and is None if it cannot be restored."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object] | None = None


def _decimal_context() -> Any:
    return decimal.getcontext().__reduce__()[1]  # all settings, as arguments of Context


_FILL = "fill_uninitialized_memory"


def _set_deterministic(value: tuple[int, bool]) -> None:
    torch.set_deterministic_debug_mode(value[0])
    setattr(torch.utils.deterministic, _FILL, value[1])


def _backend_flags() -> dict[str, Any]:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
        "cudnn_sdp": cuda.cudnn_sdp_enabled(),
        "cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        "mkldnn": torch._C._get_mkldnn_enabled(),
    }


def _set_backend_flags(flags: dict[str, Any]) -> None:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    cuda.enable_flash_sdp(flags["flash"])
    cuda.enable_mem_efficient_sdp(flags["efficient"])
    cuda.enable_math_sdp(flags["math"])
    cuda.enable_cudnn_sdp(flags["cudnn_sdp"])
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic = flags["cudnn"]
    torch._C._set_mkldnn_enabled(flags["mkldnn"])


def _float32_products() -> tuple[str, str, str]:
    cudnn: Any = torch.backends.cudnn
    return (str(torch.backends.cuda.matmul.fp32_precision), cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision)


def _set_float32_products(precisions: tuple[str, str, str]) -> None:
    cudnn: Any = torch.backends.cudnn
    torch.backends.cuda.matmul.fp32_precision, convolutions, recurrent = precisions
    set_cudnn_tf32(convolutions == "tf32")
    if _float32_products() != precisions:  # raised after the newer settings were used
        cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = convolutions, recurrent


def _memory_limit() -> float:
    """Return the fraction of the GPU's memory that may be used, rounded as torch rounds it to bytes."""
    return round(torch.cuda.get_per_process_memory_fraction(), 6) if torch.cuda.is_initialized() else 1.0


def _set_memory_limit(fraction: float) -> None:
    if torch.cuda.is_initialized():
        torch.cuda.set_per_process_memory_fraction(fraction)


def _cuda_random() -> Any:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None


def _set_cuda_random(states: Any) -> None:
    if states is not None:
        torch.cuda.set_rng_state_all(states)
    elif torch.cuda.is_initialized():  # initialised in this cell; a new generator starts with this seed
        torch.cuda.manual_seed_all(torch.initial_seed())


def _numpy_random() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()


def _set_numpy_random(state: Any) -> None:
    if state is not None:
        sys.modules["numpy"].random.set_state(state)


_RANDOM: tuple[tuple[str, Callable[[], Any], Callable[[Any], object]], ...] = (
    ("torch's random numbers", torch.get_rng_state, torch.set_rng_state),
    ("the random numbers of the GPUs", _cuda_random, _set_cuda_random),
    ("numpy's random numbers", _numpy_random, _set_numpy_random),
)


def _set_environment(values: dict[str, str]) -> None:
    for name in os.environ.keys() - values.keys():
        del os.environ[name]
    for name, value in values.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


_SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


def _handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in _SIGNALS}


def _set_handlers(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


def _set_mask(mask: set[int]) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _timers() -> bool:
    kinds = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
    return any(signal.getitimer(kind)[0] for kind in kinds)


def _stop_timers(running: bool) -> None:
    for kind in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(kind, 0)


class _Streams:
    """Standard streams and their originals; two are equal if they are the same objects in the same open state."""

    NAMES = ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__")
    _MODES = ("line_buffering", "write_through", "encoding", "errors")

    def __init__(self) -> None:
        self.objects = tuple(getattr(sys, name) for name in self.NAMES)
        self._closed = tuple(bool(getattr(stream, "closed", True)) for stream in self.objects)
        self.modes = tuple({name: getattr(stream, name, None) for name in self._MODES} for stream in self.objects)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Streams):
            return False
        same = all(a is b for a, b in zip(self.objects, other.objects, strict=True))
        return same and self._closed == other._closed and self.modes == other.modes

    __hash__ = None  # type: ignore[assignment]


def _set_streams(streams: _Streams) -> None:
    for name, stream, modes in zip(streams.NAMES, streams.objects, streams.modes, strict=True):
        setattr(sys, name, stream)
        if stream is not None and modes != {name: getattr(stream, name, None) for name in modes}:
            stream.reconfigure(**modes)


class _Descriptors:
    """Open descriptors; two sets are equal if none of the earlier set was closed or reopened as another file."""

    def __init__(self) -> None:
        try:
            numbers = {int(entry.name) for entry in Path("/proc/self/fd").iterdir()}
        except OSError:  # the system has no /proc
            numbers = set(range(3))
        self._files = {number: found for number in numbers if (found := self._identity(number)) is not None}

    @staticmethod
    def _identity(number: int) -> tuple[int, int, bool] | None:
        try:
            found = os.fstat(number)
            return found.st_dev, found.st_ino, os.get_blocking(number)
        except OSError:
            return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Descriptors) and other._files.items() <= self._files.items()

    __hash__ = None  # type: ignore[assignment]


def _directory() -> str | None:
    try:
        return str(Path.cwd())
    except OSError:  # the file was removed
        return None


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


def _limits() -> dict[int, tuple[int, int]]:
    return {kind: resource.getrlimit(kind) for kind in _LIMITS}


def _set_limits(limits: dict[int, tuple[int, int]]) -> None:
    for kind, limit in limits.items():
        if resource.getrlimit(kind) != limit:
            resource.setrlimit(kind, limit)


def _affinity() -> Any:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def _set_affinity(cores: Any) -> None:
    if cores is not None:
        os.sched_setaffinity(0, cores)


def _hooks() -> tuple[Any, ...]:
    return sys.excepthook, threading.excepthook, sys.unraisablehook, sys.gettrace(), sys.getprofile()


def _set_hooks(hooks: tuple[Any, ...]) -> None:
    sys.excepthook, threading.excepthook, sys.unraisablehook = hooks[:3]
    sys.settrace(hooks[3])
    sys.setprofile(hooks[4])


def _autocast() -> tuple[bool, ...]:
    return tuple(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))


_SETTINGS = (
    _Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Setting("the default device", torch.get_default_device, lambda device: torch.set_default_device(None)),
    _Setting("the gradient mode", torch.is_grad_enabled, torch.set_grad_enabled),
    _Setting("inference mode", torch.is_inference_mode_enabled),
    _Setting("autocast", _autocast),
    _Setting("the number of threads", torch.get_num_threads, torch.set_num_threads),
    _Setting("the number of inter-op threads", torch.get_num_interop_threads),
    _Setting(
        "the deterministic mode",
        lambda: (torch.get_deterministic_debug_mode(), getattr(torch.utils.deterministic, _FILL)),
        _set_deterministic,
    ),
    _Setting("torch's backend flags", _backend_flags, _set_backend_flags),
    _Setting("the precision of float32 products", _float32_products, _set_float32_products),
    _Setting("the memory limit", _memory_limit, _set_memory_limit),
    _Setting("the memory allocator", devices.allocator, devices.switch_allocator),
    _Setting("anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    _Setting("Python's random numbers", random.getstate, random.setstate),
    _Setting("the environment", lambda: dict(os.environ), _set_environment),
    _Setting("the working directory", _directory, os.chdir),
    _Setting("the umask", _umask, os.umask),
    _Setting("signal handlers", _handlers, _set_handlers),
    _Setting("blocked signals", lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()), _set_mask),
    _Setting("timers", _timers, _stop_timers),
    _Setting("standard streams", _Streams, _set_streams),
    _Setting("open descriptors", _Descriptors),
    _Setting("resource limits", _limits, _set_limits),
    _Setting("the priority", lambda: os.getpriority(os.PRIO_PROCESS, 0)),
    _Setting("the CPU affinity", _affinity, _set_affinity),
    _Setting("the locale", lambda: locale.setlocale(locale.LC_ALL), lambda name: locale.setlocale(locale.LC_ALL, name)),
    _Setting("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    _Setting("the switch interval", sys.getswitchinterval, sys.setswitchinterval),
    _Setting("the decimal context", _decimal_context, lambda value: decimal.setcontext(decimal.Context(*value))),
    _Setting("the digit limit of integers", sys.get_int_max_str_digits, sys.set_int_max_str_digits),
    _Setting("sys.path", lambda: list(sys.path), lambda path: sys.path.__setitem__(slice(None), path)),
    _Setting(
        "warning filters",
        lambda: list(warnings.filters),
        lambda filters: warnings.__dict__["filters"].__setitem__(slice(None), filters),
    ),
    _Setting("the garbage collector", lambda: (gc.isenabled(), gc.get_threshold()), lambda v: _set_collector(*v)),
    _Setting("hooks of sys and threading", _hooks, _set_hooks),
)


def _set_collector(enabled: bool, thresholds: tuple[int, int, int]) -> None:
    (gc.enable if enabled else gc.disable)()
    gc.set_threshold(*thresholds)


def seed_all(seed: int = 0) -> None:
    """Seed every generator of this process, so that a cell's random numbers do not depend on its worker."""
    random.seed(seed)
    torch.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


class ProcessState:
    """Snapshot of all settings, the random numbers, the threads and the child processes."""

    def __init__(self) -> None:
        self._values = {setting.name: self._now(setting) for setting in _SETTINGS}
        self._random = [(name, write, read()) for name, read, write in _RANDOM]
        self._threads = {thread.ident for thread in threading.enumerate()}
        self._children = descendants(os.getpid())

    @staticmethod
    def _now(setting: _Setting) -> Any:
        try:
            return setting.read()
        except Exception:  # for example, if the cell replaced a stream by an object without `closed`
            return None

    def restore(self) -> list[str]:
        """Restore random numbers and changed settings; return the names of those that cannot be restored."""
        lost = self.restore_random()
        changed = {s for s in _SETTINGS if self._now(s) != self._values[s.name]}
        for setting in changed:
            if setting.write is not None:
                with suppress(Exception):
                    setting.write(self._values[setting.name])
        return lost + [s.name for s in _SETTINGS if s in changed and self._now(s) != self._values[s.name]]

    def restore_random(self) -> list[str]:
        """Restore the random number generators; return the names of those that cannot be restored."""
        lost = []
        for name, write, state in self._random:
            try:
                write(state)
            except Exception:  # for example, if the GPU has failed
                lost.append(name)
        return lost

    def left_running(self) -> list[str]:
        """Return the names of threads and child processes that were started since the snapshot and still run."""
        threads = [f"thread {t.name}" for t in threading.enumerate() if t.ident not in self._threads]
        return threads + [f"process {pid}" for pid in sorted(descendants(os.getpid()) - self._children)]
