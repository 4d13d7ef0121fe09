"""Kernels of the training step's parts alone, beside the compiled plain modules and Liger's kernels, on one GPU.

    python3 scripts/benchmarks/part_kernels.py --out runs/part_kernels

Question: at which share of the memory's rate does each kernel run, and is it faster than what torch.compile makes of
the plain module, or torch itself where the compiled step leaves the module alone? Method: forward and backward through
autograd, in bfloat16, at batch 4. A sample is a row of calls on different tensors, so that the L2 cache holds none of
them, with the launches hidden. The implementations are compiled first and then measured in rounds, one after the other.
Bytes are those that the function needs at least: each input read once, each output written once. Output: a page with
medians and the middle 80%, and with --out also table.md and rows.json there; --page writes the page again from the
rows. What cannot run says why. It takes about half a minute.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn

from cs_systems.config import ModelConfig, preset
from cs_systems.machine.device import Device, resolve
from cs_systems.model import RMSNorm, RotaryEmbedding
from cs_systems.report.tables.rows import render_rows
from cs_systems.runtime.timing import measure
from cs_systems.training.parts import fused_embedding_gradient, fused_rmsnorm, fused_rotary, fused_swiglu
from cs_systems.workloads import CallableWorkload

BATCH, EPS = 4, 1e-5
ROUNDS, SAMPLES, WARMUP = 4, 5, 2
SAMPLE_BYTES = 512 << 20  # that the calls of a sample move at least: ten times the L2 cache
MOST_CALLS = 32
PASSES = ("forward", "backward")
PEERS = {"compiled": "the compiled plain modules", "eager": "torch's own for the embedding", "liger": "Liger's"}

Function = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One function of a part.

    Attributes:
        shapes: (model, tokens) → shapes of the tensors that have gradients.
        plain: model → the function by the plain modules, which is compiled.
        ours: model → the function by our kernels.
        liger: model → the same by Liger's; raises ImportError without it. None: Liger has no such kernel.
        moved: pass → elements moved for each token and unit of `width`.
        width: field of the model, d_model or d_ff.
        of_vocabulary: pass → elements moved for each row of the vocabulary and unit of `width`.
        has_eager: measure the plain function also as torch runs it, which the step does outside of its blocks.
    """

    shapes: Callable[[ModelConfig, int], list[tuple[int, ...]]]
    plain: Callable[[ModelConfig], Function]
    ours: Callable[[ModelConfig], Function]
    liger: Callable[[ModelConfig], Function] | None
    moved: dict[str, int]
    width: str = "d_model"
    of_vocabulary: dict[str, int] = field(default_factory=dict)
    has_eager: bool = False

    def bytes_of(self, kind: str, model: ModelConfig, tokens: int) -> int:
        """Return the bytes in bfloat16 that a pass needs at least."""
        elements = self.moved[kind] * BATCH * tokens + self.of_vocabulary.get(kind, 0) * model.vocab_size
        return 2 * elements * int(getattr(model, self.width))


def gated(gate: Tensor, value: Tensor) -> Tensor:
    return nn.functional.silu(gate) * value


def plain_norm(model: ModelConfig) -> Function:
    norm = RMSNorm(model.d_model, EPS)
    return lambda x, weight: (x, torch.func.functional_call(norm, {"weight": weight}, (x,)))


def plain_add_norm(model: ModelConfig) -> Function:
    norm = plain_norm(model)
    return lambda x, added, weight: norm(x + added, weight)


def rope_of(model: ModelConfig) -> RotaryEmbedding:
    return RotaryEmbedding(model.d_head, model.context_length, model.rope_theta)


def plain_rotation(model: ModelConfig) -> Function:
    rope = rope_of(model)
    return lambda q, k: (rope(q.transpose(1, 2)), rope(k.transpose(1, 2)))


def our_rotation(model: ModelConfig) -> Function:
    rope = rope_of(model)
    return lambda q, k: fused_rotary.Rotated.apply(q.transpose(1, 2), k.transpose(1, 2), rope.cos, rope.sin)


def liger_gated(model: ModelConfig) -> Function:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply  # type: ignore[no-any-return]


def liger_norm(model: ModelConfig) -> Function:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return lambda x, weight: (x, LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False))


def liger_add_norm(model: ModelConfig) -> Function:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    # It returns the normalized rows first.
    return lambda x, added, weight: LigerFusedAddRMSNormFunction.apply(x, added, weight, EPS, 0.0, "llama", False)[::-1]


def token_ids(model: ModelConfig) -> Tensor:
    """Return the same random token ids for every implementation."""
    random, shape = torch.Generator().manual_seed(0), (BATCH, model.context_length)
    return torch.randint(model.vocab_size, shape, generator=random, device="cpu").to(torch.get_default_device())


