"""N worker processes that torch's elastic launcher starts, each with a device and a socket to here. No torch in here.

All ranks get the same requests and answer each for itself; what they measured becomes one record (`slowest`). The
launcher hands no pipe on to what it starts, therefore a socket, whose path the ranks are told. It chooses a free port
for the ranks' own rendezvous.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cs_systems.config import RunConfig
from cs_systems.lifeline import die_with_parent
from cs_systems.process import GRACE_S, START_TIMEOUT_S, Event, Log, WorkerDied, WorkerTimeout, how_it_ended
from cs_systems.record import RunRecord
from cs_systems.slowest import merged

PATIENCE_S = 25.0
COMPILING_PATIENCE_S = 600.0
_TICK_S = 0.2  # how often somebody looks whether the launcher lives while ranks are awaited


@dataclass(frozen=True)
class Kind:
    """What ranks are started for; cells of one kind run on the same ones.

    patience_s: how long a rank waits for its peers in a collective. One that comes later counts as hung, so that not
    every cell needs a timeout: they do the same work, and a slow step is slow on all of them. Where each compiles for
    itself it is longer.
    """

    world_size: int
    device: str
    patience_s: float

    @classmethod
    def of(cls, config: RunConfig) -> Kind | None:
        """None for a cell that one process measures."""
        if not config.is_distributed:
            return None
        patience_s = PATIENCE_S if config.compile == "none" else COMPILING_PATIENCE_S
        return cls(config.world_size, config.device, patience_s)


def launcher_command(world_size: int, *arguments: object) -> list[str]:
    """Starts that many `cs_systems.worker`s on this machine, once. `--standalone` takes a port that is free."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    how = ["--nproc-per-node", str(world_size), "--max-restarts", "0"]
    return [*launcher, *how, "-m", "cs_systems.worker", *map(str, arguments)]


