"""What works on this machine as far as torch can tell, and what would fix the rest. Floor 3; a worker answers with it.

A row is {"check", "state", "found", "remedy"}; the state is `ok`, `missing` (an option that is not there) or `problem`
(something that is there and is in the way). The remedy is a command where there is one, None where nothing is amiss.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from cs_systems import plugins
from cs_systems.attention import AttentionBackend, AttentionCall
from cs_systems.attention._refusals import cannot_compile
from cs_systems.device import Device, resolve
from cs_systems.environment import environment
from cs_systems.record import Row

INSTALL_CUDA_TORCH = "install a CUDA build of torch, as pytorch.org/get-started says for this driver"


def check(name: str, found: str, state: str = "ok", remedy: str | None = None) -> Row:
    return {"check": name, "state": state, "found": found, "remedy": remedy}


def checks() -> list[Row]:
    """Everything that the device `auto` offers, in the order in which a person reads it."""
    device = resolve("auto")
    return [_torch(), *_gpu(device), *_packages(device), *_backends(device)]


def _torch() -> Row:
    cuda = torch.version.cuda
    found = f"{torch.__version__}, {f'CUDA {cuda}' if cuda else 'built for the CPU'}, {torch.get_num_threads()} threads"
    has_driver = Path("/proc/driver/nvidia/version").exists()
    if has_driver and cuda is None:
        return check("torch", f"{found}, although there is an NVIDIA driver", "problem", INSTALL_CUDA_TORCH)
    if has_driver and not torch.cuda.is_available():
        return check("torch", f"{found}, sees no GPU although there is a driver", "problem", INSTALL_CUDA_TORCH)
    return check("torch", found)


def _gpu(device: Device) -> Iterator[Row]:
    if not device.is_cuda:
        yield check("GPU", f"none; everything runs on the CPU ({device.name})", "missing")
        return
    now = environment(device)
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        capability = f"compute capability {properties.major}.{properties.minor}"
        driver = f", driver {now.driver}" if now.driver else ""
        yield check(f"GPU {index}", f"{properties.name}, {memory}, {capability}{driver}")
    unseen = "clocks, throttling and other processes cannot be seen"
    if _version("pynvml", "nvidia-ml-py") is None:
        yield check("nvidia-ml-py", f"not installed: {unseen}", "missing", "pip install 'cs-systems[gpu]'")
        return
    if now.sm_clock_max_hz is None:
        remedy = "nvidia-smi tells what the driver objects to"
        yield check("nvidia-ml-py", f"the driver does not answer: {unseen}", "problem", remedy)
        return
    yield check("nvidia-ml-py", "clocks, throttling and other processes are seen")
    yield _clocks(now.throttle_reasons, now.sm_clock_hz, now.sm_clock_max_hz)
    if now.other_processes:
        remedy = "nvidia-smi shows them: stop them, or choose another --device cuda:N"
        yield check("GPU's other users", f"{now.other_processes} other process(es) on it", "problem", remedy)
    else:
        yield check("GPU's other users", "none")


def _clocks(reasons: tuple[str, ...] | None, clock_hz: float | None, highest_hz: float) -> Row:
    now = "unknown" if clock_hz is None else f"{clock_hz / 1e6:.0f}"
    found = f"SM at {now} of {highest_hz / 1e6:.0f} MHz"
    if reasons:
        remedy = "let the card cool, look at its power limit (nvidia-smi -q -d PERFORMANCE), measure with --rounds"
        return check("clocks", f"{found}, held back by: {', '.join(reasons)}", "problem", remedy)
    return check("clocks", found)


def _packages(device: Device) -> Iterator[Row]:
    triton = _version("triton")
    if triton is None:
        yield check("triton", "not installed", "missing", "pip install 'cs-systems[triton]'")
    else:
        yield check("triton", triton)
    reason, remedy = _split(cannot_compile(device.torch.type))
    yield check("torch.compile", reason, "missing", remedy) if reason else check("torch.compile", "can generate code")


def _backends(device: Device) -> Iterator[Row]:
    """Each attention backend, asked for a training step's call of model `small` in the usual precision."""
    dtype = "bfloat16" if device.is_cuda else "float32"
    call = AttentionCall(device.torch.type, dtype, 64, 512, 512, 12, 12, causal=True)
    for name in plugins.names("attention"):
        yield _backend(name, call)


def _backend(name: str, call: AttentionCall) -> Row:
    title = f"attention {name}"
    try:
        backend: AttentionBackend = plugins.get("attention", name)
        reason, remedy = _split(backend.unavailable(call))
    except Exception as error:  # a broken package is what a doctor is for
        return check(title, f"{type(error).__name__}: {error}", "problem", "reinstall what it names, or choose another")
    if reason:
        return check(title, reason, "missing", remedy)
    return check(title, backend.describe() or f"{call.dtype}, d_head {call.d_head}, on {call.device}")


def _split(refusal: str | None) -> tuple[str, str | None]:
    """A refusal reads `reason: remedy`."""
    reason, _, remedy = (refusal or "").partition(": ")
    return reason, remedy or None


def _version(module: str, package: str | None = None) -> str | None:
    """The version of what can be imported here as `module`, None without it."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return version(package or module)
    except PackageNotFoundError:
        return "version unknown"