def plain_embedding(model: ModelConfig) -> Function:
    ids = token_ids(model)
    return lambda table: nn.functional.embedding(ids, table)


def our_embedding(model: ModelConfig) -> Function:
    ids = token_ids(model)
    return lambda table: fused_embedding_gradient.Lookup.apply(ids, table)


def liger_embedding(model: ModelConfig) -> Function:
    from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction

    ids = token_ids(model)
    return lambda table: LigerEmbeddingFunction.apply(table, ids)


CASES = {
    "swiglu": Case(
        lambda m, s: [(BATCH, s, m.d_ff)] * 2, lambda m: gated, lambda m: fused_swiglu.Gated.apply, liger_gated,
        {"forward": 3, "backward": 5}, "d_ff",
    ),
    "swiglu, joined": Case(
        lambda m, s: [(BATCH, s, 2 * m.d_ff)], lambda m: lambda y: gated(*y.chunk(2, -1)),
        lambda m: fused_swiglu.JoinedGated.apply, None, {"forward": 3, "backward": 5}, "d_ff",
    ),
    "norm": Case(
        lambda m, s: [(BATCH, s, m.d_model), (m.d_model,)], plain_norm,
        lambda m: lambda x, w: fused_rmsnorm.PassedNorm.apply(x, w, EPS), liger_norm,
        {"forward": 2, "backward": 4},
    ),
    "addition and norm": Case(
        lambda m, s: [(BATCH, s, m.d_model)] * 2 + [(m.d_model,)], plain_add_norm,
        lambda m: lambda x, a, w: fused_rmsnorm.AddNorm.apply(x, a, w, EPS), liger_add_norm,
        {"forward": 4, "backward": 4},
    ),
    "rotation": Case(
        lambda m, s: [(BATCH, s, m.num_heads, m.d_head)] * 2, plain_rotation, our_rotation, None,
        {"forward": 4, "backward": 4},
    ),
    "embedding": Case(
        lambda m, s: [(m.vocab_size, m.d_model)], plain_embedding, our_embedding, liger_embedding,
        {"forward": 2, "backward": 1}, of_vocabulary={"backward": 1}, has_eager=True,
    ),
}  # fmt: skip


class Calls(CallableWorkload):
    """Calls of one pass on different tensors, one after the other."""

    hides_launches = True

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        super().__init__(self._run)
        self.calls = calls

    def _run(self) -> None:
        for call in self.calls:
            call()


