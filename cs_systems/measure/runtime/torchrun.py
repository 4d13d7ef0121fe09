"""Ranks of a job that torchrun started, on any number of nodes; this process is one of them.

Only rank 0 runs the command, writes records and prints. It sends requests to the others through the launcher's store,
and they answer as workers do. The supervisor uses `Job` like `Ranks`, except that rank 0 measures in this process:

    torchrun --nproc-per-node 2 -m cs_systems comm --world-size 2 --out runs/comm

If a cell leaves the ranks in different states, the job ends after the record is written. If rank 0 waits for a failed
rank, a thread in rank 0 writes the record. If rank 0 itself was killed, the next start writes it, because it finds the
name of the cell that was being measured. The same command measures the remaining cells, and retries such cells last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from multiprocessing.connection import wait
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from cs_systems.machine import device as devices
from cs_systems.machine import process_group
from cs_systems.measure.runtime import channel
from cs_systems.measure.runtime.channel import CellRecord, Done, Join, Joined, Message, Ready, Visit
from cs_systems.measure.runtime.lifetime import die_with_parent, is_running
from cs_systems.measure.runtime.ranks import hung
from cs_systems.measure.runtime.stragglers import verdict
from cs_systems.measure.runtime.worker import answer, serve

Lost = Callable[[str, str], None]
SETTLE_S = 2.0  # time for the other ranks to report after one failed
START_TIMEOUT_S = 120.0
EXIT_LOST = 4
_LOOK_S = 0.5  # interval at which the thread in a measuring rank 0 reads the other ranks' replies
_END = b""


class JobLost(RuntimeError):
    """Error for ranks that cannot continue together; the record of the cell is already written."""

    def __init__(self, status: str, reason: str | None) -> None:
        super().__init__(
            f"{status}: {reason}. The ranks cannot continue after this cell; start the job again with the same output "
            "folder to measure the remaining cells"
        )


def _connect() -> Any:
    """Return the store of this job's launcher on a new connection, because a waiting one blocks others."""
    store, _, _ = next(rendezvous("env://"))
    return store


def follow() -> int:
    """Answer the requests of rank 0 until it ends; run by all other ranks."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank, store = int(os.environ["RANK"]), _connect()
    replies = _Replies(store, rank)
    serve(
        _requests(store),
        replies.send,
        Ready(os.getpid(), devices.resolve_or_cpu("auto").name, rank, socket.gethostname()),
    )
    process_group.leave()
    return 0


def _requests(store: Any) -> Iterator[Message]:
    for number in itertools.count():
        if (frame := _wait_for(store, f"request/{number}")) == _END:
            return
        yield channel.decode(frame, None, number)


def _wait_for(store: Any, key: str, timeout_s: float | None = None) -> bytes:
    """Return a key's value once it is set. Raises TimeoutError, or the store's own error if the store is gone."""
    end = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left = 60.0 if end is None else max(0.01, end - time.monotonic())
        try:
            store.wait([key], timedelta(seconds=left))
            return bytes(store.get(key))
        except dist.DistStoreError:
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(key) from None


class _Replies:
    """Writer of one rank's replies into the store; a failure of the rank itself also sets the key `failed`."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank, self._count = store, rank, 0

    def send(self, message: Message) -> None:
        self._store.set(f"reply/{self._rank}/{self._count}", channel.encode(message, os.getpid(), self._count))
        self._count += 1
        if isinstance(message, CellRecord) and message.failed and not message.of_peers:
            self._store.set("failed", str(self._rank))


