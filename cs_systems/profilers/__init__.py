"""How a cell is watched. A profiler is one new file that exports one constant, `PROFILER`.

A profiled cell has a worker process of its own, so that what a profiler leaves in a process disturbs no other cell.
The parent asks `problem` before anything runs, lets `launch` wrap the worker's command, and calls `collect` when the
worker has ended; `region` is entered inside the worker, around the timed steps: the warm-up stays outside. Therefore a
profiler's file imports torch only inside `region`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs_systems.core.caveats import Caveat
from cs_systems.record import Row, RunRecord

if TYPE_CHECKING:
    from cs_systems.machine.device import Device


class ProfileLost(RuntimeError):
    """The profiler left nothing, although the cell was measured; the message says what it said."""


@dataclass(frozen=True)
class Collected:
    """What joins the record: files by what they are, small plain tables by their names, and doubts.

    contradiction: how what ran is not what the record says, with its remedy; the record is then an error, with tables.
    """

    artifacts: dict[str, Path] = field(default_factory=dict)
    results: dict[str, list[Row]] = field(default_factory=dict)
    warnings: tuple[Caveat, ...] = ()
    contradiction: str | None = None


def rank_file(out: Path, rank: int) -> Path:
    """What the files of one rank begin with: those of rank 0 are the cell's."""
    return out if rank == 0 else out.with_name(f"{out.name}-rank{rank}")


def _no_region(out: Path, device: Device, model: Any) -> AbstractContextManager[object]:
    return nullcontext()


@dataclass(frozen=True)
class Profiler:
    """`out` is the path that a cell's files begin with: a profiler adds a suffix to it.

    problem: `() -> reason with its remedy`, None where the profiler can work.
    launch: `(argv, out, options, on_cuda) -> argv` that runs the worker; `options` are the person's own.
    region: `(out, device, model) -> context manager`; the model is None where its modules cannot be annotated.
    refused: `(out) -> reason with its remedy` where the machine kept the profiler from its work, which shows only once
        the worker has ended, however it did.
    collect: `(out, record) -> Collected`. Raises ProfileLost.
    sees_oom: whether there is something to collect of a cell that ran out of memory, too.
    """

    problem: Callable[[], str | None] = lambda: None
    launch: Callable[[Sequence[str], Path, Sequence[str], bool], list[str]] = lambda argv, *_: list(argv)
    region: Callable[[Path, Device, Any], AbstractContextManager[object]] = _no_region
    refused: Callable[[Path], str | None] = lambda out: None
    collect: Callable[[Path, RunRecord], Collected] = lambda *_: Collected()
    sees_oom: bool = False
