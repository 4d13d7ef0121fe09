"""Snapshots that PyTorch records on a GPU: expandable segments, with and without stacks, failed requests, texts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cs_systems.analysis.memory.allocations import replay
from cs_systems.analysis.memory.annotations import METADATA, by_annotation
from cs_systems.analysis.memory.categories import attribute
from cs_systems.analysis.memory.out_of_memory import out_of_memory
from cs_systems.analysis.memory.tensor_names import tensor_names
from cs_systems.readers.snapshot import read

pytestmark = pytest.mark.gpu
ASKED = 1 << 40
# Record steps from the first allocation on, with a failed request, and print what PyTorch counted.
RECORD = f"""
import json, sys, torch
memory = torch.cuda.memory
memory._record_memory_history(max_entries=100_000, **json.loads(sys.argv[2]))
set_text = getattr(memory, "_set_memory_metadata", lambda text: None)
set_text("weights")
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6))).cuda()
set_text("")
optimizer = torch.optim.AdamW(model.parameters())
for size in (64, 3000, 700):
    with torch.profiler.record_function("forward"):
        loss = model(torch.randn(size, 512, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
try:
    torch.empty({ASKED}, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    pass
peak = torch.cuda.max_memory_allocated()
memory._dump_snapshot(sys.argv[1])
print(json.dumps({{"peak": peak, "texts": hasattr(memory, "_set_memory_metadata")}}))
"""
EXPANDABLE = "expandable_segments:True"


@pytest.mark.parametrize(
    ("allocator", "options"),
    [
        ("", {"stacks": "python"}),
        ("", {"context": None}),
        (EXPANDABLE, {"stacks": "python"}),
        (EXPANDABLE, {"context": "state"}),
        ("roundup_power2_divisions:4", {"stacks": "python"}),
        ("max_split_size_mb:32", {"stacks": "python"}),
    ],
    ids=str,
)
def test_recorded_snapshot_has_the_peak_that_pytorch_counts(
    tmp_path: Path, allocator: str, options: dict[str, Any]
) -> None:
    path = tmp_path / "recorded.pickle"
    words = [sys.executable, "-c", RECORD, str(path), json.dumps(options)]
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": allocator, "PYTORCH_ALLOC_CONF": allocator}
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    counted = json.loads(done.stdout.splitlines()[-1])
    found = attribute(replay(read(path)))
    names = tensor_names(found)
    assert found.replay.peak_bytes == counted["peak"]
    assert found.replay.snapshot.settings.expandable_segments == (allocator == EXPANDABLE)
    (failed,) = out_of_memory(found, names)
    assert failed["requested_bytes"] == ASKED
    assert failed["device_free_bytes"]
    assert failed["cause"].startswith("too little memory")
    texts = [row for row in by_annotation(found, names) if row["kind"] == METADATA]
    assert [row["annotation"] for row in texts] == (["weights"] if counted["texts"] else [])
