"""Rule for start-up: time at the start of a recording or loop that later steps do not repeat."""

from __future__ import annotations

import math
import re

from cs_systems.analysis.attribution.gaps import silences
from cs_systems.analysis.attribution.usual_steps import START_UP, Apart, Usual
from cs_systems.analysis.comparison.loop_findings import OTHER_PHASES, SLOW_START, SlowStartRow
from cs_systems.analysis.diagnosis import WORTH, Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import FEWEST_KERNELS, MOSTLY, Evidence
from cs_systems.core.tables import Row
from cs_systems.core.tracers import tracer
from cs_systems.core.units import human

REMEDY = "warm up before recording, and leave this time out of every mean"
COLD = "run the step several times before recording it, because every kernel here runs for the first time"
LATER = "run each branch of the program once before recording or serving it, or set CUDA_MODULE_LOADING=EAGER"
FILLED = (
    "find what the program does there: if it fills this memory, do so in a kernel or in several threads, and leave "
    "this time out of every mean"
)
MANAGED = re.compile("MallocManaged|MemAllocManaged")
SPARE = 5  # steps of a loop between its start-up and its timed steps
MOST_NAMED = 2
LEAST = 0.1  # share of the recording; every recording has some start-up
LEAST_S = 0.05  # of a loop's start-up in all; other programs may take as much from a few steps
TRIAL = 0.01  # share of the recording; repeated steps that take less are only a trial
OUTWEIGHS = 0.9  # share of the recording; a larger start-up comes before a single pass


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the steps that take longer because of first uses, or the stretch before a recording is warm."""
    if (rows := SLOW_START.of(evidence.tables)) and evidence.config is not None:
        return _of_loop(rows[0], evidence.config.steps)
    usual = evidence.usual
    if usual is None or not usual.total_s or usual.start_up_s < LEAST * usual.total_s:
        return None
    first = next((apart for apart in usual.apart if apart.kind == START_UP and usual.is_named), None)
    why = f" ({', '.join(usual.start_up[:MOST_NAMED])})" if usual.start_up else ""
    share = f"{usual.start_up_s / usual.total_s:.0%} of the recording is start-up"
    takes_s, remedy = usual.start_up_s, COLD if usual.is_cold else LATER if first and first.steps[0] else REMEDY
    if (filling_s := _filling_s(usual)) > MOSTLY * usual.start_up_s:
        takes_s, remedy = filling_s, FILLED
        cause = (
            f"{filling_s / usual.total_s:.0%} of the recording the host makes no CUDA call between allocating managed "
        )
        cause += f"memory and its first use ({human(filling_s, 's')})"
    elif usual.is_cold:
        cause = f"{share}{why}, and no step is warm"
    elif first:
        cause = f"{_which(first)} {human(first.each_s, 's')} where the usual ones take {human(first.usual_s, 's')}: "
        cause += f"{share}{why}"
    else:
        cause = f"{share}, before the usual work begins{why}"
    row: Row = {"start_up_s": usual.start_up_s, "recording_s": usual.total_s}
    return Diagnosis(
        cause,
        remedy,
        usual.total_s,
        takes=takes_s,
        evidence=(row,),
        is_of_recording=True,
        is_outside=True,
        comes_last=takes_s < usual_s(usual) if remedy is FILLED else comes_last(usual, takes_s / usual.total_s),
    )


def _filling_s(usual: Usual) -> float:
    """Return the time without a CUDA call from the first allocation of managed memory to the usual work."""
    trace = usual.profile.trace
    if not len(trace.calls):
        return 0.0
    allocated_s = trace.calls.end_s[trace.calls.name.codes_where(MANAGED.search)]
    until_s = usual.profile.steps[0].start_s
    if not len(allocated_s):
        return 0.0
    return math.fsum(end - start for start, end in silences(trace, float(allocated_s[0]), until_s))


def _of_loop(row: SlowStartRow, timed: int) -> Diagnosis | None:
    """Find the slow first steps of a loop, unless nearly all of them are in its warm-up."""
    if row["timed"] < LEAST * timed or row["extra_s"] < max(LEAST * row["total_s"], LEAST_S):
        return None
    phase, steps = row["phase"], row["steps"]
    where = "" if phase is None else ", outside of the phases" if phase in OTHER_PHASES else f", most of it in {phase}"
    return Diagnosis(
        f"each of the first {steps} steps takes {human(row['each_s'], 's')} where later ones take "
        f"{human(row['later_s'], 's')}: {row['extra_s'] / row['total_s']:.0%} of the loop is start-up{where}; "
        f"{row['timed']} of them were timed",
        f"time later steps (cs-systems run --steps {steps + SPARE}:{steps + SPARE + timed}), and do before the loop, "
        "once for all runs, what the first steps prepare",
        row["total_s"],
        takes=row["extra_s"],
        evidence=(row,),
        is_of_recording=True,
        is_outside=row["timed"] <= MOSTLY * timed,  # else the causes of the timed steps are those of the slow ones
    )


def _which(apart: Apart) -> str:
    """Return the steps with their verb: "step 0 takes", "each of the first 2 steps takes", or with their numbers."""
    if len(apart.steps) == 1:
        return f"step {apart.steps[0]} takes"
    if apart.steps == tuple(range(len(apart.steps))):
        return f"each of the first {len(apart.steps)} steps takes"
    return f"each of steps {', '.join(map(str, apart.steps))} takes"


def comes_last(usual: Usual, share: float) -> bool:
    """Return whether the recording is about the usual steps, and not about this share of it outside of them."""
    if usual.is_named:
        return share < OUTWEIGHS or not _is_small(usual)
    if not tracer(usual.profile.trace.profiler).starts_program:
        return share < MOSTLY
    if usual.is_once and share > MOSTLY and usual.profile.time_s < WORTH * usual.step_s:
        return False  # the rest of the process hardly uses the GPU either
    kernels = sum(each.calls for each in usual.profile.by_step.values())
    if usual.is_once and (share > OUTWEIGHS or (kernels < FEWEST_KERNELS and usual_s(usual) < MOSTLY * usual.total_s)):
        return False  # one pass, of a few kernels that do not take most of the process either
    return usual_s(usual) >= (WORTH if usual.is_once else TRIAL) * usual.total_s


def _is_small(usual: Usual) -> bool:
    """Return whether the judged work is one step alone: after a slow one, the rest of one, or of a few kernels."""
    kernels = sum(each.calls for each in usual.profile.by_step.values())
    return len(usual.profile.steps) == 1 and (bool(usual.apart) or usual.is_rest or kernels < FEWEST_KERNELS)


def usual_s(usual: Usual) -> float:
    """Return the time of the usual steps; the process may continue after their kernels."""
    return usual.step_s * len(usual.profile.steps)


RULE = Rule(find)
