"""torch.profiler: a Chrome trace of the timed steps, which Perfetto opens, and the tables made from it.

The trace holds autograd's sequence numbers too; the attribution of backward is checked against them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs_systems.measure.profilers import Collected, ProfileLost, Profiler
from cs_systems.measure.profilers._tables import tables
from cs_systems.readers.forms.modules import HEADER, packed
from cs_systems.record import Row, RunRecord

if TYPE_CHECKING:
    from cs_systems.machine.device import Device


def trace_path(out: Path) -> Path:
    return Path(f"{out}.trace.json.gz")


@contextmanager
def record_trace(
    out: Path,
    device: Device,
    ranges: AbstractContextManager[object],
    all_threads: bool = False,
    modules: Sequence[Row] = (),
) -> Iterator[None]:
    """Record the host, and the device where there is one, inside of `ranges`; the trace is written on leaving.

    all_threads: also record host threads that neither autograd nor this thread started.
    modules: the table `modules` of the model, for the trace's header.
    """
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.is_cuda else [])]
    how = _ExperimentalConfig(profile_all_threads=all_threads)
    with profile(activities=activities, experimental_config=how) as profiler, ranges:
        if modules:
            profiler.add_metadata_json(HEADER, json.dumps(packed(modules)))
        yield
    profiler.export_chrome_trace(str(trace_path(out)))


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


PROFILER = Profiler(region=region, collect=collect)
