"""Phases of a training loop: their names, and the boundaries between them in one step.

The time of a step is cut at boundaries, and each piece belongs to one phase: the innermost open one. A phase inside
another interrupts it, so the phases of a step add up to the step. A phase that the user named is not interrupted by
phases that hooks find.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from cs_systems.analysis.comparison.loop_findings import BETWEEN, COPY, HOST_SYNC, OTHER, WITHOUT_GRADIENTS
from cs_systems.config import Phase
from cs_systems.machine.device import Device
from cs_systems.measure.workloads._batches import tensors_in
from cs_systems.record import Sample

FORWARD, LOSS, BACKWARD, OPTIMIZER = (p.value for p in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER))
INPUT, CLIP, ZERO_GRAD, REPLAY = "input", "clip", "zero_grad", "cuda_graph"
Call = tuple[bool, tuple[tuple[int, ...], ...]]
_ORDER = (INPUT, COPY, FORWARD, LOSS, BACKWARD, CLIP, OPTIMIZER, ZERO_GRAD, REPLAY, HOST_SYNC)


def in_order(names: list[str]) -> list[str]:
    """Return the names in the order of tables: phases that hooks find, the user's own, then the rest of the time."""
    known = [name for name in _ORDER if name in names]
    rest = [name for name in (OTHER, BETWEEN) if name in names]
    return [*known, *(name for name in dict.fromkeys(names) if name not in (*_ORDER, *rest)), *rest]


def call_of(arguments: Any) -> Call:
    """Return whether autograd records this call of a model, and the shapes of its tensors except scalars."""
    tensors = [tensor for tensor in tensors_in(arguments) if tensor.dim()]
    # nested tensors have no shape
    shapes = tuple((t.size(0), t.numel()) if t.is_nested else tuple(t.shape) for t in tensors)
    return torch.is_grad_enabled(), shapes


class Clocks:
    """Clocks of the host and the device during a stage, used to find how far the device runs behind the host.

    They are compared at the start and the end of the stage, when the device is idle, because they run at slightly
    different rates.
    """

    def __init__(self, device: Device, host: Callable[[], float]) -> None:
        self.device, self.host = device, host
        self._begin = self._end = self._compared()

    def end(self) -> None:
        """End the stage and wait for the device; the device's marks can be read afterwards."""
        self._end = self._compared()
        self.device.synchronize()

    def _compared(self) -> tuple[Any, float]:
        self.device.synchronize()
        return self.device.mark(), self.host()

    def lag_s(self, mark: Any, host_s: float) -> float:
        """Return the time in s from `host_s`, when the host recorded the mark, until the device reached it."""
        (begin, begun_s), (end, ended_s) = self._begin, self._end
        stage_s = self.device.between_s(begin, end)
        rate = (ended_s - begun_s) / stage_s if stage_s > 0 else 1.0
        return begun_s + rate * self.device.between_s(begin, mark) - host_s


class Cut(NamedTuple):
    """Position in a timeline: the number of boundaries and of recomputations before it."""

    boundary: int
    recomputed: int


class Timeline:
    """Boundaries of one step in order: the phase that begins there, the device's mark and the host's time.

    Inside the loop only boundaries are recorded; times are computed from them when the stage has ended.

    Attributes:
        own_s: time of the host that finding the phases took in this step, in s.
    """

    def __init__(self, clocks: Clocks, name: str) -> None:
        self.own_s = 0.0
        self._clocks, self._is_cuda = clocks, clocks.device.is_cuda
        self._names: list[str] = []
        self._marks: list[Any] = []
        self._host: list[float] = []
        self._recomputed: list[tuple[Any, Any]] = []
        self.begin(name)

    def begin(self, name: str) -> None:
        """Begin a phase, and thereby end the previous one; do nothing if it is the same."""
        if self._names and self._names[-1] == name:
            return
        self._names.append(name)
        self._mark()

    def end(self) -> None:
        """End the step; the device may be behind."""
        self._mark()

    def boundaries(self) -> int:
        return len(self._names)

    def cut(self) -> Cut:
        """Add a boundary inside the current phase, and return it for `pieces`."""
        self._names.append(self._names[-1])
        self._mark()
        return Cut(len(self._names) - 1, len(self._recomputed))

    def pieces(self, cuts: Sequence[Cut]) -> Iterator[Timeline]:
        """Yield the timeline between these boundaries in pieces, each as a step."""
        for begin, end in itertools.pairwise((Cut(0, 0), *cuts)):
            piece = copy.copy(self)
            piece._names = self._names[begin.boundary : end.boundary]
            piece._marks = self._marks[begin.boundary : end.boundary + 1]
            piece._host = self._host[begin.boundary : end.boundary + 1]
            piece._recomputed = self._recomputed[begin.recomputed : end.recomputed]
            yield piece

    def now(self) -> Any:
        """Return a mark for now, on the device if it has a clock; callable from any thread."""
        return self._clocks.device.mark() if self._is_cuda else self._clocks.host()

    def recomputed(self, begin: Any, end: Any) -> None:
        """Add a pair of marks between which backward recomputed forward."""
        self._recomputed.append((begin, end))

    def recomputed_s(self) -> float:
        """Return the seconds of recomputation during backward in this step; call it after the end of the stage."""
        return sum(self._clocks.device.between_s(begin, end) for begin, end in self._recomputed)

    def _mark(self) -> None:
        now = self._clocks.host()
        self._host.append(now)
        self._marks.append(self._clocks.device.mark() if self._is_cuda else now)

    def sample(self, *, warmup: bool) -> Sample:
        """Return the times of a step; call it only after the end of the stage."""
        host, marks, device = self._host, self._marks, self._clocks.device
        names = self.resolved()
        phases, submit = dict.fromkeys(in_order(names), 0.0), dict.fromkeys(in_order(names), 0.0)
        lag: dict[str, float] | None = dict.fromkeys(phases, 0.0) if self._is_cuda else None
        for i, name in enumerate(names):
            phases[name] += device.between_s(marks[i], marks[i + 1])
            submit[name] += host[i + 1] - host[i]
            if lag is not None:
                lag[name] = round(self._clocks.lag_s(marks[i + 1], host[i + 1]), 9)
        return Sample(
            0, warmup, round(device.between_s(marks[0], marks[-1]), 9), {n: round(s, 9) for n, s in phases.items()},
            {n: round(s, 9) for n, s in submit.items()}, lag,
        )  # fmt: skip

    def resolved(self) -> list[str]:
        """Return the phase names after deciding those that depend on the following phase.

        Time after forward is loss only if backward follows: before another forward, a loop of reinforcement learning
        runs its environment. Time between steps is input if no DataLoader was seen.
        """
        gap = BETWEEN if INPUT in self._names else INPUT
        decided, follows = list[str](), OTHER
        for name in reversed(self._names):
            if name in (FORWARD, BACKWARD):
                follows = LOSS if name == BACKWARD else OTHER
            decided.append({BETWEEN: gap, LOSS: follows}.get(name, name))
        return decided[::-1]


class Moment(NamedTuple):
    """Current phase. Its name is known when the step has ended: `phase` then finds it at the boundary in the timeline.

    is_without_gradients: autograd does not record the latest call of a model.
    """

    timeline: Timeline
    boundary: int
    is_without_gradients: bool

    def phase(self) -> str:
        names = self.timeline.resolved()
        name = names[self.boundary] if 0 <= self.boundary < len(names) else OTHER
        return WITHOUT_GRADIENTS if name == FORWARD and self.is_without_gradients else name
