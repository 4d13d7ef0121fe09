"""Tests of the guardian, which ends every process of a worker when the worker, its supervisor or the sweep ends."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cs_systems.measure.runtime.lifetime import is_running
from cs_systems.measure.runtime.processes import Log, Tree, WorkerOutOfMemory, describe_exit, oom_kills

# Starts a child, a detached grandchild and a process in a new session; writes their PIDs, and then waits.
STARTS_CHILDREN = """
import os, sys, time
def note():
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.getpid()}\\n")
def child(detached):
    if os.fork() == 0:
        if detached:
            os.setsid()
            if os.fork():
                os._exit(0)
            os.environ.clear()
        note()
        time.sleep(600)
note()
for detached in (False, True, True):
    child(detached)
while len(open(sys.argv[1]).read().split()) < 4:
    time.sleep(0.01)
open(sys.argv[1] + ".ready", "w").close()
time.sleep(600 if sys.argv[2] == "wait" else 0)
"""
SUPERVISES = f"""
import sys, time
from pathlib import Path
from cs_systems.measure.runtime.processes import Log, Tree
program = {STARTS_CHILDREN!r}
tree = Tree([lambda *fds: [sys.executable, "-c", program, sys.argv[1], "wait"]], Log(None), scratch=sys.argv[2])
time.sleep(600)
"""


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        time.sleep(0.02)


def pids(file: Path) -> list[int]:
    return [int(word) for word in file.read_text().split()]


@contextmanager
def tree(file: Path, then: str) -> Iterator[Tree]:
    """Yield the tree of a process that has started its children; `then` it waits or ends."""
    command = [sys.executable, "-c", STARTS_CHILDREN, str(file), then]
    log = Log(None)
    started = Tree([lambda *fds: command], log)
    wait_for(lambda: file.with_name(f"{file.name}.ready").exists())
    yield started
    started.close()
    log.stream.close()


@pytest.mark.parametrize("then", ["wait", "end"])
def test_all_processes_end_when_tree_closes_or_worker_ends(then: str, tmp_path: Path) -> None:
    file = tmp_path / "pids"
    with tree(file, then) as started:
        if then == "wait":
            assert all(map(is_running, pids(file)))
            started.close()
        wait_for(lambda: not any(map(is_running, pids(file))))
        assert len(pids(file)) == 4


def not_ignored() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_killed_supervisor_leaves_neither_processes_nor_folder(number: signal.Signals, tmp_path: Path) -> None:
    """Check for processes and for the private folder."""
    file, scratch = tmp_path / "pids", tmp_path / "scratch-"
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISES, str(file), str(scratch)],
        stderr=subprocess.DEVNULL,
        preexec_fn=not_ignored,  # a test run in the background ignores SIGINT, and under nohup SIGHUP
    )
    wait_for(lambda: (tmp_path / "pids.ready").exists())
    assert list(tmp_path.glob("scratch-*")) != []
    supervisor.send_signal(number)
    supervisor.wait()
    wait_for(lambda: not any(map(is_running, pids(file))) and not list(tmp_path.glob("scratch-*")))


def test_worker_has_default_signal_handlers() -> None:
    log = Log(None)
    program = "import signal; print([n.name for n in signal.Signals if signal.getsignal(n) is signal.SIG_IGN])"
    started = Tree([lambda *fds: [sys.executable, "-c", program]], log)
    assert started.wait_for_end(started.members, 20)
    started.close()
    ignored = set(ast.literal_eval(log.tail(1000)))
    around = {number.name for number in signal.Signals if signal.getsignal(number) is signal.SIG_IGN}
    assert {"SIGPIPE", "SIGXFSZ"} <= ignored <= around, "Python itself ignores two, a background job SIGINT"
    log.stream.close()


def test_status_of_killed_worker_is_its_own_signal(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    with tree(file, "wait") as started:
        os.kill(pids(file)[0], signal.SIGSEGV)
        (member,) = started.members
        assert started.wait_for_end([member], 20)
        assert member.status == -signal.SIGSEGV
        wait_for(lambda: not any(map(is_running, pids(file))))


def test_kill_by_the_oom_killer_is_out_of_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Raise the system's count of OOM kills while a worker runs."""
    monkeypatch.setattr("cs_systems.measure.runtime.processes.oom_kills", lambda: 0)
    with tree(tmp_path / "pids", "wait") as started:
        monkeypatch.setattr("cs_systems.measure.runtime.processes.oom_kills", lambda: 1)
        os.kill(pids(tmp_path / "pids")[0], signal.SIGKILL)
        death = started.death_of(started.members[0], None)
        assert isinstance(death, WorkerOutOfMemory)
        assert str(death) == "the system ran out of memory and killed the process"


def test_oom_kills_are_read_from_the_system_counter(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 3\noom_kill 12\nballoon 0\n")
    (tmp_path / "memory.events").write_text("oom 3\noom_kill 2\noom_group_kill 0\n")
    assert oom_kills([tmp_path / "vmstat"]) == 12
    assert oom_kills([tmp_path / "nowhere", tmp_path / "memory.events", tmp_path / "vmstat"]) == 2
    assert oom_kills([tmp_path / "nowhere"]) == 0


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (3, "exited with status 3"),
        (-signal.SIGSEGV, "killed by SIGSEGV"),
        (-signal.SIGKILL, "killed by SIGKILL (by a user, or by the system when memory ran out)"),
        (-40, "killed by signal 40"),
    ],
)
def test_exit_status_is_described(status: int, message: str) -> None:
    assert describe_exit(status) == message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ""),
        ("a\nb\n", "; its last output: b"),
        ("No such GPU: 0.\n\nusage: nsys profile\nTry 'nsys --help'.\n", "; its last output: No such GPU: 0."),
        (
            "Traceback (most recent call last):\n  File 'x', line 1\nValueError: so\n  frame #3\n",
            "; its last output: ValueError: so",
        ),
        ("noise\n\x1b[31mred\x1b[0m \x1b]0;title\x07\n", "; its last output: red  ]0;title"),
        ("[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: so\n", "; its last output: ValueError: so"),
        ("terminate called after throwing\n", "; its last output: terminate called after throwing"),
    ],
)
def test_last_output_is_one_line(text: str, words: str, tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    log.stream.write(text.encode())
    assert log.last_output() == words
    log.stream.close()
