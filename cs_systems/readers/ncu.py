"""Reader of Nsight Compute reports (.ncu-rep): hardware counters of single kernel launches.

NVIDIA's package ncu-report (the extra `ncu`; its licence is NVIDIA's own) reads the report offline, in a separate
process: its native code can crash on a report of another version. A metric that the report lacks is None.

Source: `ncu --query-metrics`, and the comparison of metrics in the documentation of Nsight Compute, which lists the
successors of nvprof's load and store throughput, warp execution efficiency and SM efficiency.
"""

from __future__ import annotations

import json
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypedDict, cast

from cs_systems.config import ConfigError
from cs_systems.core.formats import Format
from cs_systems.core.tables import Column, Table
from cs_systems.readers._paths import check_file

INSTALL = "pip install 'cs-systems[ncu]', or put the folder extras/python of ncu on PYTHONPATH"
UPGRADE = "pip install --upgrade ncu-report"
_PEAK, _ACTIVE = "avg.pct_of_peak_sustained_elapsed", "avg.pct_of_peak_sustained_active"
_GLOBAL, _SHARED = "l1tex__t_bytes_pipe_lsu_mem_global_op", "l1tex__data_pipe_lsu_wavefronts_mem_shared_op"
_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op"

# Column → metric. A share is a fraction of the chip's sustained peak. Loads and stores are those of the load/store
# units: copies by the tensor memory accelerator appear only in the DRAM columns.
METRICS = {
    "time_s": "gpu__time_duration.sum",
    "registers": "launch__registers_per_thread",
    "shared_bytes": "launch__shared_mem_per_block",  # bytes per block, including the driver's share
    "waves": "launch__waves_per_multiprocessor",
    "occupancy_share": f"sm__warps_active.{_ACTIVE}",  # active warps as a share of an SM's maximum, while it is active
    "highest_occupancy_share": "sm__maximum_warps_per_active_cycle_pct",  # allowed by registers and shared memory
    "sm_efficiency_share": "smsp__cycles_active.avg.pct_of_peak_sustained_elapsed",  # share of time with an active warp
    "sm_share": f"sm__throughput.{_PEAK}",
    "memory_share": f"gpu__compute_memory_throughput.{_PEAK}",  # the busiest among L1, L2 and DRAM
    "dram_share": f"gpu__dram_throughput.{_PEAK}",
    "dram_read_bytes_per_s": "dram__bytes_read.sum.per_second",
    "dram_write_bytes_per_s": "dram__bytes_write.sum.per_second",
    "load_bytes_per_s": f"{_GLOBAL}_ld.sum.per_second",
    "store_bytes_per_s": f"{_GLOBAL}_st.sum.per_second",
    "shared_load_bytes_per_s": f"{_SHARED}_ld.sum.per_second",
    "shared_store_bytes_per_s": f"{_SHARED}_st.sum.per_second",
    "shared_load_conflicts": f"{_CONFLICTS}_ld.sum",
    "shared_store_conflicts": f"{_CONFLICTS}_st.sum",
    "warp_efficiency_share": "smsp__thread_inst_executed_per_inst_executed.ratio",
}
# factors from a metric's count to its column, for metrics without a unit
_THREADS_A_WARP = 32
_BYTES_A_WAVEFRONT = 128  # upper limit: one wavefront takes 4 bytes from each of the 32 banks
_FACTORS = {
    "warp_efficiency_share": 1 / _THREADS_A_WARP,
    "shared_load_bytes_per_s": _BYTES_A_WAVEFRONT,
    "shared_store_bytes_per_s": _BYTES_A_WAVEFRONT,
}
# unit names in several versions of ncu → base units; other units are counts
_UNITS = {"%": 1e-2, "ns": 1e-9, "nsecond": 1e-9, "us": 1e-6, "usecond": 1e-6, "ms": 1e-3, "msecond": 1e-3}
_WHOLE = ("registers", "shared_bytes", "shared_load_conflicts", "shared_store_conflicts")
_LAUNCH = {"grid": "launch__grid_dim", "block": "launch__block_dim"}


