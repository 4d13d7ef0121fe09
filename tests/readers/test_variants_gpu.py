"""Traces that the profilers write on a GPU: CUDA graphs by torch.profiler, scopes by Triton's Proton."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cs_systems.analysis.attribution.profile import profile
from cs_systems.readers import _proton as proton
from cs_systems.readers import read

pytestmark = pytest.mark.gpu
REPLAYS = 3
GRAPH = f"""
import sys, torch
from torch.profiler import ProfilerActivity
x = torch.randn(512, 512, device="cuda")
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    for _ in range(3):
        x @ x
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    ((x @ x).relu() @ x).sum()
with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
    for _ in range({REPLAYS}):
        graph.replay()
    torch.cuda.synchronize()
recorded.export_chrome_trace(sys.argv[1])
"""
SCOPES = """
import sys, torch
import triton.profiler as proton
x = torch.randn(512, 512, device="cuda")
x + x
session = proton.start(sys.argv[1])
with proton.scope("step"):
    with proton.scope("sums", {"flops32": 512**2 * 4}):
        for _ in range(4):
            x + x  # one kernel on every card, unlike a product, which may be split
    x.relu()
torch.cuda.synchronize()
proton.finalize()
"""


def record(program: str, path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_kernels_of_a_replayed_graph_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    record(GRAPH, path)
    events = json.loads(path.read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    made = profile(read(path))
    assert len(made.trace.kernels) == len(kernels)
    in_graph = int(made.trace.kernels.in_graph.sum())
    assert in_graph >= 4 * REPLAYS
    assert in_graph % REPLAYS == 0
    assert any(note.startswith(f"{in_graph} kernels ran in CUDA graphs") for note in made.notes)


def test_scopes_of_proton_are_read(tmp_path: Path) -> None:
    record(SCOPES, tmp_path / "recorded")
    made = proton.read(tmp_path / "recorded.hatchet")
    rows = {row["path"]: row for row in made.scopes}
    sums = rows["step / sums"]
    assert (sums["calls"], sums["flops"]) == (4, 512**2 * 4)
    assert sums["time_s"] is not None
    assert sums["flops_per_s"] == pytest.approx(512**2 * 4 / sums["time_s"])
    assert rows["step"]["calls"] == 5
    assert {row["device"] for row in made.kernels} == {"CUDA 0"}
    assert made.devices[0].startswith("CUDA 0 (architecture ")
