"""Profiler of device memory by NVTX range: Nsight Systems records calls of cudaMalloc and cudaFree in the steps.

PyTorch's caching allocator makes few such calls, and none once its cache holds enough for a step. With `UNCACHED` among
the options it calls CUDA for each tensor, so that ranges show their allocations; such steps are slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs_systems.analysis.attribution.memory_ranges import (
    MEMORY_RANGES,
    MEMORY_RANGES_OF,
    MEMORY_USAGE,
    MemoryRange,
    MemoryRangeRow,
    memory_ranges,
)
from cs_systems.config import ConfigError, Phase
from cs_systems.measure.profilers import Collected, ProfileLost, Profiler, Unavailable, _nsys
from cs_systems.measure.profilers._blocks import gradients_of_a_block, kept_by_eager_block
from cs_systems.readers import read
from cs_systems.record import RunRecord

if TYPE_CHECKING:
    from cs_systems.machine.device import Device

UNCACHED = "--env-var=PYTORCH_NO_CUDA_MEMORY_CACHING=1"


def launch(argv: Sequence[str], out: Path, options: Sequence[str], on_cuda: bool) -> list[str]:
    return _nsys.launch(argv, out, [MEMORY_USAGE, *options] if on_cuda else [], on_cuda)


@contextmanager
def region(out: Path, device: Device, model: Any) -> Iterator[None]:
    if not device.is_cuda:
        raise Unavailable("the profiler nsys_memory requires a CUDA device; run on a GPU, or do without this profiler")
    with _nsys.region(out, device, model):
        yield


def collect(out: Path, record: RunRecord) -> Collected:
    report, database = _nsys.export(out)
    try:
        rows = memory_ranges(read(database))
    except ConfigError as error:
        raise ProfileLost(str(error)) from None
    sees = "tensors" if UNCACHED in record.run_config.profiler_args else "the caching allocator's requests"
    files = {"nsys": report, "sqlite": database}
    found = MEMORY_RANGES.filled(with_prediction(rows, record))
    return Collected(files, {**found, **MEMORY_RANGES_OF.filled([{"sees": sees}])})


def with_prediction(rows: Sequence[MemoryRange], record: RunRecord) -> list[MemoryRangeRow]:
    """Return the rows with a predicted_bytes column added."""
    kept = kept_by_eager_block(record)
    if kept is None or UNCACHED not in record.run_config.profiler_args:
        return [{**row, "predicted_bytes": None} for row in rows]
    change = {Phase.FORWARD.value: kept, Phase.BACKWARD.value: gradients_of_a_block(record.run_config) - kept}
    blocks = [row["layer"].startswith("block") for row in rows]
    return [
        {**row, "predicted_bytes": change.get(row["phase"]) if block else None}
        for row, block in zip(rows, blocks, strict=True)
    ]


PROFILER = Profiler(
    _nsys.problem, launch, region, collect=collect, measures="memory",
    instead=("leave out --nsys", "use another profiler"),
)  # fmt: skip
