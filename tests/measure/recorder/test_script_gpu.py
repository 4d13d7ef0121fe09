"""Tests of `cs-systems run` on a GPU: a trace under nsys and a memory snapshot of an unedited script."""

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


def ran(script: str, folder: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], list[RunRecord]]:
    """Run a script alone and recorded; return the recorded one if it prints and ends as it does alone."""
    file = folder / "own.py"
    file.write_text(script)
    run = ["-m", "cs_systems", "run", "--steps", "3:8", "--out", str(folder / "out"), *options, "--"]
    alone, done = (
        subprocess.run([sys.executable, *before, str(file)], capture_output=True, text=True) for before in ([], run)
    )
    assert (done.returncode, done.stdout) == (alone.returncode, alone.stdout), done.stderr
    return done, read_records(folder / "out")[0]


GRAPH = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
batch = torch.randn(64, 256, device="cuda")

def step():
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss

stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    for _ in range(2):
        step()
torch.cuda.current_stream().wait_stream(stream)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = step()
for _ in range(30):
    graph.replay()
torch.cuda.synchronize()
print(loss.item())
"""


@pytest.mark.parametrize("options", [(), ("--with", "kineto")], ids=str)
def test_replay_of_a_captured_step_is_a_step(options: tuple[str, ...], tmp_path: Path) -> None:
    _, records = ran(GRAPH, tmp_path, *options)
    for record in records:
        assert (record.status, record.reason) == ("ok", None)
    assert records[0].measurement is not None
    assert len(records[0].measurement.timed) == 5
    last = records[0].measurement.timed[-1]
    assert last.phases_s["cuda_graph"] > 0.5 * last.wall_s


HISTORY = """
import torch
from torch import nn

torch.cuda.memory._record_memory_history()
model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    model(torch.randn(8, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
allocations = [each for trace in torch.cuda.memory._snapshot()["device_traces"] for each in trace]
torch.cuda.memory._record_memory_history(enabled=None)
print(sum(each["action"] == "alloc" for each in allocations) > 20)
"""


def test_memory_history_of_the_script_stays(tmp_path: Path) -> None:
    done, (timed, snapshot) = ran(HISTORY, tmp_path, "--with", "memory")
    assert done.stdout == "True\n"
    assert "own-tools" in {caveat.code for caveat in timed.warnings}
    assert snapshot.status == "unavailable"
    assert "its own CUDA memory history was active" in str(snapshot.reason)


CHECKPOINT = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
blocks = nn.ModuleList(nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048)) for _ in range(6)).cuda()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = blocks

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=REENTRANT)
        return x

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(20):
    model(torch.randn(2048, 2048, device="cuda", requires_grad=True)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_on_a_gpu_belongs_to_backward(reentrant: bool, tmp_path: Path) -> None:
    """Forward has a third of the products of backward, which repeats it but for what it can leave out at its end."""
    _, (record, *_) = ran(CHECKPOINT.replace("REENTRANT", str(reentrant)), tmp_path)
    assert record.measurement is not None
    forward, backward = (record.measurement.median_s(phase) for phase in ("forward", "backward"))
    assert forward is not None
    assert backward is not None
    assert 2 < backward / forward < 4
    (caveat,) = (each for each in record.warnings if each.code == "recomputed")
    assert 10 < int(caveat.message.partition("%")[0]) < 50


GRAPHS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(256, 256)

    def forward(self, x):
        return self.inner(x).square().mean()

torch.manual_seed(0)
model = Net().cuda()
model.compile(mode="reduce-overhead")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch, losses = torch.randn(64, 256, device="cuda"), []
for _ in range(40):
    loss = model(batch)
    losses.append(loss.item())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(losses)
"""


def test_losses_in_the_memory_of_compiled_cuda_graphs_are_kept(tmp_path: Path) -> None:
    done, (record, *_) = ran(GRAPHS, tmp_path)
    losses = [float(each) for each in done.stdout.strip("[]\n").split(",")]
    (outcome,) = record.results["outcome"]
    assert outcome["losses"] >= 8
    assert losses[-1] < outcome["late_loss"] < outcome["early_loss"] <= losses[0]


GENERATION = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(20))).cuda()
x = torch.randn(4, 512, device="cuda")
with torch.inference_mode():
    for _ in range(60):
        x = torch.tanh(model(x))
        if (x.norm() == 0).item():
            break
print(x.norm().item() > 0)
"""


def test_generation_is_recorded_with_kernels_and_its_wait(tmp_path: Path) -> None:
    _, records = ran(GENERATION, tmp_path, "--with", "kineto")
    timed, profiled = records
    assert timed.measurement is not None
    assert {"forward", "host_sync"} <= {*timed.measurement.phase_names()}
    assert "forward-only" in {caveat.code for caveat in timed.warnings}
    assert profiled.results["kernels"]
