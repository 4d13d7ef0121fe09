"""Tests with the files that the installed torch.profiler writes, with all of its options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cs_systems.analysis.attribution.operator_table import operators
from cs_systems.analysis.attribution.profile import profile
from cs_systems.analysis.comparison.ranks import summary
from cs_systems.cli import main
from cs_systems.config import ConfigError
from cs_systems.readers import read
from tests.forks import python

RECORDED = 2  # steps
# Run everything in one process, because starting torch takes longer than all the recordings.
PROGRAM = """
import sys, warnings
import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig as Config
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule, tensorboard_trace_handler

folder = sys.argv[1]
model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters())

def step():
    nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.randint(4, (8,))).backward()
    optimizer.step()
    optimizer.zero_grad()

def record(**options):
    plan = schedule(wait=1, warmup=1, active=2, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, **options) as recorded:
        for _ in range(4):
            step()
            recorded.step()
    return recorded

record().export_chrome_trace(f"{folder}/plain.json")
record(with_modules=True, record_shapes=True).export_chrome_trace(f"{folder}/modules.json.gz")
record(with_stack=True, profile_memory=True, with_flops=True).export_chrome_trace(f"{folder}/stack.json")
for name in ("verbose", "enable_cuda_sync_events", "profile_all_threads", "capture_overload_names"):
    try:
        config = Config(**{name: True})
    except TypeError:
        continue
    record(experimental_config=config).export_chrome_trace(f"{folder}/{name}.json")
record(on_trace_ready=tensorboard_trace_handler(f"{folder}/board", use_gzip=True))
observer = ExecutionTraceObserver().register_callback(f"{folder}/execution.json")
observer.start()
step()
observer.stop()
observer.unregister_callback()
with profile(record_shapes=True, profile_memory=True, with_stack=True) as recorded:
    step()
warnings.simplefilter("ignore")
recorded.export_memory_timeline(f"{folder}/memory.json", device="cpu")
recorded.export_memory_timeline(f"{folder}/memory.raw.json.gz", device="cpu")
recorded.export_memory_timeline(f"{folder}/memory.html", device="cpu")
"""
RANK = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
plan, write = schedule(wait=1, warmup=1, active=3, repeat=1), tensorboard_trace_handler(sys.argv[1])
with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=write) as recorded:
    for _ in range(5):
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        recorded.step()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("variants")
    (program := folder / "program.py").write_text(PROGRAM)
    done = python(str(program), str(folder))
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "plain.json", "modules.json.gz", "stack.json", "verbose.json", "enable_cuda_sync_events.json",
        "profile_all_threads.json", "capture_overload_names.json", "board",
    ],
)  # fmt: skip
def test_every_variant_is_read(files: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = next((files / name).iterdir()) if name == "board" else files / name
    if not path.exists():
        pytest.skip(f"this PyTorch has no option {path.stem}")
    made = profile(read(path))
    assert len(made.steps) == RECORDED
    calls = {row["operator"]: row["calls_per_step"] for row in operators(made) if row["operator"] == "aten::relu"}
    assert calls == {"aten::relu": 1}
    assert main(["analyze", str(files / name)]) == 0
    out = capsys.readouterr().out
    assert "Optimizer.step#AdamW.step" in out or name == "stack.json"  # in this variant the modules come first
    assert "None" not in out


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("execution.json", "an execution trace of PyTorch"),
        ("memory.json", "a memory timeline of export_memory_timeline"),
        ("memory.raw.json.gz", "a memory timeline of export_memory_timeline"),
        ("memory.html", "a memory timeline of export_memory_timeline"),
    ],
)
def test_files_without_a_trace_are_refused_by_name(files: Path, name: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        read(files / name)


def test_ranks_under_torchrun_are_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, traces = tmp_path / "rank.py", tmp_path / "traces"
    script.write_text(RANK)
    # Do not fork: in forks a rank sometimes hung at the end of the recording.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script), str(traces)], capture_output=True, text=True, timeout=55
    )
    assert done.returncode == 0, done.stderr[-2000:]
    files = sorted(traces.iterdir())
    assert main(["analyze", *map(str, files)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "2 ranks of one job · 3 steps" in out
    assert "all_reduce" in out
    # Only the counterparts are certain. The profiler calibrates the clock of each process: on a busy machine two can
    # differ by more than a call lasts, and then no times are compared.
    assert "no counterpart on another rank" not in out
    ranks = [summary(profile(read(file)), rank) for rank, file in enumerate(files)]
    first, second = ([(call.step, call.name) for call in one.collectives] for one in ranks)
    assert first == second
    assert len({step for step, _ in first}) == 3
