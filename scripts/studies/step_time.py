"""Time of forward, backward and the optimizer, for each model size and context length.

Question: what does a training step cost, and is it the GPU that we time, or the host that feeds it?
Method: sizes × contexts × {fp32, bf16}, naive attention, batch 4; each phase by the device's events and, beside
    them, the host's time to submit it. Where the device stood idle at a phase's end (its lag behind the host is
    below a tenth of the phase), the phase is launch-bound: its time is the host's. Contexts 128 and 512 of small to
    xl a second time under torch.profiler, for the time of the kernels alone.
Output: times by phase with their caveats; submission against events; kernel time against the clock; an explanation.
Why: Each row says whether it was launch-bound, every sample is kept, and drift is tested for. `large` with 32 layers
    stands next to the preset's 36. Beside the ratio by the clock stands the ratio by kernel time, which no host can
    change, and the share of the step that the kernels fill.

    python scripts/studies/step_time.py
"""

from __future__ import annotations

from collections.abc import Callable

from _cells import Cell, place
from _kernels import BY_KERNEL_AND_LAYER, STEPS, clean, profiled, unknown
from _study import Study, bounded, index, row_table, run

from cs_systems.analysis.timing_caveats import LAUNCH_BOUND_LAG
from cs_systems.config import Precision, RunConfig, grid, preset
from cs_systems.core import statistics
from cs_systems.core.units import human
from cs_systems.record import Row
from cs_systems.report.tables.records import render

SIZES = ("small", "medium", "large", "xl", "2.7B")
CONTEXTS = (128, 256, 512, 1024)
PROFILED_SIZES, PROFILED_CONTEXTS = ("small", "medium", "large", "xl"), (128, 512)
PRECISIONS = (Precision.FP32, Precision.BF16)
ANSWERED_CONTEXT = 512
PHASES = ("forward", "backward", "optimizer")
LARGE_OF_32_LAYERS = preset("large", num_layers=32)
OF_LAUNCHES = "the ratio of the launch times"  # for phases that are both launch-bound
NEAR_TWO = (1.8, 2.2)  # what forward's and backward's FLOPs lead to expect, within a tenth
NO_LAG = "host and device are one here, so that nothing can be launch-bound: that part needs a GPU"


def full() -> list[RunConfig]:
    models = [preset(name) for name in SIZES]
    models.insert(SIZES.index("large"), LARGE_OF_32_LAYERS)
    twice = grid(size=PROFILED_SIZES, context_length=PROFILED_CONTEXTS, precision=PRECISIONS)
    return [
        *bounded(grid(model=models, context_length=CONTEXTS, precision=PRECISIONS, warmup=[3], steps=[10])),
        *profiled(twice, "kineto"),
    ]


def small() -> list[RunConfig]:
    tiny = preset("tiny", vocab_size=1000)
    return grid(model=[tiny], context_length=(32, 64), precision=PRECISIONS, warmup=[2], steps=[10])


def is_launch_bound(cell: Cell, phase: str) -> bool | None:
    """Return true if the device waited for the host in a phase; None where host and device are one."""
    lag, event = cell[f"{phase}.lag_median_s"], cell[f"{phase}.median_s"]
    return None if lag is None or not event else lag < LAUNCH_BOUND_LAG * event


def launch_bound_share(cell: Cell) -> float | None:
    """Return the share of the phases' time that was spent in launch-bound phases."""
    bound = {phase: is_launch_bound(cell, phase) for phase in PHASES if cell[f"{phase}.median_s"]}
    if not bound or None in bound.values():
        return None
    times: dict[str, float] = {phase: cell[f"{phase}.median_s"] for phase in bound}
    return sum(times[phase] for phase in bound if bound[phase]) / sum(times.values())


def host_and_device(cells: list[Cell], *names: str) -> list[Row]:
    """Return for each measured cell the submission, the device's time and its lag, by phase."""
    return [
        {
            **{name: cell[name] for name in names},
            **{
                f"{phase}_{what}_s": cell[f"{phase}.{column}"]
                for phase in PHASES
                if any(c[f"{phase}.median_s"] for c in cells)
                for what, column in (("submit", "submit_median_s"), ("event", "median_s"), ("lag", "lag_median_s"))
            },
            "launch-bound": None if (share := launch_bound_share(cell)) is None else f"{share:.0%}",
        }
        for cell in cells
        if cell.measured
    ]


