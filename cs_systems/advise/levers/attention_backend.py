"""Fused attention: scores and weights stay on the chip, in a kernel of PyTorch or of this toolkit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cs_systems.advise.lever import Lever, Option, Situation
from cs_systems.analysis.diagnosis import Expected
from cs_systems.config import Precision
from cs_systems.core import plugins
from cs_systems.core.fields import Subject

# backend → variant of the experiment
OF_TORCH = {"sdpa_flash": "flash", "sdpa_cudnn": "cudnn", "sdpa_efficient": "efficient"}
HALF = (Precision.BF16, Precision.FP16, Precision.BF16_PURE, Precision.FP8)


def options(situation: Situation) -> Sequence[Option] | str:
    config = situation.config
    if config.subject is not Subject.STEP:
        return "the attention of your own model is not an option; see the lines below"
    if plugins.is_foreign(config.attention):
        return f"attention {config.attention} is your own"
    names = [name for name in _fitting(situation) if name != config.attention]
    return [Option({"attention": name}, _expected(situation, name)) for name in names]


def _fitting(situation: Situation) -> Iterator[str]:
    """Yield the backends that may be fastest here; the experiment ranks PyTorch's own."""
    if not situation.on_gpu:
        yield "sdpa_flash"
    elif situation.config.precision not in HALF:
        yield "sdpa_efficient"
    else:
        yield from ("sdpa_flash", "sdpa_cudnn")
        if situation.is_hopper:
            yield "flash_cuda"


def _expected(situation: Situation, name: str) -> Expected | None:
    if situation.goal == "memory":
        return situation.forecast(attention=name)
    return situation.after_experiment("attention", OF_TORCH[name]) if name in OF_TORCH else None


LEVER = Lever(
    "sums the products with the values in another order",
    options,
    "torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)",
    0.1,
    remedies=("unfused-attention", "score-matrices"),
    experiment="attention",
)
