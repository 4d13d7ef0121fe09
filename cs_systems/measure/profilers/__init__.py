"""Profilers of a cell, one module each, which exports one constant, `PROFILER`.

A profiled cell has its own worker process, so that what a profiler changes in a process does not affect other cells.
The supervisor calls `problem` before anything runs, lets `launch` wrap the worker's command, and calls `collect` when
the worker has ended. The worker enters `region` around the timed steps; the warm-up stays outside. The supervisor runs
without torch, so a profiler's module imports torch only inside `region`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs_systems.config import ConfigError
from cs_systems.core.caveats import Caveat
from cs_systems.core.tables import Tables
from cs_systems.record import RunRecord

if TYPE_CHECKING:
    from cs_systems.analysis.attribution.profile import Profile
    from cs_systems.analysis.replay import Replay
    from cs_systems.machine.device import Device


class Unavailable(Exception):
    """Error for a cell that this machine, backend or profiler cannot run; the message has the reason and the remedy."""


class ProfileLost(RuntimeError):
    """Error for a profiler that left no result although the cell was measured.

    The message includes the profiler's own message.
    """


@dataclass(frozen=True)
class Collected:
    """Results of a profiler that join the record: files by kind, small plain tables by name, and caveats.

    contradiction: how the step that ran differs from the record, with its remedy. The record is then an error that
        still has its tables.
    profile: the trace, the tables that were made from it, and its replay; the record then gets a page of them.
    """

    artifacts: dict[str, Path] = field(default_factory=dict)
    results: Tables = field(default_factory=dict)
    warnings: tuple[Caveat, ...] = ()
    contradiction: str | None = None
    profile: tuple[Profile, Tables, Callable[[], Replay]] | None = None


def rank_file(out: Path, rank: int) -> Path:
    """Return the path prefix of one rank's files; rank 0 has the prefix of the cell."""
    return out if rank == 0 else out.with_name(f"{out.name}-rank{rank}")


def _no_region(out: Path, device: Device, model: Any) -> AbstractContextManager[object]:
    return nullcontext()


class ProfilerUnusable(ConfigError):
    """Error for a profiler that cannot work here; the message ends with what to use instead."""

    def __init__(self, reason: str, instead: tuple[str, str] | None) -> None:
        self._reason, self._instead = reason, instead
        super().__init__(f"{reason}, or {instead[1]}" if instead else reason)

    def with_options(self) -> str:
        return f"{self._reason}, or {self._instead[0]}" if self._instead else self._reason


@dataclass(frozen=True)
class Profiler:
    """Hooks of one profiler. `out` is the path prefix of a cell's files: a profiler adds a suffix to it.

    problem: `() -> reason with its remedy`, or None if the profiler can work.
    launch: `(argv, out, options, on_cuda) -> argv` that runs the worker; `options` are the user's own.
    region: `(out, device, model) -> context manager`; the model is None if its modules cannot be annotated.
    refused: `(out) -> reason with its remedy` if the machine denied the profiler access, which is known only after
        the worker has ended, with success or not.
    collect: `(out, record) -> Collected`. Raises ProfileLost.
    measures: the subject of its record: "time", "memory", "values" of tensors, or "counters" of kernels. It must be a
        literal, because reports read it from the source file.
    on_each_rank: whether a Recorder runs it on each rank, and not only on rank 0.
    sees_oom: whether a cell that ran out of memory has results to collect, too.
    checks: fields of the RunConfig that `collect` compares with what ran: no workload needs to read them.
    compares: whether it needs the step of a user's own model to be run a second time, in fp32.
    forecasts: whether it compares the memory of a user's own model with a prediction.
    tool: the tool that it uses, if a process can use that only once at a time; a key of `recorder.own_tools.TOOLS`.
    result: the name of its result; by default "profile by NAME".
    without_file: why a cell that ran out of memory left no file, with what to do; a literal, as in `measures`.
    instead: the alternative if `problem` finds something: on the command line, and in Python.
    again: `(out, device, workload)`, called after the last step, which it may run once more in another way.
    """

    problem: Callable[[], str | None] = lambda: None
    launch: Callable[[Sequence[str], Path, Sequence[str], bool], list[str]] = lambda argv, *_: list(argv)
    region: Callable[[Path, Device, Any], AbstractContextManager[object]] = _no_region
    refused: Callable[[Path], str | None] = lambda out: None
    collect: Callable[[Path, RunRecord], Collected] = lambda *_: Collected()
    measures: str = "time"
    on_each_rank: bool = False
    sees_oom: bool = False
    checks: frozenset[str] = frozenset()
    compares: bool = False
    forecasts: bool = False
    tool: str | None = None
    result: str | None = None
    without_file: str | None = None
    instead: tuple[str, str] | None = None
    again: Callable[[Path, Device, Any], None] = lambda *_: None

    @property
    def is_launcher(self) -> bool:
        """Flag of a profiler with a command of its own, which starts the process that it records."""
        return self.launch is not Profiler.launch
