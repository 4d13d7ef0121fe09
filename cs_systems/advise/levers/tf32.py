"""TF32: matrix products of float32 tensors on the tensor cores, with 10 bits of mantissa instead of 23."""

from __future__ import annotations

from collections.abc import Sequence

from cs_systems.advise.edits import after_imports
from cs_systems.advise.lever import Lever, Option, ScriptChange, Situation
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


def unfit(situation: Situation) -> str | None:
    if not situation.on_gpu:
        return "a CPU has no TF32"
    if situation.ran.get("precision") == Precision.FP32:
        return None
    if "set_float32_matmul_precision" in situation.source or "allow_tf32" in situation.source:
        return "the script sets it itself"
    return None


def hook() -> None:
    import torch

    torch.set_float32_matmul_precision("high")


LINE = 'torch.set_float32_matmul_precision("high")'
LEVER = Lever(
    "rounds the operands of products to 10 bits",
    options,
    LINE,
    0.3,
    ScriptChange(
        "TF32 in matrix products", unfit, hook=hook, patch=after_imports(LINE, needs="torch"), in_script_alone=True
    ),
    remedies=("unused-tensor-cores",),
    shortens_kernels=True,
)
