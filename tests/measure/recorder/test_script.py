"""Tests of `cs-systems run`: unedited scripts are recorded, and behave exactly as without it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.utils.data._utils.worker import _worker_loop

from cs_systems.cli import _script, main
from cs_systems.cli._children import Children
from cs_systems.core.printable import command_line
from cs_systems.measure.profilers import _nsys
from cs_systems.record import RunRecord, read_records
from tests import forked_python, forks

SCRIPT = str(Path(__file__).with_name("script.py"))


def started(*words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in a new process, which imports torch."""
    return subprocess.run([sys.executable, *words], input="typed", capture_output=True, text=True)


def both(
    python: Callable[..., subprocess.CompletedProcess[str]], words: list[str], out: Path
) -> tuple[subprocess.CompletedProcess[str], RunRecord]:
    """Run a script alone and recorded, and return the recorded one if nothing else differs."""
    run = ["-m", "cs_systems", "run", "--steps", "3:8", "--out", str(out), "--"]
    alone, recorded = (python(*before, *words) for before in ([], run))
    assert (recorded.returncode, recorded.stdout) == (alone.returncode, alone.stdout), recorded.stderr
    assert recorded.stderr.startswith(alone.stderr)
    record = read_records(out)[0][0]
    assert (record.status, record.reason) == ("ok", None)
    assert record.measurement is not None
    assert len(record.measurement.timed) == 5
    assert record.origin is not None
    assert record.origin.command == command_line("cs-systems", *run[2:], *words)
    assert record.origin.host is None
    return recorded, record


PHASES = {"input", "forward", "loss", "backward", "clip", "optimizer", "zero_grad", "other"}


def test_module_keeps_its_output_and_exit_status(tmp_path: Path) -> None:
    """A module run by its name, in new processes; the tests below run the same script by its path."""
    done, record = both(started, ["-m", "tests.measure.recorder.script", "5", "a gan"], tmp_path)
    assert done.returncode == 5
    assert done.stdout.startswith("__main__ ['5', 'a gan'] False typed ")
    assert record.config["workload"] == "loop tests.measure.recorder.script 5 'a gan'", "other arguments, other cell"
    assert phases(record) >= PHASES
    assert record.results["ran"][0]["optimizer"] == "AdamW + SGD"
    assert "loop tests.measure.recorder.script 5 'a gan' on" in done.stderr
    assert f"cs-systems report {tmp_path}" in " ".join(done.stderr.replace("\\", " ").split())


def phases(record: RunRecord) -> set[str]:
    assert record.measurement is not None
    return {name for name in record.measurement.phase_names() if max(record.measurement.durations_s(name)) > 0}


def test_script_is_profiled_and_stopped(tmp_path: Path) -> None:
    tmp_path /= "two words"
    options = ["--steps", "1:3", "--with", "kineto", "memory", "--stop", "--out", str(tmp_path)]
    done = forks.python("-m", "cs_systems", "run", *options, "--", SCRIPT, "5", "x")
    assert (done.returncode, done.stdout) == (0, "")  # the script alone prints its results, and ends with status 5
    timed, profiled, snapshot = read_records(tmp_path)[0]
    assert "few-samples" not in [c.code for c in timed.warnings if "were timed" in c.message]
    assert {"step", "forward", "backward", "clip"} <= {row["range"] for row in profiled.results["ranges"]}
    assert done.stderr.count("ranges by CPU time, per step\n") == 1, "the tables that profile prints"
    for name in ("trace", "page"):
        assert f"\n{name}: {tmp_path / profiled.artifacts[name]}\n" in done.stderr
    assert f"'{tmp_path}'" in done.stderr, "the command can be copied"
    assert snapshot.reason is None or snapshot.reason.startswith("a memory snapshot requires a CUDA device")


