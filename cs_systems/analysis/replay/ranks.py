"""Joint replay of the ranks of a job: a collective ends when its last rank has arrived, plus its transfer.

The clocks are aligned by the ends of the collectives, which all ranks reach together. Ranks whose ends differ by more
than MOST_APART_S have other collectives, or clocks that drift, and are refused. Transfers last from the arrival of the
last rank to the first end. The ranks are replayed until no collective moves any more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from cs_systems.analysis.replay import MOST_ERROR, Expected, Part, Replay
from cs_systems.analysis.replay.changes import Refusal
from cs_systems.analysis.replay.graph import NEVER, Costs
from cs_systems.analysis.replay.run import Times, replay, step_times, total
from cs_systems.analysis.replay.waits import US
from cs_systems.readers.forms.columns import UNKNOWN, Floats, Ints
from cs_systems.readers.forms.jobs import PAIRWISE, kind

MOST_APART_S = 50 * US  # between the ends of one collective on two ranks, the median
MOST_ROUNDS = 100
STILL_S = 1e-9  # a collective that moves by less has come to rest


@dataclass(frozen=True)
class Together:
    """Ranks of a job with their collectives matched: `calls[r][j]` is rank r's activity of the j-th collective.

    Attributes:
        parts: the steps of each rank.
        calls: activities by rank and collective; UNKNOWN if a rank is not in the collective's group.
        offset_s: seconds by which each rank's clock is ahead of the first rank's.
        transfer_s: duration of each collective once its last rank has arrived.
    """

    parts: tuple[Part, ...]
    calls: Ints
    offset_s: Floats
    transfer_s: Floats

    @cached_property
    def step_s(self) -> float:
        """Duration of a step as recorded, of the slowest rank."""
        return max(total(part.recorded_s) / len(part.steps) for part in self.parts)

    @cached_property
    def replayed_s(self) -> float | None:
        """Duration of a step as replayed, of the slowest rank; None if the replay does not come to rest."""
        return self._step_s([part.graph.costs for part in self.parts])

    @property
    def straggler(self) -> int:
        """Index of the rank that arrives the latest, on average over the collectives."""
        start = self._at("begin_s")
        return int(np.nanargmax(np.nanmean(start - np.nanmin(start, axis=0), axis=1)))

    def straggler_like_the_median(self) -> Expected | Refusal:
        """Return the expected duration of a step if the straggler took as long as the median of the ranks."""
        costs, late = [part.graph.costs for part in self.parts], self.straggler
        if len({_kernels(part) for part in self.parts}) > 1:
            return Refusal(
                "the ranks run different kernels, so what the straggler would do in place of another is unknown"
            )
        if len({_calls(part) for part in self.parts}) > 1:
            return Refusal("the ranks make different calls, so the host of the straggler cannot be compared")
        like: dict[str, Floats] = {
            name: np.median([getattr(one, name) for one in costs], axis=0) for name in ("segment", "work", "duration")
        }
        costs[late] = replace(costs[late], **like)  # type: ignore[arg-type]
        before, after = self.replayed_s, self._step_s(costs)
        if before is None or after is None:
            return Refusal("the replay of the ranks does not come to rest; compare their traces by analyze --ranks")
        error = abs(before / self.step_s - 1)
        if error > MOST_ERROR:
            return Refusal(
                f"the joint replay of the unchanged step is off by {error:.1%}; at most {MOST_ERROR:.0%} allow a "
                "prediction"
            )
        value = self.step_s * after / before
        off = error + max(part.graph.unexplained_s / float(part.recorded_s.sum(axis=0).max()) for part in self.parts)
        return Expected(
            value, value - off * self.step_s, value + off * self.step_s, self.step_s, (f"the straggler is rank {late}",)
        )

    def _at(self, column: str) -> Floats:
        """Return when the collectives began or ended on each rank, by the first rank's clock; NaN outside of groups."""
        rows = [
            np.where(calls == UNKNOWN, np.nan, getattr(part.graph.recorded, column)[calls] - offset)
            for part, calls, offset in zip(self.parts, self.calls, self.offset_s.tolist(), strict=True)
        ]
        return np.array(rows)

    def _step_s(self, costs: Sequence[Costs]) -> float | None:
        times = self._replayed(costs)
        if times is None:
            return None
        steps = (step_times(part.graph, one) for part, one in zip(self.parts, times, strict=True))
        return max(total(one) / len(one) for one in steps)

    def _replayed(self, costs: Sequence[Costs]) -> list[Times] | None:
        """Return the times of each rank; a collective's end only moves later from round to round, until all rest."""
        finish = np.full(len(self.transfer_s), NEVER)
        given = []
        for calls, one in zip(self.calls, costs, strict=True):
            duration = one.duration.copy()
            duration[calls[calls != UNKNOWN]] = self.transfer_s[calls != UNKNOWN]
            given.append(replace(one, duration=duration))
        for _ in range(MOST_ROUNDS):
            found, arrived = [], np.full(len(finish), NEVER)
            for part, calls, one, offset in zip(self.parts, self.calls, given, self.offset_s.tolist(), strict=True):
                until, known = one.until.copy(), calls != UNKNOWN
                until[calls[known]] = finish[known] + offset
                times = replay(part.graph, replace(one, until=until))
                arrived[known] = np.maximum(arrived[known], times.begin_s[calls[known]] - offset)
                found.append(times)
            last, finish = finish, arrived + self.transfer_s
            if np.all(np.abs(finish - last) < STILL_S):
                return found
        return None


