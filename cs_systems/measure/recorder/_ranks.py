"""Records of the ranks of one job, merged on rank 0.

The ranks exchange records through the launcher's store and not by a collective, so that a rank that left the loop
early makes the others wait for at most `patience_s`. The ranks do not begin a step together, so unlike in a sweep, the
waiting time of a timed step is unknown; `rank_steps` observes it in other steps.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from cs_systems.analysis.timing_caveats import of_spread
from cs_systems.core.caveats import REMEDIES, Caveat
from cs_systems.core.tables import first_row
from cs_systems.formulas.communication import RANKS, RankRow
from cs_systems.machine import process_group
from cs_systems.measure.recorder._result import aligned
from cs_systems.measure.runtime.stragglers import merged
from cs_systems.record import Ran, RunRecord, Sample

_numbers = itertools.count()


def rank() -> int:
    return process_group.rank() if process_group.joined() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    return process_group.size() if process_group.joined() else int(os.environ.get("WORLD_SIZE", 1))


class Meeting:
    """Place in the job's store where the ranks exchange texts of one recorder.

    All ranks create theirs in the same order.
    """

    def __init__(self) -> None:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.rank, self._size = rank(), world_size()  # stored now, because later the process group may be gone
        self._store: Any = PrefixStore(f"cs_systems/measure/recorder/{attempt}/{next(_numbers)}", _connect())

    def leave(self, what: str, text: str) -> None:
        self._store.set(f"{what}/{self.rank}", text)

    def leave_if_open(self, what: str, text: str) -> None:
        """Write a text to the store, unless the process with the store has ended."""
        with suppress(dist.DistStoreError, RuntimeError):
            self.leave(what, text)

    def collect(self, what: str, patience_s: float) -> dict[int, str]:
        """Return the texts of the other ranks that wrote them in time."""
        found, end = dict[int, str](), time.monotonic() + patience_s
        for number in range(1, self._size):
            try:
                self._store.wait([f"{what}/{number}"], timedelta(seconds=max(0.01, end - time.monotonic())))
                found[number] = self._store.get(f"{what}/{number}").decode()
            except (dist.DistStoreError, RuntimeError):
                continue
        return found


def _connect() -> Any:
    """Return a separate connection, because a waiting one blocks its other users."""
    if "MASTER_ADDR" in os.environ:
        store, _, _ = next(rendezvous("env://", rank(), world_size()))
        return store
    return dist.distributed_c10d._get_default_store()


def with_others(own: RunRecord, texts: dict[int, str]) -> RunRecord:
    """Return the record of all ranks, merged from rank 0's own and the records that the others wrote."""
    found = {0: own} | {number: RunRecord.from_dict(json.loads(text)) for number, text in texts.items()}
    return merged_loop(found, sorted({*range(world_size())} - {*found}))


def merged_loop(found: dict[int, RunRecord], missing: Sequence[int]) -> RunRecord:
    """Return the merged record; each sample, with its phases, comes from the slowest rank in that step."""
    measured = {n: r for n, r in found.items() if r.measurement is not None}
    lost = sorted({*missing, *(found.keys() - measured.keys())})
    if not measured:
        return found[0]
    names = [name for r in measured.values() if r.measurement for name in r.measurement.phase_names()]
    warmup = min(len(_samples(r, True)) for r in measured.values())
    timed = min(len(_samples(r, False)) for r in measured.values())
    alike = []
    for record in measured.values():
        assert record.measurement is not None
        kept = (*_last(_samples(record, True), warmup), *_samples(record, False)[:timed])
        cut = record if len(_samples(record, False)) == timed else _without_total(record)
        alike.append(replace(cut, measurement=replace(record.measurement, samples=aligned(kept, names))))
    whole = merged(alike, begin_together=False)
    rows: list[RankRow] = [
        {**row, "rank": list(measured)[row["rank"]], "wait_s": None} for row in RANKS.of(whole.results)
    ]
    notes = [] if not lost else [_missing(lost, found)]
    return replace(
        whole,
        config=found[min(found)].config,
        results={**whole.results, **RANKS.filled(rows)},
        warnings=(*_of_stragglers(whole), *notes),
    )


def _without_total(record: RunRecord) -> RunRecord:
    """Return the record without its total of tokens, which covers more steps than the ranks share."""
    ran = first_row(record.results, "ran")
    if ran.get("timed_tokens") is None:
        return record
    return replace(record, results={**record.results, "ran": [cast(Ran, {**ran, "timed_tokens": None})]})


def _of_stragglers(whole: RunRecord) -> Iterator[Caveat]:
    """Yield the caveats of all ranks, with `unstable` judged by the merged samples, which the tables show."""
    assert whole.measurement is not None
    if not any(caveat.code == "mixed-steps" for caveat in whole.warnings):
        yield from (
            caveat for caveat in of_spread(whole.measurement, "step", of_loop=True) if caveat.code == "unstable"
        )
    yield from (caveat for caveat in whole.warnings if caveat.code != "unstable")


def _samples(record: RunRecord, warmup: bool) -> list[Sample]:
    assert record.measurement is not None
    return [s for s in record.measurement.samples if s.warmup == warmup]


def _last(samples: list[Sample], count: int) -> list[Sample]:
    return samples[len(samples) - count :]


def _missing(lost: Sequence[int], found: dict[int, RunRecord]) -> Caveat:
    ranks = f"rank {lost[0]}" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))}"
    reasons = {found[n].reason for n in lost if n in found} - {None}
    why = f": {'; '.join(sorted(map(str, reasons)))}" if reasons else ""
    return Caveat("missing-ranks", f"no times of {ranks}{why}", REMEDIES["missing-ranks"])
