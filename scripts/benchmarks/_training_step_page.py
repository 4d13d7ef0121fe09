"""Page of the benchmark training_step: answer, figure and tables from its committed rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from training_step import FAST, FUSED, GROUPS, PEERS, SWITCHES

ALL = "up to: update_in_backward"  # all switches of FAST
WHOLE = f"up to: {[*SWITCHES][-1]}"  # all switches


def write(folder: Path) -> None:
    """Write table.md and figure.svg of a folder from its h200.json."""
    rows = json.loads((folder / "h200.json").read_text())
    (folder / "table.md").write_text(report(rows))
    drawing(rows).savefig(folder / "figure.svg")


CELLS = (("small", 512), ("large", 512), ("2.7B", 512), ("small", 2048), ("large", 2048), ("2.7B", 2048))
NAMES = {
    "llama compiled": "Llama, compiled",
    "llama cudagraphs": "Llama, reduce-overhead",
    "compiled": "blocks compiled",
}
NAMES |= {f"up to: {name}": f"+ {name.replace('_', ' ')}" for name in SWITCHES}
NAMES["up to: master"] = "+ master weights"


def report(rows: list[dict[str, Any]]) -> str:
    """Return the page of the committed rows: answer, figure, tables."""
    found = {(r["size"], r["context"], r["variant"]): r for r in rows}
    text = [
        "# Training step beside the stock stack",
        "",
        answer(found),
        "",
        "![step time of each variant](figure.svg)",
        "",
        "    python3 scripts/benchmarks/training_step.py --variants cumulative each --json h200.json",
        "",
        "One H200, torch 2.11, batch 4, vocabulary 10,000, AdamW; both sides in one run. Llama is transformers' "
        "LlamaForCausalLM of the same shape: SDPA, bf16 autocast, torch.compile, fused AdamW, and CUDA graphs "
        "(reduce-overhead) for small. *Floor*: model FLOPs at the measured rate of a large product plus 28 bytes for "
        "each parameter at the measured rate of a copy. *MFU*: of 989 TFLOP/s. *Host*: time to submit the step; where "
        "it is near the step, the GPU waits for launches. *Gain*: over the row above, ms. *Predicted*: from the bytes "
        "that a switch no longer moves; for the update in backward the whole update, which is a limit; for a fused "
        "kernel its bytes at an expected 4.0 TB/s against those of Inductor's kernels at 2.6.",
        "",
        "Not measured: medium, 8B on two GPUs, and the loss curves on a GPU. On a CPU, 200 steps of tiny with the "
        "precision, optimizer and parts of fast, without its graph and attention, stay within 0.0003 of eager, where "
        "two seeds differ by 0.024 ([curves](curves_cpu/curves.svg), `scripts/benchmarks/recipe_curves.py`).",
    ]
    for size, context in CELLS:
        text += ["", f"## {size}, context {context}", "", *cumulative(found, size, context)]
    text += ["", "## Each part alone, and left out", "", *each(found)]
    text += ["", "## What the figures say", "", *REMARKS, ""]
    return "\n".join(text)


REMARKS = (
    "- Master weights gain more than predicted: parameters in bf16 also keep the residual stream in bf16, where "
    "autocast keeps it in fp32.",
    "- Joined projections (q, k, v in one product; w1, w3 in one): 1 to 2% for small at 512; nothing at large and "
    "2.7B, and 1 to 2% slower at context 2048, where Inductor concatenates the gradients before the joined product.",
    "- Fused cross-entropy: no time at a vocabulary of 10,000 (the logits are 1 to 2% of the bytes); up to 0.4 GiB.",
    "- The update inside backward: nothing for small and large, whose update is 1 and 6 ms; 1 to 2% for 2.7B, of the "
    "25% that the update takes: the products leave the other kernel few free multiprocessors.",
    "- At context 2048 the products alone take 222 of 320 ms for 2.7B (770 TFLOP/s, their ceiling), attention 35 ms "
    "(d_head 80 is computed as 128), the update 22 ms, and 40 ms are pointwise kernels at 2.6 TB/s.",
)


def answer(found: dict[Any, Any]) -> str:
    """Return the sentences that open the page."""
    ratios = {}
    for size, context in CELLS:
        peer = min(r["wall_s"] for (s, c, v), r in found.items() if (s, c) == (size, context) and v in PEERS)
        ours = found[size, context, ALL]["wall_s"]
        narrow = found[size, context, "up to: bf16 state"]["wall_s"]
        ratios[size, context] = peer / ours, peer / narrow
    short = [f"{r[0]:.2f}× for {size}" for (size, context), r in ratios.items() if context == 512]
    long = [f"{r[0]:.2f}× for {size}" for (size, context), r in ratios.items() if context == 2048]
    best = found["2.7B", 512, "up to: bf16 state"], found["2.7B", 2048, "up to: bf16 state"]
    return (
        f"With exact master weights the step is faster than the best Llama of the same run by {', '.join(short)} at "
        f"context 512, and {', '.join(long)} at 2048. Moments in bf16 with stochastic rounding bring 2.7B to "
        f"{ratios['2.7B', 512][1]:.2f}× and {ratios['2.7B', 2048][1]:.2f}×, an MFU of {100 * best[0]['mfu']:.0f}% and "
        f"{100 * best[1]['mfu']:.0f}%. The goal of 1.3× is met at context 512 (2.7B with bf16 moments only), not at "
        "2048."
    )


def cumulative(found: dict[Any, Any], size: str, context: int) -> list[str]:
    """Return the table of the peers and of the switches added up; predicted: by the bytes."""
    lines = [
        "| step | ms | p10–p90 | gain | predicted | host, ms | floor, ms | MFU | peak |",
        "| :--- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    before = None
    for name in (*PEERS, *GROUPS["cumulative"]):
        if (row := found.get((size, context, name))) is None:
            continue
        gain = "" if before is None or name in PEERS else f"{1e3 * (before - row['wall_s']):.2f}"
        guess = row["predicted_s"] if name.startswith("up to") else None
        middle, low, high = (f"{1e3 * row[f'wall_{what}s']:.2f}" for what in ("", "p10_", "p90_"))
        lines.append(
            f"| {NAMES[name]} | {middle} | {low}–{high} "
            f"| {gain} | {'' if guess is None else f'{1e3 * guess:.2f}'} | {1e3 * row['submit_s']:.1f} "
            f"| {1e3 * row['floor_s']:.1f} | {100 * row['mfu']:.1f}% | {row['peak_bytes'] / 2**30:.1f} GiB |"
        )
        before = None if name in PEERS else row["wall_s"]
    return lines


def each(found: dict[Any, Any]) -> list[str]:
    """Return the table of the switches alone, against the compiled blocks, and left out of all but bf16 state."""
    lines = [
        "Milliseconds at context 512; in brackets against the compiled blocks, and against all but bf16 state and the "
        "fused kernels; a fused kernel left out is against all.",
        "",
        "| switch | small, alone | small, left out | 2.7B, alone | 2.7B, left out |",
        "| :--- | ---: | ---: | ---: | ---: |",
    ]
    for name in (*FAST, *FUSED):
        cells, whole = [], WHOLE if name in FUSED else ALL
        for size in ("small", "2.7B"):
            for row, beside in (
                (found.get((size, 512, f"alone: {name}")), found[size, 512, "compiled"]),
                (found.get((size, 512, f"without: {name}")), found.get((size, 512, whole))),
            ):
                cells.append(
                    f"{1e3 * row['wall_s']:.2f} ({row['wall_s'] / beside['wall_s'] - 1:+.1%})"
                    if row is not None and beside is not None
                    else ""
                )
        if any(cells):
            lines.append(f"| {name.replace('_', ' ')} | {' | '.join(cells)} |")
    return lines


def changed(seconds: float, beside: float) -> str:
    return f"{1e3 * seconds:.2f} ({seconds / beside - 1:+.1%})"


def drawing(rows: list[dict[str, Any]]) -> Any:
    """Return the figure: step time of each variant as a multiple of the floor."""
    from cs_systems.report.figures.drawing import COLORS, one_panel

    drawn, axes = one_panel(4.2)
    measured = {r["variant"] for r in rows}
    names = [name for name in ("llama compiled", "llama cudagraphs", *GROUPS["cumulative"]) if name in measured]
    for (size, context), color in zip(CELLS, COLORS, strict=False):
        of_cell = {
            r["variant"]: r["wall_s"] / r["floor_s"] for r in rows if (r["size"], r["context"]) == (size, context)
        }
        marker = "o" if context == 512 else "s"
        for group, style in ((names[:2], ""), (names[2:], "-" if context == 512 else "--")):
            at = [n for n, name in enumerate(names) if name in group and name in of_cell]
            label = f"{size}, {context}" if style else None
            axes.plot(at, [of_cell[names[n]] for n in at], style, marker=marker, color=color, label=label)
    axes.set_yscale("log")
    axes.set_yticks([1, 1.25, 2, 4, 8], ["1", "1.25", "2", "4", "8"])
    axes.minorticks_off()
    axes.set_ylabel("step time / floor")
    axes.set_xticks(range(len(names)), [NAMES[name] for name in names], rotation=25, ha="right")
    axes.legend(title="size, context", ncols=2, frameon=False)
    axes.grid(axis="y")
    return drawn