class Job:
    """All ranks of this job, seen from rank 0; there is one, and it ends with the process."""

    def __init__(self) -> None:
        self._store, self._count = _connect(), 0
        self._others = range(1, int(os.environ["WORLD_SIZE"]))
        self._read = dict.fromkeys(self._others, 0)  # number of replies read from each rank
        self._devices: dict[int, str] = {}
        self._hellos: dict[int, Ready] = {}
        for rank in self._others:
            hello = self._next(rank, None)
            assert isinstance(hello, Ready)
            self._hellos[rank] = hello
        self._kind: Any = None
        self.hello = Ready(os.getpid(), devices.resolve("auto").name)
        self.lost: Lost = lambda status, reason: None

    def of_kind(self, kind: Any, lost: Lost) -> Job:
        """Return the ranks, joined for cells of that kind.

        lost: called with a status and a reason if this process must end at once.
        """
        self.lost = lost
        if kind != self._kind:
            for _ in self.request(Join(kind.device, kind.patience_s)):
                pass
            self._kind = kind
        return self

    alive = True

    def finish(self) -> None:
        return

    close = finish

    def end(self) -> None:
        """Let the other ranks end."""
        self._store.set(f"request/{self._count}", _END)

    def request(self, request: Message, timeout_s: float | None = None) -> Iterator[Message]:
        """Do what `Ranks.request` does, but report a cell's visits when it is done. Raises JobLost."""
        self._store.delete_key("failed")
        self._store.set(f"request/{self._count}", channel.encode(request, os.getpid(), self._count))
        self._count += 1
        mine: list[Message] = []
        answers: dict[int, dict[int, CellRecord]] = {}
        with self._watched(timeout_s):
            answer(request, mine.append)
            for message in mine:
                self._note(0, message, answers)
            silent = [rank for rank in self._others if not self._hear(rank, answers, mine)]
        names = [self._name(rank) for rank in range(len(self._others) + 1)]
        for message in mine:
            if isinstance(message, Visit):
                yield message
            if not isinstance(message, CellRecord):
                continue
            of_cell = answers[message.cell]
            is_explained = any(a.failed and not a.of_peers for a in of_cell.values())
            if silent and not is_explained and len(of_cell) < len(names):
                why = self._why_silent([rank for rank in self._others if rank not in of_cell])
                self.lost(*why)
                raise JobLost(*why)
            record = verdict(of_cell, names)
            yield CellRecord(message.cell, dataclasses.asdict(record))
            if len(of_cell) < len(names) or any(a.of_peers for a in of_cell.values()):
                raise JobLost(record.status, record.reason)

    def _hear(self, rank: int, answers: dict[int, dict[int, CellRecord]], mine: list[Message]) -> bool:
        """Store a rank's answers up to its last one; return False if that one is missing although this rank is done."""
        allowed_s = self._kind.patience_s if self._kind else START_TIMEOUT_S
        if any(message.failed for message in mine if isinstance(message, CellRecord)):
            allowed_s = SETTLE_S
        while True:
            try:
                message = self._next(rank, allowed_s)
            except TimeoutError:
                return False
            self._note(rank, message, answers)
            if isinstance(message, Done):
                return True

    def _note(self, rank: int, message: Message, answers: dict[int, dict[int, CellRecord]]) -> None:
        if isinstance(message, Joined):
            self._devices[rank] = message.device
        elif isinstance(message, CellRecord):
            answers.setdefault(message.cell, {})[rank] = message

    def _next(self, rank: int, timeout_s: float | None) -> Message:
        number = self._read[rank]
        pid = self._hellos[rank].pid if number else None
        message = channel.decode(_wait_for(self._store, f"reply/{rank}/{number}", timeout_s), pid, number)
        self._read[rank] += 1
        return message

    def _name(self, rank: int) -> str:
        host = self._hellos[rank].host if rank else socket.gethostname()
        hosts = {socket.gethostname(), *(hello.host for hello in self._hellos.values())}
        where = f" of {host}" if len(hosts) > 1 else ""
        return f"rank {rank} on {self._devices.get(rank, 'an unknown device')}{where}"

    def _why_silent(self, ranks: list[int]) -> tuple[str, str]:
        """Return the status and reason for a cell that these ranks did not answer while others waited for them."""
        if dead := self._dead(ranks):
            return "killed", f"{', '.join(map(self._name, dead))} died; see the launcher's output"
        patience_s = self._kind.patience_s if self._kind else START_TIMEOUT_S
        return "timeout", hung(", ".join(map(self._name, ranks)), patience_s)

    def _dead(self, ranks: list[int]) -> list[int]:
        """Return which of these ranks ran on this host and have ended."""
        mine = [rank for rank in ranks if self._hellos[rank].host == socket.gethostname()]
        return [rank for rank in mine if not is_running(self._hellos[rank].pid)]

    @contextlib.contextmanager
    def _watched(self, timeout_s: float | None) -> Iterator[None]:
        """Watch the other ranks in a thread while this rank measures, and end the process if one has failed."""
        over = threading.Event()
        wakeup_read, wakeup_write = os.pipe()
        os.set_blocking(wakeup_write, False)
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        watcher = threading.Thread(target=self._watch, args=(over, wakeup_read, timeout_s), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            signal.set_wakeup_fd(-1)
            os.write(wakeup_write, b"\0")
            watcher.join()
            signal.signal(signal.SIGTERM, before)
            os.close(wakeup_read)
            os.close(wakeup_write)

    def _watch(self, over: threading.Event, wakeup_read: int, timeout_s: float | None) -> None:
        store, end = _connect(), None if timeout_s is None else time.monotonic() + timeout_s
        while not over.is_set():
            signals = os.read(wakeup_read, 1) if wait([wakeup_read], _LOOK_S) else b""
            if over.is_set():
                return
            if signals == bytes([signal.SIGTERM]):
                if store.check(["failed"]):
                    self._report_failure(int(store.get("failed")), store)
                dead = self._dead(list(self._others))
                names = ", ".join(map(self._name, dead)) or "a rank or the whole job"
                self._give_up("killed", f"{names} was ended; see the launcher's output")
            elif store.check(["failed"]) and not over.wait(SETTLE_S):
                self._report_failure(int(store.get("failed")), store)
            elif end is not None and time.monotonic() > end:
                self._give_up("timeout", f"the ranks did not answer within {timeout_s:g} s; raise timeout_s")

    def _report_failure(self, rank: int, store: Any) -> None:
        for number in itertools.count(self._read[rank]):
            try:
                frame = _wait_for(store, f"reply/{rank}/{number}", SETTLE_S)
            except TimeoutError:  # the failed record has been read already
                return
            message = channel.decode(frame, self._hellos[rank].pid, number)
            if isinstance(message, CellRecord) and message.failed:
                record = message.record
                self._give_up(record["status"], f"{self._name(rank)}: {record['reason']}")

    def _give_up(self, status: str, reason: str) -> None:
        self.lost(status, reason)
        print(f"cs-systems: {JobLost(status, reason)}", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(EXIT_LOST)


@cache
def job() -> Job:
    """Return this process's job; the other ranks end when this process does."""
    import atexit

    die_with_parent()
    made = Job()
    atexit.register(made.end)
    return made