def kernels_and_clock(cells: list[Cell], *names: str) -> list[Row]:
    """Return for each profiled cell its phases by events and by kernels, and the GPU's busy share."""
    return [
        {
            **{name: cell[name] for name in names},
            **{
                f"{phase}_{what}_s": cell[f"{phase}.{column}"]
                for phase in PHASES
                if any(c[f"{phase}.kernel_s"] for c in cells)
                for what, column in (("event", "median_s"), ("kernels", "kernel_s"))
            },
            "ratio by events": ratio(cell),
            "ratio by kernels": cell["kernel_ratio"],
            "kernels": cell["kernels"],
            "kernels_s": cell["kernel_s"],
            "step_s": cell["median_s"],
            "GPU busy": f"{cell['busy_share']:.0%}",
        }
        for cell in cells
        if cell["kernel_ratio"]
    ]


def tables(cells: list[Cell], format: str) -> list[str]:
    lag = "the host's submission against the device's events; lag: how far the device was behind at the phase's end"
    kernels = (
        f"kernel time ({STEPS} steps under torch.profiler) against the clock (steps without it), where both were "
        "measured; ratio: backward over forward; GPU busy: kernels over the step by the clock"
    )
    cells, names = clean(cells), ("size", "context_length", "precision")
    return [
        render([cell.record for cell in cells], format),
        *row_table(host_and_device(cells, *names), lag, format),
        *row_table(kernels_and_clock(cells, *names), kernels, format),
    ]


def explain(cells: list[Cell]) -> list[str]:
    timed = clean(cells)
    return [
        *_launch_bound(timed),
        *kernels_say(timed, "seq_len"),
        *_along_context(timed),
        *_layers(timed),
        *_drift(timed),
        *unknown(cells),
    ]


def ratio(cell: Cell) -> float:
    """Return backward's time over forward's."""
    return float(cell["backward.median_s"] / cell["forward.median_s"])


def why_the_ratio(cell: Cell) -> str:
    """Return a sentence on backward over forward, and on the host's share in that ratio."""
    text = f"backward takes {ratio(cell):.2f} times as long as forward"
    forward, backward = (human(cell[f"{phase}.submit_median_s"] or 0, "s") for phase in ("forward", "backward"))
    if not is_launch_bound(cell, "forward"):
        return text
    if is_launch_bound(cell, "backward"):
        return f"{text}, {OF_LAUNCHES}: the host took {forward} and {backward} to submit them"
    if ratio(cell) >= NEAR_TWO[0]:
        return f"{text}, though forward is launch-bound"
    lag = cell["forward.lag_median_s"]
    ended = f"the device ended {human(lag, 's')} later" if lag > 0 else "the device had ended by then"
    return f"{text}, but only forward is launch-bound: the host took {forward} to submit it, {ended}"


def kernels_say(cells: list[Cell], at: str) -> list[str]:
    """Return the ratio by the clock and by the kernels, for each size and precision along `at`, and over all."""
    known = [cell for cell in cells if cell["kernel_ratio"]]
    notes = []
    for size, precision in dict.fromkeys((cell["size"], cell["precision"]) for cell in known):
        same = [cell for cell in known if (cell["size"], cell["precision"]) == (size, precision)]
        notes.append(f"{size} {precision}: {'; '.join(_kernels_beside(cell, at) for cell in same)}")
    if len(known) > 1:
        clock, kernels = sorted(map(ratio, known)), sorted(cell["kernel_ratio"] for cell in known)
        notes.append(
            f"in the {len(known)} profiled cells backward takes {kernels[0]:.2f} to {kernels[-1]:.2f} times as long as "
            f"forward by the kernels, {clock[0]:.2f} to {clock[-1]:.2f} times by the clock"
        )
    return notes


def _kernels_beside(cell: Cell, at: str) -> str:
    whose = ""
    if is_launch_bound(cell, "forward") and is_launch_bound(cell, "backward"):
        whose = f", {OF_LAUNCHES}"
    return (
        f"at {at.removesuffix('_size').replace('seq_len', 'context')} {cell[at]} backward : forward is "
        f"{ratio(cell):.2f} by the clock{whose}, and {cell['kernel_ratio']:.2f} by the kernels, which fill "
        f"{cell['busy_share']:.0%} of the step"
    )