@pytest.mark.nsys
def test_script_below_nsys_keeps_its_streams_and_exit_status(tmp_path: Path) -> None:
    pytest.importorskip("nvtx")
    options = ["--steps", "1:3", "--with", "nsys", "--record-host", "--out", str(tmp_path)]
    run = ["-m", "cs_systems", "run", *options, "--", SCRIPT, "5", "below"]
    done = started(*run)
    assert done.returncode == 5, done.stderr
    (line,) = done.stdout.splitlines()  # none of nsys's messages
    assert line.startswith("__main__ ['5', 'below'] False typed ")
    timed, profiled = read_records(tmp_path)[0]
    assert "below-nsys" in [c.code for c in timed.warnings]
    assert profiled.status == "ok"
    for record in (timed, profiled):
        assert record.origin is not None
        assert record.origin.command == command_line("cs-systems", *run[2:])
        assert record.origin.host == socket.gethostname()
    page = (tmp_path / profiled.artifacts["page"]).read_text()
    assert f'UTC on {socket.gethostname()} by: <span class="option">cs-systems</span> run' in page
    assert {"forward", "backward", "optimizer"} <= {row["range"] for row in profiled.results["ranges"]}
    assert (tmp_path / profiled.artifacts["nsys"]).is_file()
    assert not list(tmp_path.glob(".nsys-*"))
    assert done.stderr.count("loop script 5 below on") == 2
    assert "under nsys" in done.stderr


def test_nsys_that_records_nothing_is_an_error_document_next_to_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (nsys := tmp_path / "nsys").write_text("#!/bin/sh\necho 'no room'\nexit 3\n")
    nsys.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(_nsys, "check", lambda: {"state": "ok"})
    monkeypatch.setattr("cs_systems.cli.run.signal.signal", lambda *_: None)  # the handlers would outlive the test
    options = ["--with", "nsys", "--format", "json", "--out", str(tmp_path)]
    assert main(["run", *options, "--", SCRIPT]) == 3
    out, err = capfd.readouterr()
    assert out == "", "standard output is the script's"
    message = "nothing was recorded, and nsys ended with 'no room'; try it without --with nsys"
    assert json.loads(err)["error"] == {"message": message, "status": 3}


def test_failing_script_keeps_its_traceback_and_the_record(tmp_path: Path) -> None:
    done, record = both(forks.python, [SCRIPT, "0", "fails"], tmp_path)
    assert done.returncode == 1
    assert "_script.py" not in done.stderr
    assert "ValueError: bad batch" in done.stderr
    assert record.config["workload"] == "loop script 0 fails"
    assert phases(record) >= PHASES
    assert record.results["ran"][0]["optimizer"] == "AdamW"


def test_run_of_an_edited_script_is_no_repeat_of_the_earlier_one(tmp_path: Path) -> None:
    (folder := tmp_path / "project").mkdir()
    script, module = folder / "train.py", folder / "sizes_of_it.py"
    script.write_text("from sizes_of_it import SIZE\n" + WARNS.replace("Linear(2, 2)", "Linear(2, SIZE)"))
    words = ["-m", "cs_systems", "run", "--steps", "2:6", "--out", str(tmp_path / "out"), "--", str(script)]
    for size in (2, 2, 3):
        module.write_text(f"SIZE = {size}")
        done = forks.python(*words)
        assert done.returncode == 0, done.stderr
    records = read_records(tmp_path / "out")[0]
    assert [record.repeat for record in records] == [0, 1, 2]
    first, second, third = (record.results["ran"][0]["workload_sha256"] for record in records)
    assert first == second != third
    codes = [{caveat.code for caveat in record.warnings} for record in records]
    assert ["edited-script" in of_record for of_record in codes] == [False, False, True]
    said = "2 earlier records of this loop ran another version of the script, or of a file that it imports"
    assert said in " ".join(done.stderr.split())


def test_file_of_a_module_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "a_package").mkdir()
    for name in ("__init__", "__main__", "train"):
        (folder / f"{name}.py").write_text("raise SystemExit('it was imported')")
    found = [_script._module_file(name) for name in ("a_package", "a_package.train", "a_package.other", "no_package")]
    assert found[2:] == [None, None]
    assert [file and file.resolve() for file in found[:2]] == [folder / "__main__.py", folder / "train.py"]


WARNS = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for i in range(12):
    optimizer.zero_grad()
    loss = model(torch.ones(2)).sum()
    loss.backward()
    optimizer.step()
    if i == 1:
        loss = float(loss)
    if i == 2:
        torch.ones(3, dtype=torch.complex64)[0].__float__()
