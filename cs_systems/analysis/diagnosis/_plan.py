"""Plan of remedies: the gain of each by a replay of the recorded step, on top of those before it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from cs_systems.analysis.diagnosis._findings import ON_TOP, WORTH, Diagnosis, Expected
from cs_systems.analysis.replay import Change, LaunchesFree
from cs_systems.analysis.replay import Expected as Predicted
from cs_systems.analysis.replay.what_ifs import Answering

ALIKE = 0.8  # share of the largest saving: a remedy for one cause that saves this much comes before a CUDA graph
MOST_BEYOND = 2  # times the share of a cause; a replay that saves more also removes other causes
SHORTER = 0.5  # times the kernels' time: streams may overlap more than they did


def planned(found: Iterable[Diagnosis], replay: Answering, busy_s: float = 0.0) -> list[Diagnosis]:
    """Return the diagnoses with the duration that the replay expects; those without a gain are left out.

    The first remedy is applied alone, each further one on top of those before it. A diagnosis stays unchanged if the
    replay cannot apply its change, expects a saving beyond the cause, or a step shorter than its kernels; no range
    begins below them. The first keeps the duration that an experiment measured.

    busy_s: the time of the kernels of a step.
    """
    found = [one for one in found if one.share >= WORTH]
    answers = {id(one): replay.what_if(one.change) for one in found if one.change is not None}
    told = [(one, answer) for one in found if isinstance(answer := answers.get(id(one)), Predicted)]
    beyond = [one for one, answer in told if answer.share > MOST_BEYOND * one.share or answer.value < SHORTER * busy_s]
    told = [(one, answer) for one, answer in told if one not in beyond]
    others = beyond + [
        one
        for one in found
        if not isinstance(answer := answers.get(id(one)), Predicted)
        and (answer is None or answer.share is None or answer.share >= WORTH)
    ]
    told = [(one, answer) for one, answer in told if answer.share >= WORTH]
    most = max((answer.share for _, answer in told), default=0.0)
    told.sort(
        key=lambda pair: (isinstance(pair[0].change, LaunchesFree) or pair[1].share < ALIKE * most, -pair[1].share)
    )
    chosen: list[Change] = []
    plan: list[Diagnosis] = []
    before: Predicted | None = None
    for one, alone in told:
        assert one.change is not None
        answer = replay.what_if(*chosen, one.change) if chosen else alone
        if not isinstance(answer, Predicted):
            continue
        now = answer.now if before is None else before.value
        if now - answer.value < WORTH * answer.now:
            continue
        low = min(max(answer.low, SHORTER * busy_s), answer.value, now)
        expected = Expected(answer.value, low, answer.high, "replayed")
        then, recorded = (ON_TOP, None) if chosen else ("", replay.step_s if answer.is_estimated else None)
        known = replace(one, now=now, expected=expected, recorded=recorded, then=then)
        plan.append(replace(known, at_best=None, unprofiled=None))
        chosen, before = [*chosen, one.change], answer
    return [*plan, *others]
