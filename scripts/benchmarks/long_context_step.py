"""Plan of the 8B training step at 32,768 tokens on two GPUs, then the step itself beside FSDP2's.

    python3 scripts/benchmarks/long_context_step.py                                  # the plan: memory and time
    python3 scripts/benchmarks/long_context_step.py --run --out runs/long_context    # on two GPUs: plan and measurement

Question: which blocks must be recomputed so that the step fits, and how long does it take? Method: the plan adds up
the bytes that a rank holds at the largest moment, the end of forward, with one sequence on each rank: its shares of
parameters and optimizer state, the tensors that each compiled block keeps, the weights of the root unit, and the
tensors of the loss. The fewest blocks are recomputed that let the sum fit. Time is the arithmetic of the products and
of attention at the rates of one H200 (`RATES`, from profiles/training_step and profiles/attention_h200), plus bytes at
its rate of copying; communication hides behind it. Then `fsdp` and `torch_fsdp2` run the plan, and the table has both.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cs_systems import sweep
from cs_systems.config import ModelConfig, RunConfig, preset
from cs_systems.core import statistics
from cs_systems.formulas.cost import block_parameter_count, matmul_weights, parameter_count
from cs_systems.record import RunRecord

GIB = 1 << 30
BF16, FP32 = 2, 4
CAPACITY_BYTES = round(139.7 * GIB)
RESERVE_BYTES = 6 * GIB  # CUDA's context, NCCL's buffers, memory that the allocator cannot use
STATE_BYTES = {"adamw_fused": 2 * BF16, "adamw_bf16_state": 3 * BF16, "adamw_master": BF16 + 2 * FP32}
"""Optimizer of bf16 parameters → bytes of its state for an element."""


@dataclass(frozen=True)
class Rates:
    """Measured rates of one GPU.

    Attributes:
        product_flops_per_s: bf16 products of the step's sizes.
        attention_flops_per_s: backend → (forward, backward) at d_head 128, causal, credited.
        bytes_per_s: elementwise kernels.
    """

    product_flops_per_s: float
    attention_flops_per_s: Mapping[str, tuple[float, float]]
    bytes_per_s: float


def _attention_rates(forward_ms: float, backward_ms: float) -> tuple[float, float]:
    """Return the FLOP/s of a causal call of 32 heads, 16,384 tokens and d_head 128.

    Backward computes 2.5 times the FLOPs of forward.
    """
    flops = 2 * 16_384**2 * 32 * 128
    return flops / forward_ms * 1e3, 2.5 * flops / backward_ms * 1e3


RATES = Rates(
    product_flops_per_s=770e12,
    attention_flops_per_s={"flash_cuda": _attention_rates(2.765, 8.255), "sdpa_cudnn": _attention_rates(3.417, 9.785)},
    bytes_per_s=2.9e12,
)


@dataclass(frozen=True)
class Plan:
    """One way to run the step. recomputed: the number of blocks, the first ones, that keep their input only."""

    model: ModelConfig
    tokens: int
    ranks: int
    optimizer: str
    recomputed: int

    def kept_by_a_block(self) -> int:
        """Return the bytes that a compiled block keeps under `selective:products`.

        These are its input, q, k, v, attention's output and log-sum-exp (fp32), its projection, gate and value.
        """
        m, n = self.model, self.tokens
        return n * ((6 * m.d_model + 2 * m.d_ff) * BF16 + m.num_heads * FP32)

    def memory(self) -> dict[str, float]:
        """Return the bytes of a rank at the end of forward, by what they are for."""
        m, n = self.model, self.tokens
        hidden, kept = n * m.d_model * BF16, self.kept_by_a_block()
        own = parameter_count(m) / self.ranks
        head = m.vocab_size * m.d_model
        return {
            "parameters, this rank's": own * BF16,
            "optimizer state, this rank's": own * STATE_BYTES[self.optimizer],
            f"kept by {m.num_layers - self.recomputed} blocks": (m.num_layers - self.recomputed) * kept,
            f"input of {self.recomputed} recomputed blocks": self.recomputed * hidden,
            "embedding and last layer, whole": 2 * head * BF16,
            "one block's weights, gathered ahead": block_parameter_count(m) * BF16,
            "loss: weight's gradient in fp32, a chunk's share of it, a chunk of logits": head * (2 * FP32 + BF16),
            "loss: last hidden states and their gradient": 2 * hidden,
        }

    def peak_bytes(self) -> float:
        return sum(self.memory().values())

    def seconds(self, attention: str, rates: Rates = RATES) -> dict[str, float]:
        """Return the parts of the step's time on a rank."""
        m, n = self.model, self.tokens
        forward_rate, backward_rate = rates.attention_flops_per_s[attention]
        scores = 2 * n**2 * m.d_model  # FLOPs of causal attention, two products
        block_products = 2 * n * (matmul_weights(m) - m.vocab_size * m.d_model) / m.num_layers
        hidden, wide = n * m.d_model * BF16, n * m.d_ff * BF16
        # Reads and writes of the kernels between products: norms, rotary embedding, sums, SwiGLU, and their backward.
        elementwise = 40 * hidden + 13 * wide
        chunks = math.ceil(n / m.d_model)
        head = m.vocab_size * m.d_model
        loss_bytes = chunks * head * 4 * FP32 + 3 * n * m.vocab_size * BF16
        own = parameter_count(m) / self.ranks
        step_bytes = own * (3 * BF16 + 2 * STATE_BYTES[self.optimizer])
        return {
            "products": 6 * n * matmul_weights(m) / rates.product_flops_per_s,
            "attention, forward": m.num_layers * scores / forward_rate,
            "attention, backward": m.num_layers * 2.5 * scores / backward_rate,
            "recomputed blocks": self.recomputed * (block_products / rates.product_flops_per_s + scores / forward_rate),
            "kernels between products": m.num_layers * elementwise / rates.bytes_per_s,
            "loss, beside its products": loss_bytes / rates.bytes_per_s,
            "optimizer": step_bytes / rates.bytes_per_s,
        }


