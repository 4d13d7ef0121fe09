"""Trials that are forks of a process that has imported what the script imports."""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cs_systems.advise.lever import ScriptPlan, all_levers
from cs_systems.advise.scripts import FIRST, IMPORTS, ScriptBench, sets_variables
from cs_systems.advise.sources import sources
from cs_systems.measure.runtime.program import script_command
from cs_systems.measure.runtime.script_forks import Imports, NoForks, ScriptForks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fork server needs Linux")

SCRIPT = """import gc, os, random, sys
import torch
from torch import nn

print("child of", os.getppid())
print("random", random.random(), "frozen", gc.get_freeze_count(), "argv", sys.argv, "path", sys.path[0])
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
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(folder)
    files = sources(folder / "train.py")
    made = ScriptBench(
        ["train.py"], all_levers(), tmp_path / "out", script_command, OPTIONS, sources=files, may_fork=True
    )
    yield made
    made.close()


def printed(bench: ScriptBench, name: str) -> list[str]:
    return (bench.folder / name / "log.txt").read_text().splitlines()


def test_trials_are_forks_that_differ_from_new_processes_in_nothing_that_a_script_sees(bench: ScriptBench) -> None:
    records = [bench.measure(ScriptPlan(("zero_grad",) * (number == 2)), number) for number in range(3)]
    assert [(one.status, len(one.measurement.timed if one.measurement else ())) for one in records] == [("ok", 8)] * 3
    first, *forks = (printed(bench, name) for name in (FIRST, "start-0", "start-1"))
    parents = [lines[0].split()[-1] for lines in forks]
    assert first[0].split()[-1] == str(os.getpid()), "the first process is a new one"
    assert parents[0] == parents[1] != str(os.getpid())
    words = [lines[1].split() for lines in (first, *forks)]
    assert len({each[1] for each in words}) == 3, "each process draws its own random numbers"
    assert len({" ".join(each[2:]) for each in words}) == 1, words
    assert "frozen 0" in first[1]
    imports = json.loads((bench.folder / FIRST / IMPORTS).read_text())
    assert {"torch", "torch.nn"} <= {*imports["modules"]}


def test_a_script_that_sets_variables_runs_in_new_processes(bench: ScriptBench) -> None:
    script = Path("train.py")
    script.write_text(f'import os\nos.environ["OMP_NUM_THREADS"] = "1"\n{SCRIPT}')
    bench.sources = sources(script)
    bench.measure(ScriptPlan(), 0)
    assert printed(bench, "start-0")[0].split()[-1] == str(os.getpid())
    assert not (bench.folder / FIRST).exists(), "no process shows what is imported"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("os.environ['A'] = '1'", True),
        ("del environ['A']", True),
        ("os.environ.setdefault('A', '1')", True),
        ("os.putenv('A', '1')", True),
        ("load_dotenv()", True),
        ("rank = int(os.environ.get('RANK', -1))", False),
        ("path = os.environ['HOME']\nsettings.update(a=1)", False),
    ],
)
def test_setting_a_variable_is_told_from_reading_one(text: str, expected: bool) -> None:
    assert sets_variables(text) is expected


def test_modules_that_hold_something_of_torch_are_not_imported_before_the_script() -> None:
    import torch

    found = Imports.of_this_process()
    assert "tests" not in {name.partition(".")[0] for name in found.modules}, "the user's own modules are left out"
    assert "cs_systems" not in found.bound
    assert {"torch", "json"} <= {*found.modules}
    own = type(sys)("of_users")
    own.__dict__.update(__file__="/elsewhere/site-packages/of_users.py", kept=torch.nn.Linear)
    sys.modules["of_users"] = own
    try:
        again = Imports.of_this_process()
    finally:
        del sys.modules["of_users"]
    assert ("of_users" in again.bound, "of_users" in again.modules) == (True, False)
    assert {name.partition(".")[0] for name in Imports.of_torch(again).modules} == {"torch"}


MODULES = {
    "starts_thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "holds_torch": "from torch import nn",
    "imports_it": "import holds_torch",
    "fails": "raise RuntimeError('only in the server')",
}


@pytest.fixture
def library(tmp_path: Path) -> dict[str, str]:
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}


@pytest.mark.parametrize(
    ("module", "reason"),
    [("starts_thread", "an imported module has started a thread"), ("imports_it", "holds_torch was imported, which")],
)
def test_server_refuses_to_fork_after_an_import_that_a_fork_would_show(
    library: dict[str, str], module: str, reason: str
) -> None:
    with pytest.raises(NoForks, match=reason):
        ScriptForks(Imports((module,), ("holds_torch",)), library)


def test_trial_that_takes_too_long_is_ended_and_the_next_one_runs(library: dict[str, str], tmp_path: Path) -> None:
    (script := tmp_path / "slow.py").write_text(
        "import sys, time\nprint('began', flush=True)\ntime.sleep(float(sys.argv[1]))"
    )
    (log := tmp_path / "log.txt").touch()
    forks = ScriptForks(Imports(("fails",)), library)  # a module that cannot be imported is left to the script
    try:
        options = json.dumps({**OPTIONS, "out": str(tmp_path), "levers": [], "seed": 0, "files": []})
        began_s = time.monotonic()
        with pytest.raises(TimeoutError):
            forks.run([options, str(script), "60"], library, log, 2.0)
        assert time.monotonic() - began_s < 30
        forks.run([options, str(script), "0"], library, log, 50.0)
        assert log.read_text().count("began") == 2
        forks.close()
        with pytest.raises(NoForks, match="the fork server ended"):
            forks.run([options, str(script), "0"], library, log, 50.0)
    finally:
        forks.close()