class CounterRow(TypedDict):
    """Hardware counters of one launch, in `counters`. `METRICS` names the metric of each column.

    Shares are fractions of the chip's sustained peak.
    """

    kernel: Annotated[str, Column(beside=52)]
    ranges: str  # open NVTX ranges, outermost first
    grid: str | None
    block: str | None
    time_s: float | None
    registers: Annotated[int | None, Column("regs")]  # per thread
    shared_bytes: Annotated[int | None, Column("per block")]  # per block, including the driver's share
    waves: float | None
    occupancy_share: float | None
    highest_occupancy_share: Annotated[float | None, Column("at most")]
    sm_efficiency_share: Annotated[float | None, Column("SM eff.")]
    sm_share: Annotated[float | None, Column("SM")]
    memory_share: float | None
    dram_share: Annotated[float | None, Column("DRAM")]
    dram_read_bytes_per_s: Annotated[float | None, Column("read")]
    dram_write_bytes_per_s: Annotated[float | None, Column("written")]
    load_bytes_per_s: float | None
    store_bytes_per_s: float | None
    shared_load_bytes_per_s: Annotated[float | None, Column("load")]
    shared_store_bytes_per_s: Annotated[float | None, Column("store")]
    shared_load_conflicts: Annotated[int | None, Column("ld conflicts")]
    shared_store_conflicts: Annotated[int | None, Column("st conflicts")]
    warp_efficiency_share: Annotated[float | None, Column("warp eff.")]


COUNTERS = Table("counters", CounterRow, "hardware counters of each kernel launch")


def read(path: Path) -> list[CounterRow]:
    """Return one row for each profiled launch, in order.

    Raises:
        ConfigError: The file or the package is missing or unusable.
    """
    check_file(path, "report", FORMAT.suffixes)
    import subprocess

    done = subprocess.run([sys.executable, "-m", __name__, path.resolve()], capture_output=True, text=True)
    if done.returncode < 0:
        crash = signal.Signals(-done.returncode).name
        raise ConfigError(
            f"NVIDIA's ncu-report was ended by {crash} on {path}; install its newest version ({UPGRADE}), or profile "
            "again with fewer kernels"
        )
    if done.returncode:
        why = (done.stderr.strip() or "no message").splitlines()[-1]
        raise ConfigError(f"ncu-report cannot read {path}: {why}; install its newest version: {UPGRADE}")
    found: list[CounterRow] | str = json.loads(done.stdout)
    if isinstance(found, str):
        raise ConfigError(found)
    return found


def rows(path: Path) -> list[CounterRow]:
    """Return the rows of `read`, read in this process."""
    load = _loader()
    try:
        report = load(str(path))
        found = [_row(action) for profiled in report for action in profiled]
    except Exception as error:  # NVIDIA's library raises exceptions of its own
        raise ConfigError(
            f"ncu-report cannot read {path}: {error}; use an ncu-report at least as new as the ncu that wrote the "
            f"report ({UPGRADE}), or profile again if the report is truncated"
        ) from error
    if not found:
        raise ConfigError(f"{path} holds no profiled kernel; give a complete report of ncu, or profile again")
    return found


def _loader() -> Callable[[str], Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # its SWIG types warn under Python 3.12 and newer
            import ncu_report
    except ImportError as error:
        raise ConfigError(f"a report of ncu requires NVIDIA's package ncu-report ({error}); run {INSTALL}") from None
    load: Callable[[str], Any] = ncu_report.load_report
    return load


def _row(action: Any) -> CounterRow:
    values = {column: _value(action, metric) for column, metric in METRICS.items()}
    for column, factor in _FACTORS.items():
        if (value := values[column]) is not None:
            values[column] = value * factor
    for column in _WHOLE:
        if (value := values[column]) is not None:
            values[column] = round(value)
    shapes = {name: tuple(_value(action, f"{metric}_{axis}") for axis in "xyz") for name, metric in _LAUNCH.items()}
    row = {
        "kernel": action.name(action.NameBase_DEMANGLED),
        "ranges": " > ".join(_ranges(action.nvtx_state())),
        **{
            name: None if None in shape else "×".join(f"{side:.0f}" for side in shape) for name, shape in shapes.items()
        },
        **values,
    }
    return cast(CounterRow, row)


def _value(action: Any, metric: str) -> float | None:
    found = action.metric_by_name(metric)
    value = None if found is None else found.value()
    return float(value) * _UNITS.get(found.unit(), 1) if isinstance(value, int | float) else None


def _ranges(state: Any) -> Iterator[str]:
    """Yield the names of the open ranges in stack order; `push_pop_ranges` would sort them."""
    for domain in map(state.domain_by_id, state.domains()) if state is not None else ():
        yield from (domain.push_pop_range(i).name() for i in range(len(domain.push_pop_ranges())))


FORMAT = Format(
    title="a report of ncu",
    matches=lambda head, path: head.startswith(b"NVR\0") or path.suffix == ".ncu-rep",
    suffixes=(".ncu-rep",),
    holds="counters",
    read=read,
    record="`ncu --set full --nvtx -o report python train.py`",
    lacks="times of the program: ncu runs each kernel alone",
)

if __name__ == "__main__":
    try:
        json.dump(rows(Path(sys.argv[1])), sys.stdout)
    except ConfigError as error:
        json.dump(str(error), sys.stdout)
