"""TF32: matrix products of float32 tensors on the tensor cores, with 10 bits of mantissa instead of 23."""

from __future__ import annotations

from collections.abc import Sequence

from cs_systems.advise.lever import Lever, Option, Situation
from cs_systems.config import Precision
from cs_systems.formulas.peaks import has_tensor_cores, lacks_bf16


def options(situation: Situation) -> Sequence[Option] | str:
    if not situation.on_gpu:
        return "a CPU has no TF32"
    if situation.config.precision is not Precision.FP32:
        return f"the precision is {situation.config.precision.value} already"
    name = situation.environment.device_name
    if not has_tensor_cores(name) or lacks_bf16(name):
        return f"{name} is not known to have TF32"
    return [Option({"precision": Precision.TF32}, situation.after_experiment("products", "tf32"))]


LEVER = Lever("rounds the operands of products to 10 bits", options, 'torch.set_float32_matmul_precision("high")', 0.3)