"""


def test_warning_about_a_read_names_the_line_of_the_script(tmp_path: Path) -> None:
    (script := tmp_path / "warns.py").write_text(WARNS)
    done, _ = both(forks.python, [str(script)], tmp_path / "out")
    assert f"{script}:11: UserWarning: Converting a tensor with requires_grad=True to a scalar" in done.stderr


def test_script_has_the_absolute_name_that_python_gives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "named.py").write_text("import sys; print(__file__, sys._getframe().f_code.co_filename, sys.argv[0])")
    alone, recorded = (started(*before, "named.py").stdout for before in ([], ["-m", "cs_systems", "run", "--"]))
    assert alone == recorded == f"{tmp_path / 'named.py'} {tmp_path / 'named.py'} named.py\n"


@pytest.mark.timeout(120)
def test_ranks_of_torchrun_write_one_record(tmp_path: Path) -> None:
    options = ["--steps", "3:8", "--out", str(tmp_path)]
    words = ["-m", "cs_systems", "run", *options, "--", SCRIPT, "0", "torchrun"]
    done = forked_python.torchrun(*words, timeout_s=110)
    assert done.returncode == 0, done.stderr
    (record,) = read_records(tmp_path)[0]
    assert record.config["world_size"] == 2
    assert {row["rank"] for row in record.results["ranks"]} == {0, 1}


@pytest.mark.timeout(120)
def test_ranks_that_slurm_started_write_one_record_and_stop_together(tmp_path: Path) -> None:
    options = ["--steps", "1:3", "--with", "kineto", "--stop", "--out", str(tmp_path)]
    script = str(Path(__file__).with_name("slurm_script.py"))
    job = os.environ | {"SLURM_NTASKS": "2", "MASTER_ADDR": "127.0.0.1"}
    with ExitStack() as ranks:
        job["MASTER_PORT"] = str(ranks.enter_context(forks.held_port()))
        waits = [
            ranks.enter_context(
                forks.started(
                    *("-m", "cs_systems", "run", *options, "--", script), environment=job | {"SLURM_PROCID": str(rank)}
                )
            )
            for rank in range(2)
        ]
        done = [wait(110) for wait in waits]
    assert [rank.returncode for rank in done] == [0, 0], done
    assert [rank.stdout for rank in done] == ["", ""]  # the script would print the number of its last step
    assert "loop slurm_script on" in done[0].stderr
    assert "cs-systems" not in done[1].stderr
    timed, profiled = read_records(tmp_path)[0]
    assert timed.config["world_size"] == 2
    assert {row["rank"] for row in timed.results["ranks"]} == {0, 1}
    assert profiled.config["profiler"] == "kineto"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no script is given; write it after --, as in cs-systems run -- train.py"),
        (["--", "none.py"], "script 'none.py' does not exist; correct the path"),
        (["--", "-m", "nopackage.train"], "no module is named 'nopackage'; correct its name, or run the command in"),
        (["--", "-m", "./train.py"], "-m takes the name of a module, not the path './train.py'; leave out -m"),
        (
            ["--foo_bar=1", "--", "train.py"],
            "unknown option --foo_bar; leave it out, or, if --foo_bar is an option of the script, write it after -- "
            "and the script's name\n",
        ),
        (
            ["--step=3:9", "--", "train.py"],
            "unknown option --step; write --steps, or, if --step is an option of",
        ),
        (["--", "/tmp"], "script '/tmp' is a folder; name a .py file in it"),
        (["--", ""], "no script is given; write it after --, as in cs-systems run -- train.py"),
        (["--", "python", ""], "starts Python itself; write cs-systems run -- train.py"),
        (["--", "-u", "train.py"], "'-u' is an option, not a script; write the script first, as in cs-systems run --"),
        (
            ["--", "python", "train.py", "--lr", "3"],
            "'python' is not a script, and cs-systems run starts Python itself; write cs-systems run -- train.py --lr",
        ),
        (["--", sys.executable, "-u", "train.py"], "starts Python itself; write cs-systems run -- train.py"),
        (
            ["--", "torchrun", "train.py"],
            "'torchrun' is not a script but a launcher of ranks; write torchrun --nproc-per-node 2 -m cs_systems run "
            "-- train.py",
        ),
        (["--", "accelerate", "launch", "train.py"], "write accelerate launch -m cs_systems run -- train.py"),
        (
            ["--", "bash", "go.sh"],
            "'bash' is a program, but a Python script is needed; write cs-systems run -- train.py",
        ),
        (["--with", "perf", "--", SCRIPT], "unknown --with 'perf'; choose among auto, none, kineto, nsys, memory"),
        (["--with", "kineto", "nsys", "--", SCRIPT], "--with kineto and nsys cannot trace the same process"),
        (["--out", SCRIPT, "--", SCRIPT], "it is a file; choose another --out"),
        (
            ["--steps", "9:3", "--", SCRIPT],
            "--steps is '9:3'; write FIRST:LAST, such as 5:25, with FIRST at least 1 and below LAST, and at most 9",
        ),
    ],
)
def test_malformed_words_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words]) == 2
    assert said in capsys.readouterr().err


def test_script_without_training_gets_a_message(tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("print('done')")
    done = forks.python("-m", "cs_systems", "run", "--", str(script))
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert "nothing was recorded, because the script ran no backward pass" in done.stderr


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (
            "raise ValueError('no data')",
            "failed with ValueError: no data before its first backward pass; correct its error",
        ),
        ("raise SystemExit('no data')", "ended with exit status 1 before its first backward pass; correct its error"),
        ("raise SystemExit(2)", "ended with exit status 2 before its first backward pass; correct its error"),
        ("raise KeyboardInterrupt", "was interrupted before its first backward pass; let it run longer"),
    ],
)
def test_script_that_fails_before_training_gets_no_advice_to_train(end: str, reason: str, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(end)
    done = forks.python("-m", "cs_systems", "run", "--out", str(tmp_path / "out"), "--", str(script))
    assert f"cs-systems: nothing was recorded, because the script {reason}\n" in done.stderr


@pytest.mark.parametrize("end", ["raise ValueError", "import os; os._exit(1)"])
def test_failure_before_the_first_record_leaves_no_folder(end: str, tmp_path: Path) -> None:
    (script := tmp_path / "fails.py").write_text(f"import os; os.chdir('/')\n{end}")
    own = tmp_path / "own"
    own.mkdir()
    for out in (tmp_path / "runs" / "new", own / "new", own):
        forks.python("-m", "cs_systems", "run", "--out", str(out), "--", str(script))
    assert sorted(tmp_path.iterdir()) == [script, own], "the user's own folder stays"
    assert not [*own.iterdir()]


@pytest.mark.parametrize("steps", [2, 6])
def test_script_that_a_signal_kills_leaves_the_finished_records_or_no_folder(steps: int, tmp_path: Path) -> None:
    done, records = recorded(tmp_path, f"train(steps={steps})\nimport signal; os.kill(os.getpid(), signal.SIGTERM)\n")
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert [record.status for record in records] == ["ok"] * (steps > 4)
    assert (tmp_path / "out").exists() == (steps > 4)


def test_script_that_asks_for_input_gets_it_and_is_told_how_where_it_ends(tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text("print(input())\nprint(input())")
    command = [sys.executable, "-m", "cs_systems", "run", "--out", str(tmp_path / "out"), "--", str(script)]
    done = subprocess.run(command, input="typed\n", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "typed\n")
    assert done.stderr.endswith(
        "cs-systems: nothing was recorded, because the script failed with EOFError: EOF when reading a line before its "
        "first backward pass; it asks for input: type it at a terminal, or give it as cs-systems run -- train.py < "
        "answers.txt\n"
    )


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "ValueError"])
def test_traceback_begins_with_the_first_frame_of_the_script(error: str, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(f"raise {error}")
    command = [sys.executable, "-m", "cs_systems", "run", "--out", str(tmp_path / "out"), "--", str(script)]
    done = subprocess.run(command, capture_output=True, text=True)  # in a new process, which prints it at its end
    assert re.findall(r'File "(.*)", line (\d+)', done.stderr) == [(str(script), "1")]


LOOP = """
import os, subprocess, sys, threading, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def train(*_, steps=9):
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
"""


def recorded(tmp_path: Path, program: str) -> tuple[subprocess.CompletedProcess[str], list[RunRecord]]:
    """Run a program that begins with LOOP, and return its output and the records."""
    script = tmp_path / "script.py"
    script.write_text(LOOP + program)
    options = ["--steps", "1:4", "--out", str(tmp_path / "out")]
    done = forks.python("-m", "cs_systems", "run", *options, "--", str(script))
    return done, read_records(tmp_path / "out")[0] if (tmp_path / "out" / "records.jsonl").exists() else []


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (
            "workers = [torch.multiprocessing.get_context('fork').Process(target=train) for _ in range(2)]\n"
            "for each in workers: each.start()\n"
            "for each in workers: each.join()\n",
            "it started 2 child processes of train, not recorded; if they train, call train in the script itself, with "
            "the rank and world size of torchrun's environment: torchrun --nproc-per-node 2 -m cs_systems run -- ",
        ),
        (
            "torch.multiprocessing.start_processes(train, nprocs=1, start_method='fork')\n",
            "it started 1 child process of train, not recorded; if they train, call train in the script itself",
        ),
        (
            "subprocess.run([sys.executable, '-c', 'pass'])\nsubprocess.run(['true'])\n",
            "it started 1 child process of Python, not recorded; if they train, record one by cs-systems run -- -c pass"
            ", or ranks by torchrun --nproc-per-node 2 -m cs_systems run -- train.py",
        ),
    ],
    ids=["multiprocessing", "torch.multiprocessing", "subprocess"],
)
def test_children_that_train_are_named_with_a_remedy(program: str, said: str, tmp_path: Path) -> None:
    done, records = recorded(tmp_path, program)
    assert (done.returncode, records) == (0, []), done.stderr
    begin = "cs-systems: nothing was recorded, because the script ran no backward pass of torch in its main thread; "
    assert done.stderr.startswith(begin + said)


@pytest.mark.parametrize(
    ("program", "status", "said"),
    [
        (
            "train(steps=6)\nraise ValueError('bad batch\\nof 12')",
            1,
            "failed after step 6 of its loop with ValueError: bad batch",
        ),
        ("train(steps=40)\nassert False", 1, "failed after step 40 of its loop with AssertionError"),
        ("train(steps=3)\nsys.exit(3)", 3, "ended after step 3 of its loop with exit status 3"),
        ("train()\nsys.exit(0)", 0, None),
        (
            "train()\noptimizer = torch.optim.Adam(model.parameters())\ntrain()\nraise ValueError('bad')",
            1,
            "failed with ValueError: bad",
        ),
    ],
    ids=["early", "after the recording", "exit status", "success", "uncounted"],
)
def test_answer_begins_with_the_failure_of_the_script(
    program: str, status: int, said: str | None, tmp_path: Path
) -> None:
    done, (record,) = recorded(tmp_path, program)
    assert (done.returncode, record.status) == (status, "ok"), done.stderr
    answer = done.stderr.partition("\n\n")[2] if status == 1 else done.stderr.removeprefix("\n")
    assert answer.startswith(f"the script {said}\n\n") or (said is None and "the script" not in done.stderr)


def test_interrupted_script_is_called_interrupted() -> None:
    recorder = SimpleNamespace(steps_done=lambda: 3)
    said = _script._failure(130, KeyboardInterrupt(), [recorder])
    assert said == "the script was interrupted after step 3 of its loop"


def test_document_notes_the_failure_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOOP + "train()\nraise SystemExit(4)")
    options = ["--format", "json", "--steps", "1:4", "--out", str(tmp_path / "out")]
    done = forks.python("-m", "cs_systems", "run", *options, "--", str(script))
    assert done.returncode == 4
    assert "the script ended after step 9 of its loop with exit status 4" in json.loads(done.stderr)["notes"]


def test_workers_of_a_data_loader_do_not_count_as_training_children() -> None:
    children = Children()
    children._starts(SimpleNamespace(_target=_worker_loop, _args=()))
    children._runs(None, ["git", "status"])
    assert children.remedy() is None


@pytest.mark.parametrize(
    ("end", "status", "is_reported"),
    [
        ("os._exit(7)", 7, True),
        ("thread = threading.Thread(target=os._exit, args=(7,)); thread.start(); thread.join()", 7, False),
        ("threading.Thread(target=sys.exit, args=(7,)).start()", 0, True),
    ],
)
def test_script_that_ends_its_process_itself_leaves_its_record(
    end: str, status: int, is_reported: bool, tmp_path: Path
) -> None:
    done, (record,) = recorded(tmp_path, f"train()\n{end}\n")
    assert (done.returncode, record.status) == (status, "ok"), done.stderr
    assert f"records: {tmp_path / 'out' / 'records.jsonl'}\n" in done.stderr
    assert ("loop script on" in done.stderr) == is_reported


STREAM = """
class Both:
    def __init__(self, stream): self.stream = stream
    def write(self, text): self.stream.write(text)
    def flush(self): self.stream.flush()
