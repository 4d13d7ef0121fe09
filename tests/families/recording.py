"""Trace of torch.profiler on a CPU as if it were of a GPU: each innermost operator becomes a kernel."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from cs_systems.analysis.attribution.profile import Profile, profile
from cs_systems.machine.device import resolve
from cs_systems.measure.profilers._torch_profiler import trace_path
from cs_systems.measure.profilers.kineto import region
from cs_systems.readers import read
from cs_systems.readers.forms.columns import Categorical
from cs_systems.readers.forms.trace import Function, Kernels, Trace
from tests.families.conftest import Made


def recorded(made: Made, out: Path, model: nn.Module | None = None) -> Profile:
    """Return the profile of one step, recorded as `profile --with kineto` does."""
    with region(out, resolve("cpu"), made.model if model is None else model):
        made.step()
    return profile(with_kernels(trace_path(out)))


def with_kernels(path: Path) -> Trace:
    trace = read(path)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    ops = [e for e in events if e.get("ph") == "X" and e.get("cat") == "cpu_op" and e.get("dur")]
    origin = next(e["ts"] for e in events if e.get("ph") == "X" and _is_kept(e))
    ops = sorted(_innermost(ops), key=lambda e: float(e["ts"]))
    start = np.array([(e["ts"] - origin) * 1e-6 for e in ops])
    end = start + np.array([e["dur"] * 1e-6 for e in ops])
    zeros = np.zeros(len(ops), np.int64)
    kernels = Kernels(
        Categorical.of(Function(e["name"], None, None, None, None) for e in ops),
        start, end, zeros, zeros, np.array([e["tid"] for e in ops], np.int64), start, end, zeros > 0, zeros - 1,
    )  # fmt: skip
    return replace(trace, kernels=kernels)


def _is_kept(event: dict[str, Any]) -> bool:
    return event.get("cat") == "user_annotation" or (
        event.get("cat") == "cpu_op" and "Sequence number" in event.get("args", {})
    )


def _innermost(ops: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for tid in {e["tid"] for e in ops}:
        mine = sorted((e for e in ops if e["tid"] == tid), key=lambda e: (e["ts"], -e["dur"]))
        found += [e for e, after in zip(mine, [*mine[1:], None], strict=True)
                  if after is None or after["ts"] >= e["ts"] + e["dur"]]  # fmt: skip
    return found
