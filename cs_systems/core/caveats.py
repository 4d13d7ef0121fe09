"""Caveats: reasons to doubt a result, each with its remedy. A caveat never changes a measured value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict

from cs_systems.core.tables import Table
from cs_systems.core.units import counted, fixed, human


class GraphBreakRow(TypedDict):
    """Place where torch.compile left the graph, in `graph_breaks`; a cell's record has the first ones."""

    reason: str
    place: str | None  # innermost line of the user's code: `train.py:12 in forward`
    count: int


@dataclass(frozen=True)
class Caveat:
    """Reason to doubt a result: a `code` to group by, the observation, and the remedy."""

    code: str
    message: str
    remedy: str


# Least share of a step that finding its phases takes, to be told, and least number of boundaries between them.
OBSERVED, MANY_BOUNDARIES = 0.05, 100
RECORD_AGAIN = "record again, with fewer steps and without another profiler"
REMOVE_BREAKS = "keep printing, .item(), .cpu() and branches on tensors out of the compiled code"
_NAME_STEPS = "name the iteration: Recorder(...), and with recorder.step(): around the body of the loop"
# Code of a caveat → its remedy. Tables show these even for records that were written with an earlier wording.
REMEDIES = {
    "profiled": "take times from cs-systems time; use a profile for shares and causes",
    "few-samples": "time 10 steps or more (--steps)",
    "unstable": "increase --warmup and --steps, and compare medians over several --rounds",
    "launch-bound": "CPU-bound: the GPU waits for kernel launches; use a larger batch, --compile or CUDA graphs",
    "recompiled": "increase --warmup; keep shapes and flags constant, because each change compiles again",
    "graph-breaks": f"{REMOVE_BREAKS}; TORCH_LOGS=graph_breaks prints each with its stack",
    "cudaMalloc": "increase --warmup until the caching allocator needs no more memory",
    "throttled": "measure in short rounds with --rounds, interleave the cells to compare, or cool the GPU",
    "shared-gpu": "stop the other processes, or choose another GPU with --device cuda:N",
    "no-forward": "pass the module that the loop calls: the one that DDP or torch.compile returned",
    "incomplete-trace": RECORD_AGAIN,
    "below-nsys": "record without nsys for times to compare",
    "mixed-steps": _NAME_STEPS,
    "no-optimizer": _NAME_STEPS,
    "forward-only": f"if a step is something else, {_NAME_STEPS}",
    "mixed-batches": "compare tokens/s or samples/s, not times; or pad to one length, and drop the last short batch",
    "own-tools": "time the program without them",
    "observed": "time the loop itself with one clock around many steps; use its phases for shares and causes",
    "edited-script": "record each version into a folder of its own (--out), and compare the folders",
    "own-capture": "leave out these calls, or start the program under nsys yourself",
    "recomputed": "checkpoint fewer blocks where the memory allows it",
    "full-attention": "compare MFU only with runs that count it in full too; is_causal=True makes causality known",
    "missing-ranks": "see the output of those ranks; all of them must leave the loop at the same step",
    "skipped-steps": "set a lower init_scale of the GradScaler, warm up until its scale has settled, or use bf16 "
    "without one; if the loss is NaN, correct that first",
    "not-restored": "load the model again before it is trained or saved, and build again what else is named",
    "nan-loss": "lower the learning rate or use another precision",
    "inf-loss": "lower the learning rate or use another precision",
}
LATER_WARMUP, LATER_STEPS = 20, 50  # steps that are recorded later; twice those of a record that has as many


def _later(warmup: int, steps: int) -> str:
    return (
        f"record more steps after a longer warm-up where the loop has them, such as cs-systems run --steps {warmup}:"
        f"{warmup + steps}, or Recorder(warmup={warmup}, steps={steps})"
    )


_LATER = _later(LATER_WARMUP, LATER_STEPS)
# The same for a user's own loop, measured by `cs-systems run` or a Recorder, which have other options. The remedy of
# few-samples depends on the length of the loop, and is in the record.
LOOP_REMEDIES = {code: remedy for code, remedy in REMEDIES.items() if code != "few-samples"} | {
    "profiled": "take times from the record without a profiler; use a profile for shares and causes",
    "unstable": _LATER,
    "launch-bound": "CPU-bound: the GPU waits for kernel launches; use a larger batch, torch.compile or CUDA graphs",
    "recompiled": f"{_LATER}; keep shapes and flags constant, because each change compiles again",
    "cudaMalloc": f"{_LATER}, when the caching allocator needs no more memory",
    "mixed-batches": "compare tokens/s, given by `with recorder.step(tokens=…):`, not times; or pad to one length, and "
    "drop the last short batch",
    "throttled": "record fewer steps, or cool the GPU",
    "shared-gpu": "stop the other processes, or choose another GPU with CUDA_VISIBLE_DEVICES",
}


def beyond(remedy: str, warmup: int, steps: int, timed: int | None) -> str:
    """Return a remedy of LOOP_REMEDIES with steps beyond those that the loop recorded.

    Args:
        remedy: the remedy, which may name no steps.
        warmup: the steps before the timed ones.
        steps: the steps to time.
        timed: the steps that were timed, fewer where the loop ended; None if unknown.
    """
    if timed is not None and timed < steps:
        return remedy.replace(_LATER, "let the loop run longer, and record more steps after a longer warm-up")
    warmup = LATER_WARMUP if warmup < LATER_WARMUP else 2 * warmup
    return remedy.replace(_LATER, _later(warmup, LATER_STEPS if steps < LATER_STEPS else 2 * steps))


