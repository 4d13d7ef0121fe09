"""Gain of each technique of a FlashAttention kernel in CUDA C++, added in turn and left out alone.

Question: how long does one pass take at each step of the ladder of scripts/_cuda_steps.py, what does the
    last fp32 step lose without one of its techniques, how busy is the chip, and how far is it from one CPU core?
Method: batch 4, n 16384, d 64, one head, not causal, forward; then a grid of (batch, n, d). Every step is first
    compared with float64 at n 512: a wrong one ends the run. Counters by Nsight Compute at n 4096, each step's
    kernel once. Copies from and to pinned host memory on one and on four streams, with the same kernel. The sequential
    C program runs where that takes a second; elsewhere its time is computed from the rate of the largest that ran.
Output: cumulative and leave-one-out times, counters, speed-up over the sequential program next to the work of a launch.
Why: Steps that are added in one order only hide what each is worth once the others are there. A launch of few blocks
    leaves most multiprocessors idle, which the waves per multiprocessor show.

    python scripts/studies/cuda_kernel_ablation.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from _cells import Cell, place, script
from _kernels import clean
from _study import Study, index, row_table, run

from cs_systems.config import AttentionShape, Mode, Precision, RunConfig
from cs_systems.core import plugins
from cs_systems.core.units import human
from cs_systems.formulas.peaks import peak_flops
from cs_systems.measure.profilers.ncu import chosen
from cs_systems.record import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BACKENDS = script("_cuda_steps.py")
# The techniques in the order in which one builds on the other, and the last fp32 step without each.
LADDER = ("naive", "shared", "padded", "coalesced", "registers", "unrolled", "async", "tensor_cores")
ALL_FP32 = "async"
LEFT_OUT = tuple(f"without_{t}" for t in ("shared", "padding", "coalescing", "registers", "unrolling", "async"))
STREAMS = ("one_stream", "four_streams")
SEQUENTIAL = "reference"
MAIN, COUNTED = AttentionShape(4, 1, 16384, 64), AttentionShape(4, 1, 4096, 64)
GRID = (
    *(AttentionShape(b, 1, n, 64) for b, n in ((1, 1024), (16, 1024), (4, 4096))),
    *(AttentionShape(4, 1, 4096, d) for d in (32, 128)),
)
SEQUENTIAL_SHAPES = (AttentionShape(1, 1, 1024, 64), AttentionShape(1, 1, 2048, 64))
D_HEADS = (32, 64, 128)
ERROR = (1e-5, 2e-3)  # largest errors of outputs of at most 1: in fp32, and with weights rounded to fp16
BASE = RunConfig(workload="attention", mode=Mode.FORWARD, shape=MAIN, warmup=2, steps=5)


def cell(name: str, shape: AttentionShape = MAIN, **fields: object) -> RunConfig:
    """Return the config of a step; tensor_cores and the copies take fp16, all others fp32."""
    precision = Precision.FP16 if name in ("tensor_cores", *STREAMS) else Precision.FP32
    named = {"workload": f"{BACKENDS}:{name}"} if name in STREAMS else {"attention": f"{BACKENDS}:{name}"}
    device = "cpu" if name == SEQUENTIAL else "auto"
    return replace(BASE, shape=shape, precision=precision, device=device, **{**named, **fields})  # type: ignore[arg-type]


def full() -> list[RunConfig]:
    main = [cell(name) for name in (*LADDER, *LEFT_OUT, *STREAMS)]
    grid = [cell(name, shape) for shape in GRID for name in ("naive", ALL_FP32, "tensor_cores")]
    counted = {
        "profiler": "ncu",
        "profiler_args": (*chosen("attend", None), "--launch-count=1"),
        "warmup": 1,
        "steps": 1,
    }
    counters = [cell(name, COUNTED, **counted) for name in (*LADDER, *LEFT_OUT)]
    return [*main, *grid, *sequential(), *counters]


def sequential() -> list[RunConfig]:
    return [cell(SEQUENTIAL, shape, warmup=1, steps=3) for shape in SEQUENTIAL_SHAPES]


def small() -> list[RunConfig]:
    """Return the sequential program's cells, the only ones that run without a GPU."""
    return sequential()


def step_of(found: Cell) -> str:
    config = found.record.run_config
    return (config.workload if config.workload != "attention" else config.attention).rpartition(":")[2]


def flops(shape: AttentionShape) -> int:
    """Return 4 batch n² d: two products of 2 n² d each."""
    return 4 * shape.batch * shape.heads * shape.seq**2 * shape.d_head


def timed(cells: Sequence[Cell], shape: AttentionShape) -> dict[str, Cell]:
    return {step_of(c): c for c in clean(cells) if c.measured and c.record.run_config.shape == shape}