def together(replays: Sequence[Replay]) -> Together | Refusal:
    """Return the joint replay of a job's ranks, in their order, or the reason why there is none."""
    for number, one in enumerate(replays):
        if one.why_not:
            return Refusal(f"rank {number}: {one.why_not}")
    parts = tuple(one.parts[0] for one in replays)
    if len({len(part.steps) for part in parts}) > 1:
        return Refusal("the ranks have different numbers of steps")
    found: list[dict[tuple[str, str], list[int]]] = []
    for one, part in zip(replays, parts, strict=True):
        mine = _collectives(one, part)
        if any(key[0] in PAIRWISE for key in mine):
            return Refusal("ranks send to single other ranks, which the joint replay does not carry")
        found.append(mine)
    keys = dict.fromkeys(key for mine in found for key in mine)
    columns: list[list[int]] = []
    for key in keys:
        counts = {len(mine[key]) for mine in found if key in mine}
        if len(counts) > 1:
            return Refusal(f"the ranks have different numbers of {key[0]}")
        if sum(key in mine for mine in found) > 1:
            columns += [[mine[key][j] if key in mine else UNKNOWN for mine in found] for j in range(counts.pop())]
    if not columns:
        return Refusal("the ranks have no collective in common")
    calls = np.array(columns, np.int64).T
    everywhere = (calls != UNKNOWN).all(axis=0)
    if not everywhere.any():
        return Refusal("no collective is of all ranks, so their clocks cannot be compared")
    ends = np.array([part.graph.recorded.done_s[row[everywhere]] for part, row in zip(parts, calls, strict=True)])
    offset_s = np.median(ends - ends[0], axis=1)
    apart_s = float(np.median(np.ptp(ends - offset_s[:, None], axis=0)))
    if apart_s > MOST_APART_S:
        return Refusal(
            f"the ends of collectives differ by {apart_s * 1e6:.0f} µs between ranks; at most 50 allow a replay"
        )
    joint = Together(parts, calls, offset_s, np.zeros(calls.shape[1]))
    transfer_s = np.nanmin(joint._at("done_s"), axis=0) - np.nanmax(joint._at("begin_s"), axis=0)
    return replace(joint, transfer_s=np.maximum(transfer_s, 0.0))


def _collectives(one: Replay, part: Part) -> dict[tuple[str, str], list[int]]:
    """Return the activities of each kind and group of collectives, in the order in which they began."""
    r, found = part.graph.recorded, defaultdict[tuple[str, str], list[int]](list)
    names, of = r.families
    if "collective" not in names:
        return found
    mine = np.flatnonzero((of == names.index("collective")) & part.graph.launched)
    for k in mine[np.argsort(r.begin_s[mine], kind="stable")].tolist():
        message = one.trace.messages.get(int(r.trace_kernel[k]))
        found[kind(message.name if message else r.label[k]), message.group if message else ""].append(k)
    return found


def _kernels(part: Part) -> tuple[str, ...]:
    """Return the families of a rank's activities, in order; "" for a copy."""
    names, of = part.graph.recorded.families
    return tuple(names[family] if family != UNKNOWN else "" for family in of.tolist())


def _calls(part: Part) -> tuple[str, ...]:
    return tuple(part.graph.recorded.name)
