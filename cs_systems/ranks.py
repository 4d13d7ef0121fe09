"""N worker processes that torch's elastic launcher starts, each with a device and a socket to here. No torch in here.

All ranks get the same requests and answer each for itself; what they measured becomes one record (`slowest`). The
launcher hands no pipe on to what it starts, therefore a socket, whose path the ranks are told. It takes a free port for
the ranks' own rendezvous.

A cell that fails on a rank ends within `SETTLE_S`, and the record names the rank, its device and its error. A rank
that dies closes its socket. One that hangs shows in its peers: their collectives fail after the kind's patience; then,
or when the time allowed is over, each rank is asked where in the code it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
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
from cs_systems.lifeline import die_with_parent, rank_log, stack_file
from cs_systems.process import GRACE_S, START_TIMEOUT_S, Event, Log, WorkerDied, WorkerTimeout, how_it_ended
from cs_systems.slowest import failed, verdict

PATIENCE_S = 25.0
COMPILING_PATIENCE_S = 600.0
SETTLE_S = 2.0  # for the peers of a rank that failed to say what they know
_LOOK_S = 1.0  # how often, while nothing arrives, somebody looks whether NCCL has given up
_TICK_S = 0.2  # how often somebody looks whether the launcher lives
_TELL_S = 3.0  # how long a rank may take to say where it is: on a busy machine it waits for a core
# What would send the launcher's ranks to somebody else's rendezvous, or change its options.
_NOT_OURS = re.compile("PET_|TORCHELASTIC_|MASTER_|RANK$|WORLD_SIZE$|LOCAL_|GROUP_|ROLE_")
# NCCL's watchdog ends the process whose collective failed; it has waited for a peer.
_NCCL_GAVE_UP = "Watchdog caught collective operation timeout"


@dataclass(frozen=True)
class Kind:
    """What ranks are started for; cells of one kind run on the same ones.

    patience_s: how long a rank waits for its peers in a collective; who comes later has hung. It need not be as long
    as a step, which is slow on all ranks alike: that is why a hang is found where nobody gave a timeout. A timeout
    that is longer is the patience too, for cells whose ranks drift apart; as is, where each compiles, a longer one.
    """

    world_size: int
    device: str
    patience_s: float

    @classmethod
    def of(cls, config: RunConfig, timeout_s: float | None = None) -> Kind | None:
        """None for a cell that one process measures."""
        if not config.is_distributed:
            return None
        least_s = PATIENCE_S if config.compile == "none" else COMPILING_PATIENCE_S
        return cls(config.world_size, config.device, max(least_s, timeout_s or 0.0))


class NotStarted(RuntimeError):
    """There are no ranks to measure with; the message tells why."""


def launcher_command(world_size: int, *arguments: object) -> list[str]:
    """Starts that many `cs_systems.worker`s on this machine, once. `--standalone` takes a port that is free."""
    launcher = [sys.executable, "-m", "cs_systems.launcher", "--standalone", "--local-addr", "127.0.0.1"]
    how = ["--nproc-per-node", str(world_size), "--max-restarts", "0"]
    return [*launcher, *how, "-m", "cs_systems.worker", *map(str, arguments)]


class _Rank:
    """This end of one rank's socket, and what it has told of itself: its number, its pid, its device."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel, self._buffer = channel, b""
        self.hello: Event = {}
        self.device = ""
        self.gone = False  # then its pid may be another's
        self.log: Log | None = None

    @property
    def number(self) -> int:
        return int(self.hello["rank"])

    @property
    def name(self) -> str:
        return f"rank {self.number} on {self.device}" if self.device else f"rank {self.number}"

    def events(self) -> list[Event]:
        """What has arrived; to be called when something has. Marks a rank that is gone."""
        chunk = b""
        with contextlib.suppress(ConnectionError):
            chunk = self.channel.recv(1 << 16)
        self.gone = not chunk
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    @property
    def gave_up(self) -> bool:
        """Whether NCCL has said here that it waited in vain for a peer."""
        return self.log is not None and _NCCL_GAVE_UP in self.log.tail(1 << 16)

    def signal(self, number: int) -> None:
        """To one that has said its pid. One that has not ends with the launcher."""
        if self.hello and not self.gone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.hello["pid"], number)