def cumulative(cells: Sequence[Cell]) -> list[Row]:
    found, rows, before, first = timed(cells, MAIN), [], None, None
    for name in LADDER:
        if name not in found:
            continue
        time_s = found[name]["median_s"]
        first, before = first or time_s, before or time_s
        rate = flops(MAIN) / time_s
        rows.append(
            {
                "step": name, "time_s": time_s, "p10_s": found[name]["p10_s"], "p90_s": found[name]["p90_s"],
                "faster than before": before / time_s,
                "faster than naive": first / time_s, "flops_per_s": rate, "of peak_share": _of_peak(found[name], rate),
            }
        )  # fmt: skip
        before = time_s
    return rows


def _of_peak(found: Cell, flops_per_s: float) -> float | None:
    """Return the fraction of the device's peak at the step's precision; None if it is unknown."""
    machine = found.record.environment
    peak = peak_flops(machine.device_name, found.record.run_config.precision) if machine else None
    return flops_per_s / peak.per_s if peak else None


def left_out(cells: Sequence[Cell]) -> list[Row]:
    found = timed(cells, MAIN)
    if ALL_FP32 not in found:
        return []
    whole = found[ALL_FP32]["median_s"]
    names = [ALL_FP32, *(name for name in LEFT_OUT if name in found)]
    return [
        {"fp32 kernel": name, "time_s": found[name]["median_s"], "times as long": found[name]["median_s"] / whole}
        for name in names
    ]


def streams(cells: Sequence[Cell]) -> list[Row]:
    found = timed(cells, MAIN)
    names = [name for name in ("tensor_cores", *STREAMS) if name in found]
    what = {"tensor_cores": "the kernel alone, data on the device"}
    return [{"copies": what.get(n, n.replace("_", " ")), "time_s": found[n]["median_s"]} for n in names]


def counters(cells: Sequence[Cell]) -> list[Row]:
    shown = {
        "occupancy_share": "occupancy_share", "highest_occupancy_share": "at most_share",
        "sm_efficiency_share": "SM efficiency_share", "warp_efficiency_share": "warp efficiency_share",
        "waves": "waves", "load_bytes_per_s": "load_bytes_per_s", "store_bytes_per_s": "store_bytes_per_s",
        "shared_load_bytes_per_s": "shared load_bytes_per_s", "shared_load_conflicts": "conflicts",
        "registers": "registers",
    }  # fmt: skip
    return [
        {"step": step_of(c)} | {title: row.get(column) for column, title in shown.items()}
        for c in cells
        for row in c.record.results.get("counters", ())[:1]
    ]


def one_core(cells: Sequence[Cell]) -> list[Row]:
    """Return the cell of the sequential program if it ran."""
    return [
        {
            "batch": shape.batch,
            "n": shape.seq,
            "d": shape.d_head,
            "time_s": c["median_s"],
            "flops_per_s": flops(shape) / c["median_s"],
        }
        for c in clean(cells)
        if c.measured and step_of(c) == SEQUENTIAL
        for shape in [shape_of(c)]
    ]


def speed_ups(cells: Sequence[Cell]) -> list[Row]:
    """Return speed-ups over the sequential program, by its measured time or else by its rate."""
    ran = [c for c in clean(cells) if c.measured and step_of(c) == SEQUENTIAL]
    if not ran:
        return []
    rates = {c.record.run_config.shape: flops(shape_of(c)) / c["median_s"] for c in ran}
    typical = rates[max(rates, key=lambda shape: flops(shape or MAIN))]
    rows = []
    for shape in (*GRID, MAIN):
        found = timed(cells, shape)
        for name in ("naive", ALL_FP32, "tensor_cores"):
            if name in found:
                one_core_s = flops(shape) / rates.get(shape, typical)
                rows.append(
                    {
                        "batch": shape.batch, "n": shape.seq, "d": shape.d_head, "flops": flops(shape), "step": name,
                        "time_s": found[name]["median_s"], "one core_s": one_core_s,
                        "is": "measured" if shape in rates else "by its rate",
                        "speed-up": one_core_s / found[name]["median_s"],
                    }
                )  # fmt: skip
    return rows


def shape_of(found: Cell) -> AttentionShape:
    return found.record.run_config.shape or AttentionShape()


def tables(cells: list[Cell], format: str) -> list[str]:
    return [
        *row_table(cumulative(cells), "each technique added to those above it", format),
        *row_table(left_out(cells), "the last fp32 kernel without one technique", format),
        *row_table(streams(cells), "copies from and to the host", format),
        *row_table(counters(cells), f"counters, batch {COUNTED.batch}, n {COUNTED.seq}, d {COUNTED.d_head}", format),
        *row_table(one_core(cells), "the sequential program on one CPU core", format),
        *row_table(speed_ups(cells), "against one CPU core", format),
    ]


