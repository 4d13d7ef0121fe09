"""Client of this process's fork server, which starts workers in a few milliseconds instead of two seconds.

The first worker starts the server, which imports torch once for all later workers of this process. The server is
replaced when something changed that a new process would have inherited or imported.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import wait  # unlike select.select, it takes descriptors above 1023
from pathlib import Path
from typing import Any

SERVER = [sys.executable, "-m", "cs_systems.measure.runtime.fork_server"]
READY = b"R"
NOT_FORKED = b"0"  # answer instead of a PID: a module that the server imported has opened a GPU
LONGEST_BYTES = 1 << 20  # more than the kernel passes in one message; longer environments are refused
MOST_DESCRIPTORS = 200  # the kernel passes at most 253 in one message
_PACKAGE = Path(__file__).parents[2]
# Variables that no import reads, so a worker can get its own values after the fork.
_READ_LATER = re.compile(
    "PYTEST_CURRENT_TEST|COLUMNS|LINES|NO_COLOR|PWD|OLDPWD|SHLVL|_|(LOCAL_)?(RANK|WORLD_SIZE)|(PET_)?MASTER_(ADDR|PORT)"
    "|(GLOO|NCCL)_SOCKET_IFNAME|TORCH_NCCL_DUMP_ON_TIMEOUT|CUDA_VISIBLE_DEVICES"
    "|TORCHINDUCTOR_CACHE_DIR|_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"
)
_lock = threading.Lock()
_server: _Server | None = None
_retired: list[subprocess.Popen[bytes]] = []
_modules: set[str] = set()  # modules to import before the next fork
_refusal: str | None = None  # why the server of this process cannot fork


class NoServer(RuntimeError):
    """Error for an unusable fork server; workers are then started as programs, which also shows the reason."""


class ForkedGuardian:
    """Guardian forked by the server, with the methods of `subprocess.Popen` that its owner needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._ended: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended = None

    def poll(self) -> int | None:
        """Return 0 if it has ended, else None."""
        if self._ended is not None and wait([self._ended], 0):
            os.close(self._ended)
            self._ended = None
        return 0 if self._ended is None else None

    def wait(self, timeout_s: float) -> int:
        """Wait until it has ended. Raises subprocess.TimeoutExpired."""
        if self._ended is not None:
            wait([self._ended], timeout_s)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("guardian", timeout_s)
        return 0


class _Server:
    """Running fork server. inherited: result of `_inherited` when it was started."""

    def __init__(self, inherited: Mapping[str, object], environment: Mapping[str, str], timeout_s: float) -> None:
        self.inherited, self._owner = inherited, os.getpid()
        self._control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)  # preserves message boundaries
        with theirs:
            self.process = subprocess.Popen(
                [*SERVER, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # only the supervisor handles Ctrl-C
            )
        self._control.settimeout(timeout_s)
        self._is_ready = False

    @property
    def is_mine(self) -> bool:
        """Flag of the process that started the server; False in a forked child."""
        return self._owner == os.getpid()

    def fork(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """Ask the server to fork a guardian, and return its PID. Raises OSError or NoServer if the server has ended."""
        if not self._is_ready and self._control.recv(len(READY)) != READY:
            raise NoServer("the fork server did not start")
        self._is_ready = True
        socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
        if not (answer := self._control.recv(LONGEST_BYTES)):
            raise NoServer("the fork server ended")
        if answer == NOT_FORKED:
            global _refusal
            _refusal = "a module has opened a GPU while it was imported, and a fork cannot use it"
            raise NoServer(_refusal)
        return int(answer)

    def retire(self) -> None:
        """Send no more requests; the server ends when its guardians have."""
        self._control.close()
        if self.is_mine:
            _retired.append(self.process)


def fork_guardian(
    plan: Mapping[str, Any],
    descriptors: Sequence[int],
    environment: Mapping[str, str],
    timeout_s: float,
) -> ForkedGuardian:
    """Ask the fork server to fork a guardian of workers.

    Args:
        plan: the guardian's plan; each command's `argv` are a worker's arguments, its descriptors first.
        descriptors: the log, the ends of the control and status pipes, then each command's own, in order.
        environment: the variables of the guardian; a command's `env` is added to them.
        timeout_s: the time that the server may take to start.

    Raises NoServer if processes cannot be forked this way.
    """
    global _server
    if reason := unavailable():
        raise NoServer(reason)
    if len(descriptors) > MOST_DESCRIPTORS:
        raise NoServer("the fork server starts at most 98 workers")
    imports = {
        name: value
        for name, value in {**environment, **plan["commands"][0]["env"]}.items()
        if not _READ_LATER.fullmatch(name)
    }
    inherited = _inherited(imports)
    with _lock:
        _retired[:] = [process for process in _retired if process.poll() is None]
        if _server is not None and (not _server.is_mine or _server.inherited != inherited):
            _retire()
        request = {"plan": plan, "env": {**environment}, "cwd": str(Path.cwd()), "modules": sorted(_modules)}
        _modules.clear()  # a module that cannot be imported ends this server, but not the next one
        try:
            _server = _server or _Server(inherited, imports, timeout_s)
            return ForkedGuardian(_server.fork(request, descriptors))
        except BaseException as error:
            _retire()  # an answer may still arrive
            if isinstance(error, (OSError, NoServer)):
                raise NoServer(str(error)) from error
            raise


def unavailable() -> str | None:
    """Return the reason why workers start as programs on this machine, or None if they are forked."""
    if not hasattr(os, "pidfd_open"):
        return "the fork server needs Linux"
    return _refusal


def preload(modules: Iterable[str]) -> None:
    """Let the server import modules before it forks its next worker."""
    _modules.update(modules)


def server_pids() -> set[int]:
    """Return the PIDs of this process's fork server, and of earlier ones that may still be running."""
    servers = [_server.process] if _server is not None and _server.is_mine else []
    return {process.pid for process in servers + _retired}


def _retire() -> None:
    global _server
    if _server is not None:
        _server.retire()
        _server = None


@atexit.register
def _end() -> None:
    """End all servers, and with them the guardians and workers of this process."""
    _retire()
    for process in _retired:
        process.kill()
        process.returncode = 0  # do not wait, because a second Ctrl-C would then print a traceback


def _inherited(environment: Mapping[str, str]) -> dict[str, object]:
    """Return the state that a new process would inherit from this one or read from the package."""
    limits = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
    umask = re.search(r"^Umask:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return {
        "environment": environment,
        "affinity": os.sched_getaffinity(0),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "limits": [resource.getrlimit(limit) for limit in limits],
        "umask": umask and umask[1],
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "ignored signals": [n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN],
        "sources": max(path.stat().st_mtime_ns for path in _PACKAGE.rglob("*.py")),
    }