"""


@pytest.mark.parametrize(
    ("program", "is_reported"),
    [
        (f"{STREAM}sys.stdout, sys.stderr = Both(sys.stdout), Both(sys.stderr)\ntrain()\n", True),
        ("train()\nsys.stdout.flush()\nsys.stderr.close()\n", False),
        ("thread = threading.Thread(target=train)\nthread.start()\nthread.join()\n", True),
        ("train()\nsys.stdout.close()\n", True),
        ("train()\nsys.stdout = None\n", True),
        ("train()\nsys.stdout.flush()\nsys.stderr = None\n", False),
        ("train()\nsys.stdout.flush()\nsys.stdout = sys.stderr = None\n", False),
    ],
    ids=[
        *("own class of stream", "closed stream", "trained in another thread", "closed output", "no output"),
        *("no standard error", "no stream"),
    ],
)
def test_script_keeps_its_exit_status_whatever_it_does_to_streams_and_threads(
    program: str, is_reported: bool, tmp_path: Path
) -> None:
    done, (record,) = recorded(tmp_path, program)
    assert (done.returncode, record.status) == (0, "ok"), done.stderr
    assert "Traceback" not in done.stderr
    assert ("loop script on" in done.stderr) == is_reported
    assert "loop script on" not in done.stdout


def test_records_are_in_the_folder_that_was_named_before_the_script_left_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(f"{LOOP}os.mkdir('inside')\nos.chdir('inside')\ntrain()\n")
    options = ["--steps", "1:4", "--out", "out", "--with", "kineto"]
    done = forks.python("-m", "cs_systems", "run", *options, "--", "script.py")
    timing, profile = read_records(tmp_path / "out")[0]
    assert (timing.status, profile.status, done.returncode) == ("ok", "ok", 0), done.stderr
    assert all((tmp_path / "out" / name).is_file() for name in profile.artifacts.values())
    assert [*(tmp_path / "inside").iterdir()] == []
    assert "records: out/records.jsonl\n" in done.stderr


def test_script_that_another_program_replaces_leaves_its_record(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{LOOP}train()\nos.execv('/bin/echo', ['echo', 'another program'])\n")
    done = forks.python("-m", "cs_systems", "run", "--steps", "1:4", "--out", str(tmp_path / "out"), "--", str(script))
    assert (done.returncode, done.stdout) == (0, "another program\n")
    assert len(read_records(tmp_path / "out")[0]) == done.stderr.count("loop script on") == 1


def test_script_with_its_own_recorder_runs_as_alone(tmp_path: Path) -> None:
    own = f"""
