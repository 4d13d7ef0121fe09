"""Page of the benchmark training_step: answer, figure and tables from its committed rows.

python3 scripts/benchmarks/training_step_page.py profiles/training_step
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from _training_step_ablation import ABLATION, ALL, LOW, of_cell, powers, switches, written
from _training_step_ablation import drawing as gains_drawing
from training_step import BY_CUBLASLT, PEERS

from cs_systems.report.figures import plot
from cs_systems.report.figures.drawing import COLORS, one_panel

Rows = Mapping[tuple[str, int, str], dict[str, Any]]
"""(size, context, variant) → row, of one run a cell."""

GOAL = 1.3  # times as fast as the best Llama in bf16
SIZES = ("small", "medium", "large", "2.7B")
CELLS = tuple((size, context) for context in (512, 2048) for size in SIZES)
BEFORE, OLD = "up to: update_in_backward", "up to: fused_embedding_gradient"  # without and with the Triton kernels
STATE, UPDATE_ONLY = "up to: bf16 state", "up to: fused_weight_update"
NAMES = {
    "llama compiled": "Llama, compiled",
    "llama cudagraphs": "Llama, reduce-overhead",
    "llama liger": "Llama with Liger",
    "llama liger compiled": "Llama with Liger, compiled",
    "llama torchao fp8": "Llama with torchao, linear layers in fp8",
    BEFORE: "without the fused kernels",
    "up to: fused_rotary": "without the embedding's kernel",
    OLD: "fast before the fused products",
    ALL: "fast",
    BY_CUBLASLT: "fast, products by cublasLt",
    STATE: "fast, moments in bf16",
    LOW: "fast, linear layers in fp8",
}
OTHERS = ("llama liger", "llama liger compiled", "llama torchao fp8")
IN_BF16 = tuple(name for name in PEERS if name != "llama torchao fp8")
TABLE = (
    "| step | ms | p10–p90 | host, ms | floor, ms | MFU | peak |",
    "| :--- | ---: | ---: | ---: | ---: | ---: | ---: |",
)
INTRODUCTION = (
    "One H200, torch 2.11, batch 4, vocabulary 10,000, AdamW; both sides of a comparison in one run. Llama is "
    "transformers' LlamaForCausalLM of the same shape: SDPA, bf16 autocast, torch.compile, fused AdamW, and CUDA "
    "graphs (reduce-overhead) for small and medium; with Liger it has Liger's norms, SwiGLU, rotation and fused loss. "
    "*Floor*: model FLOPs at the measured rate of a large bf16 product plus 28 "
    "bytes for each parameter at the measured rate of a copy; a step in fp8 can pass it. *MFU*: of 989 TFLOP/s, "
    "bf16's, for all. *Fast before the fused products* has update_in_backward and fused_swiglu in place of "
    "fused_weight_update and fused_feed_forward. *Host*: time to submit the step; where it is near the step, the GPU "
    "waits for launches."
)
EQUALITY = (
    "200 steps of small on one H200: with one seed the loss curves of fast and eager are 0.0006 apart, where those of "
    "two seeds are 0.0047 apart ([curves](curves_h200/curves.svg), a dated result). Moments in "
    "bf16 and fp8 are in no recipe: compare their curves on your data first.\n\n"
    "All cells but small at 512 are of one run; small at 512 is of an earlier one. Between them backward of SwiGLU "
    "inside its product became 0 to 10% faster, which is 3 to 4 µs a block at 512. 8B at 32,768 tokens on "
    "two GPUs is in [long_context](../long_context/table.md)."
)
AGAIN = (
    "The same benchmark with the present kernels, in one run on one H100; fp8 of 2.7B at 2048 is of a second run. It "
    "computes as an H200 does, but its memory moves 3.0 TB/s instead of 4.3, so the optimizer's bytes take longer. "
    "*Of floor*: fast beside the floor at the rates of this card, 766 TFLOP/s and 3.0 TB/s.",
)
REMARKS = (
    "- The fused products gain 4 to 6% of the step at context 2048 and 7 to 12% at 512 (rows of one run above). The "
    "update inside the products of the weights' gradients has most of it: those bytes, 26 for each element and two "
    "more to write the gradient, move while the tensor cores compute, and several weights, or blocks, share a launch "
    "whose last wave is full. SwiGLU inside the products around it gains 2 to 3% for small, medium and large at 2048, "
    "and less than the spread for 2.7B and at 512. Alone they are in "
    "[part_kernels](../part_kernels/products_h200.txt), and what each kernel of the step takes is in "
    "[kernels](kernels.md).",
    "- What binds the fused update is memory at 512 tokens a sequence: on an H100 its bytes alone, without a product, "
    "move at 2.7 TB/s, and the kernel takes 11 to 24% longer than all of its bytes would at that rate "
    "([record](../part_kernels/products_h100.txt)); by ncu DRAM is used to 72–76% and L2 to 72–78%, the tensor cores "
    "to 34–37%. At 2048 the tensor cores are at 71–73% and L2 at 76–82%. On an H200 the kernel alone, called again "
    "and again, takes 1.03 to 1.09 ms for a block of 2.7B and 2048 tokens, where one call at a higher clock took 0.94.",
    "- The second goal, 1.25 times the floor, is missed by small at 512 (1.46 on the H200, 1.48 on the H100), by "
    "medium at 512 on the H200 (1.28; 1.24 on the H100), and by small, medium and large at 2048 (1.47, 1.35 and "
    "1.30; 1.44, 1.32 and 1.28). At 2048 attention is most of the distance: at the floor's rate of products it would "
    "take 1.2, 3.2 and 6.1 ms of the H100's steps, and it takes 3.0, 8.6 and 17.3, which is ahead of "
    "FlashAttention-4 and cuDNN in every row ([attention](../attention_h100/peers/table.md)). Beside a floor with "
    "its true time, small would be at 1.23, medium at 1.14 and large at 1.12. Its kernels use SM to 47% and L2 to "
    "60–66%.",
    "- Small at 512 takes 1.5 ms more than its floor of 3.2: products and SwiGLU 0.7, attention 0.5, norms and "
    "rotation 0.5, the rest 0.2; the update takes 0.25 less, because the floor adds it to its product. The products "
    "fill the 132 multiprocessors with one small tile each; such tiles take more operands from L2 (61%), and the "
    "tensor cores are used to 57%. The fastest algorithms of cublasLt would save 1% of the step; launches that "
    "overlap, and Triton's products, save nothing. Attention's backward has 192 blocks, so that latencies count: SM "
    "19%, L2 48%, DRAM 25%. The board is at its power limit even so, 692 W at 1,875 MHz.",
    "- The goal of 1.3 is met for medium and large at 2048 with little to spare: 1.32 and 1.34 in this run, 1.30 and "
    "1.32, 1.295 and 1.28 in the two before. It is missed by 8% for 2.7B at 2048, and so are 65% of the peak: what "
    "binds there is the board's power. Fast takes 694 W of 700 at a clock of 1,440 MHz of 1,980, where the tensor "
    "cores' peak is 779 TFLOP/s and the whole step reaches 76% of it; Llama takes 689 W at 1,560 MHz and reaches 58%. "
    "So whatever saves time elsewhere gives part of it back in the products.",
    "- No other algorithm for the products changes that. Back to back at the limit, the products of 32 blocks of 2.7B "
    "take 246 ms on an H200 by torch ([record](product_power_h200.txt)) and 244 on an H100 ([kernels](kernels.md)). "
    "The fastest of some 50 algorithms and clusters for each take 240 there, most at 91 to 96% of the tensor cores' "
    "peak at their clock. The H200's 246 ms and attention alone, 32 × 0.77 ms "
    "([attention](../attention_h200/peers/table.md)), are 271 ms; the goal is 269 for the whole step. The floor in the "
    "tables has the rate of products before the clock falls, 790 TFLOP/s. With the 669 that they keep at the limit it "
    "is 283 ms, which fast exceeds by 3%.",
    "- fast is at the limit in every cell, small too: it takes 691 to 694 W where the compiled Llama of the same cell "
    "takes 337 to 690.",
    "- Predicted well: the graph where the step waits for its host (13.5 ms predicted and 14.3 gained for small at "
    "512, 33.4 and 35.8 for large), the norm (4.6 ms, and 5.1 to 5.7 gained, for 2.7B at 2048), SwiGLU alone (7.9 and "
    "6.5), attention for 2.7B at 2048 (26.2, and 22.4 to 23.4 gained), and that the loss and the embedding's gradient "
    "gain less than the spread.",
    "- Predicted too low: master weights, 11 ms and 17 gained for 2.7B at 2048, because parameters in bf16 also keep "
    "the residual stream in bf16; the rotation, 1.5 ms and 4.4 to 7.4, because with joined projections it also "
    "writes the gradients of q, k and v into one tensor, which is a copy otherwise.",
    "- Predicted too high: updates in backward and inside products, whose limit is 21 to 22 ms for 2.7B and which "
    "gain 7 at 512 and 12 at 2048 together, because their bytes move at the cost of the products beside them; SwiGLU "
    "inside the products, 10.7 ms and 3.3 for 2.7B at 2048; attention for large at 2048, 20 and 11; fp8, 86 ms and 65 "
    "to 72 for 2.7B at 2048, 20 and 9 for large, 19 and 5 for 2.7B at 512, and a loss for small and for large at 512, "
    "whose products are too small to pay for the quantization.",
    "- Alone and without a graph, a part of small or large at 512 changes mostly the host's time, and many make the "
    "step slower. joined_projections loses at 2.7B and 2048 before the fused kernels (−2.9 ms) and gains beside them "
    "(1.1 lost without it); fused_rmsnorm alone loses 2 to 4 ms where the GPU binds, probably because Inductor then "
    "casts the residual in kernels of their own.",
    "- In fp8 Llama with torchao (tensor-wise; the last layer in bf16, as here) takes 1.25 times our time for 2.7B at "
    "2048, and 1.47 times at 512, on an H200 before the fused products. Our quantizing kernel ran alone at 3.4 of 4.3 "
    "TB/s there; at 2.3 when it divided instead of multiplying by the inverse, with which the step of 2.7B took 243 "
    "ms.",
    "- Liger's kernels make this Llama slower than torch.compile does, at every size measured: each launch costs the "
    "host, and its backward of the norm runs at 1.3 TB/s where ours runs at 3.5 "
    "([part_kernels](../part_kernels/table.md)). Compiled as a whole, medium at 512, its fused loss failed in torch "
    "2.11: `addmm` of fp32 and bf16.",
    "- cublasLt in place of cuBLAS (`torch.backends.cuda.preferred_blas_library`): no gain, the medians differ by "
    "0.7% at most, within the spread.",
    "- Kernels of a step of 2.7B at 2048, uncaptured, on the H100 ([tables](kernels_2.7B_2048_h100.txt)): products "
    "252 of 298 ms, attention 33, norms 7, the rest 6; the GPU is busy 98.8% of the time.",
    "- Llama's time at 512 depends on the host: large took 86 ms in the run of the first tables, and 50, 54, 61, 68, "
    "74, 83, 92 and 101 in others, beside 26 to 29 ms of fast.",
)


def write(folder: Path) -> None:
    """Write table.md and figure.svg of a folder from its JSON files."""
    names = ("h200", "h100", "products", "other_peers")
    step, again, fused, others = (read(folder / f"{name}.json") for name in names)
    ablation = json.loads((folder / "ablation.json").read_text())
    (folder / "table.md").write_text(report(step, again, fused, others, ablation))
    plot.write(partial(drawing, step), folder / "figure.svg")
    plot.write(partial(gains_drawing, ablation), folder / "gains.svg")


def read(file: Path) -> Rows:
    return {(row["size"], row["context"], row["variant"]): row for row in json.loads(file.read_text())}


def report(step: Rows, again: Rows, fused: Rows, others: Rows, ablation: Sequence[dict[str, Any]]) -> str:
    """Return the page.

    Args:
        step: rows of the recipe and its peers.
        again: rows of the same with later code, on another device.
        fused: rows of fast without and with fused_feed_forward.
        others: rows of more peers, measured before the fused products.
        ablation: rows of each switch alone, added up and left out; `run` tells the runs of a cell apart.
    """
    text = [
        *("# Training step beside the stock stack", "", answer(step), ""),
        *("![step time of each variant](figure.svg)", "", INTRODUCTION, "", EQUALITY),
    ]
    for size, context in CELLS:
        text += ["", f"## {size}, context {context}", "", *steps(step, NAMES, size, context)]
    text += ["", "## Later code, on one H100", "", *AGAIN, "", *compared(again)]
    text += ["", "## Each switch alone, added up and left out", "", "![what each switch gains](gains.svg)"]
    text += [line for paragraph in ABLATION for line in ("", paragraph)]
    for cell in (cell for cell in CELLS if of_cell(ablation, cell)):
        text += ["", f"### {cell[0]}, context {cell[1]}", "", *switches(of_cell(ablation, cell))]
    text += ["", "## What lowers the clock", "", *powers(ablation, NAMES)]
    text += ["", "## SwiGLU inside the products", ""]
    text += beside(fused, {UPDATE_ONLY: "fast with fused_swiglu", ALL: "fast, with fused_feed_forward"})
    text += ["", "## Other peers, before the fused products"]
    before = NAMES | {OLD: "fast before the fused products"}
    for size, context in (cell for cell in CELLS if any((*cell, name) in others for name in OTHERS)):
        text += ["", f"### {size}, context {context}", "", *steps(others, before, size, context)]
    return "\n".join([*text, "", "## What the figures say", "", *REMARKS, ""])


def answer(step: Rows) -> str:
    """Return the sentences that open the page."""

    def times(variant: str, size: str, context: int) -> float | None:
        row = step.get((size, context, variant))
        return row and peer_s(step, size, context) / row["wall_s"]

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


def peer_s(found: Rows, size: str, context: int) -> float:
    """Return the time of the fastest Llama in bf16 of a cell."""
    return float(min(r["wall_s"] for (s, c, v), r in found.items() if (s, c) == (size, context) and v in IN_BF16))


def listed_cells(cells: Sequence[tuple[str, int]]) -> str:
    """Return cells as in "small, large at 512; small at 2048"."""
    of_context = {context: [size for size, of in cells if of == context] for context in (512, 2048)}
    return "; ".join(f"{', '.join(sizes)} at {context}" for context, sizes in of_context.items() if sizes)


def steps(found: Rows, names: Mapping[str, str], size: str, context: int) -> Iterable[str]:
    """Yield the table of a cell, with a row per variant."""
    yield from TABLE
    for name, title in names.items():
        if row := found.get((size, context, name)):
            low, high = (f"{1e3 * row[f'wall_{what}_s']:.2f}" for what in ("p10", "p90"))
            yield (
                f"| {title} | {1e3 * row['wall_s']:.2f} | {low}–{high} | {1e3 * row['submit_s']:.1f} "
                f"| {1e3 * row['floor_s']:.1f} | {100 * row['mfu']:.1f}% | {row['peak_bytes'] / 2**30:.1f} GiB |"
            )


def compared(found: Rows) -> Iterable[str]:
    """Yield the table of fast and of variants that change its result, against the fastest Llama, a row per cell."""
    yield (
        "| size, context | Llama, ms | fast, ms | p10–p90 | times as fast | of floor | MFU | moments in bf16, ms "
        "| fp8, ms |"
    )
    yield f"| :--- |{' ---: |' * 8}"
    for size, context in CELLS:
        fast, peer = found[size, context, ALL], peer_s(found, size, context)
        inexact = [found.get((size, context, name)) for name in (STATE, LOW)]
        values = (
            *(f"{size}, {context}", f"{1e3 * peer:.2f}", f"{1e3 * fast['wall_s']:.2f}"),
            f"{1e3 * fast['wall_p10_s']:.2f}–{1e3 * fast['wall_p90_s']:.2f}",
            *(f"{peer / fast['wall_s']:.2f}", f"{fast['wall_s'] / fast['floor_s']:.2f}", f"{100 * fast['mfu']:.1f}%"),
            *(f"{1e3 * row['wall_s']:.2f}" if row else "–" for row in inexact),
        )
        yield f"| {' | '.join(values)} |"


def beside(found: Rows, names: Mapping[str, str]) -> Iterable[str]:
    """Yield the table of some variants in all cells that include them."""
    cells = [cell for cell in CELLS if all((*cell, name) in found for name in names)]
    yield "Milliseconds, median and p10–p90, in one run; the other fused kernels are on."
    yield ""
    yield f"| step | {' | '.join(f'{size}, {context}' for size, context in cells)} |"
    yield f"| :--- |{' ---: |' * len(cells)}"
    for name, title in names.items():
        yield f"| {title} | {' | '.join(written(found[*cell, name]) for cell in cells)} |"


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


if __name__ == "__main__":
    write(Path(sys.argv[1]))
