"""Fork server: a process that has imported the worker's modules, and forks guardians with workers that start at once.

`python -m cs_systems.measure.runtime.fork_server SOCKET PARENT` only imports the worker's code: it queries no device,
starts no thread and computes nothing, so that a fork equals a new process. It answers `R` when it is ready. Each
request on the socket (`fork_client`) has a guardian's plan and descriptors, and the answer is the guardian's PID. The
server ends when the socket closes or its parent ends, and its guardians end with it.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

from cs_systems.measure.runtime.guardian import HANDLED, PR_SET_PDEATHSIG, Guardian, prctl

if __name__ == "__main__":
    gc.disable()  # importing torch makes no garbage; the worker enables collection again
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # `serve` watches the parent, but importing takes seconds
    if os.getppid() != int(sys.argv[2]):
        sys.exit(1)

import importlib
import json
import select
import socket
from collections.abc import Iterable
from typing import IO, Any, NoReturn

from cs_systems.measure.runtime import worker
from cs_systems.measure.runtime.fork_client import LONGEST_BYTES, MOST_DESCRIPTORS, NOT_FORKED, READY
from cs_systems.measure.runtime.forking import has_opened_a_gpu, open_descriptors, run_and_exit


class ForkingGuardian(Guardian):
    """Guardian that forks its workers. kept: the server's descriptors that a new process would have too."""

    def __init__(self, plan: dict[str, Any], kept: Iterable[int]) -> None:
        super().__init__(plan)
        self._kept = {*kept}
        self._handlers = {number: signal.getsignal(number) for number in HANDLED} | {signal.SIGCHLD: signal.SIG_DFL}

    def _spawn(self, argv: list[str], env: dict[str, str], fds: list[int], output: IO[bytes] | None) -> int:
        if (pid := os.fork()) == 0:
            self._become_worker(argv, env, fds, output)
        return pid

    def _become_worker(
        self, argv: list[str], env: dict[str, str], fds: list[int], output: IO[bytes] | None
    ) -> NoReturn:
        """Undo the guardian's settings in this fork, and run the worker."""
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            if output is not None:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            for descriptor in open_descriptors() - self._kept - {*fds}:
                os.close(descriptor)
            os.environ.update(env)
            sys.argv = [worker.__file__, *argv]
        except BaseException:
            os._exit(1)
        run_and_exit(worker.main)


def _guard(request: dict[str, Any], descriptors: list[int], server: int, kept: set[int]) -> None:
    """Become the guardian of a request's workers, with the sender's environment and working directory."""
    log, control, status, *rest = descriptors
    for descriptor in open_descriptors() - kept - {*descriptors}:
        os.close(descriptor)
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    if not sys.flags.safe_path:
        sys.path[0] = request["cwd"]
    plan = {**request["plan"], "control": control, "status": status, "parent": server}
    for command in plan["commands"]:
        count = len(command["fds"])
        command["fds"], rest = rest[:count], rest[count:]
        command["argv"][:count] = map(str, command["fds"])
    ForkingGuardian(plan, kept).run()


def serve(control: socket.socket, parent: int) -> None:
    """Fork a guardian for each request. After the last request, wait for the guardians' or the parent's end."""
    kept = open_descriptors() - {control.fileno(), parent}
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes guardians that have ended
    server = os.getpid()
    prctl(PR_SET_PDEATHSIG, 0)  # the thread that started this process may end before its process
    control.send(READY)
    listened, alive = [control.fileno()], set[int]()  # alive: a pipe per guardian that closes when it ends
    while listened or alive:
        ready, _, _ = select.select([parent, *listened, *alive], [], [])
        if parent in ready:
            return
        for pipe in alive.intersection(ready):
            os.close(pipe)
            alive.remove(pipe)
        if control.fileno() not in ready:
            continue
        text, descriptors, _, _ = socket.recv_fds(control, LONGEST_BYTES, MOST_DESCRIPTORS)
        if not text:
            listened = []
            continue
        request = json.loads(text)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for module in request["modules"]:
            importlib.import_module(module)
        prctl(PR_SET_PDEATHSIG, 0)
        if has_opened_a_gpu():
            for descriptor in descriptors:
                os.close(descriptor)
            control.send(NOT_FORKED)
            continue
        gc.freeze()  # a garbage collection in a worker would copy the pages of everything imported
        pipe, theirs = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                _guard(request, [*descriptors, theirs], server, kept)
            finally:
                os._exit(0)
        for descriptor in (*descriptors, theirs):
            os.close(descriptor)
        alive.add(pipe)
        control.send(str(pid).encode())


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), os.pidfd_open(int(sys.argv[2])))
