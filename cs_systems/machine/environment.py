"""Hardware and software that produced a number."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

from cs_systems.core.version import __version__
from cs_systems.machine import device as devices
from cs_systems.machine.device import Device
from cs_systems.record import Environment

# rooms of the package with code that cannot change a measured number
_NOT_MEASURING = {"cli", "report", "advise", "analysis", "readers"}
_THROTTLE_REASONS = {
    "SwPowerCap": "power cap",
    "HwSlowdown": "hardware slowdown",
    "HwThermalSlowdown": "hardware thermal slowdown",
    "HwPowerBrakeSlowdown": "power brake",
    "SwThermalSlowdown": "thermal slowdown",
}


def environment(device: Device) -> Environment:
    """Return the current facts about this process, its software and its device."""
    capability = device.capability()
    gpu = _Gpu.of(device)
    return Environment(
        cs_systems=__version__,
        code_version=code_version(),
        git_commit=git_commit(),
        python=platform.python_version(),
        torch=torch.__version__,
        triton=_version("triton"),
        cuda=torch.version.cuda,
        cudnn=str(torch.backends.cudnn.version()) if device.is_cuda else None,
        platform="-".join(filter(None, (platform.system(), platform.machine(), *platform.libc_ver()))),
        cpu=devices.cpu_name(),
        cpu_threads=torch.get_num_threads(),
        device=str(device.torch),
        device_name=device.name,
        compute_capability=f"{capability[0]}.{capability[1]}" if capability else None,
        driver=gpu.ask(lambda nvml, _: nvml.nvmlSystemGetDriverVersion()),
        device_memory_bytes=device.total_memory_bytes(),
        sm_clock_hz=gpu.sm_clock_hz(),
        sm_clock_max_hz=gpu.ask(lambda nvml, h: nvml.nvmlDeviceGetMaxClockInfo(h, nvml.NVML_CLOCK_SM) * 1e6),
        power_w=gpu.power_w(),
        temperature_c=gpu.ask(lambda nvml, h: float(nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU))),
        throttle_reasons=gpu.throttle_reasons(),
        other_processes=gpu.ask(_other_processes),
        float32_matmul=devices.float32_matmul(),
        allocator_settings=devices.allocator_settings() if device.is_cuda else None,
        load_average=load_average(),
        cpu_cores=os.cpu_count(),
    )


def load_average() -> float | None:
    """Return the mean number of processes running or waiting for a core in the last minute; None if unknown."""
    try:
        return round(os.getloadavg()[0], 2)
    except (OSError, AttributeError):
        return None


def sm_clock_hz(device: Device) -> float | None:
    """Return the current SM clock in Hz; None without NVML."""
    return _Gpu.of(device).sm_clock_hz()


def power_w(device: Device) -> float | None:
    """Return the board's power in W, on recent GPUs a mean over up to a second; None without NVML."""
    return _Gpu.of(device).power_w()


def energy_j(device: Device) -> float | None:
    """Return the energy in J that the board has used since its driver was loaded; None without NVML or before Volta."""
    return _Gpu.of(device).ask(lambda nvml, h: nvml.nvmlDeviceGetTotalEnergyConsumption(h) / 1e3)  # type: ignore[no-any-return]


def idle_power_w(device: Device) -> float | None:
    """Return the board's current power in W; None without NVML, and while the GPU computes."""
    gpu = _Gpu.of(device)
    busy = gpu.ask(lambda nvml, h: nvml.nvmlDeviceGetUtilizationRates(h).gpu)
    return gpu.power_w() if busy == 0 else None


def throttle_reasons(device: Device) -> tuple[str, ...] | None:
    """Return the reasons why the clocks are lowered now; None without NVML."""
    return _Gpu.of(device).throttle_reasons()


def other_processes_bytes(device: Device) -> int | None:
    """Return the GPU memory of other processes in bytes.

    None where NVML is missing or does not report it per process, as in a container.
    """
    return _Gpu.of(device).ask(_other_processes_bytes)  # type: ignore[no-any-return]


@cache
def code_version() -> str:
    """Return a hash of the source files that can change a measured number.

    It works with and without git.
    """
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        if file.relative_to(root).parts[0] not in _NOT_MEASURING:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


@cache
def git_commit() -> str | None:
    """Return the commit of the package's checkout, with + for local changes in the package; None outside git.

    For a copy without .git, the environment variable CS_SYSTEMS_GIT_COMMIT provides the commit.
    """
    if commit := os.environ.get("CS_SYSTEMS_GIT_COMMIT"):
        return commit
    root = Path(__file__).parents[1]
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        # Check only the package, because a sweep's own output files would make the tree dirty.
        changed = _git(root, "status", "--porcelain", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if changed else "")


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _other_processes(nvml: Any, handle: Any) -> int:
    return sum(process.pid != os.getpid() for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle))


def _other_processes_bytes(nvml: Any, handle: Any) -> int | None:
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    # one is this process, under its PID outside of the container; none means that processes are hidden
    if len(processes) < 2:
        return 0 if processes else None
    used = [process.usedGpuMemory for process in processes if process.pid != os.getpid()]
    return None if None in used else sum(used)


class _Gpu:
    """NVML queries of one GPU; each returns None if unavailable (no GPU, no nvidia-ml-py, no permission)."""

    def __init__(self, device: Device) -> None:
        self.nvml: Any = None
        if not device.is_cuda:
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            self.handle = pynvml.nvmlDeviceGetHandleByUUID(device.uuid())
            self.nvml = pynvml
        except Exception:  # catch all exceptions, because without the library its exception types do not exist either
            self.nvml = None

    @staticmethod
    @cache
    def of(device: Device) -> _Gpu:
        return _Gpu(device)

    def ask(self, question: Any) -> Any:
        if self.nvml is None:
            return None
        try:
            return question(self.nvml, self.handle)
        except self.nvml.NVMLError:
            return None

    def sm_clock_hz(self) -> float | None:
        return self.ask(lambda nvml, h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM) * 1e6)  # type: ignore[no-any-return]

    def power_w(self) -> float | None:
        return self.ask(lambda nvml, h: nvml.nvmlDeviceGetPowerUsage(h) / 1e3)  # type: ignore[no-any-return]

    def throttle_reasons(self) -> tuple[str, ...] | None:
        bits = self.ask(lambda nvml, h: nvml.nvmlDeviceGetCurrentClocksEventReasons(h))
        if bits is None:
            return None
        return tuple(text for name, text in _THROTTLE_REASONS.items() if bits & self._reason_bit(name))

    def _reason_bit(self, name: str) -> int:
        """Return the bit of a throttle reason.

        NVML renamed throttle reasons to event reasons; a library has only one of the names.
        """
        spellings = (f"nvmlClocksEventReason{name}", f"nvmlClocksThrottleReason{name}")
        return next((int(getattr(self.nvml, s)) for s in spellings if hasattr(self.nvml, s)), 0)
