"""cuDNN tries its convolution kernels in the first steps and keeps the fastest, for inputs of one size."""

from __future__ import annotations

from collections.abc import Callable

from cs_systems.advise.edits import after_imports
from cs_systems.advise.lever import Lever, ScriptChange, Situation
from cs_systems.advise.levers._models import any_convolutions

LINE = "torch.backends.cudnn.benchmark = True"


def unfit(situation: Situation) -> str | None:
    if not situation.on_gpu:
        return "a CPU has no cuDNN"
    return "the script sets it itself" if "cudnn.benchmark" in situation.source else None


def hook() -> Callable[[], bool]:
    import torch

    torch.backends.cudnn.benchmark = True
    return any_convolutions


LEVER = Lever(
    "sums in another order inside of convolutions",
    None,
    LINE,
    0.03,
    ScriptChange(
        "cuDNN's own choice of kernels",
        unfit,
        hook=hook,
        patch=after_imports(LINE, needs="torch"),
        in_script_alone=True,
    ),
    shortens_kernels=True,
)
