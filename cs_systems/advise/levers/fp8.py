"""Linear layers of the blocks in fp8, which a GPU with fp8 tensor cores computes at twice the rate of bf16."""

from __future__ import annotations

from collections.abc import Sequence

from cs_systems.advise.lever import Lever, Option, Situation, only_built_in
from cs_systems.config import Precision
from cs_systems.formulas.peaks import peak_flops

LEAST_WIDTH = 1024  # smallest d_model; below it, finding the scales took longer than fp8 saved (profiles/training_step)


def options(situation: Situation) -> Sequence[Option] | str:
    config = situation.config
    if reason := only_built_in(situation):
        return reason
    if not situation.on_gpu or peak_flops(situation.environment.device_name, Precision.FP8) is None:
        return f"{situation.environment.device_name} is not known to have products in fp8"
    if config.precision is not Precision.BF16:
        return f"it follows precision bf16, and the precision is {config.precision.value}"
    if config.model.d_model < LEAST_WIDTH:
        return f"d_model {config.model.d_model} is too small: below {LEAST_WIDTH}, scaling costs more than fp8 saves"
    return [Option({"precision": Precision.FP8})]


LEVER = Lever(
    "rounds the operands of linear layers to 3 bits", options, "torchao.float8.convert_to_float8_training", 0.1
)
