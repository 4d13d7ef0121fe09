"""Programs run in forks of one process that has imported torch.

Use them where a test is not about the start of Python: each start would import torch for two seconds.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cs_systems.runtime import fork_client


def server() -> Any:
    """Return the context of the fork server that all tests of a process share."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


def python(*words: str, timeout_s: float = 55.0) -> subprocess.CompletedProcess[str]:
    """Do what `subprocess.run([sys.executable, *words], capture_output=True, text=True)` does.

    Args:
        words: a script or `-m` and a module, then its arguments.
        timeout_s: the time after which the program and all that it started are killed.

    Raises subprocess.TimeoutExpired.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder) / name for name in ("out", "err"))
        process = server().Process(target=_program, args=(words, dict(os.environ), str(out), str(err)))
        process.start()
        try:
            process.join(timeout_s)
            if process.exitcode is None:
                raise subprocess.TimeoutExpired(words, timeout_s, out.read_text(), err.read_text())
        finally:
            _kill_group(process.pid)
            process.join()
        return subprocess.CompletedProcess(words, process.exitcode, out.read_text(), err.read_text())


def torchrun(*words: str, timeout_s: float = 55.0) -> subprocess.CompletedProcess[str]:
    """Run torchrun with two ranks on this machine, which are forks too. words: those of `python`."""
    ranks = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    as_forks = ["--start-method", "fork", "--run-path", __file__]
    return python("-m", "torch.distributed.run", *ranks, *as_forks, *words, timeout_s=timeout_s)


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


def _program(words: tuple[str, ...], environment: Mapping[str, str], *streams: str) -> None:
    """Become a program with this environment and these files for its output."""
    os.setsid()
    for number, name in enumerate(streams, 1):
        with Path(name).open("wb") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    gc.enable()
    run(words)


def run(words: tuple[str, ...]) -> None:
    """Run a script or module as Python does: with default signals, and the functions that it registers for its exit."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # torchrun handles them, and its ranks inherit that
        signal.signal(number, signal.SIG_DFL)
    if words[0] == "-m":
        sys.argv = [*words[1:]]
        sys.path.insert(0, str(Path.cwd()))
        program = lambda: runpy.run_module(words[1], run_name="__main__", alter_sys=True)  # noqa: E731
    else:
        sys.argv = [*words]
        sys.path.insert(0, str(Path(words[0]).parent))
        program = lambda: runpy.run_path(words[0], run_name="__main__")  # noqa: E731
    try:
        program()
    finally:
        atexit._run_exitfuncs()


if __name__ == "__main__":
    run(tuple(sys.argv[1:]))
