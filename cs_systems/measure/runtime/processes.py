"""Worker processes for the supervisor: a process tree under a guardian, and a channel to each worker.

A worker's standard output and error go to a log, so that its prints cannot be mistaken for a reply or disturb a
progress bar; the end of that log explains a crash. The supervisor watches both a worker's pipe and its process: a pipe
may stay open in a child that the worker forked, and a process may go on without its pipe.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from cs_systems.measure.runtime import channel
from cs_systems.measure.runtime.channel import (
    BUG,
    CellRecord,
    ChannelError,
    Done,
    Experimenting,
    Message,
    Ready,
    Receiver,
    Timing,
    Visit,
    Warming,
)
from cs_systems.measure.runtime.fork_client import ForkedGuardian, NoServer, fork_guardian

START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 120.0  # timeout of a request that measures nothing
GRACE_S = 10.0  # time for an idle process to end
FINISH_TIMEOUT_S = 600.0  # time for a profiler to write its report after the worker has ended
_GUARDIAN = Path(__file__).with_name("guardian.py")


class WorkerDied(RuntimeError):
    """Error for a worker that ended before it replied, with its exit status and the last line of its log."""


class WorkerOutOfMemory(WorkerDied):
    """Error for a worker that the system killed because memory ran out."""


class WorkerTimeout(RuntimeError):
    """Error for a worker that sent no message in the allowed time, which the text states; a remedy may follow."""

    remedy = "; raise timeout_s"


class RequestUnread(WorkerTimeout):
    """Error for a worker that did not read its request in time; this limit is not the measurement's `timeout_s`."""

    remedy = "; close other programs and measure again"


def worker_command(*arguments: object) -> list[str]:
    """Build a worker's command from its ends of the two pipes, or from a single `Run` request as JSON."""
    return [sys.executable, "-m", "cs_systems.measure.runtime.worker", *map(str, arguments)]


class Log:
    """Log file of a process's output: a given file that others also write to, or a temporary one."""

    def __init__(self, path: Path | None) -> None:
        self.stream: IO[bytes] = tempfile.TemporaryFile() if path is None else path.open("ab+")  # noqa: SIM115
        # position where this process's output begins, later this visit's output
        self.begin = self.stream.seek(0, os.SEEK_END)

    def tail(self, size_bytes: int) -> str:
        end = self.stream.seek(0, os.SEEK_END)
        self.stream.seek(max(min(self.begin, end), end - size_bytes))
        return self.stream.read().decode(errors="replace")

    def last_output(self) -> str:
        """Return, as a clause, the last line that explains the end of a process, preferably an exception's line."""
        lines = [line for line in map(printable, self.tail(1 << 14).splitlines()) if line.strip()]
        lines = [line for line in lines if not _USAGE.match(line)] or lines
        errors = [line for line in lines if _EXPLAINS.match(line)]
        candidates = errors or [line for line in lines if not line[0].isspace()]
        last = _RANK_PREFIX.sub("", (candidates or lines or [""])[-1].strip())
        return f"; its last output: {last[:200]}" if last else ""


_USAGE = re.compile(r"usage: |Try '|Use the '")  # programs print this after the reason why they reject an option
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch's prefix of each line of a traceback
# Lines that report an error, as written by Python exceptions, C++, the interpreter, and programs.
_EXPLAINS = re.compile(
    r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception|Interrupt|Exit|Warning)\b: \S"
    r"|Fatal |terminate called|  what\(\)|(?i:unrecogni[sz]ed option|(fatal )?error:)"
)


def printable(text: str) -> str:
    """Return the text without characters that move the cursor, set colours or change the text direction."""
    return "".join(c if c.isprintable() or c == "\t" else " " for c in re.sub(r"\x1b\[[0-9;?]*[ -/]*[@-~]", "", text))


