"""Ablation of the training step: each switch alone, added up and left out, from its committed rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from training_step import PEAK_FLOPS, SWITCHES, VARIANTS, measured_as

from cs_systems.config import preset
from cs_systems.formulas import cost
from cs_systems.report.figures.drawing import COLORS, INK, WIDTH, with_legend

Cell = tuple[str, int]  # size, context
ALL, LOW = "fast", "fast in fp8"
FLOPS_PER_CYCLE = 132 * 4096  # multiprocessors of an H100 or H200, dense bfloat16 FLOPs of each
SWITCH_NAMES = {"master": "master weights", "bf16 state": "moments in bf16"}
ABLATION = (
    "One H200, for small at 2048 one H100 (80 GB); torch 2.11, otherwise as above. Milliseconds: median (p10–p90), and "
    "what the switch gains. *Alone*: in the compiled step with SDPA. *Added up*: beside the row above. *Left out*: "
    "what fast loses without it; without fused_weight_update the update is inside backward, without fused_feed_forward "
    "SwiGLU is fused_swiglu. All rows of a cell are of one run, but fast in fp8 and some of those left out of large, "
    "and of 2.7B at 512: they are of a second run, beside its own compiled and fast. Rows with equal options are "
    "measured once.",
    "*Predicted* before a row ran: from the bytes that the switch no longer moves; a fused kernel's at an expected "
    "4.0 TB/s against Inductor's at 2.6, rates of an H200, whose copies move 4.3 TB/s where an H100's move 3.0; for an "
    "update in backward or inside products the whole update, which is a limit. Attention: both kernels alone, times "
    "layers. Graph: the step against itself with its launches queued beforehand. fp8: half of the products' time less "
    "quantizing, for *alone* and for fp8 in fast.",
)

Runs = Sequence[Mapping[str, dict[str, Any]]]
"""Runs of a cell, each variant → row; the first has the most rows."""


def of_cell(ablation: Sequence[dict[str, Any]], cell: Cell) -> Runs:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in ablation:
        if (row["size"], row["context"]) == cell:
            found.setdefault(row["run"], {})[row["variant"]] = row
    return sorted(found.values(), key=len, reverse=True)


def first_of(ablation: Sequence[dict[str, Any]], cell: Cell, variant: str) -> dict[str, Any]:
    """Return the row of a variant in the cell's run with the most rows, else in its other run."""
    return next(run[variant] for run in of_cell(ablation, cell) if variant in run)


@dataclass(frozen=True)
class Switched:
    """Step with a switch in one position, and the step with which it is compared.

    gain_s: seconds that the switch saves; for a switch that is left out, seconds that the step loses. None: a row
    failed.
    """

    row: Mapping[str, Any]
    gain_s: float | None
    predicted_s: float | None


def positions(runs: Runs) -> dict[str, dict[str, Switched]]:
    """Return switch → position (alone, up to, without) → step, for the variants that were measured."""
    found: dict[str, dict[str, Switched]] = {}
    before = "compiled"
    for switch in SWITCHES:
        at = found[switch] = {}
        for how, base in (("alone", "compiled"), ("up to", before), ("without", ALL)):
            name = f"{how}: {switch}"
            if switch == "fp8_linear" and how == "up to":
                name, base = LOW, ALL
            if name not in VARIANTS or (row_name := measured_as(name)) == measured_as(base):
                continue
            run = next((run for run in reversed(runs) if {row_name, base} <= run.keys()), None)
            if run is not None:
                at[how] = between(run[row_name], run[base], how, switch)
        if "up to" in at and switch != "fp8_linear":
            before = measured_as(f"up to: {switch}")
    return found


def between(row: Mapping[str, Any], base: Mapping[str, Any], how: str, switch: str) -> Switched:
    guess = row["predicted_s"]
    if how == "without":
        guess = None  # that row's prediction is for the switch's own position
    elif switch == "graph" and "queued_s" in base:
        guess = base["wall_s"] - base["queued_s"]
    gain = None
    if "wall_s" in row and "wall_s" in base:
        gain = (base["wall_s"] - row["wall_s"]) * (-1 if how == "without" else 1)
    return Switched(row, gain, guess)