def explain(cells: list[Cell]) -> list[str]:
    notes = []
    if steps := cumulative(cells):
        most = max(steps, key=lambda row: row["faster than before"])
        slower = [row["step"] for row in steps if row["faster than before"] < 1]
        notes.append(f"{most['step']} brings most where it is added: {most['faster than before']:.3g} times as fast")
        notes += [f"{name} makes it slower where it is added" for name in slower]
    if parts := left_out(cells)[1:]:
        most = max(parts, key=lambda row: row["times as long"])
        useless = [row["fp32 kernel"] for row in parts if row["times as long"] < 1.02]
        notes.append(f"the whole misses most {most['fp32 kernel']}: {most['times as long']:.3g} times as long")
        notes += [f"{name} it is as fast, within 2%, or faster" for name in useless]
    by = index([c for c in cells if step_of(c) in STREAMS and shape_of(c) == MAIN], "workload")
    if len(by) == len(STREAMS):
        one, four = (c["median_s"] for c in by.values())
        notes.append(f"on four streams the pass with its copies takes {human(four, 's')} instead of {human(one, 's')}")
    return notes


def draw(cells: list[Cell]) -> Figure:
    """Draw the time of each step of the ladder, and of the last fp32 kernel without one technique.

    If no step ran on a GPU, draw the sequential program's time.
    """
    from matplotlib.figure import Figure

    from cs_systems.report.figures.drawing import COLORS, MARKERS, WIDTH, log_scale

    ladder = [(row["step"], row["time_s"], row["flops_per_s"]) for row in cumulative(cells)]
    without = [(row["fp32 kernel"], row["time_s"], flops(MAIN) / row["time_s"]) for row in left_out(cells)[1:]]
    core = [(f"one core, n {row['n']}", row["time_s"], row["flops_per_s"]) for row in one_core(cells)]
    kinds = zip(zip(COLORS, MARKERS, strict=True), (ladder, without, () if ladder else core), strict=False)
    bars = [(bar, look) for look, of_kind in kinds for bar in of_kind]
    drawn = Figure(figsize=(WIDTH, 0.8 + 0.3 * len(bars)), layout="constrained")
    axes = drawn.subplots()
    for height, ((_, time_s, rate), (color, marker)) in enumerate(bars):  # points: a bar has no length on this axis
        axes.plot(1e3 * time_s, height, color=color, marker=marker)
        text = f"{human(time_s, 's')}, {human(rate, 'flops_per_s')}"
        axes.annotate(text, (1e3 * time_s, height), (8, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(bars)), [name for (name, _, _), _ in bars])
    log_scale(axes.xaxis)
    axes.set_xlim(right=axes.get_xlim()[1] * 4)  # leave room for the label of the longest bar
    axes.grid(axis="x")
    axes.invert_yaxis()
    axes.set_xlabel("ms of a pass, logarithmic" + f"; {spoken(MAIN)}, one technique more in each" * bool(ladder))
    return drawn


def spoken(shape: AttentionShape) -> str:
    return f"batch {shape.batch}, n {shape.seq}, d {shape.d_head}"


def answer(cells: list[Cell]) -> str:
    steps = cumulative(cells)
    if len(steps) < 2:
        if core := one_core(cells):
            text = f"{human(core[-1]['time_s'], 's')} at n {core[-1]['n']}"
            return f"{place(cells)}, the sequential program takes {text}; no GPU kernel was measured."
        return ""
    first, last = steps[0], steps[-1]
    added = ", ".join(f"{row['faster than before']:.3g} by {row['step']}" for row in steps[1:])
    missed = ", ".join(f"{row['times as long']:.3g} {row['fp32 kernel']}" for row in left_out(cells)[1:])
    alone = f"; the last fp32 kernel takes this many times as long: {missed.replace('_', ' ')}" if missed else ""
    where = place([c for c in cells if step_of(c) != SEQUENTIAL])
    return (
        f"{where}, all techniques together take one pass from {human(first['time_s'], 's')} to "
        f"{human(last['time_s'], 's')}, {last['faster than naive']:.0f} times as fast, in these factors: "
        f"{added}{alone}."
    )


STUDY = Study(
    __file__,
    __doc__,
    "What is each technique of a FlashAttention kernel in CUDA C++ worth, added in turn and left out alone?",
    full,
    small,
    tables,
    explain,
    answer,
    figure="time",
    draw=draw,
)


def check() -> list[str]:
    """Return the steps with a wrong output on this GPU; none if there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        return []
    wrong = []
    for name in (*LADDER, *LEFT_OUT):
        attend, in_half = plugins.get("attention", f"{BACKENDS}:{name}"), name == "tensor_cores"
        for d in D_HEADS:
            like = {"device": "cuda", "dtype": torch.float16 if in_half else torch.float32}
            q, k, v = (torch.randn(2, 1, 512, d, **like) for _ in range(3))
            right = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
            error = (attend(q, k, v) - right).abs().max().item()
            if not error < ERROR[in_half]:
                wrong.append(f"{name} at d {d}: off by {error:.2g}")
    return wrong


if __name__ == "__main__":
    if wrong := check():
        raise SystemExit("\n".join(wrong))
    raise SystemExit(run(STUDY))
