"""Integers of modules as variables in compiled code: a counter in a module does not compile the model again."""

from __future__ import annotations

from cs_systems.advise.edits import after_imports
from cs_systems.advise.lever import Lever, ScriptChange, Situation
from cs_systems.advise.levers.compile import compiles
from cs_systems.advise.levers.dynamic_shapes import CAUSE, REPEATS_NOTHING

LINE = "torch._dynamo.config.allow_unspec_int_on_nn_module = True"


def unfit(situation: Situation) -> str | None:
    if not compiles(situation.source):
        return "the script compiles no model"
    return REPEATS_NOTHING if situation.history and CAUSE not in situation.causes else None


def hook() -> None:
    import torch._dynamo.config

    torch._dynamo.config.allow_unspec_int_on_nn_module = True


LEVER = Lever(
    "sums in another order, because other kernels are compiled",
    None,
    LINE,
    0.1,
    ScriptChange(
        "integers of modules as variables in torch.compile",
        unfit,
        hook=hook,
        patch=after_imports(LINE, needs="torch"),
        in_script_alone=True,
    ),
    remedies=(CAUSE,),
)
