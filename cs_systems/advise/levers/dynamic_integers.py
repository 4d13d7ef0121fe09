"""Integers of modules as variables in compiled code: a counter in a module does not compile the model again."""

from __future__ import annotations

from cs_systems.advise.edits import after_imports
from cs_systems.advise.lever import Lever, ScriptChange
from cs_systems.advise.levers.dynamic_shapes import CAUSE, unfit

LINE = "torch._dynamo.config.allow_unspec_int_on_nn_module = True"


def hook() -> None:
    import torch._dynamo.config

    torch._dynamo.config.allow_unspec_int_on_nn_module = True


LEVER = Lever(
    "sums in another order, because other kernels are compiled",
    None,
    LINE,
    0.25,
    ScriptChange(
        "integers of modules as variables in torch.compile",
        unfit,
        hook=hook,
        patch=after_imports(LINE, needs="torch"),
        in_script_alone=True,
    ),
    remedies=(CAUSE,),
)