def plan(model: ModelConfig, tokens: int, ranks: int, optimizer: str, capacity_bytes: float = CAPACITY_BYTES) -> Plan:
    """Return the plan with the fewest recomputed blocks that fits. Raises ValueError where none does."""
    for recomputed in range(model.num_layers + 1):
        candidate = Plan(model, tokens, ranks, optimizer, recomputed)
        if candidate.peak_bytes() + RESERVE_BYTES <= capacity_bytes:
            return candidate
    raise ValueError(f"{optimizer} needs {candidate.peak_bytes() / GIB:.0f} GiB with every block recomputed")


def config(chosen: Plan, strategy: str, attention: str) -> RunConfig:
    """Return the cell that runs a plan."""
    checkpoint = "selective:products" + (f":{chosen.recomputed}" if chosen.recomputed else "")
    return RunConfig(
        model=chosen.model,
        batch_size=1,
        seq_len=chosen.tokens,
        attention=attention,
        precision="bf16-pure",  # type: ignore[arg-type]
        optimizer=chosen.optimizer,
        compile="default",
        compile_scope="block",
        parts=("fused_cross_entropy",),
        checkpoint=checkpoint,
        strategy=strategy,
        world_size=chosen.ranks,
        allocator="expandable_segments",
        warmup=3,
        steps=5,
    )


def pages(plans: Mapping[str, Plan], attention: str) -> Iterator[str]:
    """Yield the plan of each optimizer as Markdown."""
    for optimizer, chosen in plans.items():
        memory, seconds = chosen.memory(), chosen.seconds(attention)
        yield (
            f"\n## {optimizer}: {chosen.recomputed} of {chosen.model.num_layers} blocks recomputed, "
            f"{chosen.peak_bytes() / GIB:.1f} GiB, {sum(seconds.values()):.2f} s with {attention}\n"
        )
        yield "| memory at the end of forward | GiB |\n| --- | ---: |"
        yield from (f"| {name} | {size / GIB:.1f} |" for name, size in memory.items())
        yield "\n| time | s |\n| --- | ---: |"
        yield from (f"| {name} | {time_s:.3f} |" for name, time_s in seconds.items())


def measured(records: list[RunRecord], plans: Mapping[str, Plan]) -> Iterator[str]:
    """Yield the table of the measured cells beside their predictions."""
    yield "\n| strategy | optimizer | attention | s | p10–p90 | predicted s | peak GiB | predicted GiB |"
    yield "| --- | --- | --- | ---: | --- | ---: | ---: | ---: |"
    for record in records:
        cell = record.run_config
        chosen = plans[cell.optimizer]
        row = f"| {cell.strategy} | {cell.optimizer} | {cell.attention} |"
        predicted = f"{sum(chosen.seconds(cell.attention).values()):.2f}"
        if record.measurement is None:
            yield f"{row} {record.status}: {record.reason} | | {predicted} | | {chosen.peak_bytes() / GIB:.1f} |"
            continue
        step = statistics.summary(record.measurement.durations_s("step"))
        peak_bytes = record.measurement.peak_allocated_bytes
        peak = "" if peak_bytes is None else f"{peak_bytes / GIB:.1f}"
        spread = f"{step.p10:.2f}–{step.p90:.2f}"
        yield f"{row} {step.median:.2f} | {spread} | {predicted} | {peak} | {chosen.peak_bytes() / GIB:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", default=list(STATE_BYTES), choices=list(STATE_BYTES))
    parser.add_argument("--recomputed", type=int, help="number of recomputed blocks (default: the fewest that fit)")
    parser.add_argument("--layers", type=int, help="number of blocks (default: those of 8B)")
    parser.add_argument("--strategies", nargs="+", default=["fsdp", "torch_fsdp2"], choices=["fsdp", "torch_fsdp2"])
    parser.add_argument("--profiler", default="none", help="profiler of the run: kineto, memory_snapshot")
    parser.add_argument("--run", action="store_true", help="run the plan on two GPUs, with fsdp and torch_fsdp2")
    parser.add_argument("--out", type=Path, default=Path("runs/long_context"), help="folder of the records")
    args = parser.parse_args()
    model, tokens = preset("8B"), 32_768
    model = replace(model, vocab_size=151_936, context_length=tokens)
    model = replace(model, num_layers=args.layers or model.num_layers)
    plans = {name: plan(model, tokens, 2, name) for name in args.optimizers}
    if args.recomputed is not None:
        plans = {name: replace(chosen, recomputed=args.recomputed) for name, chosen in plans.items()}
    print(f"# {model.name} at {tokens:,} tokens, one sequence on each of two GPUs")
    for line in pages(plans, "flash_cuda"):
        print(line, flush=True)
    if args.run:
        cells = [
            replace(config(chosen, strategy, attention), profiler=args.profiler)
            for strategy, attention in (("fsdp", "flash_cuda"), ("torch_fsdp2", "sdpa_cudnn"))
            for chosen in plans.values()
            if strategy in args.strategies and (strategy == "fsdp" or chosen.optimizer == "adamw_fused")
        ]
        for line in measured(list(sweep(cells, out=args.out)), plans):
            print(line, flush=True)


if __name__ == "__main__":
    main()
