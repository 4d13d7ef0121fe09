"""Page of the benchmark training_step: answer, figure and tables from its committed rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from training_step import BY_CUBLASLT, FAST, NEEDS, PEERS, POINTWISE, SWITCHES

from cs_systems.report.figures import plot
from cs_systems.report.figures.drawing import COLORS, one_panel

Rows = Mapping[tuple[str, int, str], dict[str, Any]]
"""(size, context, variant) → row, of one run a cell."""

GOAL = 1.3  # times as fast as the best Llama in bf16
SIZES = ("small", "medium", "large", "2.7B")
CELLS = tuple((size, context) for context in (512, 2048) for size in SIZES)
ALL = "fast"
BEFORE, OLD = "up to: update_in_backward", "up to: fused_embedding_gradient"  # without and with the Triton kernels
WITHOUT_EMBEDDING, UPDATE_ONLY = "up to: fused_rotary", "up to: fused_weight_update"
STATE, LOW, LOWEST = "up to: bf16 state", "fast in fp8", "up to: fp8_linear"
NAMES = {
    "llama compiled": "Llama, compiled",
    "llama cudagraphs": "Llama, reduce-overhead",
    "llama liger": "Llama with Liger",
    "llama liger compiled": "Llama with Liger, compiled",
    "llama torchao fp8": "Llama with torchao, linear layers in fp8",
    BEFORE: "without the fused kernels",
    WITHOUT_EMBEDDING: "without the embedding's kernel",
    OLD: "fast before the fused products",
    ALL: "fast",
    BY_CUBLASLT: "fast, products by cublasLt",
    STATE: "fast, moments in bf16",
    LOW: "fast, linear layers in fp8",
    LOWEST: "fast, both",
}
OTHERS = ("llama liger", "llama liger compiled", "llama torchao fp8")
IN_BF16 = tuple(name for name in PEERS if name != "llama torchao fp8")
SWITCH_NAMES = {"compiled": "blocks compiled"} | {f"up to: {name}": f"+ {name.replace('_', ' ')}" for name in SWITCHES}
SWITCH_NAMES["up to: master"] = "+ master weights"
FUSED = (*POINTWISE,)
TABLE = (
    "| step | ms | p10–p90 | gain | predicted | host, ms | floor, ms | MFU | peak |",
    "| :--- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
)
INTRODUCTION = (
    "One H200, torch 2.11, batch 4, vocabulary 10,000, AdamW; both sides of a comparison in one run. Llama is "
    "transformers' LlamaForCausalLM of the same shape: SDPA, bf16 autocast, torch.compile, fused AdamW, and CUDA "
    "graphs (reduce-overhead) for small and medium; with Liger it has Liger's norms, SwiGLU, rotation and fused loss. "
    "*Floor*: model FLOPs at the measured rate of a large bf16 product plus 28 "
    "bytes for each parameter at the measured rate of a copy; a step in fp8 can pass it. *MFU*: of 989 TFLOP/s, "
    "bf16's, for all. *Fast before the fused products* has update_in_backward and fused_swiglu in place of "
    "fused_weight_update and fused_feed_forward. *Host*: time to submit the step; where it is near the step, the GPU "
    "waits for launches. *Gain*: over the row "
    "above, ms. *Predicted*: from the bytes that a switch no longer moves; for the update in backward the whole "
    "update, which is a limit; for a fused kernel its bytes at an expected 4.0 TB/s against those of Inductor's "
    "kernels at 2.6."
)
EQUALITY = (
    "200 steps of small on one H200: with one seed the loss curves of fast and eager are 0.0006 apart, where those of "
    "two seeds are 0.0047 apart ([curves](curves_h200/curves.svg), `scripts/benchmarks/recipe_curves.py`). Moments in "
    "bf16 and fp8 are in no recipe: compare their curves on your data first.\n\n"
    "All cells but small at 512 are of one run; small at 512 is of an earlier one. Between them backward of SwiGLU "
    "inside its product became 0 to 10% faster, which is 3 to 4 µs a block at 512. 8B at 32,768 tokens on "
    "two GPUs is in [long_context](../long_context/table.md)."
)
REMARKS = (
    "- The fused products gain 4 to 6% of the step at context 2048 and 7 to 12% at 512 (rows of one run above). The "
    "update inside the products of the weights' gradients has most of it: those bytes, 26 for each element and two "
    "more to write the gradient, move while the tensor cores compute, and several weights, or blocks, share a launch "
    "whose last wave is full. SwiGLU inside the products around it gains 2 to 3% for small, medium and large at 2048, "
    "and less than the spread for 2.7B and at 512. Alone they are in "
    "[part_kernels](../part_kernels/products_h200.txt).",
    "- What binds the fused update is probably the power of the board: the kernel alone, called again and again, takes "
    "1.03 to 1.09 ms for a block of 2.7B and 2048 tokens, whatever is loaded ahead and however the products share "
    "operands, where one call at a higher clock took 0.94; by ncu its tensor cores were then busy half of the time, "
    "and memory moved 3.1 TB/s.",
    "- The goal of 1.3 is met for medium and large at 2048 with little to spare: 1.32 and 1.34 in this run, 1.30 and "
    "1.32, 1.295 and 1.28 in the two before. It is missed by 8% for 2.7B at 2048, and so are 65% of the peak: what "
    "binds there is the board's power. Sampled five times a second by nvidia-smi during the timed steps, Llama takes "
    "690 W of 700 at a clock of 1,613 MHz of 1,980, and fast 691 W at 1,485 MHz: what it does more in a second costs "
    "it a tenth of the clock. At 1,485 MHz the tensor cores' peak is 803 TFLOP/s, of which the whole step reaches 74%; "
    "in a profile of another run its products reached 672 TFLOP/s.",
    "- Fused kernels: 5% of the step at 2.7B and 2048, 4 to 11% elsewhere; each alone is in "
    "[part_kernels](../part_kernels/table.md). SwiGLU gains only on a joined product, whose gradients Inductor "
    "concatenates. At 2.7B and 2048 the rotation gains 9 ms where 1.4 were predicted: with joined projections it also "
    "writes the gradients of q, k and v into one tensor.",
    "- With the fused kernels joined projections gain 2% at 2.7B (311.6 against 318.5 ms); without them they lose.",
    "- fp8, without the fused products: 1.29 times as fast as fast at 2.7B and 2048, 1.08 times at 512, 1.11 times for "
    "large and 1.04 for medium at 2048. It is slower than fast for small, and for medium and large at 512, whose "
    "products are too small to pay for the quantization. Llama with torchao's fp8 (tensor-wise; the last layer in "
    "bf16, as here) takes "
    "1.25 times our time for 2.7B at 2048, and 1.47 times at 512. Our kernel ran alone at 3.4 of 4.3 TB/s; at 2.3 "
    "when it divided instead of multiplying by the inverse, with which the step of 2.7B took 243 ms.",
    "- Liger's kernels make this Llama slower than torch.compile does, at every size measured: each launch costs the "
    "host, and its backward of the norm runs at 1.3 TB/s where ours runs at 3.5 ([part_kernels]"
    "(../part_kernels/table.md)). Compiled as a whole, medium at 512, its fused loss failed in torch 2.11: "
    "`addmm` of fp32 and bf16.",
    "- Master weights gain more than predicted: parameters in bf16 also keep the residual stream in bf16, where "
    "autocast keeps it in fp32.",
    "- Fused cross-entropy: up to 0.4 GiB, and no time at a vocabulary of 10,000 (the logits are 1 to 2% of the bytes) "
    "when these rows were measured. Since then its kernel reads each row of logits once, 40 µs in place of 93 for "
    "2,048 rows, and backward multiplies in place: fast took 4.91 ms in place of 4.97 for small at 512, in two runs.",
    "- cublasLt in place of cuBLAS (`torch.backends.cuda.preferred_blas_library`): no gain, the medians differ by 0.7% "
    "at most, within the spread.",
    "- The update inside backward: nothing for small and large, whose update is 1 and 6 ms; 1 to 2% for 2.7B, of the "
    "25% that the update takes: the products leave the other kernel few free multiprocessors.",
    "- At context 2048 the products of 2.7B alone took 222 of 312 ms (770 TFLOP/s, their ceiling), the update 22 ms, "
    "and attention 35 ms when d_head 80 was computed as 128. Six of attention's seven products now take 80 columns: 7 "
    "to 10 ms less were predicted, and the step takes 308 ms in place of 316, in two runs.",
    "- The gradient of the embedding gains 0.08 ms for small at 512, where 0.07 were predicted, and less than the "
    "spread elsewhere. Alone it takes a third to a sixth of torch's time, and its sums have one order.",
    "- Llama's time at 512 depends on the host: large took 86 ms in the run of the table, and 50, 54, 68, 83 and 92 "
    "in others, beside 26 to 29 ms of fast.",
)


def write(folder: Path) -> None:
    """Write table.md and figure.svg of a folder from its JSON files."""
    names = ("h200", "products", "other_peers", "fused_kernels", "fused_kernels_2.7B", "embedding", "switches")
    step, *others = (read(folder / f"{name}.json") for name in names)
    (folder / "table.md").write_text(report(step, *others))
    plot.write(partial(drawing, step), folder / "figure.svg")


def read(file: Path) -> Rows:
    return {(row["size"], row["context"], row["variant"]): row for row in json.loads(file.read_text())}


def report(
    step: Rows, products: Rows, others: Rows, fused: Rows, fused_added: Rows, embedding: Rows, switches: Rows
) -> str:
    """Return the page.

    Args:
        step: rows of the recipe and its peers.
        products: rows of fast without and with fused_feed_forward.
        others: rows of more peers, measured before the fused products.
        fused: rows of the fused kernels at 512 and 2048, each left out of all switches.
        fused_added: rows of all switches, added up, at 2.7B and 2048.
        embedding: rows of fast without and with the kernel for the embedding's gradient.
        switches: rows of all other switches alone, added up and left out, measured before the fused kernels.
    """
    text = [
        *("# Training step beside the stock stack", "", answer(step), ""),
        *("![step time of each variant](figure.svg)", "", INTRODUCTION, "", EQUALITY),
    ]
    for size, context in CELLS:
        text += ["", f"## {size}, context {context}", "", *added(step, NAMES, size, context, with_gains=False)]
    text += ["", "## SwiGLU inside the products", ""]
    text += beside(products, {UPDATE_ONLY: "fast with fused_swiglu", ALL: "fast, with fused_feed_forward"})
    text += ["", "## Other peers, before the fused products"]
    before = NAMES | {OLD: "fast before the fused products"}
    for size, context in (cell for cell in CELLS if any((*cell, name) in others for name in OTHERS)):
        text += ["", f"### {size}, context {context}", "", *added(others, before, size, context, with_gains=False)]
    text += ["", "## All switches added up: 2.7B, context 2048", ""]
    with_peers = {name: NAMES[name] for name in PEERS} | SWITCH_NAMES
    text += added(fused_added, with_peers, "2.7B", 2048)
    text += ["", "## Fused kernels", "", *left_out(fused)]
    text += ["", "## Gradient of the embedding", ""]
    text += beside(embedding, {WITHOUT_EMBEDDING: "torch's gradient of the embedding", OLD: "fused"})
    text += ["", "## Other switches, before the fused kernels"]
    for size, context in (cell for cell in CELLS if (*cell, "compiled") in switches):
        text += ["", f"### {size}, context {context}", "", *added(switches, with_peers, size, context)]
    text += ["", "### Each alone, and left out", "", *each(switches)]
    return "\n".join([*text, "", "## What the figures say", "", *REMARKS, ""])


def answer(step: Rows) -> str:
    """Return the sentences that open the page."""

    def times(variant: str, size: str, context: int) -> float | None:
        row = step.get((size, context, variant))
        peer = min(r["wall_s"] for (s, c, v), r in step.items() if (s, c) == (size, context) and v in IN_BF16)
        return row and peer / row["wall_s"]

    def listed(variant: str, context: int) -> str:
        ratios = [(times(variant, size, context), size) for size in SIZES]
        return ", ".join(f"{ratio:.2f}× for {size}" for ratio, size in ratios if ratio)

    def mfu(variant: str, context: int) -> str:
        return f"{100 * step['2.7B', context, variant]['mfu']:.0f}%"

    met = [cell for cell in CELLS if (times(ALL, *cell) or 0) >= GOAL]
    return (
        "With exact master weights the step is faster than the best Llama in bf16 of the same run by "
        f"{listed(ALL, 512)} at context 512, and {listed(ALL, 2048)} at 2048. With the linear layers in fp8, which "
        f"changes the result, it is {listed(LOW, 2048)} at 2048. Model FLOPs utilisation of 2.7B: {mfu(ALL, 512)} and "
        f"{mfu(ALL, 2048)}; "
        f"with moments in bf16 {mfu(STATE, 512)} at 512; in fp8 {mfu(LOW, 512)} and {mfu(LOW, 2048)} of bf16's peak. "
        f"The goal of 1.3× is met without either in {listed_cells(met)}."
    )


def listed_cells(cells: Sequence[tuple[str, int]]) -> str:
    """Return cells as in "small, large at 512; small at 2048"."""
    of_context = {context: [size for size, of in cells if of == context] for context in (512, 2048)}
    return "; ".join(f"{', '.join(sizes)} at {context}" for context, sizes in of_context.items() if sizes)


def added(found: Rows, names: Mapping[str, str], size: str, context: int, *, with_gains: bool = True) -> Iterable[str]:
    """Yield the table of a cell; with gains, each row has that over the row above, and the prediction of it."""
    yield from (
        TABLE
        if with_gains
        else (line.replace(" gain | predicted |", "").replace(" ---: | ---: |", "", 1) for line in TABLE)
    )
    before = None
    for name, title in names.items():
        if (row := found.get((size, context, name))) is None:
            continue
        gain = "" if before is None or name in PEERS else f"{1e3 * (before - row['wall_s']):.2f}"
        guess = row["predicted_s"] if name.startswith("up to") else None
        gains = f"| {gain} | {'' if guess is None else f'{1e3 * guess:.2f}'} " if with_gains else ""
        middle, low, high = (f"{1e3 * row[f'wall_{what}s']:.2f}" for what in ("", "p10_", "p90_"))
        yield (
            f"| {title} | {middle} | {low}–{high} {gains}| {1e3 * row['submit_s']:.1f} | {1e3 * row['floor_s']:.1f} "
            f"| {100 * row['mfu']:.1f}% | {row['peak_bytes'] / 2**30:.1f} GiB |"
        )
        before = None if name in PEERS else row["wall_s"]


def left_out(found: Rows) -> Iterable[str]:
    """Yield the table of the fused kernels: together, without joined projections, and each left out."""
    cells = [cell for cell in CELLS if (*cell, "fused") in found]
    yield "Milliseconds, in one run; each kernel is left out of all switches, moments in bf16 among them."
    yield ""
    yield f"| step | {' | '.join(f'{size}, {context}' for size, context in cells)} |"
    yield f"| :--- |{' ---: |' * len(cells)}"
    names = {BEFORE: NAMES[BEFORE], "fused": "fast", "fused, not joined": "fast without joined projections"}
    names |= {WITHOUT_EMBEDDING: "fast, moments in bf16"} | {f"without: {n}": f"the same without {n}" for n in FUSED}
    for name, title in names.items():
        rows = [found.get((*cell, name)) for cell in cells]
        times = ["" if row is None else f"{1e3 * row['wall_s']:.2f}" for row in rows]
        yield f"| {title} | {' | '.join(times)} |"


def beside(found: Rows, names: Mapping[str, str]) -> Iterable[str]:
    """Yield the table of some variants in all cells that have them."""
    cells = [cell for cell in CELLS if all((*cell, name) in found for name in names)]
    yield "Milliseconds, median and p10–p90, in one run; the other fused kernels are on."
    yield ""
    yield f"| step | {' | '.join(f'{size}, {context}' for size, context in cells)} |"
    yield f"| :--- |{' ---: |' * len(cells)}"
    for name, title in names.items():
        times = (tuple(1e3 * found[*cell, name][f"wall_{what}s"] for what in ("", "p10_", "p90_")) for cell in cells)
        yield f"| {title} | {' | '.join(f'{mid:.2f} ({low:.2f}–{high:.2f})' for mid, low, high in times)} |"


def each(found: Rows) -> Iterable[str]:
    """Yield the table of the switches alone, against the compiled blocks, and left out of all but bf16 state."""
    yield "Milliseconds at context 512; in brackets against the compiled blocks, and against all but bf16 state."
    yield ""
    yield "| switch | small, alone | small, left out | 2.7B, alone | 2.7B, left out |"
    yield "| :--- | ---: | ---: | ---: | ---: |"
    for name in (name for name in FAST if ("small", 512, f"alone: {name}") in found or name in NEEDS):
        cells = [
            changed(found.get((size, 512, f"{how}: {name}")), found[size, 512, beside])
            for size in ("small", "2.7B")
            for how, beside in (("alone", "compiled"), ("without", BEFORE))
        ]
        yield f"| {name.replace('_', ' ')} | {' | '.join(cells)} |"


def changed(row: Mapping[str, Any] | None, beside: Mapping[str, Any]) -> str:
    return f"{1e3 * row['wall_s']:.2f} ({row['wall_s'] / beside['wall_s'] - 1:+.1%})" if row else ""


def drawing(step: Rows) -> Any:
    """Return the figure: step time of each variant as a multiple of the floor."""
    drawn, axes = one_panel(4.2)
    names: Sequence[str] = [name for name in NAMES if any(variant == name for _, _, variant in step)]
    for (size, context), color in zip(CELLS, COLORS, strict=False):
        of_cell = {name: step[size, context, name] for name in names if (size, context, name) in step}
        marker = "o" if context == 512 else "s"
        for is_peer, style in ((True, "none"), (False, "-" if context == 512 else "--")):
            at = [n for n, name in enumerate(names) if (name in PEERS) == is_peer and name in of_cell]
            label = None if is_peer else f"{size}, {context}"
            ratios = [of_cell[names[n]]["wall_s"] / of_cell[names[n]]["floor_s"] for n in at]
            axes.plot(at, ratios, linestyle=style, marker=marker, color=color, label=label)
    axes.set_yscale("log")
    axes.set_yticks(ticks := [1, 1.25, 1.5, 2, 3, 4, 6, 10], [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylabel("step time / floor in bf16")
    axes.set_xticks(range(len(names)), [NAMES[name] for name in names], rotation=25, ha="right")
    axes.legend(title="size, context", ncols=2, frameon=False)
    axes.grid(axis="y")
    return drawn
