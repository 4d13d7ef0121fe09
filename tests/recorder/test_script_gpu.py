"""`cs-systems run` on a GPU: a trace below nsys, and a memory snapshot, of a script that was not edited."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cs_systems.record import RunRecord, read_records

pytestmark = pytest.mark.gpu

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(30):
    optimizer.zero_grad()
    loss = model(torch.randn(64, 512).cuda(non_blocking=True)).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
print(loss.item())
"""


def recorded(folder: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], list[RunRecord]]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    run = ["-m", "cs_systems", "run", "--steps", "3:8", "--out", str(folder / "out"), *options, "--", str(script)]
    done = subprocess.run([sys.executable, *run], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done, read_records(folder / "out")[0]


def test_memory_leaves_a_snapshot_and_stop_ends_the_script(tmp_path: Path) -> None:
    done, (timed, snapshot) = recorded(tmp_path, "--with", "memory", "--stop")
    assert done.stdout == ""
    assert timed.measurement is not None
    assert timed.measurement.clock == "cuda_event"
    assert (snapshot.status, snapshot.config["profiler"]) == ("ok", "memory_snapshot")
    assert (tmp_path / "out" / snapshot.artifacts["snapshot"]).is_file()


@pytest.mark.nsys
def test_nsys_gives_kernels_a_phase(tmp_path: Path) -> None:
    done, (timed, profiled) = recorded(tmp_path, "--with", "nsys")
    assert len(done.stdout.splitlines()) == 1
    assert "below-nsys" in [c.code for c in timed.warnings]
    assert (profiled.status, profiled.config["profiler"]) == ("ok", "nsys")
    (coverage,) = profiled.results["coverage"]
    assert coverage["steps"] == 3
    assert coverage["phase_coverage"] > 0.95
    assert {"forward", "backward", "clip", "optimizer"} <= {row["phase"] for row in profiled.results["phases"]}