def _launch_bound(cells: list[Cell]) -> list[str]:
    measured = [cell for cell in cells if cell.measured]
    if measured and launch_bound_share(measured[0]) is None:
        return [NO_LAG]
    notes, free = [], []
    for size, precision in dict.fromkeys((cell["size"], cell["precision"]) for cell in measured):
        same = [cell for cell in measured if (cell["size"], cell["precision"]) == (size, precision)]
        bound = [cell for cell in same if is_launch_bound(cell, "forward")]
        free += [cell for cell in same if cell not in bound]
        if bound:
            where, first = ", ".join(str(cell["seq_len"]) for cell in bound), bound[0]
            why = f"at {first['seq_len']} {why_the_ratio(first)}"
            notes.append(f"{size} {precision}: forward is launch-bound at context {where}: {why}")
    if free:
        ratios = [ratio(cell) for cell in free]
        notes.append(
            f"in the {len(free)} cells that are not launch-bound in forward, backward takes {min(ratios):.2f} to "
            f"{max(ratios):.2f} times as long as forward"
        )
    return notes


def _along_context(cells: list[Cell]) -> list[str]:
    """Return sentences on the growth of forward's time and FLOPs from the shortest to the longest context."""
    notes = []
    by = index(cells, "size", "precision", "seq_len")
    for size, precision in dict.fromkeys(key[:2] for key in by):
        lengths = sorted(key[2] for key in by if key[:2] == (size, precision))
        a, b = (by[size, precision, n] for n in (lengths[0], lengths[-1]))
        if len(lengths) > 1 and is_launch_bound(a, "forward") is not False:
            work, time = (b[f"forward.{name}"] / a[f"forward.{name}"] for name in ("model_flops", "median_s"))
            notes.append(
                f"{size} {precision}: from context {lengths[0]} to {lengths[-1]} the FLOPs of forward grow {work:.1f} "
                f"times, its time {time:.1f} times"
            )
    return notes


def _layers(cells: list[Cell]) -> list[str]:
    by = index(cells, "size", "seq_len", "precision")
    ratios = [
        by[LARGE_OF_32_LAYERS.label, *rest]["median_s"] / cell["median_s"]
        for (size, *rest), cell in by.items()
        if size == "large" and (LARGE_OF_32_LAYERS.label, *rest) in by
    ]
    if not ratios:
        return []
    fewer, ours = LARGE_OF_32_LAYERS.num_layers, preset("large").num_layers
    return [
        f"large with {fewer} layers takes {min(ratios):.2f} to {max(ratios):.2f} of the time of the "
        f"preset's {ours} (by layers it would be {fewer / ours:.2f})"
    ]


def _drift(cells: list[Cell]) -> list[str]:
    """Return a sentence for each cell with steps that rise or fall over time, with the change."""
    notes = []
    for cell in cells:
        found = statistics.drift(cell.record.measurement.durations_s("step")) if cell.record.measurement else None
        if found and abs(found.change) > statistics.DRIFT_LIMIT and found.p_value < 0.01:
            change = f"{abs(found.change):.1%} {'longer' if found.change > 0 else 'less'}"
            notes.append(f"{cell.label('attention', 'mode')} drifted: its second half of steps took {change}")
    return notes or ["no cell drifted: no trend of the steps over time is significant"]


def answer(cells: list[Cell]) -> str:
    by = index(cells, "precision", "seq_len", "size")
    context = max((key[1] for key in by if key[1] <= ANSWERED_CONTEXT), default=None)
    notes = []
    for precision in PRECISIONS:
        same = {size: cell for (p, seq, size), cell in by.items() if (p, seq) == (precision.value, context)}
        if same:
            by_time = sorted(same, key=_time(same))
            times = [f"{_phases(same[size])} ({size})" for size in (by_time[0], by_time[-1])]
            notes.append(f"{' to '.join(dict.fromkeys(times))} in {precision.value}")
    free = [ratio(cell) for cell in by.values() if is_launch_bound(cell, "forward") is not True]
    if not notes or not free:
        return ""
    return (
        f"{place(cells)}, at context {context} forward, backward, the optimizer and the whole step take "
        f"{'; '.join(notes)}. Where forward is not launch-bound, backward takes "
        f"{min(free):.2f} to {max(free):.2f} times as long as forward."
    )


def _phases(cell: Cell) -> str:
    return ", ".join(human(cell[name], "s") for name in (*(f"{phase}.median_s" for phase in PHASES), "median_s"))


def _time(cells: dict[str, Cell]) -> Callable[[str], float]:
    return lambda size: float(cells[size]["median_s"])


STUDY = Study(
    __file__,
    __doc__,
    "How long do forward, backward and the optimizer take, for each model size and context length?",
    full,
    small,
    tables,
    explain,
    answer,
    figure="phases",
    drawn=lambda cell: cell["precision"] == Precision.BF16 and not cell.profiled,
    drops=BY_KERNEL_AND_LAYER,
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
