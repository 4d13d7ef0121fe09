"""Ranks of one machine as a single worker: N processes with a device each, which measure the same cells together.

All ranks get the same requests and answer them individually; their measurements become one record (`stragglers`). They
meet through a file in a private folder and communicate over the loopback interface, which no other machine can reach.

A cell that fails on a rank ends within `SETTLE_S`, and the record names the rank, its device and its error. A hung rank
is detected by its peers: their collectives fail after the kind's patience. Then, or at the timeout, each rank reports
its position in the code.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cs_systems.config import RunConfig
from cs_systems.machine.cores import usable_cores
from cs_systems.measure.runtime.channel import CellRecord, ChannelError, Done, Join, Joined, Message, Ready, Visit
from cs_systems.measure.runtime.lifetime import stack_file
from cs_systems.measure.runtime.processes import (
    START_TIMEOUT_S,
    Expected,
    Log,
    Member,
    Tree,
    WorkerDied,
    WorkerTimeout,
    deadline_after,
    worker_command,
)
from cs_systems.measure.runtime.stragglers import verdict

PATIENCE_S = 25.0
COMPILING_PATIENCE_S = 600.0
SETTLE_S = 2.0  # time for the other ranks to report after one failed
_LOG_CHECK_S = 1.0  # interval between searches of the logs for NCCL's watchdog while no message arrives
_STACK_TIMEOUT_S = 3.0  # time for a rank to report its stack; on a busy machine it waits for a core
# Environment variables of a launcher, removed before launching ranks: they belong to another process group.
_OF_LAUNCHERS = re.compile("PET_|TORCHELASTIC_|MASTER_|RANK$|WORLD_SIZE$|LOCAL_|GROUP_|ROLE_")
LOOPBACK = "lo"
_WAITS = re.compile(r"\(distributed_c10d\.py:\d+\)$")  # stack line of a rank that is waiting for its peers
# share of a rank's patience after which a waiting line is believed, because messages arrive after they are sent
_ALMOST = 0.8
# NCCL's watchdog logs this before it ends a process with a collective that timed out waiting for a peer.
_NCCL_TIMEOUT = "Watchdog caught collective operation timeout"


@dataclass(frozen=True)
class Kind:
    """Requirements of a cell on the processes that measure it; cells of one kind share processes.

    sources: code from outside the package that the cell names; importing it may change the process. patience_s: how
    long a rank waits for its peers in a collective before they count as hung. It can be shorter than a step, because a
    slow step is slow on all ranks; so a hang is found even without a timeout. A longer timeout also raises the
    patience, for ranks that drift apart. The minimum is longer if each rank compiles.
    """

    world_size: int = 1
    device: str = ""
    patience_s: float = 0.0
    sources: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: RunConfig, timeout_s: float | None = None) -> Kind:
        sources = config.sources
        if not config.is_distributed:
            return cls(sources=sources)
        least_s = PATIENCE_S if config.compile == "none" else COMPILING_PATIENCE_S
        return cls(config.world_size, config.device, max(least_s, timeout_s or 0.0), sources)

    @property
    def is_distributed(self) -> bool:
        return self.device != ""


class NotStarted(RuntimeError):
    """Error for ranks that did not start; the message gives the cause."""


class RankHung(WorkerTimeout):
    """Error for ranks that did not arrive while others waited; the message ends with the remedy."""

    remedy = ""


def hung(names: str, patience_s: float, where: str = "") -> str:
    """Return an error that names the ranks for which the others waited, with a remedy.

    The patience is `timeout_s` if that is above the patience's minimum.
    """
    return (
        f"{names} kept the others waiting for {patience_s:g} s{where}; if only slow, set timeout_s above "
        f"{patience_s:g}, else make all ranks call the same collectives"
    )


class _Rank:
    """Rank with its process, its first messages, and its log."""

    def __init__(self, member: Member, log: Path, patience_s: float) -> None:
        self.member, self.log = member, Log(log)
        self._patience_s, self.heard_at = patience_s, time.monotonic()
        self.hello: Ready | None = None
        self.device = ""

    @property
    def number(self) -> int:
        return self.member.index

    @property
    def name(self) -> str:
        return f"rank {self.number} on {self.device}" if self.device else f"rank {self.number}"

    @property
    def is_gone(self) -> bool:
        return self.member.status is not None or self.member.receiver.closed

    @property
    def timed_out_in_nccl(self) -> bool:
        """Flag of a rank with NCCL's timeout in its log, because it waited for a peer that did not arrive.

        A step may print such a line too. NCCL's line comes only after the rank was silent for its whole patience.
        """
        silent_s = time.monotonic() - self.heard_at
        return silent_s > _ALMOST * self._patience_s and _NCCL_TIMEOUT in self.log.tail(1 << 16)

    def signal(self, number: int) -> None:
        if self.hello and self.member.status is None:
            with suppress(ProcessLookupError):
                os.kill(self.hello.pid, number)


class Ranks:
    """Group of ranks with the interface of `processes.Worker`. Raises NotStarted.

    log: the group's log; each rank has its own next to it, `worker-rank1.log`.
    """

    def __init__(self, kind: Kind, log: Path | None = None) -> None:
        self._kind, self._log = kind, Log(log)
        self._ranks: list[_Rank] = []
        self._answers: dict[int, dict[int, CellRecord]] = {}  # cell → rank → its record
        self._first_at: dict[int, float] = {}  # cell → time of the first rank's record
        self._done: dict[int, bool] = {}  # rank → whether it is still usable
        self._received: list[tuple[_Rank, Message]] = []
        self._expected: list[Expected] = []
        logs = [
            str(log.with_name(f"{log.stem}-rank{r}{log.suffix}")) if log else f"{{scratch}}/rank{r}.log"
            for r in range(kind.world_size)
        ]
        self._tree = Tree(
            [lambda *fds: worker_command(*fds, "{scratch}")] * kind.world_size,
            self._log,
            environments=[_rank_variables(rank, kind.world_size) for rank in range(kind.world_size)],
            logs=logs,
            scratch=str(Path(os.environ.get("TMPDIR") or "/tmp") / "cs-ranks-"),
            environment={name: value for name, value in os.environ.items() if not _OF_LAUNCHERS.match(name)},
        )
        try:
            self._wait_for_ranks(logs)
            for _ in self.request(Join(kind.device, kind.patience_s), START_TIMEOUT_S):
                pass
        except (WorkerDied, WorkerTimeout, ChannelError) as error:
            self.close()
            is_slow = isinstance(error, WorkerTimeout) and not isinstance(error, RankHung)
            remedy = "; run cs-systems doctor, or use fewer ranks" if is_slow else ""
            raise NotStarted(f"{kind.world_size} ranks did not start: {error}{remedy}") from error
        hello = self._ranks[0].hello
        assert hello is not None
        self.hello = hello

    def _wait_for_ranks(self, logs: list[str]) -> None:
        """Wait until every rank has registered."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._tree.scratch is None and self._tree.alive:
            self._tree.wait(0.1)
        self._ranks = [
            _Rank(member, Path(file.replace("{scratch}", str(self._tree.scratch))), self._kind.patience_s)
            for member, file in zip(self._tree.members, logs, strict=True)
        ]
        while waiting := [rank for rank in self._ranks if rank.hello is None]:
            event = self._next(deadline)
            if event is None:
                names = ", ".join(rank.name for rank in waiting)
                raise WorkerTimeout(f"{names} did not answer within {START_TIMEOUT_S:g} s")
            rank, message = event
            assert isinstance(message, Ready)
            rank.hello = message

    def request(self, request: Message, timeout_s: float | None = None) -> Iterator[Message]:
        """Send a request to all ranks and yield their answers merged, as from one worker, up to `Done`.

        A visit is reported when rank 0 begins it, a record when all ranks have theirs or one has failed. `timeout_s`
        limits the time from one of these to the next. Raises WorkerDied, WorkerTimeout or ChannelError; the ranks are
        unusable then.
        """
        self._answers.clear()
        self._first_at.clear()
        self._done.clear()
        self._expected = [Expected(request) for _ in self._ranks]
        for rank in self._ranks:
            try:
                rank.member.send(request)
            except BrokenPipeError:
                raise self._death(rank) from None
        deadline = deadline_after(timeout_s)
        while len(self._done) < len(self._ranks):
            if (event := self._next(min(deadline, self._last_due()))) is None:
                if time.monotonic() < deadline:
                    raise self._hang([r for r in self._ranks if any(r.number not in a for a in self._answers.values())])
                raise WorkerTimeout(f"the ranks did not answer within {timeout_s:g} s ({self._locations(self._ranks)})")
            rank, message = event
            if isinstance(message, Visit) and rank.number == 0:
                yield message
                deadline = deadline_after(timeout_s)
            if not isinstance(message, CellRecord):
                continue
            answers = self._answers[message.cell]
            if message.failed:
                self._settle(answers)
            if message.failed or len(answers) == len(self._ranks):
                record = verdict(answers, [r.name for r in self._ranks])
                yield CellRecord(message.cell, dataclasses.asdict(record))
                if len(answers) < len(self._ranks) or any(a.of_peers for a in answers.values()):
                    raise WorkerDied("other ranks wait for a rank that has failed")
                deadline = deadline_after(timeout_s)
        if not all(self._done.values()):
            self.close()

    def _last_due(self) -> float:
        """Return the time by which the last rank must answer for a cell that other ranks have answered."""
        waiting = [at for cell, at in self._first_at.items() if len(self._answers[cell]) < len(self._ranks)]
        return min(waiting, default=math.inf) + self._kind.patience_s

    def _settle(self, answers: dict[int, CellRecord]) -> None:
        """Wait briefly, after a failure, for all ranks' results of the cell or for one that explains it.

        Raises WorkerDied for a rank that has died, and WorkerTimeout if some ranks only waited for others.
        """
        deadline = time.monotonic() + SETTLE_S
        try:
            while len(answers) < len(self._ranks) and self._next(deadline) is not None:
                pass
        except (WorkerDied, WorkerTimeout, ChannelError):
            if all(answer.of_peers for answer in answers.values() if answer.failed):
                raise
            return  # this rank finished the cell and died in the next one
        late = [rank for rank in self._ranks if rank.number not in answers]
        if late and all(answer.of_peers for answer in answers.values() if answer.failed):
            raise self._hang(late)

    def _next(self, deadline: float) -> tuple[_Rank, Message] | None:
        """Store and return the next message of any rank; return None at the deadline.

        Raises WorkerDied, WorkerTimeout or ChannelError for a rank that ended or broke its pipe, after all messages.
        """
        while not self._received:
            left = max(0.0, deadline - time.monotonic())
            arrived = self._tree.wait(min(left, _LOG_CHECK_S))
            for rank in self._ranks:
                self._received += [(rank, message) for message in rank.member.received]
                rank.member.received.clear()
            if self._received:
                break
            for rank in self._ranks:
                if rank.member.broken is not None:
                    raise ChannelError(f"{rank.name}: {rank.member.broken}")
            if gone := [rank for rank in self._ranks if rank.is_gone and rank.number not in self._done]:
                raise self._death(*gone)  # a rank that has finished may exit by itself
            if not arrived:
                self._check_nccl_timeouts()
                if left <= _LOG_CHECK_S:
                    return None
        rank, message = self._received.pop(0)
        rank.heard_at = time.monotonic()
        if isinstance(message, (Ready, Done)):
            if isinstance(message, Done):
                self._done[rank.number] = message.usable
            return rank, message
        self._expected[rank.number].check(message)
        if isinstance(message, Joined):
            rank.device = message.device
        elif isinstance(message, Visit):
            rank.log.begin = message.log_bytes
        elif isinstance(message, CellRecord):
            self._answers.setdefault(message.cell, {})[rank.number] = message
            self._first_at.setdefault(message.cell, time.monotonic())
        return rank, message

    def _check_nccl_timeouts(self) -> None:
        """Raise WorkerTimeout if NCCL timed out; NCCL then ends its process, but may take long to do so."""
        if not any(rank.timed_out_in_nccl for rank in self._ranks):
            return
        time.sleep(SETTLE_S)  # the other waiting ranks log it within the same second
        raise self._hang([rank for rank in self._ranks if not rank.timed_out_in_nccl] or self._ranks)

    @property
    def alive(self) -> bool:
        return self._tree.alive

    def finish(self) -> None:
        """Let the ranks end by themselves."""
        self._tree.finish([], wrapped=False)
        self._close_logs()

    def close(self) -> None:
        """Kill the ranks and everything that they started."""
        self._tree.close()
        self._close_logs()

    def _close_logs(self) -> None:
        for rank in self._ranks:
            rank.log.stream.close()
        self._log.stream.close()

    def _death(self, *gone: _Rank) -> WorkerDied | WorkerTimeout:
        """Return the error of the rank that died first, with its cause."""
        late = [rank for rank in self._ranks if not rank.is_gone]
        if late and all(rank.timed_out_in_nccl for rank in gone):
            hang = self._hang(late)
            if not all(_WAITS.search(self._place(rank) or "") for rank in late):  # otherwise they wait for a dead rank
                return hang
        first = next((self._ranks[member.index] for member in self._tree.ended), gone[0])
        death = self._tree.death_of(first.member, first.log)
        return type(death)(f"{first.name} {death}")

    def _hang(self, late: list[_Rank]) -> RankHung:
        names = ", ".join(rank.name for rank in late)
        return RankHung(hung(names, self._kind.patience_s, f": {self._locations(late)}"))

    def _locations(self, ranks: list[_Rank]) -> str:
        """Describe these ranks' positions in the code, grouped by place; SIGUSR1 makes them write their stacks."""
        for rank in ranks:
            rank.signal(signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_TIMEOUT_S
        while not all(map(self._place, ranks)) and time.monotonic() < deadline:
            time.sleep(0.02)
        places: dict[str, list[str]] = {}
        for rank in ranks:
            places.setdefault(self._place(rank) or "an unknown place", []).append(rank.name)
        return "; ".join(f"{', '.join(names)} is in {place}" for place, names in places.items())

    def _place(self, rank: _Rank) -> str | None:
        """Return the innermost line of the stack that the rank has written."""
        file = stack_file(self._tree.scratch or Path(), rank.number)
        found = re.search(r'File "(.*)", line (\d+) in (.+)\n', file.read_text()) if file.exists() else None
        return found and f"{found[3]} ({Path(found[1]).name}:{found[2]})"


def _rank_variables(rank: int, world_size: int) -> dict[str, str]:
    """Return the environment variables of a rank, as torchrun would set them.

    Each rank gets its share of the usable cores, because ranks that all used every core would contend for them. Gloo
    and NCCL are bound to the loopback interface.
    """
    threads = max(1, usable_cores() // world_size)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": LOOPBACK,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }
