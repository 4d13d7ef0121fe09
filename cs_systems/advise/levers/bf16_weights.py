"""Parameters in bf16, with exact float32 master weights in the optimizer: no casts, half the bytes of a weight."""

from __future__ import annotations

from collections.abc import Sequence

from cs_systems.advise.lever import Lever, Option, Situation, only_built_in
from cs_systems.analysis.diagnosis import Expected
from cs_systems.config import Mode, Precision
from cs_systems.core.optimizers import DEFAULT, MASTER, USUAL


def options(situation: Situation) -> Sequence[Option] | str:
    config = situation.config
    if reason := only_built_in(situation):
        return reason
    if not situation.on_gpu:
        return "its optimizer's kernel needs a GPU"
    if config.precision is not Precision.BF16:
        return f"it follows precision bf16, and the precision is {config.precision.value}"
    if config.mode is not Mode.TRAIN_STEP or config.optimizer not in (DEFAULT, USUAL):
        return "it replaces the fused AdamW of a whole training step"
    return [Option({"precision": Precision.BF16_PURE, "optimizer": MASTER}, _expected(situation))]


def _expected(situation: Situation) -> Expected | None:
    """Return the step without the casts of its products."""
    casts_s, device_s = situation.casts_s(), situation.device_s
    if casts_s is None or device_s is None or situation.goal == "memory":
        return None
    value = max(device_s - casts_s, situation.host_s)
    return Expected(value, value, value, "forecast")


LEVER = Lever(
    "rounds gradients and activations to 8 bits; the master weights stay exact",
    options,
    "cs_systems.model.training.master_adamw.MasterAdamW(model.bfloat16().parameters())",
    0.17,
    remedies=("precision-casts",),
)
