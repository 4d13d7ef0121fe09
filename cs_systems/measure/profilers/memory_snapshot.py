"""PyTorch's own memory history around the recorded steps, dumped at the end or when memory runs out.

A JSON file next to the pickle has data that the snapshot lacks (`readers.snapshot` documents the format). Stacks hold
only Python frames: with C++ frames, symbolising made a dump of 4 s take 461 s.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs_systems.measure.profilers import Collected, ProfileLost, Profiler, Unavailable
from cs_systems.readers.snapshot import SIDECAR_VERSION
from cs_systems.record import RunRecord

if TYPE_CHECKING:
    from cs_systems.machine.device import Device


def snapshot_path(out: Path) -> Path:
    return Path(f"{out}.pickle")


def sidecar_path(out: Path) -> Path:
    return Path(f"{snapshot_path(out)}.json")


@contextmanager
def region(out: Path, device: Device, model: Any) -> Iterator[None]:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from cs_systems.instrument.annotate import RecordFunctionRanges
    from cs_systems.instrument.hooks import annotated
    from cs_systems.instrument.memory_readings import named_tensors

    if not device.is_cuda:
        raise Unavailable("a memory snapshot requires a CUDA device; leave it out or run on a GPU")
    memory, optimizers = torch.cuda.memory, list[Any]()
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: optimizers.append(optimizer))
    device.restart_peaks()
    memory._record_memory_history(stacks="python", clear_history=True, global_record_annotations=True)
    try:
        with annotated(RecordFunctionRanges(), model):
            yield
    finally:
        device.synchronize()
        memory._dump_snapshot(str(snapshot_path(out)))
        memory._record_memory_history(enabled=None)
        hook.remove()
        known = {"max_allocated_bytes": device.peaks()[0], "tensors": named_tensors(model, optimizers[-1:])}
        sidecar_path(out).write_text(json.dumps({"schema_version": SIDECAR_VERSION, "config": None, **known}))


def collect(out: Path, record: RunRecord) -> Collected:
    """Return the snapshot's files, after adding the record's config to the sidecar."""
    snapshot, sidecar = snapshot_path(out), sidecar_path(out)
    if not (snapshot.is_file() and sidecar.is_file()):
        raise ProfileLost("PyTorch left no snapshot; check the free disk space")
    known = json.loads(sidecar.read_text())
    sidecar.write_text(json.dumps(known | {"config": record.config}))
    return Collected({"snapshot": snapshot, "snapshot_names": sidecar})


PROFILER = Profiler(
    region=region, collect=collect, measures="memory", sees_oom=True,
    tool="CUDA memory history", result="memory snapshot",
    without_file="no snapshot: memory ran out while the model was built or in the warm-up, before the snapshot began; "
    "use --warmup 0, or a smaller model or batch",
)  # fmt: skip
