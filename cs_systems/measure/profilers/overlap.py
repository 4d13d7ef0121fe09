"""Profiler of the overlap of communication and computation: torch.profiler on every rank around the timed steps.

It has ranges of phases but not of modules, so it disturbs a step less than `kineto` does. The record gets the tables
`overlap` and `streams`, a drawing of one step of rank 0: see `attribution.overlap`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs_systems.analysis.attribution.gathers import GATHERS, gathers
from cs_systems.analysis.attribution.overlap import (
    RANK_OVERLAP,
    STREAMS,
    RankOverlapRow,
    SkewRow,
    StreamRow,
    median_row,
    median_step,
    picture,
    skew_rows,
    streams,
)
from cs_systems.analysis.attribution.timeline import OVERHEAD
from cs_systems.config import ConfigError
from cs_systems.core.caveats import Caveat
from cs_systems.core.fields import Subject
from cs_systems.measure.profilers import Collected, ProfileLost, Profiler, rank_file
from cs_systems.measure.profilers._readings import CHECK_SHARED
from cs_systems.measure.profilers._tables import overhead
from cs_systems.measure.profilers._torch_profiler import record_trace, trace_path
from cs_systems.readers import read
from cs_systems.record import RunRecord

if TYPE_CHECKING:
    from cs_systems.machine.device import Device


def region(out: Path, device: Device, model: Any) -> AbstractContextManager[None]:
    """Record as `kineto` does, but with ranges of phases only, and on all threads: any may start collectives."""
    from cs_systems.instrument.annotate import RecordFunctionRanges, listening

    return record_trace(out, device, listening(RecordFunctionRanges()), all_threads=True)


def collect(out: Path, record: RunRecord) -> Collected:
    """Return `overlap`, a row for each rank's median step, `streams` and `overhead`.

    Waiting and transfer are None if the ranks' traces do not fit together; a caveat then gives the reason.
    """
    paths = [trace_path(rank_file(out, rank)) for rank in range(record.run_config.world_size)]
    if missing := [number for number, path in enumerate(paths) if not path.is_file()]:
        raise ProfileLost(f"the trace of rank {missing[0]} is not in the output folder; {CHECK_SHARED}")
    traces = [read(path) for path in paths]
    ranks = [streams(trace) for trace in traces]
    caveats: tuple[Caveat, ...] = ()
    try:
        skew = skew_rows(ranks)
    except ConfigError as error:
        skew = [SkewRow(rank=rank, transfer_s=None, waiting_s=None) for rank in range(len(ranks))]
        what, _, remedy = str(error).partition("; ")
        caveats = (Caveat("no-skew", what, remedy),)
    rows: list[RankOverlapRow] = [
        {"rank": row["rank"], **median_row(own), **row} for row, own in zip(skew, ranks, strict=True)
    ]
    step, config = ranks[0][median_step(ranks[0])], record.run_config
    shown: list[StreamRow] = [{"rank": 0, **row} for row in picture(traces[0], step)]
    layers = config.model.num_layers if record.subject is Subject.STEP else None
    gathered = gathers(traces[0], step, layers) if len(traces[0].kernels) else []
    results = {
        **RANK_OVERLAP.filled(rows),
        **STREAMS.filled(shown),
        **(GATHERS.filled(gathered) if gathered else {}),
        **OVERHEAD.filled(overhead(record)),
    }
    names = ["trace", *(f"trace_rank{number}" for number in range(1, len(paths)))]
    return Collected(dict(zip(names, paths, strict=True)), results, caveats)


PROFILER = Profiler(region=region, collect=collect, tool="torch.profiler")
