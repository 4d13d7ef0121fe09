"""Autocast to bf16: products in bf16 over parameters in float32."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from cs_systems.advise.edits import before_optimizer
from cs_systems.advise.lever import Lever, Option, ScriptChange, Situation
from cs_systems.advise.levers._models import at_optimizer
from cs_systems.config import Precision
from cs_systems.formulas.peaks import lacks_bf16

CPU = Path("/proc/cpuinfo")


def options(situation: Situation) -> Sequence[Option] | str:
    if situation.config.precision not in (Precision.FP32, Precision.TF32):
        return f"the precision is {situation.config.precision.value} already"
    if reason := _lacks_bf16(situation):
        return reason
    fields = {"precision": Precision.BF16}
    expected = situation.after_experiment("products", "bf16")
    return [Option(fields, situation.forecast(**fields) if situation.goal == "memory" else expected)]


def _lacks_bf16(situation: Situation) -> str | None:
    if situation.on_gpu and lacks_bf16(situation.environment.device_name):
        return f"{situation.environment.device_name} has no products in bf16"
    if not situation.on_gpu and not _cpu_has_bf16():
        return "this CPU has no instructions for products in bf16"
    return None


def _cpu_has_bf16() -> bool:
    """Return whether Linux lists such instructions for this CPU; True if it lists no instructions."""
    try:
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", CPU.read_text(), re.MULTILINE)
    except OSError:
        return True
    return found is None or bool({"amx_bf16", "avx512_bf16", "bf16"} & {*found[1].split()})


def unfit(situation: Situation) -> str | None:
    is_full = situation.ran.get("precision") in (Precision.FP32, Precision.TF32)
    if not is_full and any(word in situation.source for word in ("autocast", "bfloat16", "float16", ".half()")):
        return "the script chooses its precision itself"
    return _lacks_bf16(situation)


def hook() -> Callable[[], bool]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def cast(model: torch.nn.Module) -> None:
        model.forward = torch.autocast(device, torch.bfloat16)(model.forward)

    return at_optimizer(cast)


LINE = "{model}.forward = torch.autocast(next({model}.parameters()).device.type, torch.bfloat16)({model}.forward)"
LEVER = Lever(
    "rounds the operands of products to 8 bits",
    options,
    "with torch.autocast(device.type, torch.bfloat16):  # around forward and loss",
    0.4,
    ScriptChange("autocast to bf16 around the model", unfit, hook=hook, patch=before_optimizer(LINE)),
    remedies=("unused-tensor-cores", "slow-products"),
    saves_memory=True,
    shortens_kernels=True,
)
