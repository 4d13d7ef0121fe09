"""A file that is used like Python's executable; its programs are forks, in which torch is imported already.

A program that starts others by the name of Python, such as `cs-systems advise -- train.py`, can be given this name. The
file is a small client of the process of the tests, in which a thread asks the fork server of `tests.forks`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver, reduction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests import forks

CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps([sys.argv[0], sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(server, [len(request).to_bytes(8, "little")], [1, 2])
server.sendall(request)
status = int(server.recv(8) or -signal.SIGKILL)
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if status != -signal.SIGKILL else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""
_folders: list[TemporaryDirectory[str]] = []


@cache
def executable() -> str:
    """Return the path of the file. A program has no input, and is killed when its client ends."""
    forks.server()
    forkserver.ensure_running()  # before a test takes this file for Python's executable
    _folders.append(folder := TemporaryDirectory(prefix="python-"))
    address, file = f"{folder.name}/socket", Path(folder.name, "python")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    file.write_text(CLIENT.format(python=sys.executable, address=address))
    file.chmod(0o700)
    threading.Thread(target=_serve, args=(listener,), daemon=True).start()
    return str(file)


def torchrun(*words: str, timeout_s: float = 55.0) -> subprocess.CompletedProcess[str]:
    """Run torchrun with two ranks on this machine; it starts them as it starts Python, but they are forks.

    The arguments are those of `forks.python`.
    """
    command = ("-m", "torch.distributed.run", *forks.TWO_RANKS, "--no-python", executable(), *words)
    return forks.python(*command, timeout_s=timeout_s)


def _serve(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    """Run the program of one client, and send its exit status."""
    with connection:
        head, streams, *_ = socket.recv_fds(connection, 8, 2)
        request = b""
        while len(request) < int.from_bytes(head, "little"):
            request += connection.recv(1 << 16)
        process = forks.server().Process(target=_program, args=(*json.loads(request), _Streams(streams)))
        with forks.starting:
            process.start()
        for number in streams:
            os.close(number)
        select.select([connection, process.sentinel], [], [])
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what it left running
        with forks.starting:
            process.join()
        with suppress(OSError):
            connection.sendall(str(process.exitcode).encode())


class _Streams:
    """Descriptors that are sent to another process."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers

    def __getstate__(self) -> list[Any]:
        return [reduction.DupFd(number) for number in self.numbers]

    def __setstate__(self, sent: list[Any]) -> None:
        self.numbers = [each.detach() for each in sent]


def _program(file: str, words: list[str], variables: dict[str, str], folder: str, streams: _Streams) -> None:
    os.chdir(folder)
    sys.path[:0] = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    sys.executable = file
    forks.become(tuple(words), variables, streams.numbers)
