"""Guardian of worker processes: starts them, and ends their whole process tree when they or the supervisor end.

The supervisor runs this file as a separate script, `python -I -S guardian.py PLAN`, without the package and without
torch. The guardian is the reaper of all processes that the workers start: a child that they fork, detach or abandon
becomes the guardian's child when its parent ends (PR_SET_CHILD_SUBREAPER, Linux), so that nothing outlives the tree,
even if the supervisor was killed by SIGKILL. On other systems it ends the workers' process groups.

PLAN is JSON: `control`, the read end of a pipe that closes when the supervisor ends; `status`, the write end of a pipe
for its reports; `parent`, the supervisor's PID; `commands`, each {argv, env, fds, log}; `scratch`, the prefix of a
private folder that the guardian makes and finally removes, or null. `{scratch}` in an argument or a log means that
folder.

Reports are lines: `scratch PATH`, then `exit INDEX STATUS` for each command as it ends, with the signal's number
negated. It ends when all commands have ended, or when the control pipe closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO, Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.005
HANDLED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def prctl(option: int, value: int) -> None:
    """Call Linux's prctl; do nothing on other systems."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class Guardian:
    """Runner of one plan's commands, their exit statuses, and all of their descendants."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._control, self._status, self._parent = plan["control"], plan["status"], plan["parent"]
        self._scratch = tempfile.mkdtemp(prefix=plan["scratch"]) if plan["scratch"] else None
        self._plan = plan["commands"]
        self._running: dict[int, int] = {}  # PID → index of the command

    def run(self) -> None:
        """Start the commands, and return when all of their processes have ended."""
        wakeup_read, wakeup_write = os.pipe()
        os.set_blocking(wakeup_write, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        # Use handlers that do nothing, because workers would inherit SIG_IGN, which only nohup or a shell should give
        # them. The kernel sends SIGTERM when the supervisor's thread ends.
        for number in HANDLED:
            if number in (signal.SIGCHLD, signal.SIGTERM) or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        try:
            if self._scratch:
                self._report(f"scratch {self._scratch}")
            for index, command in enumerate(self._plan):
                self._start(index, command)
            while self._running and os.getppid() == self._parent:
                ready, _, _ = select.select([self._control, wakeup_read], [], [])
                if self._control in ready:
                    break
                os.read(wakeup_read, 4096)
                self._reap()
        finally:
            self._end_tree()
            if self._scratch:
                shutil.rmtree(self._scratch, ignore_errors=True)

    def _report(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the supervisor may have ended
            os.write(self._status, f"{line}\n".encode())

    def _filled(self, text: str) -> str:
        return text.replace("{scratch}", self._scratch or "")

    def _start(self, index: int, command: dict[str, Any]) -> None:
        output = open(self._filled(command["log"]), "ab") if command["log"] else None  # noqa: SIM115, PTH123
        argv = [self._filled(word) for word in command["argv"]]
        self._running[self._spawn(argv, command["env"], command["fds"], output)] = index
        for descriptor in command["fds"]:
            os.close(descriptor)
        if output is not None:
            output.close()

    def _spawn(self, argv: list[str], env: dict[str, str], fds: list[int], output: IO[bytes] | None) -> int:
        """Start a process with these descriptors and its output in `output` or the guardian's; return its PID."""
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | env,
            pass_fds=fds,
            start_new_session=True,
            preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        process.returncode = 0  # `_reap` reads its exit status
        return process.pid

    def _reap(self) -> bool:
        """Collect the exit status of every child that has ended; return whether any child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid in self._running:
                self._report(f"exit {self._running.pop(pid)} {os.waitstatus_to_exitcode(status)}")

    def _end_tree(self) -> None:
        groups = list(self._running)
        while True:
            for pid in descendants(os.getpid()):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            for group in groups:
                with contextlib.suppress(OSError):
                    os.killpg(group, signal.SIGKILL)
            if not self._reap():
                return
            groups = list(self._running)
            time.sleep(_POLL_S)


def descendants(root: int) -> set[int]:
    """Return the PIDs of all descendants of `root` from /proc; return an empty set on systems without /proc."""
    parents = {}
    try:
        names = [name for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208
    except OSError:
        return set()
    for name in names:
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:  # noqa: PTH123
            parents[int(name)] = int(stat.read().rpartition(b")")[2].split()[1])
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}


if __name__ == "__main__":
    Guardian(json.loads(sys.argv[1])).run()