@dataclass
class Member:
    """Worker of a tree: its pipes, and the messages received from it that are not processed yet.

    broken: the error of invalid data on its pipe, after the messages in `received`; nothing more is read.
    """

    index: int
    request_fd: int
    receiver: Receiver
    received: list[Message] = field(default_factory=list)
    broken: ChannelError | None = None
    status: int | None = None  # set when the process has ended
    _sent: int = 0

    def send(self, message: Message, timeout_s: float = START_TIMEOUT_S) -> None:
        """Send a request. Raises BrokenPipeError if the worker has ended, RequestUnread if it does not read."""
        frame = memoryview(channel.encode(message, os.getpid(), self._sent))
        self._sent += 1
        deadline = time.monotonic() + timeout_s
        while frame:
            try:
                frame = frame[os.write(self.request_fd, frame) :]
            except BlockingIOError:
                if (left := deadline - time.monotonic()) <= 0:
                    raise RequestUnread(f"the worker process read no request within {timeout_s:g} s") from None
                (poll := select.poll()).register(self.request_fd, select.POLLOUT)
                poll.poll(1e3 * min(left, 0.1))

    def listen(self) -> None:
        """Store the messages that have arrived, and the error if other data arrived."""
        if self.broken is not None:
            return
        try:
            for message in self.receiver.messages():
                self.received.append(message)
        except ChannelError as error:
            self.broken = error

    def stop_requests(self) -> None:
        """Close the request pipe, which ends the worker's loop."""
        if self.request_fd >= 0:
            os.close(self.request_fd)
            self.request_fd = -1


