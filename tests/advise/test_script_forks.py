"""Trials that are forks of a process that has imported what the script uses of torch."""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cs_systems.advise.lever import ScriptPlan, all_levers
from cs_systems.advise.scripts import FIRST, IMPORTS, ScriptBench
from cs_systems.advise.sources import sources
from cs_systems.measure.runtime.program import script_command
from cs_systems.measure.runtime.script_forks import ENDED, Imports, Look, NoForks, ScriptForks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fork server needs Linux")

SCRIPT = """import gc, os, random, sys
import torch
from torch import nn
import mine

print("child of", os.getppid())
print("drawn", random.random(), torch.rand(1).item())
print("process", gc.get_freeze_count(), sys.argv, sys.path[0], __name__, torch.get_num_threads(), mine.__file__)
model = nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(40):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
"""
OPTIONS = {"name": "train", "warmup": 2, "steps": 8, "stop": True, "profile": "none"}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptBench]:
    """Return the bench of scripts/train.py; in the folder above, a file has the name of a module of Python."""
    folder = tmp_path / "project"
    (folder / "scripts").mkdir(parents=True)
    (folder / "profile.py").write_text("raise RuntimeError('not the one of Python')")
    (folder / "scripts" / "train.py").write_text(SCRIPT)
    (folder / "scripts" / "mine.py").touch()
    monkeypatch.chdir(folder)
    files = sources(Path("scripts/train.py"))
    made = ScriptBench(
        ["scripts/train.py"], all_levers(), tmp_path / "out", script_command, OPTIONS, sources=files, may_fork=True
    )
    yield made
    made.close()


def printed(bench: ScriptBench, name: str) -> list[list[str]]:
    lines = (bench.folder / name / "log.txt").read_text().splitlines()
    return [line.split(" ", 1) for line in lines]


def test_trials_are_forks_in_which_a_script_sees_a_new_process(bench: ScriptBench) -> None:
    records = [bench.measure(ScriptPlan(), number) for number in range(2)]
    assert [(one.status, len(one.measurement.timed if one.measurement else ())) for one in records] == [("ok", 8)] * 2
    first, *forks = (printed(bench, name) for name in (FIRST, "start-0", "start-1"))
    assert first[0][1] == f"of {os.getpid()}", "the first process is a new one"
    assert forks[0][0] == forks[1][0] != first[0]
    drawn = [number for lines in (first, *forks) for number in lines[1][1].split()]
    assert len({*drawn}) == 6, "each process draws its own random numbers"
    assert first[2] == forks[0][2] == forks[1][2]
    assert first[2][1].startswith("0 "), "no object is frozen"
    imports = Imports.read(bench.folder / FIRST / IMPORTS)
    assert imports is not None
    assert {"torch", "torch.nn"} <= {*imports.modules}
    assert {name.partition(".")[0] for name in imports.modules} == {"torch"}
    assert not list((bench.folder / FIRST).glob("*.jsonl")), "a report of the folder has only the trials"
    sampled = bench.sampled()
    assert sampled is not None
    assert "own_python" in sampled.results
    (bench.folder / FIRST / IMPORTS).write_text('{"modules": [')  # as an interrupted process may leave it
    again = ScriptBench(
        ["scripts/train.py"], all_levers(), bench.folder, script_command, OPTIONS, sources=bench.sources, may_fork=True
    )
    assert again.measure(ScriptPlan(), 1).key == records[1].key
    assert again._imports() is None


def test_variables_and_cores_set_before_torch_is_imported_need_a_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Look(tmp_path / IMPORTS)
    look.torch_is_imported()
    assert look.found().refusal is None
    monkeypatch.setenv("OF_ANOTHER_LIBRARY", "1")
    assert look.found().refusal is None, "set after torch was imported"
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    assert look.found().refusal == "the script sets TORCHINDUCTOR_MAX_AUTOTUNE"
    monkeypatch.delenv("TORCHINDUCTOR_MAX_AUTOTUNE")
    look.torch_is_imported()
    look.leave()
    left = Imports.read(tmp_path / IMPORTS)
    assert left is not None
    assert left.refusal == "the script sets environment variables before it imports torch"
    with pytest.raises(NoForks, match="sets environment variables before"):
        ScriptForks(tmp_path / "train.py", left, os.environ, 60.0)
    assert Imports.read(tmp_path / "none.json") is None


MODULES = {
    "starts_thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "starts_program": "import subprocess\nsubprocess.Popen(['sleep', '600'])",
}


def of_torch(*others: str) -> Imports:
    import torch

    return Imports(others, str(torch.__file__))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return a script that waits, next to modules which the server can import."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    (found := tmp_path / "slow.py").write_text(
        "import sys, time\nprint('began', flush=True)\ntime.sleep(float(sys.argv[1]))\nsys.exit('no data')"
    )
    return found


@pytest.mark.parametrize(
    ("imports", "reason"),
    [
        (of_torch("starts_thread"), "an imported module has started a thread"),
        (Imports((), "/elsewhere/torch/__init__.py"), "the script imports another torch"),
    ],
)
def test_server_refuses_to_fork_what_a_new_process_would_not_be(script: Path, imports: Imports, reason: str) -> None:
    with pytest.raises(NoForks, match=reason):
        ScriptForks(script, imports, os.environ, 60.0)


def test_trial_that_takes_too_long_is_ended_and_the_next_one_runs(script: Path, tmp_path: Path) -> None:
    (log := tmp_path / "log.txt").touch()
    forks = ScriptForks(script, of_torch("fails", "starts_program"), os.environ, 60.0)
    try:
        options = json.dumps({**OPTIONS, "out": str(tmp_path), "levers": [], "seed": 0, "files": []})
        began_s = time.monotonic()
        with pytest.raises(TimeoutError):
            forks.run([options, str(script), "60"], log, 2.0)
        assert time.monotonic() - began_s < 30
        forks.run([options, str(script), "0"], log, 50.0)
        assert log.read_text().count("began") == 2
        assert "no data\n" in log.read_text(), "the message of sys.exit"
        server = forks._server.pid
        forks.close()
        assert not any(f"\t{server}\n" in text for text in map(sessions, Path("/proc").glob("[0-9]*")))
        with pytest.raises(NoForks, match=ENDED):
            forks.run([options, str(script), "0"], log, 50.0)
    finally:
        forks.close()


def sessions(process: Path) -> str:
    """Return the line of a process that names its session; nothing if it has ended."""
    try:
        text = (process / "status").read_text()
    except OSError:
        return ""
    lines = [] if "State:\tZ" in text else text.splitlines(keepends=True)
    return next((line for line in lines if line.startswith("NSsid:")), "")


def test_first_process_runs_once_if_it_leaves_no_imports(bench: ScriptBench) -> None:
    bench.measure(ScriptPlan(), 0)
    (bench.folder / FIRST / IMPORTS).unlink()
    written_ns = (bench.folder / FIRST / "log.txt").stat().st_mtime_ns
    assert bench.measure(ScriptPlan(), 1).status == "ok"
    assert (bench.folder / FIRST / "log.txt").stat().st_mtime_ns == written_ns
