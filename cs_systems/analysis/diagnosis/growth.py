"""Rule for a loop or recording that grows from step to step: its memory, or the time of its steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from cs_systems.analysis.attribution.host_work import host_work
from cs_systems.analysis.attribution.step_growth import growing, grows_alike
from cs_systems.analysis.attribution.tables import host_gaps
from cs_systems.analysis.attribution.usual_steps import START_UP, Usual
from cs_systems.analysis.comparison.loop_findings import (
    CALLS,
    COLLECTOR,
    DENORMALS,
    GROWTH,
    HOST_MEMORY,
    IN_NO_PHASE,
    LATER_STEPS,
    OTHER,
    OWN_PYTHON,
    RESULTS,
    GrowthRow,
    OwnPythonRow,
)
from cs_systems.analysis.comparison.loop_growth import Growth, time_growth
from cs_systems.analysis.diagnosis import Diagnosis, Rule, Unknown
from cs_systems.analysis.diagnosis._evidence import MOSTLY, Evidence
from cs_systems.analysis.diagnosis.own_python import called_at, work_of
from cs_systems.config import Phase
from cs_systems.core.tables import Row
from cs_systems.core.units import human

GRAPH = "keep numbers in place of tensors with their graph: .item() or .detach()"
NOTABLE = 0.10  # share of the step
SAMPLED = 2 / 3  # share of the time outside of the phases that one line took when the stack was sampled
COPIES = "keep numbers (.item()) or copies (.clone()) in place of tensors in a large storage"
CACHE = "leave lru_cache out where the same arguments do not come again, or give it a small maxsize"
HOLDER = "keep fewer of them, or write them to a file"
MEMORY = "find what is kept from step to step, such as losses with their graph, outputs or a cache without a limit"
OF_INFERENCE = "find what is kept from step to step, such as outputs or a cache without a limit"
PREPARED = "it is probably what cuDNN keeps of each size that it prepared: "
READS_MORE = (
    "find what grows in the model's inputs: keep keys and values in a cache in place of all tokens so far, and write "
    "them into a buffer of the final size in place of torch.cat, which copies all earlier ones in each step"
)
BUFFER = "write into a buffer of the final size in place of torch.cat, which copies all earlier entries in each step"
CONCATENATES = "CatArray"
TIME = "find what each step does for all steps before it, such as reading a list that grows"
APPEND = "write only what is new in each step, such as one line at the end of a file, or write everything at the end"
WRITING = ("writes values as text", "writes a file")  # kinds of work
TABLE = "fills a pandas table"
FLUSH = "torch.set_flush_denormal(True)"
MAY_FADE = f"{FLUSH} shows whether numbers fade to denormals, with which a CPU is slow"
FADED = 0.01  # share of denormal numbers in an optimizer; operators with so few of them are slower already


def find(evidence: Evidence) -> Diagnosis | Unknown | None:
    """Find the quantity with the largest growth; memory, which ends the program, comes first."""
    rows = GROWTH.of(evidence.tables)
    memory = [row for row in rows if row["quantity"] not in ("step time", IN_NO_PHASE)]
    slower = next((row for row in rows if row not in memory), None)
    if memory:
        most = _of_memory(max(memory, key=lambda row: row["last"] - row["first"]), evidence)
        if slower is None or slower["quantity"] == IN_NO_PHASE:
            return most
        return replace(most, cause=f"{most.cause}; {_slower(_growth(slower), None)}", remedy=f"{most.remedy}; {TIME}")
    if slower is not None:
        return _of_time(slower, evidence)
    return _of_trace(evidence.usual) if evidence.usual else _of_later_steps(evidence)


def _of_later_steps(evidence: Evidence) -> Unknown | None:
    """Find a loop whose later steps are much slower than the timed ones, without a steady growth."""
    row = LATER_STEPS.first(evidence.tables)
    if row is None:
        return None
    first = row["steps"] - row["steps"] // 3
    last = first + min(row["timed"], row["steps"] // 4)
    return Unknown(
        f"why later steps take {human(row['later_s'], 's')}, where the timed ones took {human(row['timed_s'], 's')}; "
        f"time these (cs-systems run --steps {first}:{last})"
    )


def _of_memory(row: GrowthRow, evidence: Evidence) -> Diagnosis:
    grown, name = row["last"] - row["first"], row.get("kept")
    cause = (
        f"{row['quantity']} grows by {human(row['per_step'], 'bytes')} a step: {human(grown, 'bytes')} in "
        f"{row['steps']} steps"
    )
    if not name:
        remedy = OF_INFERENCE if row.get("is_inference") else MEMORY
        if row["quantity"] == HOST_MEMORY and (preparation := _kept_preparation(evidence)):
            remedy = f"{PREPARED}{preparation}; else {remedy}"
        return Diagnosis(cause, remedy, row["last"], unit="bytes", takes=grown, evidence=(row,))
    what = row.get("kept_tensors") or "objects"
    remedy = GRAPH if "graph" in what else COPIES if "storage" in what else CACHE if what == RESULTS else HOLDER
    where = f" at {row['place']}" if row.get("place") else ""
    cause += f"; {name} keeps {what}{where}" if what.startswith("a ") else f"; {what} are kept in {name}{where}"
    return Diagnosis(cause, remedy, row["last"], unit="bytes", takes=grown, evidence=(row,))


def _kept_preparation(evidence: Evidence) -> str | None:
    """Return the remedy for an operator that the host prepares again for each size, if a step waits for one."""
    for row in host_gaps.of(evidence.tables):
        work = host_work(row["host"])
        if work is not None and work.is_replaced and row["time_s"] >= NOTABLE * (evidence.step_s or math.inf):
            return work.remedy
    return None


def _of_time(row: GrowthRow, evidence: Evidence) -> Diagnosis | None:
    first, last, own = row["first"], row["last"], OWN_PYTHON.of(evidence.tables)
    if row["quantity"] == IN_NO_PHASE:
        return _of_other(row, evidence.step_s, own)
    phase = row.get("phase")
    place = f"in {phase}" if phase not in (None, OTHER) else "outside of the model" if phase else None
    cause = _slower(_growth(row), place)
    most = _most_of_other(own) if phase in (None, OTHER) else None
    where = _named(most, last - first) if most is not None and most["function"] != COLLECTOR else ""
    work = work_of(most["function"], most.get("calls")) if most is not None and where else None
    if work is not None and work.words in (*WRITING, TABLE):
        remedy = work.remedy if work.words == TABLE else APPEND
        where = f"{where}, which {work.words}"
        return Diagnosis(cause, remedy, last, takes=last - first, evidence=(row,), where=where)
    if row.get("is_inference") and phase == Phase.FORWARD and not where:
        return Diagnosis(cause, READS_MORE, last, takes=last - first, evidence=(row,))
    is_on_cpu = evidence.config is not None and evidence.config.device == "cpu"
    faded = DENORMALS.first(evidence.tables)
    if faded is not None and (faded["share"] < FADED or (faded.get("extra_s") or 0.0) < MOSTLY * (last - first)):
        faded = None
    if is_on_cpu and phase not in (OTHER, Phase.INPUT) and not where and faded is not None:
        # the phases are those of the timed steps, before numbers have faded
        cause = _slower(_growth(row), None) + (
            f"; at step {faded['step']:,}, {faded['share']:.0%} of what {faded['optimizer']} keeps ({faded['state']}) "
            "has faded to denormal numbers, with which a CPU is slow"
        )
        return Diagnosis(cause, f"{FLUSH} before the loop", last, takes=last - first, evidence=(row, {**faded}))
    remedy = f"{TIME}; {MAY_FADE}" if is_on_cpu and phase != OTHER and not where else TIME
    return Diagnosis(cause, remedy, last, takes=last - first, evidence=(row,), where=where)


def _named(most: OwnPythonRow, grown_s: float) -> str:
    """Return the line with most of the growth, or that with most of this time when sampled; "" if no line had it."""
    named = called_at(most["function"], most["place"], most.get("calls"))
    if most["time_s"] >= MOSTLY * grown_s:
        return named
    return f"after the timed steps mostly {named}" if most["share"] >= SAMPLED else ""


def _of_other(row: GrowthRow, step_s: float | None, own: Sequence[OwnPythonRow]) -> Diagnosis | None:
    """Find that the time of the program's own code in a step grows, with the function that has most of it.

    Time that is mostly the garbage collector's has a rule of its own.
    """
    grown_s = row["last"] - row["first"]
    if step_s is None or grown_s < NOTABLE * step_s:
        return None
    most = _most_of_other(own)
    if most and most["function"] == COLLECTOR:
        return None
    where = f", most of it in {called_at(most['function'], most['place'], most.get('calls'))}" if most else ""
    cause = (
        f"the step's time outside of the model grows by {human(row['per_step'], 's')} with each step, from "
        f"{human(row['first'], 's')} to {human(row['last'], 's')} in {row['steps']} steps{where}"
    )
    return Diagnosis(cause, TIME, step_s, takes=min(step_s, row["last"]), evidence=(row,), refines=("own-python",))


def _most_of_other(own: Sequence[OwnPythonRow]) -> OwnPythonRow | None:
    """Return the own function with the most time outside of the phases, in steps after the timed ones."""
    placed = (each for each in own if each["phase"] == OTHER and each["function"] != CALLS)
    return max(placed, key=lambda each: each["time_s"], default=None)


def _growth(row: GrowthRow) -> Growth:
    return Growth(row["steps"], row["first"], row["last"], row["per_step"])


def _slower(found: Growth, where: str | None) -> str:
    """Return the cause for steps that become slower; `where` says where most of the growth is, if known."""
    return (
        f"a step takes {human(found.per_step, 's')} longer with each step: {human(found.first, 's')} at first, "
        f"{human(found.last, 's')} after {found.steps} steps{f', most of it {where}' if where else ''}"
    )


def _of_trace(usual: Usual) -> Diagnosis | None:
    """Find steps that become slower; growth from a longer attention context or a lower clock does not count."""
    slow = (window for one in usual.apart if one.kind != START_UP for window in one.windows)
    windows = sorted((*usual.windows, *slow), key=lambda window: window.start_s)
    found = time_growth([(window.number, window.end_s - window.start_s) for window in windows])
    if found is None:
        return None
    more_s, kernels = found.last - found.first, growing(usual.profile.trace.kernels, windows)
    if grows_alike(kernels):
        return None
    if sum(one.more_s for one in kernels if one.family == "attention") > MOSTLY * more_s:
        return None
    most = kernels[0] if kernels and kernels[0].more_s > MOSTLY * more_s else None
    cause = _slower(found, f"in {most.kernel}" if most else None)
    row: Row = {"steps": found.steps, "first_s": found.first, "last_s": found.last, "per_step_s": found.per_step}
    return Diagnosis(
        cause,
        BUFFER if most and most.kernel.startswith(CONCATENATES) else TIME,
        found.last,
        takes=more_s,
        evidence=(row,),
        is_of_recording=True,
        refines=("unfused-elementwise",) if most and most.family in ("copy", "elementwise", "norm") else (),
    )


RULE = Rule(find, judges_loop=True)
