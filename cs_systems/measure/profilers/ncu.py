"""Profiler `ncu`: Nsight Compute reads hardware counters of single kernels.

The worker runs under `ncu`, which runs each kernel that it counts several times. The step's times are then not
meaningful, and no table of times is made.

`profiler_args` select the kernels: `chosen(kernel, range)`. Options: the documentation of Nsight Compute's command
line.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs_systems.config import ConfigError
from cs_systems.core.diagnostic import Diagnostic, diagnostic
from cs_systems.measure.profilers import Collected, ProfileLost, Profiler, Unavailable, _nsys
from cs_systems.readers import ncu as reports
from cs_systems.record import RunRecord

if TYPE_CHECKING:
    from cs_systems.machine.device import Device

MOST = 10  # most kernels to count; each runs a dozen times
DEFAULTS = (
    "--target-processes=all",
    "--profile-from-start=off",  # do not count before the timed steps
    "--nvtx",
    "--replay-mode=kernel",
    "--clock-control=none",  # ncu would otherwise lock the GPU's clocks, which a profiler must not change
    f"--launch-count={MOST}",
    f"--metrics={','.join(reports.METRICS.values())}",
    "--force-overwrite",
)
NOT_PERMITTED = "ERR_NVGPUCTRPERM"
REFUSED = (
    f"the driver does not permit hardware counters ({NOT_PERMITTED}); run as root, or load the driver with "
    "NVreg_RestrictProfilingToAdminUsers=0; in a container, start the container with --cap-add=SYS_ADMIN "
    f"(https://developer.nvidia.com/{NOT_PERMITTED})"
)
_REMEDY = "install it with apt install nsight-compute (NVIDIA's CUDA repository)"
# The driver states in this file whether only root may read hardware counters.
_DRIVER_PARAMETERS = Path("/proc/driver/nvidia/params")
# one of them exists if an NVIDIA driver is loaded; the second one in WSL
_DRIVERS = ("/proc/driver/nvidia", "/dev/dxg")


def chosen(kernel: str | None, range: str | None) -> tuple[str, ...]:
    """Return ncu's options that select kernels by name, by NVTX range or by both.

    kernel: a regular expression that matches a part of the kernel function's name.
    range: the NVTX range in which the kernels are launched: `scores`, or `block 0/*/scores` for a nested range.

    Raises ConfigError without either.
    """
    if not kernel and not range:
        raise ConfigError(
            "--with ncu requires --kernel REGEX or --range NAME, because ncu runs each counted kernel several times; "
            "list the kernels with cs-systems profile --with kineto"
        )
    options = [f"--kernel-name=regex:{kernel}"] if kernel else []
    if range:
        options.append(f"--nvtx-include={range if '/' in range else f'{range}/'}")  # a slash marks a push/pop range
    return tuple(options)


def check() -> Diagnostic:
    """Return the `doctor` row for ncu: whether it can count here."""
    path = shutil.which("ncu")
    if path is None:
        return diagnostic("ncu", _nsys.NOT_ON_PATH, "missing", _REMEDY)
    found = _nsys.version_of(path)
    if importlib.util.find_spec("ncu_report") is None:
        return diagnostic(
            "ncu", f"{found} lacks the package ncu-report to read its reports", "missing", reports.INSTALL
        )
    for_root_alone = _DRIVER_PARAMETERS.exists() and "RmProfilingAdminOnly: 1" in _DRIVER_PARAMETERS.read_text()
    if for_root_alone and os.geteuid() != 0:
        remedy = "run ncu as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
        return diagnostic("ncu", f"{found}, but the driver permits hardware counters to root only", "problem", remedy)
    return diagnostic("ncu", found)


def problem() -> str | None:
    """Return the missing requirement, or None. Whether counters are permitted is only known after ncu has run."""
    row = check()
    if row["state"] != "missing":
        return None
    if not any(Path(driver).exists() for driver in _DRIVERS):
        return "ncu requires an NVIDIA GPU, and this machine has no NVIDIA driver; use the profiler kineto or nsys"
    return _nsys.reason(row)


def launch(argv: Sequence[str], out: Path, options: Sequence[str], on_cuda: bool) -> list[str]:
    """Return the command that runs the worker under `ncu`.

    ncu rejects an option given twice, so a user's option replaces the default of the same name.
    """
    if not on_cuda:
        return list(argv)  # `region` raises Unavailable instead
    named = {option.partition("=")[0] for option in options}
    defaults = [option for option in DEFAULTS if option.partition("=")[0] not in named]
    files = [f"--export={out.absolute()}", f"--log-file={_log(out).absolute()}"]
    return ["ncu", *defaults, *files, *options, *argv]


def _log(out: Path) -> Path:
    return Path(f"{out}.ncu.log")


@contextmanager
def region(out: Path, device: Device, model: Any) -> Iterator[None]:
    if not device.is_cuda:
        raise Unavailable("the profiler ncu requires a CUDA device; use the profiler kineto")
    with _nsys.region(out, device, model):
        yield


def refused(out: Path) -> str | None:
    log = _log(out)
    return REFUSED if log.is_file() and NOT_PERMITTED in log.read_text(errors="replace") else None


def collect(out: Path, record: RunRecord) -> Collected:
    report, log = Path(f"{out}.ncu-rep"), _log(out)
    if not report.is_file():
        output = log.read_text(errors="replace") if log.is_file() else ""
        if "No kernels were profiled" in output:
            options = " ".join(record.run_config.profiler_args)
            remedy = "list the kernels with cs-systems profile --with kineto"
            if "--nvtx-include" in options:
                remedy += ", and the ranges of its trace with cs-systems analyze TRACE --table range_tree"
            raise ProfileLost(f"no kernel of the timed steps matches {options}; {remedy}")
        if not output.strip():
            raise ProfileLost(
                "ncu wrote neither a report nor a message; run ncu yourself, with the command that "
                "cs-systems profile --with ncu --kernel REGEX --show-command prints"
            )
        raise ProfileLost(f"ncu wrote no report: {_nsys.last_line(output)}; read all its messages in {log}")
    try:
        return Collected({"ncu": report}, {"counters": reports.read(report)})
    except ConfigError as error:
        raise ProfileLost(str(error)) from error


PROFILER = Profiler(problem, launch, region, refused, collect, measures="counters")