def switches(runs: Runs) -> Iterable[str]:
    """Yield the table of a cell's switches."""
    columns = {"alone": "alone", "up to": "added up", "without": "left out"}
    yield f"| switch | predicted | {' | '.join(f'{title} | gain' for title in columns.values())} |"
    yield f"| :--- | ---: |{' ---: | ---: |' * len(columns)}"
    for name in ("eager", "compiled"):
        if row := runs[0].get(name):
            yield f"| {name} | | {written(row)} | | {'| ' * 4}|"
    for switch, at in positions(runs).items():
        if not at:
            continue
        guesses = [
            f"{1e3 * at[how].predicted_s:.2f}" for how in ("up to", "alone") if how in at and at[how].predicted_s
        ]
        guess = guesses[0] if len(set(guesses)) == 1 else f"{guesses[0]}, alone {guesses[1]}" if guesses else ""
        cells = [(written(at[how].row), signed(at[how].gain_s)) if how in at else ("", "") for how in columns]
        name = SWITCH_NAMES.get(switch, switch)
        yield f"| {name} | {guess} | {' | '.join(cell for pair in cells for cell in pair)} |"


def written(row: Mapping[str, Any]) -> str:
    if "wall_s" not in row:
        return "out of memory" if row["error"].startswith("OutOfMemoryError") else "failed"
    middle, low, high = (1e3 * row[f"wall_{what}s"] for what in ("", "p10_", "p90_"))
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


def signed(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:+.2f}".replace("-", "−")


def drawing(ablation: Sequence[dict[str, Any]]) -> Any:
    """Return the figure: the gains of the switches, added up, as a share of the compiled step, and the prediction."""
    from matplotlib.figure import Figure

    cells = sorted({(row["context"], cost.parameter_count(preset(row["size"])), row["size"]) for row in ablation})
    drawn = Figure(figsize=(WIDTH, 9), layout="constrained")
    panels = drawn.subplots(len(cells) // 2, 2, sharey=True)
    for axes, (context, _, size) in zip(panels.T.flat, cells, strict=True):
        runs = of_cell(ablation, (size, context))
        whole = runs[0]["compiled"]["wall_s"]
        found = {switch: at["up to"] for switch, at in positions(runs).items() if "up to" in at}
        rows = range(len(found))
        axes.barh(
            rows, [100 * (each.gain_s or 0) / whole for each in found.values()], color=COLORS[0], label="measured"
        )
        guesses = [(n, each.predicted_s) for n, each in zip(rows, found.values(), strict=True) if each.predicted_s]
        at = [100 * guess / whole for _, guess in guesses]
        axes.plot(at, [n for n, _ in guesses], "|", color=INK, markersize=9, label="predicted, or the limit")
        axes.set_title(f"{size}, {context}")
        axes.set_yticks(rows, [SWITCH_NAMES.get(switch, switch) for switch in found])
        axes.grid(axis="x")
    panels[0, 0].invert_yaxis()
    for axes in panels[-1]:
        axes.set_xlabel("gain, % of the compiled step")
    return with_legend(drawn, panels[-1, 1])


def powers(ablation: Sequence[dict[str, Any]], names: Mapping[str, str]) -> Iterable[str]:
    """Yield the table of clock and power of the rows, read while each ran for 3 s; names: variant → title."""
    yield (
        "The rows above on the same card, steps one after another for three seconds; NVML was read in the second half, "
        "4 to 21 times. The board's limit is 700 W, its highest clock 1,980 MHz. *Capped*: the share of readings in "
        "which NVML named the power limit as what lowers the clock. *Peak*: of the tensor cores at that clock; *of "
        "it*: model FLOPs in the time above."
    )
    yield ""
    yield "| size, context | step | W | MHz | capped | peak, TFLOP/s | of it |"
    yield "| :--- | :--- | ---: | ---: | ---: | ---: | ---: |"
    for row in ablation:
        cell = row["size"], row["context"]
        if "power_w" not in row or row is not first_of(ablation, cell, row["variant"]):
            continue
        clock, peak = row["sm_clock_hz"], FLOPS_PER_CYCLE * row["sm_clock_hz"]
        capped = row["throttle_reasons"].get("power cap", 0) / row["readings"]
        of_peak = f"{peak / 1e12:,.0f} | {row['mfu'] * PEAK_FLOPS / peak:.0%}" if row["variant"] != LOW else "|"
        yield (
            f"| {cell[0]}, {cell[1]} | {names.get(row['variant'], 'blocks compiled')} | {row['power_w']:.0f} "
            f"| {clock / 1e6:,.0f} | {capped:.0%} | {of_peak} |"
        )
