"""torch.compile with CUDA graphs: the compiled passes of a script's model are launched whole, not kernel by kernel.

Mode reduce-overhead of torch.compile. Options of the built-in model are in compile and cuda_graph.
"""

from __future__ import annotations

from collections.abc import Callable

from cs_systems.advise.edits import before_optimizer
from cs_systems.advise.lever import Lever, ScriptChange, Situation
from cs_systems.advise.levers._models import at_optimizer
from cs_systems.advise.levers.compile import unfit as compiles_itself

MODE = "reduce-overhead"


def unfit(situation: Situation) -> str | None:
    return compiles_itself(situation) if situation.on_gpu else "it needs a GPU"


def hook() -> Callable[[], bool]:
    return at_optimizer(lambda model: model.compile(mode=MODE))


LINE = f'{{model}}.compile(mode="{MODE}")'
LEVER = Lever(
    "sums in another order inside of fused kernels",
    None,
    LINE.format(model="model"),
    0.05,
    ScriptChange(
        "torch.compile of the model with CUDA graphs",
        unfit,
        hook=hook,
        patch=before_optimizer(LINE),
        replaces={"compile": "reduce_overhead compiles the model already"},
    ),
    remedies=("launch-bound",),
    cost=6.0,  # less than compile's, so that it comes first where launches are a third of the step or more
)
