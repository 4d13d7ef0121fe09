"""Profiler `kineto`: torch.profiler writes a Chrome trace of the timed steps, and tables are made from it.

Perfetto can open the trace. It also holds autograd's sequence numbers, against which the attribution of backward is
checked.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs_systems.measure.profilers import Collected, ProfileLost, Profiler
from cs_systems.measure.profilers._tables import tables
from cs_systems.measure.profilers._torch_profiler import record_trace, trace_path
from cs_systems.record import RunRecord

if TYPE_CHECKING:
    from cs_systems.machine.device import Device


def region(out: Path, device: Device, model: Any) -> AbstractContextManager[None]:
    from cs_systems.instrument.annotate import RecordFunctionRanges
    from cs_systems.instrument.hooks import annotated
    from cs_systems.instrument.structure import as_table, rows

    modules = [] if model is None else as_table(rows(model))
    return record_trace(out, device, annotated(RecordFunctionRanges(), model), modules=modules)


def collect(out: Path, record: RunRecord) -> Collected:
    trace = trace_path(out)
    if not trace.is_file():
        raise ProfileLost("torch.profiler left no trace; check the free disk space")
    return replace(tables(trace, record), artifacts={"trace": trace})


PROFILER = Profiler(region=region, collect=collect, on_each_rank=True, tool="torch.profiler")
