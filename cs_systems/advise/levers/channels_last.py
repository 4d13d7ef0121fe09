"""Weights of convolutions in channels-last order, as the kernels of tensor cores and oneDNN read them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from cs_systems.advise.edits import before_optimizer
from cs_systems.advise.lever import Lever, ScriptChange, Situation
from cs_systems.advise.levers._models import at_optimizer, has_convolutions

LINE = "{model}.to(memory_format=torch.channels_last)"


def unfit(situation: Situation) -> str | None:
    if "channels_last" in situation.source:
        return "the script sets it itself"
    has_images = re.search(r"\bConv(Transpose)?2d\b|resnet|\btorchvision\b|\btimm\b", situation.source)
    return None if has_images else "the script names no model of images"


def hook() -> Callable[[], bool]:
    import torch

    def order(model: Any) -> bool:
        model.to(memory_format=torch.channels_last)
        return has_convolutions(model)

    return at_optimizer(order)


LEVER = Lever(
    "sums in another order inside of convolutions",
    None,
    LINE.format(model="model"),
    0.05,
    ScriptChange("weights in channels-last order", unfit, hook=hook, patch=before_optimizer(LINE)),
    remedies=("layout-conversions",),
    shortens_kernels=True,
)
