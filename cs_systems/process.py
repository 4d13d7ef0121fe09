"""A worker process and the two pipes to it. No torch in here.

The worker's standard output and error go to a log, so that nothing it prints is mistaken for a reply or scrolls over a
progress bar; the end of that log explains a death.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from cs_systems.config import RunConfig

Event = dict[str, Any]
START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 120.0  # for a question that measures nothing
GRACE_S = 10.0  # for a process that has closed its pipes to end
FINISH_TIMEOUT_S = 600.0  # a profiler writes its report when the worker has ended


class WorkerDied(RuntimeError):
    """The process ended before it had answered; the message says how, with the end of its log."""


class WorkerTimeout(RuntimeError):
    """No event came in the time allowed, which the message tells."""


def worker_command(*arguments: object) -> list[str]:
    """`arguments`: the numbers of its ends of the two pipes, or one request as JSON, which it answers and ends."""
    return [sys.executable, "-m", "cs_systems.worker", *map(str, arguments)]


def run_request(configs: Sequence[RunConfig], repeat: int, out: Path | None) -> Event:
    """Asks a worker to measure cells; `out` is what a profiler's files begin with."""
    return {"op": "run", "cells": [c.to_dict() for c in configs], "repeat": repeat, "out": out and str(out)}


class Log:
    """Where a process's output goes: a file that others write to as well, or one that is gone with it."""

    def __init__(self, path: Path | None) -> None:
        self.stream: IO[bytes] = tempfile.TemporaryFile() if path is None else path.open("ab+")  # noqa: SIM115
        self.begin = self.stream.seek(0, os.SEEK_END)  # of what is this process's, and then this visit's

    def tail(self, size_bytes: int) -> str:
        end = self.stream.seek(0, os.SEEK_END)
        self.stream.seek(max(self.begin, end - size_bytes))
        return self.stream.read().decode(errors="replace")

    def last_words(self) -> str:
        lines = [line for line in self.tail(4096).splitlines() if line.strip()]
        last = " | ".join(lines[-3:])[-500:]
        return f"; its last words: {last}" if last else ""


class Worker:
    """One `python -m cs_systems.worker`, started on creation and killed on `close`.

    wrap: makes another command of the worker's, one that runs it and hands its open pipes on.
    """

    def __init__(self, log: Path | None = None, wrap: Callable[[list[str]], list[str]] = list) -> None:
        self._log = Log(log)
        request_read, self._requests = os.pipe()
        self._replies, reply_write = os.pipe()
        self._buffer = b""
        self._process = subprocess.Popen(
            wrap(worker_command(request_read, reply_write)),
            stdin=subprocess.DEVNULL,
            stdout=self._log.stream,
            stderr=self._log.stream,
            pass_fds=(request_read, reply_write),
            start_new_session=True,  # Ctrl-C in the terminal is for the parent alone
        )
        os.close(request_read)
        os.close(reply_write)
        try:
            self.hello = self._read(START_TIMEOUT_S)
        except (WorkerDied, WorkerTimeout) as error:
            self.close()
            raise RuntimeError(f"the worker process did not start: {error}") from error

    def request(self, timeout_s: float | None = None, **request: Any) -> Iterator[Event]:
        """Send one request and yield its events up to `done`. `timeout_s` is allowed from one event to the next.

        Raises WorkerDied or WorkerTimeout; the worker is of no use then.
        """
        try:
            os.write(self._requests, json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise WorkerDied(self._obituary()) from None
        while True:
            event = self._read(timeout_s)
            if event["event"] == "done":
                if not event["usable"]:
                    self.close()
                return
            yield event

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def finish(self) -> None:
        """Let the worker end by itself, and whatever wraps it finish its own work."""
        if self._log.stream.closed:
            return
        os.close(self._requests)
        self._requests = os.open(os.devnull, os.O_WRONLY)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(FINISH_TIMEOUT_S)
        self.close()

    def close(self) -> None:
        """Kill the process and all that it started; once only, for its number may be another's by then."""
        if self._log.stream.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # a worker under a wrapper ends with its parent
        self._process.wait()
        for descriptor in (self._requests, self._replies):
            os.close(descriptor)
        self._log.stream.close()

    def _read(self, timeout_s: float | None) -> Event:
        deadline = time.monotonic() + (timeout_s or 0.0)
        while b"\n" not in self._buffer:
            wait = None if timeout_s is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._replies], [], [], wait)[0]:
                raise WorkerTimeout(f"no answer within {timeout_s:g} s")
            chunk = os.read(self._replies, 1 << 16)
            if not chunk:
                raise WorkerDied(self._obituary())
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        event: Event = json.loads(line)
        self._log.begin = event.get("log_bytes", self._log.begin)
        return event

    def _obituary(self) -> str:
        """How the process ended that has closed its pipes; one that goes on without them is killed by `close`."""
        try:
            status = self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            return f"it closed its pipes and went on for {GRACE_S:g} s without them{self._log.last_words()}"
        return how_it_ended(status) + self._log.last_words()


def how_it_ended(status: int) -> str:
    """An exit status in words; negative it is a signal's number."""
    if status >= 0:
        return f"exited with status {status}"
    by = " (by hand, or by the system when memory ran out)" if status == -signal.SIGKILL else ""
    return f"killed by {signal.Signals(-status).name}{by}"