class Ranks:
    """Like `process.Worker`, of N processes: started on creation, killed on `close`. Raises NotStarted.

    log: the launcher's; each rank has its own beside it, `worker-rank1.log`.
    """

    def __init__(self, kind: Kind, log: Path | None = None) -> None:
        self._kind = kind
        self._log = Log(log)
        self._folder = tempfile.TemporaryDirectory(prefix="cs-ranks-")
        self._logs = log or Path(self._folder.name) / "worker.log"
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._heard: list[tuple[_Rank, Event]] = []
        self._answers: dict[int, dict[int, Event]] = {}  # cell → rank → its record
        self._first_at: dict[int, float] = {}  # cell → when the first rank had its record
        self._done: dict[int, bool] = {}  # rank → whether it is of further use
        self._address = Path(self._folder.name) / "socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self._address))
            listener.listen(kind.world_size)
            self._launcher = subprocess.Popen(
                launcher_command(kind.world_size, self._address, self._logs),
                stdin=subprocess.DEVNULL,
                stdout=self._log.stream,
                stderr=self._log.stream,
                env={name: value for name, value in os.environ.items() if not _NOT_OURS.match(name)} | _own(kind),
                start_new_session=True,  # Ctrl-C in the terminal is for the parent alone
                preexec_fn=die_with_parent,
            )
            try:
                self._greet(listener)
                for _ in self.request(START_TIMEOUT_S, op="join", device=kind.device, patience_s=kind.patience_s):
                    pass
            except (WorkerDied, WorkerTimeout) as error:
                self.close()
                raise NotStarted(f"{kind.world_size} ranks did not start: {error}") from error
        self.hello = self._ranks[0].hello

    def _greet(self, listener: socket.socket) -> None:
        """Wait until every rank has said which it is."""
        deadline = time.monotonic() + START_TIMEOUT_S
        listener.settimeout(_TICK_S)
        while len(self._ranks) < self._kind.world_size:
            with contextlib.suppress(TimeoutError):
                self._ranks.append(_Rank(listener.accept()[0]))
            if (status := self._launcher.poll()) is not None:
                raise WorkerDied(f"the launcher {how_it_ended(status)}{self._log.last_words()}")
            if time.monotonic() > deadline:
                raise WorkerTimeout(f"{len(self._ranks)} of them came within {START_TIMEOUT_S:g} s")
        for rank in self._ranks:
            rank.channel.settimeout(START_TIMEOUT_S)
            while not rank.hello:
                try:
                    said = rank.events()
                except TimeoutError:
                    raise WorkerTimeout(f"one did not say which it is within {START_TIMEOUT_S:g} s") from None
                if rank.gone:
                    raise WorkerDied(f"one ended before it said which it is{self._log.last_words()}")
                rank.hello = said[0] if said else {}
            rank.channel.settimeout(None)
            rank.log = Log(rank_log(self._logs, rank.number))
            self._selector.register(rank.channel, selectors.EVENT_READ, rank)
        self._ranks.sort(key=lambda rank: rank.number)

    def request(self, timeout_s: float | None = None, **request: Any) -> Iterator[Event]:
        """Send one request to all ranks and yield what they answer as one worker would, up to `done`.

        A visit is told when rank 0 begins it, a record when all ranks have theirs, or one has failed. `timeout_s` is
        allowed from one of these to the next. Raises WorkerDied or WorkerTimeout; the ranks are of no use then.
        """
        self._answers.clear()
        self._first_at.clear()
        line = json.dumps(request).encode() + b"\n"
        for rank in self._ranks:
            try:
                rank.channel.sendall(line)
            except ConnectionError:
                raise self._death(rank) from None
        self._done.clear()
        deadline = _deadline(timeout_s)
        while len(self._done) < len(self._ranks):
            if (heard := self._next(min(deadline, self._last_due()))) is None:
                if time.monotonic() < deadline:
                    raise self._hang([r for r in self._ranks if any(r.number not in a for a in self._answers.values())])
                raise WorkerTimeout(f"no answer within {timeout_s:g} s: {self._whereabouts(self._ranks)}")
            rank, event = heard
            if event["event"] == "visit" and rank.number == 0:
                yield event
                deadline = _deadline(timeout_s)
            if event["event"] != "record":
                continue
            answers = self._answers[event["cell"]]
            if failed(event):
                self._settle(answers)
            if failed(event) or len(answers) == len(self._ranks):
                record = verdict(answers, [r.name for r in self._ranks])
                yield {"event": "record", "cell": event["cell"], "record": dataclasses.asdict(record)}
                if len(answers) < len(self._ranks) or any(a["of_peers"] for a in answers.values()):
                    raise WorkerDied("its peers wait for a rank that has failed")
                deadline = _deadline(timeout_s)
        if not all(self._done.values()):
            self.close()

    def _last_due(self) -> float:
        """When the last rank must have answered for a cell of which some have."""
        waiting = [at for cell, at in self._first_at.items() if len(self._answers[cell]) < len(self._ranks)]
        return min(waiting, default=math.inf) + self._kind.patience_s

    def _settle(self, answers: dict[int, Event]) -> None:
        """After a failure: wait a little until all ranks have said what became of the cell, or one that explains it.

        Raises WorkerDied for a rank that has died, and WorkerTimeout where some only waited for others.
        """
        deadline = time.monotonic() + SETTLE_S
        try:
            while len(answers) < len(self._ranks) and self._next(deadline) is not None:
                pass
        except (WorkerDied, WorkerTimeout):
            if all(answer["of_peers"] for answer in answers.values() if failed(answer)):
                raise
            return  # it went on to the next cell and died of that
        late = [rank for rank in self._ranks if rank.number not in answers]
        if late and all(answer["of_peers"] for answer in answers.values() if failed(answer)):
            raise self._hang(late)

    def _next(self, deadline: float) -> tuple[_Rank, Event] | None:
        """Note and return the next event of any rank; None at the deadline.

        Raises WorkerDied or WorkerTimeout for a rank that is gone, once all is told that it had said.
        """
        while not self._heard:
            if gone := [rank for rank in self._ranks if rank.gone]:
                raise self._death(*gone)
            left = max(0.0, deadline - time.monotonic())
            ready: list[_Rank] = [key.data for key, _ in self._selector.select(min(left, _LOOK_S))]
            if not ready:
                self._see_who_gave_up()
                if left <= _LOOK_S:
                    return None
            for rank in ready:
                self._heard += [(rank, event) for event in rank.events()]
        rank, event = self._heard.pop(0)
        if event["event"] == "joined":
            rank.device = event["device"]
        elif event["event"] == "visit" and rank.log is not None:
            rank.log.begin = event["log_bytes"]
        elif event["event"] == "record":
            self._answers.setdefault(event["cell"], {})[rank.number] = event
            self._first_at.setdefault(event["cell"], time.monotonic())
        elif event["event"] == "done":
            self._done[rank.number] = event["usable"]
        return rank, event

    def _see_who_gave_up(self) -> None:
        """Raises WorkerTimeout where NCCL has waited in vain: it ends its process, but may be long about that."""
        if not any(rank.gave_up for rank in self._ranks):
            return
        time.sleep(SETTLE_S)  # the others that wait say so in the same second
        raise self._hang([rank for rank in self._ranks if not rank.gave_up] or self._ranks)

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
        """Kill the ranks, then their launcher, which has reaped them; once only."""
        if self._log.stream.closed:
            return
        self._kill()
        self._launcher.kill()
        self._launcher.wait()
        self._selector.close()
        for rank in self._ranks:
            rank.channel.close()
            if rank.log is not None:
                rank.log.stream.close()
        self._log.stream.close()
        self._folder.cleanup()

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.signal(signal.SIGKILL)
            rank.gone = True
        with contextlib.suppress(subprocess.TimeoutExpired):  # of one that never said which it is nobody knows the pid
            self._launcher.wait(GRACE_S if any(rank.hello for rank in self._ranks) else 0.0)

    def _death(self, *gone: _Rank) -> WorkerDied | WorkerTimeout:
        """What a rank died of, as the launcher tells once all of them have ended."""
        if all(rank.gave_up for rank in gone) and (late := [rank for rank in self._ranks if not rank.gone]):
            return self._hang(late)
        deadline = time.monotonic() + GRACE_S
        while any(map(_exists, gone)) and time.monotonic() < deadline:
            time.sleep(_TICK_S / 10)  # the launcher is to see how it ends before anything else does
        for key, _ in self._selector.select(0):  # who else has died by now
            key.data.events()
        dead = [rank for rank in self._ranks if rank.gone]
        self._kill()
        ends = {rank: self._exit_status(rank) for rank in dead}
        # The launcher ends the peers of a rank that it has seen dead: they are not the cause.
        cause = next((rank for rank, status in ends.items() if status != -signal.SIGTERM), gone[0])
        status = ends[cause]
        how = "closed its socket and went on" if status is None else how_it_ended(status)
        return WorkerDied(f"{cause.name} {how}{cause.log.last_words() if cause.log else ''}")

    def _exit_status(self, rank: _Rank) -> int | None:
        """As the launcher prints it at its end; None where it has not seen the rank end."""
        told = re.findall(rf"rank\s*: {rank.number} \(local_rank.*\s+exitcode\s*: (-?\d+)", self._log.tail(1 << 16))
        return int(told[-1]) if told else None

    def _hang(self, late: list[_Rank]) -> WorkerTimeout:
        who = ", ".join(rank.name for rank in late)
        return WorkerTimeout(
            f"{who} kept the others waiting for {self._kind.patience_s:g} s: {self._whereabouts(late)}"
        )

    def _whereabouts(self, ranks: list[_Rank]) -> str:
        """Where in the code these ranks are, those in one place together; Python's handler of SIGUSR1 writes it."""
        for rank in ranks:
            rank.signal(signal.SIGUSR1)
        deadline = time.monotonic() + _TELL_S
        while not all(map(self._place, ranks)) and time.monotonic() < deadline:
            time.sleep(_TICK_S / 10)
        places: dict[str, list[str]] = {}
        for rank in ranks:
            places.setdefault(self._place(rank) or "a place that it does not tell", []).append(rank.name)
        return "; ".join(f"{', '.join(names)} is in {place}" for place, names in places.items())

    def _place(self, rank: _Rank) -> str | None:
        """The innermost line that it has told."""
        file = stack_file(self._address, rank.number)
        told = re.search(r'File "(.*)", line (\d+) in (.+)\n', file.read_text()) if file.exists() else None
        return told and f"{told[3]} ({Path(told[1]).name}:{told[2]})"


def _exists(rank: _Rank) -> bool:
    """Whether a rank that has closed its socket still ends, or has ended unseen by the launcher."""
    try:
        os.kill(rank.hello["pid"], 0)
    except ProcessLookupError:
        return False
    return True


def _deadline(timeout_s: float | None) -> float:
    return time.monotonic() + (math.inf if timeout_s is None else timeout_s)


def _own(kind: Kind) -> dict[str, str]:
    """Of the host's cores each rank gets its share: all of them on every rank would be in each other's way."""
    threads = max(1, (os.cpu_count() or 1) // kind.world_size)
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)), "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