def passes_of(function: Function, shapes: Sequence[tuple[int, ...]], count: int, device: Device) -> dict[str, Calls]:
    """Return the calls of both passes, compiled, on `count` sets of tensors."""
    forward, backward = [], []
    for _ in range(count):
        inputs = [torch.randn(shape, device=device.torch, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
        outputs = function(*inputs)
        outputs = [outputs] if isinstance(outputs, Tensor) else [*outputs]
        upstream = [torch.randn_like(y) for y in outputs]
        forward.append(lambda inputs=inputs: function(*inputs))
        backward.append(
            lambda outputs=outputs, inputs=inputs, upstream=upstream: torch.autograd.grad(
                outputs, inputs, upstream, retain_graph=True
            )
        )
    found = {"forward": Calls(forward), "backward": Calls(backward)}
    for calls in found.values():
        calls.calls[0]()
    return found


def implementations(case: Case, model: ModelConfig) -> Iterator[tuple[str, Callable[[], Function]]]:
    yield "ours", lambda: case.ours(model)
    yield "compiled", lambda: torch.compile(case.plain(model), dynamic=False)
    if case.has_eager:
        yield "eager", lambda: case.plain(model)
    if (liger := case.liger) is not None:
        yield "liger", lambda: liger(model)


def rows_of(name: str, model: ModelConfig, tokens: int, device: Device) -> list[dict[str, Any]]:
    """Return a row for each implementation and pass of a case, measured in rounds."""
    torch._dynamo.reset()
    case = CASES[name]
    shapes = case.shapes(model, tokens)
    moved = {kind: case.bytes_of(kind, model, tokens) for kind in PASSES}
    count = max(2, min(MOST_CALLS, -(-SAMPLE_BYTES // moved["forward"])))
    head = {"case": name, "size": model.name, "context": tokens}
    rows, found = [], {}
    for label, make in implementations(case, model):
        try:
            with device.torch:
                function = make()
            found[label] = passes_of(function, shapes, count, device)
        except Exception as error:  # a peer's failure must not cost the other rows
            rows.append(head | {"implementation": label, "reason": f"{type(error).__name__}: {str(error)[:200]}"})
    times: dict[tuple[str, str], list[float]] = {(label, kind): [] for label in found for kind in PASSES}
    for _ in range(ROUNDS):
        for label, kind in times:
            for sample in measure(found[label][kind], device, warmup=WARMUP, steps=SAMPLES):
                if not sample.warmup:
                    times[label, kind].append(sample.phases_s["call"] / count)
    for (label, kind), seconds in times.items():
        tenths = quantiles(seconds, n=10)
        spread = {"median_s": median(seconds), "p10_s": tenths[0], "p90_s": tenths[-1]}
        row = head | {"implementation": label, "pass": kind, **spread, "bytes": moved[kind], "calls": count}
        rows.append(row | {"bytes_per_s": moved[kind] / median(seconds)})
    return rows


def page(rows: Sequence[dict[str, Any]], machine: str) -> str:
    """Return the page: the answer, what was measured, and the table."""
    measured = [r for r in rows if "reason" not in r]
    medians = {(_cell(r), r["implementation"]): r["median_s"] for r in measured}
    shown = []
    for r in measured:
        beside = medians.get((_cell(r), "compiled"))
        shown.append(
            {name: str(r[name]) for name in ("case", "size", "context", "pass", "implementation")}
            | {"us": f"{1e6 * r['median_s']:.1f}", "spread": f"{1e6 * r['p10_s']:.1f}–{1e6 * r['p90_s']:.1f}"}
            | {"mb": f"{r['bytes'] / 1e6:.1f}", "rate": f"{r['bytes_per_s'] / 1e12:.2f}"}
            | {"ratio": f"{beside / r['median_s']:.2f}×" if beside else "–"}
        )
    caption = f"{machine}, bf16, batch {BATCH}; MB: each input read once, each output written once"
    titles = {"us": "µs", "spread": "p10–p90", "mb": "MB", "rate": "TB/s", "ratio": "over compiled"}
    notes = dict.fromkeys(
        f"{r['implementation']}, {r['case']}, {r['size']}: {r['reason']}" for r in rows if "reason" in r
    )
    answers = [
        f"Beside {name} our kernels are {_speed_ups(medians, peer)}."
        for peer, name in PEERS.items()
        if any(implementation == peer for _, implementation in medians)
    ]
    return "\n\n".join(
        [
            "# Kernels of the training step's parts alone",
            " ".join(answers),
            "    python3 scripts/benchmarks/part_kernels.py --out runs/part_kernels",
            render_rows(shown, "markdown", caption, [*notes], titles=titles).strip() + "\n",
        ]
    )


def _cell(row: dict[str, Any]) -> tuple[str, str, int, str]:
    return row["case"], row["size"], row["context"], row["pass"]


def _speed_ups(medians: Mapping[tuple[tuple[str, str, int, str], str], float], peer: str) -> str:
    """Return the range of our speed-ups over a peer in each pass, over the cells in which both were measured."""
    ratios: dict[str, list[float]] = {kind: [] for kind in PASSES}
    for (cell, implementation), seconds in medians.items():
        if implementation == "ours" and (cell, peer) in medians:
            ratios[cell[-1]].append(medians[cell, peer] / seconds)
    return ", and ".join(f"{min(r):.2f} to {max(r):.2f} times as fast in {kind}" for kind, r in ratios.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--sizes", nargs="+", default=["2.7B", "large", "small"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[2048, 512])
    parser.add_argument("--budget-s", type=float, default=50.0, help="start no case after this time (%(default)s s)")
    parser.add_argument("--out", type=Path, help="folder for table.md and rows.json")
    parser.add_argument("--page", type=Path, metavar="DIR", help="measure nothing; write table.md from DIR/rows.json")
    args = parser.parse_args()
    if args.page:
        found = json.loads((args.page / "rows.json").read_text())
        (args.page / "table.md").write_text(page(found["rows"], found["machine"]))
        return
    device, began = resolve("cuda"), time.monotonic()
    machine = f"{device.name}, torch {torch.__version__}"
    rows: list[dict[str, Any]] = []
    for tokens in args.contexts:
        for size in args.sizes:
            for name in args.cases:
                if time.monotonic() - began > args.budget_s:
                    head = {"case": name, "size": size, "context": tokens, "implementation": "all"}
                    rows.append(head | {"reason": "left out, the time is spent"})
                    continue
                rows += rows_of(name, preset(size, context_length=tokens), tokens, device)
                device.release_memory()
                print(f"{name}, {size}, {tokens}: measured after {time.monotonic() - began:.1f} s", flush=True)
    print(page(rows, machine))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "rows.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
        (args.out / "table.md").write_text(page(rows, machine))


if __name__ == "__main__":
    main()