class _Rank:
    """This end of one rank's socket; `pid` and `name` as it introduced itself."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel, self._buffer = channel, b""
        self.hello: Event = {}

    @property
    def number(self) -> int:
        return int(self.hello["rank"])

    @property
    def name(self) -> str:
        return f"rank {self.number} ({self.hello['device']})"

    def events(self) -> list[Event] | None:
        """What has arrived; to be called when something has. None: the rank is gone."""
        try:
            chunk = self.channel.recv(1 << 16)
        except ConnectionError:
            chunk = b""
        if not chunk:
            return None
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.hello["pid"], signal.SIGKILL)


class Ranks:
    """Like `process.Worker`, of N processes: started on creation, killed on `close`."""

    def __init__(self, kind: Kind, log: Path | None = None) -> None:
        self._kind = kind
        self._log = Log(log)
        self._ranks: list[_Rank] = []
        self._gone: set[_Rank] = set()
        self._selector = selectors.DefaultSelector()
        self._heard: list[tuple[_Rank, Event]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="cs-ranks-")
        address = str(Path(self._folder.name) / "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(kind.world_size)
            self._launcher = subprocess.Popen(
                launcher_command(kind.world_size, address),
                stdin=subprocess.DEVNULL,
                stdout=self._log.stream,
                stderr=self._log.stream,
                env=os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(_threads(kind)))},
                start_new_session=True,  # Ctrl-C in the terminal is for the parent alone
                preexec_fn=die_with_parent,
            )
            try:
                self._greet(listener)
                for _ in self.request(START_TIMEOUT_S, op="join", device=kind.device, patience_s=kind.patience_s):
                    pass
            except (WorkerDied, WorkerTimeout) as error:
                self.close()
                raise RuntimeError(f"{kind.world_size} ranks did not start: {error}") from error
        self.hello = self._ranks[0].hello

    def _greet(self, listener: socket.socket) -> None:
        """Wait until every rank has said which it is."""
        deadline = time.monotonic() + START_TIMEOUT_S
        listener.settimeout(_TICK_S)
        while len(self._ranks) < self._kind.world_size:
            with contextlib.suppress(TimeoutError):
                self._ranks.append(_Rank(listener.accept()[0]))
            self._check_launcher()
            if time.monotonic() > deadline:
                raise WorkerTimeout(f"{len(self._ranks)} of them came within {START_TIMEOUT_S:g} s")
        for rank in self._ranks:
            rank.channel.settimeout(START_TIMEOUT_S)
            while not rank.hello:
                said = rank.events()
                if said is None:
                    raise WorkerDied(f"one ended before it said which it is{self._log.last_words()}")
                rank.hello = said[0] if said else {}
            rank.channel.settimeout(None)
            self._selector.register(rank.channel, selectors.EVENT_READ, rank)
        self._ranks.sort(key=lambda rank: rank.number)

    def _check_launcher(self) -> None:
        if (status := self._launcher.poll()) is not None:
            raise WorkerDied(f"the launcher {how_it_ended(status)}{self._log.last_words()}")

    def request(self, timeout_s: float | None = None, **request: Any) -> Iterator[Event]:
        """Send one request to all ranks and yield what they answer as one worker would, up to `done`.

        A visit is told when rank 0 begins it, a record when all ranks have theirs, or one has failed. `timeout_s` is
        allowed from one of these to the next. Raises WorkerDied or WorkerTimeout; the ranks are of no use then.
        """
        line = json.dumps(request).encode() + b"\n"
        for rank in self._ranks:
            try:
                rank.channel.sendall(line)
            except ConnectionError:
                raise WorkerDied(self._obituary(rank)) from None
        records: dict[int, dict[int, Event]] = {}
        done: dict[int, bool] = {}
        deadline = _deadline(timeout_s)
        while len(done) < len(self._ranks):
            rank, event = self._next(deadline, timeout_s)
            if event["event"] == "done":
                done[rank.number] = event["usable"]
            elif event["event"] == "record":
                of_cell = records.setdefault(event["cell"], {})
                of_cell[rank.number] = event["record"]
                if (record := self._together(of_cell)) is not None:
                    yield {"event": "record", "cell": event["cell"], "record": dataclasses.asdict(record)}
                    deadline = _deadline(timeout_s)
                    if record.status not in ("ok", "unavailable"):
                        self.close()  # its peers may wait for it, and what they share may be broken
                        raise WorkerDied(f"the cell failed on rank {rank.number}")
            elif rank.number == 0:
                self._log.begin = event.get("log_bytes", self._log.begin)
                yield event
                deadline = _deadline(timeout_s)
        if not all(done.values()):
            self.close()

    def _together(self, of_cell: dict[int, Event]) -> RunRecord | None:
        """The record of a cell, of those that its ranks have sent so far; None as long as some are missing."""
        records = {number: RunRecord.from_dict(record) for number, record in sorted(of_cell.items())}
        for number, record in records.items():
            if record.status not in ("ok", "unavailable"):
                return dataclasses.replace(record, reason=f"{self._ranks[number].name}: {record.reason}")
        if len(records) < len(self._ranks):
            return None
        refused = next((r for r in records.values() if r.status == "unavailable"), None)
        return refused or merged(list(records.values()))

    def _next(self, deadline: float | None, timeout_s: float | None) -> tuple[_Rank, Event]:
        """The next event of any rank. Raises WorkerTimeout, or WorkerDied once what the dead had said is told."""
        while not self._heard:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = [key.data for key, _ in self._selector.select(left)]
            if not ready:
                raise WorkerTimeout(f"no answer within {timeout_s:g} s")
            for rank in ready:
                said = rank.events()
                if said is None:
                    raise WorkerDied(self._obituary(rank))
                self._heard += [(rank, event) for event in said]
        return self._heard.pop(0)

    @property
    def alive(self) -> bool:
        return self._launcher.poll() is None

    def finish(self) -> None:
        """Let the ranks end by themselves."""
        if self._log.stream.closed:
            return
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.channel.shutdown(socket.SHUT_WR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(GRACE_S)
        self.close()

    def close(self) -> None:
        """Kill the ranks and their launcher, which is left to the last: it reaps them."""
        if self._log.stream.closed:
            return
        for rank in self._ranks:
            if rank in self._gone:
                continue  # its number may be another's by now
            rank.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(GRACE_S if self._ranks else 0.0)
        self._launcher.kill()
        self._launcher.wait()
        self._selector.close()
        for rank in self._ranks:
            rank.channel.close()
        self._log.stream.close()
        self._folder.cleanup()

    def _obituary(self, rank: _Rank) -> str:
        """How a rank ended, as the launcher tells once all of them have."""
        words = self._log.last_words()  # before the launcher's own
        self._gone.add(rank)
        for other in self._ranks:
            if other not in self._gone:
                other.kill()
                self._gone.add(other)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(GRACE_S)
        told = re.findall(rf"rank\s*: {rank.number} \(local_rank.*\s+exitcode\s*: (-?\d+)", self._log.tail(1 << 16))
        how = how_it_ended(int(told[-1])) if told else "closed its socket and went on"
        return f"{rank.name} {how}{words}"


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def _threads(kind: Kind) -> int:
    """Of a CPU's cores each rank gets its share: all of them on every rank would be in each other's way."""
    return max(1, (os.cpu_count() or 1) // kind.world_size) if kind.device == "cpu" else os.cpu_count() or 1