import cs_systems
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with cs_systems.Recorder(model, optimizer, out={str(tmp_path / "own")!r}, warmup=1, steps=3, profile="none") as own:
    for _ in range(6):
        with own.step():
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
"""
    done, records = recorded(tmp_path, own)
    assert (done.returncode, records) == (0, []), done.stderr
    assert done.stderr.startswith("cs-systems: nothing was recorded, because another Recorder is active")
    (record,) = read_records(tmp_path / "own")[0]
    assert record.measurement is not None
    assert len(record.measurement.timed) == 3
    assert phases(record) >= {"forward", "backward", "optimizer"}


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)"])
@pytest.mark.parametrize("steps", [0, 2, 9])
def test_fork_of_a_recorded_script_records_nothing(steps: int, end: str, tmp_path: Path) -> None:
    """Fork before, inside and after the timed steps; the fork trains, too."""
    fork = f"""
train(steps={steps})
if not (child := os.fork()):
    train()
    {end}
assert os.waitpid(child, 0)[1] == 0
train()
"""
    done, records = recorded(tmp_path, fork)
    assert done.returncode == 0, done.stderr
    assert [record.status for record in records] == ["ok"]
    assert done.stderr.count("loop script on") == 1


def test_script_that_replaces_itself_before_training_gets_a_message(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nos.execv('/bin/true', ['true'])\n")
    done = started("-m", "cs_systems", "run", "--out", str(tmp_path / "out"), "--", str(script))
    assert done.stderr == (
        "cs-systems: nothing was recorded, because the script replaced itself by '/bin/true' before its first backward "
        "pass; set the environment variables that it sets yourself, and run that program with cs-systems run\n"
    )
