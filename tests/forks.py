"""Programs run in forks of one process that has imported torch.

Use them where a test is not about the start of Python: each start would import torch for two seconds.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from cs_systems.measure.runtime import fork_client

starting = threading.Lock()  # a start reads the exit status of processes that have ended: only one thread may do so


def server() -> Any:
    """Return the context of the fork server that all tests of a process share."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


def python(
    *words: str, timeout_s: float = 55.0, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Do what `subprocess.run([sys.executable, *words], capture_output=True, text=True)` does.

    Args:
        words: a script, `-m` and a module, or `-c` and a program, then its arguments.
        timeout_s: the time after which the program and all that it started are killed.
        environment: its variables; by default those of this process.

    Raises subprocess.TimeoutExpired.
    """
    with started(*words, environment=environment) as wait:
        return wait(timeout_s)


@contextmanager
def started(
    *words: str, environment: Mapping[str, str] | None = None, namespace: str | None = None
) -> Iterator[Callable[[float], subprocess.CompletedProcess[str]]]:
    """Start a program as `python` does, and yield a function that waits for it; at the end it is killed.

    namespace: the name of the network namespace that it runs in.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder) / name for name in ("out", "err"))
        variables = dict(os.environ if environment is None else environment)
        process = server().Process(target=_program, args=(words, variables, namespace, str(out), str(err)))

        def wait(timeout_s: float) -> subprocess.CompletedProcess[str]:
            process.join(timeout_s)
            if process.exitcode is None:
                raise subprocess.TimeoutExpired(words, timeout_s, out.read_text(), err.read_text())
            return subprocess.CompletedProcess(words, process.exitcode, out.read_text(), err.read_text())

        with starting:
            process.start()
        try:
            yield wait
        finally:
            _kill_group(process.pid)
            process.join()


TWO_RANKS = ("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")


def torchrun(*words: str, timeout_s: float = 55.0) -> subprocess.CompletedProcess[str]:
    """Run torchrun with two ranks on this machine, which are forks of it; the arguments are those of `python`.

    Ranks that record themselves sometimes hung before their first output, because the launcher has threads: start these
    by `tests.forked_python.torchrun`.
    """
    return python(*launcher(*TWO_RANKS), *words, timeout_s=timeout_s)


def started_ranks(*words: str, timeout_s: float = 55.0) -> list[subprocess.CompletedProcess[str]]:
    """Run a program on two ranks, which find each other by their variables as under Slurm; no launcher starts."""
    with ExitStack() as running:
        port = running.enter_context(held_port())
        job = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        waits = [
            running.enter_context(started(*words, environment=job | {"RANK": number, "LOCAL_RANK": number}))
            for number in ("0", "1")
        ]
        return [wait(timeout_s) for wait in waits]


def launcher(*options: str) -> list[str]:
    """Return the words of torchrun with these options, which precede those of its ranks; they are forks of it."""
    return ["-m", "torch.distributed.run", *options, "--start-method", "fork", "--run-path", __file__]


@contextmanager
def held_port() -> Iterator[int]:
    """Yield a port of this machine for a rendezvous, which the system gives to no other program meanwhile."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the rendezvous may listen there: this does not
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


@contextmanager
def own_fork_server() -> Iterator[None]:
    """Start the workers of sweeps from another fork server, for a change of what they inherit.

    The one before is kept for the tests that follow: a server takes seconds to start.
    """
    kept, fork_client._server = fork_client._server, None
    fork_client._modules.clear()  # which earlier cells would have it import
    try:
        yield
    finally:
        fork_client._retire()
        fork_client._server = kept


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _program(words: tuple[str, ...], variables: Mapping[str, str], namespace: str | None, *streams: str) -> None:
    """Become a program with these variables, in this network namespace and with these files for its output."""
    if namespace is not None:
        with Path("/run/netns", namespace).open() as entered:
            if ctypes.CDLL(None, use_errno=True).setns(entered.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")
    become(words, variables, [os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in streams])


def become(words: tuple[str, ...], variables: Mapping[str, str], streams: Sequence[int]) -> None:
    """Run a program in a session of its own, with these variables and these descriptors for its output."""
    os.setsid()
    for number, stream in enumerate(streams, 1):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(variables)
    gc.enable()
    run(words)


class _ReplacedError(BaseException):
    """Program that replaces the one that runs, where `os.execv` would start Python and import torch."""


_execv = os.execv


def _replace(executable: str, command: Sequence[str]) -> NoReturn:
    if executable != sys.executable:
        _execv(executable, command)
    raise _ReplacedError(*command[1:])


def run(words: tuple[str, ...]) -> None:
    """Run a script or module as Python does: with default signals, and the functions that it registers for its exit."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # torchrun handles them, and its ranks inherit that
        signal.signal(number, signal.SIG_DFL)
    os.execv = _replace
    folders = [*sys.path]
    try:
        while words:
            try:
                sys.path[:] = folders
                _run(words)
                words = ()
            except _ReplacedError as by:
                words = by.args
    except Exception as error:
        sys.excepthook(type(error), error.with_traceback(_of_program(error)), error.__traceback__)
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()


def _run(words: tuple[str, ...]) -> None:
    if words[0] == "-m":
        sys.argv = [*words[1:]]
        sys.path.insert(0, str(Path.cwd()))
        sys.modules.pop(words[1], None)  # imported for a program that this one replaces
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [*words]
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


def _of_program(error: Exception) -> types.TracebackType | None:
    """Return the traceback without the frames that Python itself would not have."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    run(tuple(sys.argv[1:]))