class Tree:
    """Worker processes under one guardian, which ends them and all their descendants when this process ends.

    commands: for each worker a function that builds its command from its two descriptors (requests, replies);
    `{scratch}` in a command is the path of a private folder of the tree. environments, logs: one for each worker, or
    empty.
    """

    def __init__(
        self,
        commands: Sequence[Callable[[int, int], list[str]]],
        log: Log,
        *,
        environments: Sequence[Mapping[str, str]] = (),
        logs: Sequence[str] = (),
        scratch: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.members: list[Member] = []
        self.ended: list[Member] = []  # in the order of their ends
        self.scratch: Path | None = None
        self._oom_kills = oom_kills()
        plan, theirs = [], []
        control_read, self._control = os.pipe()
        self._status, status_write = os.pipe()
        for index, command in enumerate(commands):
            request_read, request_write = os.pipe()
            reply_read, reply_write = os.pipe()
            os.set_blocking(request_write, False)
            self.members.append(Member(index, request_write, Receiver(reply_read)))
            fds = [request_read, reply_write]
            theirs += fds
            env = dict(environments[index]) if environments else {}
            plan.append({"argv": command(*fds), "env": env, "fds": fds, "log": logs[index] if logs else None})
        whole = {"commands": plan, "scratch": scratch}
        inherited = dict(os.environ if environment is None else environment)
        self._guardian = _start_guardian(whole, [control_read, status_write, *theirs], log, inherited)
        for descriptor in (control_read, status_write, *theirs):
            os.close(descriptor)
        os.set_blocking(self._status, False)
        self._reports = b""
        self._closed = False

    @property
    def alive(self) -> bool:
        self._look()
        return not self._closed and not self.ended and self._guardian.poll() is None

    def wait(self, timeout_s: float) -> bool:
        """Wait until some worker has sent data, closed its pipe or ended; return False at the timeout."""
        poll = select.poll()
        listened = [m.receiver.descriptor for m in self.members if not m.receiver.closed and m.broken is None]
        for descriptor in (self._status, *listened):
            poll.register(descriptor, select.POLLIN)
        ready = poll.poll(None if timeout_s == math.inf else max(0, math.ceil(timeout_s * 1000)))
        self._look()
        for member in self.members:
            member.listen()
        return bool(ready)

    def _look(self) -> None:
        """Read the guardian's reports."""
        if self._closed:
            return
        while True:
            try:
                chunk = os.read(self._status, 4096)
            except BlockingIOError:
                break
            if not chunk:  # the guardian ended or was killed
                for member in self.members:
                    if member.status is None:
                        member.status = -signal.SIGKILL
                        self.ended.append(member)
                break
            *lines, self._reports = (self._reports + chunk).split(b"\n")
            for line in lines:
                word, _, rest = line.decode().partition(" ")
                if word == "scratch":
                    self.scratch = Path(rest)
                elif word == "exit":
                    index, status = map(int, rest.split())
                    self.members[index].status = status
                    self.ended.append(self.members[index])

    def wait_for_end(self, members: Iterable[Member], timeout_s: float) -> bool:
        """Wait until these members have ended; return False at the timeout."""
        deadline = time.monotonic() + timeout_s
        while any(m.status is None for m in members):
            if (left := deadline - time.monotonic()) <= 0:
                return False
            poll = select.poll()
            poll.register(self._status, select.POLLIN)
            poll.poll(math.ceil(left * 1000))
            self._look()
        return True

    def death_of(self, member: Member, log: Log | None) -> WorkerDied:
        """Return the error for a worker that has ended or closed its pipe."""
        output = log.last_output() if log else ""
        if not self.wait_for_end([member], GRACE_S):
            return WorkerDied(f"it closed its pipes but did not exit within {GRACE_S:g} s{output}")
        assert member.status is not None
        if member.status == -signal.SIGKILL and oom_kills() > self._oom_kills:
            return WorkerOutOfMemory(f"the system ran out of memory and killed the process{output}")
        return WorkerDied(describe_exit(member.status) + output)

    def finish(self, pids: Sequence[int], wrapped: bool) -> None:
        """Let the workers end, then their wrapper; kill whatever takes too long."""
        if self._closed:
            return
        for member in self.members:
            member.stop_requests()
        if not self.wait_for_end(self.members, GRACE_S) and wrapped:
            for pid in pids:  # a thread that the worker's step left running would prevent its exit
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self.wait_for_end(self.members, FINISH_TIMEOUT_S)
        self.close()

    def close(self) -> None:
        """Kill the workers and all their descendants; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):  # a fork of this process may hold the pipe open
            os.write(self._control, b"end")
        os.close(self._control)
        for member in self.members:
            member.stop_requests()
            os.close(member.receiver.descriptor)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process in a driver may be unkillable
            self._guardian.wait(GRACE_S)
        os.close(self._status)


def _start_guardian(
    plan: dict[str, Any], descriptors: list[int], log: Log, environment: Mapping[str, str]
) -> ForkedGuardian | subprocess.Popen[bytes]:
    """Start the guardian of these commands: by a fork if all are plain workers, else as a program."""
    program = worker_command()
    if all(command["argv"][: len(program)] == program for command in plan["commands"]):
        arguments = [{**command, "argv": command["argv"][len(program) :]} for command in plan["commands"]]
        forked = {**plan, "commands": arguments}
        with suppress(NoServer):
            return fork_guardian(forked, [log.stream.fileno(), *descriptors], environment, START_TIMEOUT_S)
    control, status, *_ = descriptors
    whole = {**plan, "control": control, "status": status, "parent": os.getpid()}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_GUARDIAN), json.dumps(whole)],
        stdin=subprocess.DEVNULL,
        stdout=log.stream,
        stderr=log.stream,
        env=environment,
        pass_fds=descriptors,
        start_new_session=True,  # only the supervisor handles Ctrl-C
    )


class Worker:
    """Worker process; it starts on creation, and `close` ends it and all its descendants.

    wrap: builds a command that runs the worker's command and passes on its open pipes.
    """

    def __init__(self, log: Path | None = None, wrap: Callable[[list[str]], list[str]] = list) -> None:
        self._log = Log(log)
        self._wrapped = False

        def command(*descriptors: int) -> list[str]:
            bare = worker_command(*descriptors)
            self._wrapped = (wrapped := wrap(list(bare))) != bare
            return wrapped

        self._tree = Tree([command], self._log)
        self._member = self._tree.members[0]
        try:
            hello = self._next(deadline_after(START_TIMEOUT_S), START_TIMEOUT_S)
            assert isinstance(hello, Ready)
            self.hello = hello
        except (WorkerDied, WorkerTimeout, ChannelError) as error:
            self.close()
            remedy = ""  # a ChannelError has its own remedy
            if isinstance(error, WorkerTimeout):
                remedy = "; close other programs and try again, or run cs-systems doctor"
            elif isinstance(error, WorkerDied):
                remedy = "; correct the cause, or run cs-systems doctor"
            raise RuntimeError(f"the worker process did not start: {error}{remedy}") from error

    def request(self, request: Message, timeout_s: float | None = None) -> Iterator[Message]:
        """Send a request and yield the replies up to `Done`.

        `timeout_s` limits the time from one reply to the next, not counting messages of warm-up progress.

        Raises WorkerDied, WorkerTimeout or ChannelError; the worker is unusable then.
        """
        try:
            self._member.send(request)
        except BrokenPipeError:
            raise self._tree.death_of(self._member, self._log) from None
        expected = Expected(request)
        deadline = deadline_after(timeout_s)
        while True:
            reply = self._next(deadline, timeout_s)
            if isinstance(reply, Done):
                if not reply.usable:
                    self.close()
                return
            expected.check(reply)
            if isinstance(reply, Visit):
                self._log.begin = reply.log_bytes
            yield reply
            if not isinstance(reply, (Warming, Timing)):
                deadline = deadline_after(timeout_s)

    @property
    def alive(self) -> bool:
        return self._tree.alive

    def finish(self) -> None:
        """Let the worker end by itself, and let its wrapper finish."""
        self._tree.finish([self.hello.pid], self._wrapped)
        self._log.stream.close()

    def close(self) -> None:
        """Kill the process and all its descendants."""
        self._tree.close()
        self._log.stream.close()

    def _next(self, deadline: float, timeout_s: float | None) -> Message:
        while not self._member.received:
            if self._member.broken is not None:
                raise self._member.broken
            if self._member.status is not None or self._member.receiver.closed:
                raise self._tree.death_of(self._member, self._log)
            if not self._tree.wait(max(0.0, deadline - time.monotonic())):
                raise WorkerTimeout(f"the worker process did not answer within {timeout_s:g} s")
        return self._member.received.pop(0)


def deadline_after(timeout_s: float | None) -> float:
    """Return the end of the timeout by the monotonic clock; infinity for None."""
    return time.monotonic() + (math.inf if timeout_s is None else timeout_s)


class Expected:
    """Check of the replies to one request: their types, their cells, and one record per cell. Raises ChannelError."""

    def __init__(self, request: Message) -> None:
        self._kinds = channel.REPLIES[type(request)]
        self._open = set(range(len(request.cells))) if isinstance(request, channel.Run) else set()

    def check(self, reply: Message) -> None:
        if not isinstance(reply, self._kinds):
            raise ChannelError(f"a worker process sent an unexpected reply ({type(reply).__name__}); {BUG}")
        if isinstance(reply, (Visit, Warming, Timing, Experimenting, CellRecord)) and reply.cell not in self._open:
            raise ChannelError(
                f"a worker process replied for cell {reply.cell}, which is finished or was not requested; {BUG}"
            )
        if isinstance(reply, CellRecord):
            self._open.remove(reply.cell)


def describe_exit(status: int) -> str:
    """Describe an exit status; a negative one is a signal's number."""
    if status == channel.EXIT_LOST:
        return "the step closed or replaced the worker's pipe"
    if status >= 0:
        return f"exited with status {status}"
    by = " (by a user, or by the system when memory ran out)" if status == -signal.SIGKILL else ""
    try:
        return f"killed by {signal.Signals(-status).name}{by}"
    except ValueError:  # real-time signals have no names
        return f"killed by signal {-status}"


def oom_kills(counters: Iterable[Path] | None = None) -> int:
    """Return the number of processes that the kernel has killed because memory ran out; 0 if it reports none.

    This process's control group is read first, because the machine's counter includes other containers.
    """
    for counter in _oom_counters() if counters is None else counters:
        with suppress(OSError):
            if count := re.search(r"^oom_kill (\d+)$", counter.read_text(), re.MULTILINE):
                return int(count[1])
    return 0


@lru_cache
def _oom_counters() -> tuple[Path, ...]:
    """List the files that may count out-of-memory kills, the most specific first. Source: cgroups(7)."""
    root, files = Path("/sys/fs/cgroup"), []
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers == "":
                files += [root / group.lstrip("/") / "memory.events", root / "memory.events"]
            elif "memory" in controllers.split(","):
                memory = root / "memory"
                files += [memory / group.lstrip("/") / "memory.oom_control", memory / "memory.oom_control"]
    return (*files, Path("/proc/vmstat"))
