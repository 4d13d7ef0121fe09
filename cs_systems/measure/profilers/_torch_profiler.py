"""Recording with torch.profiler into a Chrome trace."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs_systems.readers.forms.modules import HEADER, packed
from cs_systems.record import Row

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
    """Record the host, and the device if there is one, with `ranges` open; write the trace at the end.

    all_threads: also record host threads that neither autograd nor this thread started.
    modules: the table `modules` of the model, for the trace's header.
    """
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.is_cuda else [])]
    how = _ExperimentalConfig(profile_all_threads=all_threads)
    # one cycle, so that nothing is cleared; torch would warn that the end of each cycle clears its events
    whole: dict[str, Any] = {"acc_events": True} if "acc_events" in inspect.signature(profile).parameters else {}
    with profile(activities=activities, experimental_config=how, **whole) as profiler, ranges:
        if modules:
            profiler.add_metadata_json(HEADER, json.dumps(packed(modules)))
        yield
    profiler.export_chrome_trace(str(trace_path(out)))