def caveat(code: str, message: str) -> Caveat:
    """Return the caveat with that code and its remedy."""
    return Caveat(code, message, REMEDIES[code])


def cut_short(timed: int, wanted: int, done: int | None, ended: str, missing: Sequence[str] = ()) -> Caveat:
    """Return the caveat of a user's loop that ended before all steps were timed.

    Args:
        timed: the steps that were timed.
        wanted: the steps to time.
        done: the steps of the loop, including warm-up; None if unknown.
        ended: `the loop ended` or `the loop was interrupted`, and the error that ended it, if any.
        missing: names of the results that profilers would have recorded after the timing.
    """
    lost = f"; no {' and no '.join(missing)} was recorded" if missing else ""
    begin, _, error = ended.partition(" with ")
    how = " ".join(filter(None, [begin, f"after {done}" if done else "", f"with {error}" if error else ""]))
    message = f"{timed} of {wanted} steps were timed, because {how}{lost}"
    remedy = "correct the error, and record again" if error else "let the loop run longer"
    first = min(2, (done or 0) // 4)
    if done and not error and 0 < first < done - timed:
        steps = f"cs-systems run --steps {first}:{done}, or Recorder(warmup={first}, steps={done - first})"
        remedy += f", or time earlier steps: {steps}"
    return Caveat("few-samples", message, remedy)


def observed(own_s: float, step_s: float, boundaries: int) -> Iterator[Caveat]:
    """Yield the caveat for a loop if finding its phases takes notable time.

    Args:
        own_s: time of the host that this took in a step, in s; on a GPU some of it may be hidden.
        step_s: the step with it, in s.
        boundaries: the number of boundaries between phases in a step.
    """
    if boundaries >= MANY_BOUNDARIES and own_s >= OBSERVED * step_s:
        told = f"finding the phases takes up to {human(own_s, 's')} of the step"
        yield caveat("observed", f"{told}, which has {boundaries:,} of their boundaries")


def own_tools(names: Iterable[str]) -> Caveat:
    """Return the caveat for a loop that was timed while the program itself profiled or traced it."""
    return caveat("own-tools", f"timed under the program's own {' and '.join(sorted(names))}, which cost time")


def edited_script(records: int) -> Caveat:
    """Return the caveat for the loop of a script that changed after earlier records of the same loop were written."""
    what = "ran another version of the script, or of a file that it imports"
    return caveat("edited-script", f"{counted(records, 'earlier record')} of this loop {what}")


def own_capture(calls: int) -> Caveat:
    """Return the caveat for a program with calls that would have begun or ended nsys's capture."""
    what = counted(calls, "call") + " of cudaProfilerStart and cudaProfilerStop by the program did nothing"
    return caveat("own-capture", f"{what}: nsys captured the recorded steps alone")


def recomputed(share: float) -> Caveat:
    """Return the caveat for a backward pass that spends this share on recomputing forward."""
    return caveat("recomputed", f"{100 * share:.0f}% of backward repeats forward, for torch.utils.checkpoint")


UNEVEN = ("mixed-steps", "mixed-batches")  # steps do different work: a known cause of spread
SHARED = "shared-gpu"  # other processes used the GPU


def mixed_batches(what: str) -> Caveat:
    """Return the caveat for timed steps with batches of different sizes.

    what: the consequence for the numbers.
    """
    return caveat("mixed-batches", f"the batches of the timed steps differ in size; {what}")


def skipped_steps(skipped: int, steps: int, first_scale: float, scale: float | None) -> Caveat:
    """Return the caveat for optimizer steps that a GradScaler skipped.

    scale: its current scale; None if unknown.
    """
    last = scale_in_words(scale)
    scales = f"scale {scale_in_words(first_scale)} at first" + (f", {last} at last" if last else "")
    what = f"{skipped} of {counted(steps, 'optimizer step')} were skipped by the GradScaler ({scales})"
    return caveat("skipped-steps", what)


def scale_in_words(number: float | None) -> str:
    """Return a scale of a GradScaler as text; "" if it is unknown."""
    if number is None:
        return ""
    return fixed(number, 0) if number >= 1 else f"{number:.2g}"


def full_attention(why: str) -> Caveat:
    """Return the caveat for model FLOPs that include attention scores which a mask may hide."""
    return caveat("full-attention", f"model FLOPs count the whole score matrix of attention: {why}")


def no_number(loss: float | None) -> Iterator[Caveat]:
    """Yield a caveat if the loss is NaN or infinite."""
    if loss is not None and not math.isfinite(loss):
        code, value = ("nan-loss", "NaN") if math.isnan(loss) else ("inf-loss", "infinite")
        yield caveat(code, f"the loss is {value}, so that its times are left out")


def not_restored(names: Sequence[str]) -> Caveat:
    """Return the caveat for a measurement in the user's process that could not restore everything."""
    shown = ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" * (len(names) > _MOST_NAMES))
    return caveat("not-restored", f"the measurement may have changed {shown}, and could not restore it")


_MOST_NAMES = 5


def broken_graph(rows: Sequence[GraphBreakRow]) -> str:
    """Return a clause with the place of the first graph break and its reason."""
    first = rows[0]
    where = f" at {first['place']}" if first["place"] else ""
    return f"left the graph, first{where}: {first['reason']}"


GRAPH_BREAKS = Table("graph_breaks", GraphBreakRow, "places where torch.compile left the graph")
