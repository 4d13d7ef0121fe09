"""Diagnostics of this machine that need torch, each with a remedy; a worker collects them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from cs_systems.core import plugins
from cs_systems.core.diagnostic import NEEDS_GPU, Diagnostic, diagnostic
from cs_systems.core.units import counted
from cs_systems.machine.device import Device, resolve
from cs_systems.machine.environment import environment
from cs_systems.model.attention import AttentionBackend, AttentionCall
from cs_systems.model.attention._refusals import cannot_compile

INSTALL_CUDA_TORCH = "install the CUDA build of torch that pytorch.org/get-started lists for this driver"


def checks() -> list[Diagnostic]:
    """Return the diagnostics of the device that `auto` selects and of its software, in reading order."""
    device = resolve("auto")
    return [_torch(), *_gpu(device), *_packages(device), *_backends(device)]


def _torch() -> Diagnostic:
    cuda = torch.version.cuda
    threads = counted(torch.get_num_threads(), "thread")
    found = f"{torch.__version__}, {f'CUDA {cuda}' if cuda else 'built for the CPU'}, {threads}"
    has_driver = Path("/proc/driver/nvidia/version").exists()
    if has_driver and cuda is None:
        return diagnostic("torch", f"{found}, but an NVIDIA driver is installed", "problem", INSTALL_CUDA_TORCH)
    if has_driver and not torch.cuda.is_available():
        return diagnostic(
            "torch", f"{found}, finds no GPU although an NVIDIA driver is installed", "problem", INSTALL_CUDA_TORCH
        )
    return diagnostic("torch", found)


def _gpu(device: Device) -> Iterator[Diagnostic]:
    if not device.is_cuda:
        yield diagnostic("GPU", f"none; everything runs on the CPU ({device.name})", "missing")
        return
    now = environment(device)
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        capability = f"compute capability {properties.major}.{properties.minor}"
        driver = f", driver {now.driver}" if now.driver else ""
        yield diagnostic(f"GPU {index}", f"{properties.name}, {memory}, {capability}{driver}")
    unread = "clocks, throttling and other processes cannot be read"
    if _version("pynvml", "nvidia-ml-py") is None:
        yield diagnostic("nvidia-ml-py", f"not installed: {unread}", "missing", "pip install 'cs-systems[gpu]'")
        return
    if now.sm_clock_max_hz is None:
        remedy = "run nvidia-smi to see the driver's error"
        yield diagnostic("nvidia-ml-py", f"the driver does not answer: {unread}", "problem", remedy)
        return
    yield diagnostic("nvidia-ml-py", "clocks, throttling and other processes can be read")
    yield _clocks(now.throttle_reasons, now.sm_clock_hz, now.sm_clock_max_hz)
    if now.other_processes:
        remedy = "find them with nvidia-smi and stop them, or choose another --device cuda:N"
        yield diagnostic(
            "GPU's other users",
            f"{counted(now.other_processes, 'other process', 'other processes')} on it",
            "problem",
            remedy,
        )
    else:
        yield diagnostic("GPU's other users", "none")


def _clocks(reasons: tuple[str, ...] | None, clock_hz: float | None, highest_hz: float) -> Diagnostic:
    now = "unknown" if clock_hz is None else f"{clock_hz / 1e6:.0f}"
    found = f"SM at {now} of {highest_hz / 1e6:.0f} MHz"
    if reasons:
        remedy = (
            "let the GPU cool, check its power limit (nvidia-smi -q -d PERFORMANCE), or split the steps with --rounds"
        )
        return diagnostic("clocks", f"{found}, throttled by: {', '.join(reasons)}", "problem", remedy)
    return diagnostic("clocks", found)


def _packages(device: Device) -> Iterator[Diagnostic]:
    triton = _version("triton")
    if triton is None:
        yield diagnostic("triton", "not installed", "missing", "pip install 'cs-systems[triton]'")
    else:
        yield diagnostic("triton", triton)
    reason, remedy = _split(cannot_compile(device.torch.type))
    if reason:
        yield diagnostic("torch.compile", reason, "missing", remedy)
    else:
        yield diagnostic("torch.compile", "can generate code")


def _backends(device: Device) -> Iterator[Diagnostic]:
    """Check each attention backend with the call of a training step of model `small` in the default precision."""
    dtype = "bfloat16" if device.is_cuda else "float32"
    call = AttentionCall(device.torch.type, dtype, 64, 512, 512, 12, 12, causal=True)
    for name in plugins.names("attention"):
        yield _backend(name, call)


def _backend(name: str, call: AttentionCall) -> Diagnostic:
    title = f"attention {name}"
    try:
        backend: AttentionBackend = plugins.get("attention", name)
        refusal = backend.unavailable(call)
        if refusal and call.device == "cpu":  # report the missing GPU rather than the CPU's missing dtype
            refusal = backend.unavailable(replace(call, dtype="bfloat16")) or refusal
        reason, remedy = _split(refusal)
    except Exception as error:  # doctor must report a broken package, whatever it raises
        return diagnostic(
            title,
            f"{type(error).__name__}: {error}",
            "problem",
            "reinstall the package in the error, or choose another backend",
        )
    if reason:
        is_installable = call.device == "cuda" or "install" in (remedy or "")
        return diagnostic(title, reason, "missing" if is_installable else NEEDS_GPU, remedy)
    return diagnostic(title, backend.describe() or f"{call.dtype}, d_head {call.d_head}, on {call.device}")


def _split(refusal: str | None) -> tuple[str, str | None]:
    """Split a refusal of the form `reason; remedy`, or `reason: remedy`, into its two parts."""
    if refusal and "; " in refusal:  # the reason may contain both separators, the remedy contains none
        reason, _, remedy = refusal.rpartition("; ")
    else:
        reason, _, remedy = (refusal or "").partition(": ")
    return reason, remedy or None


def _version(module: str, package: str | None = None) -> str | None:
    """Return the version of the package that can be imported here as `module`, or None."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return version(package or module)
    except PackageNotFoundError:
        return "version unknown"
