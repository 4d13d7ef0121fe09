"""What a rank of N holds of a training step, by formula.

Of parameters, gradients and the optimizer's state a rank has everything, or the N-th part where its strategy splits
them (`ParallelStrategy.splits`; Rajbhandari et al. 2020, figure 1): with Ψ bytes of parameters and AdamW's two moments
4Ψ in one process, 2Ψ + 2Ψ/N with the optimizer split, 4Ψ/N with all of it. What a batch needs is each rank's own.

Gradients are there from backward on, the state from the optimizer's first step on.
"""

from __future__ import annotations

from collections.abc import Collection

from cs_systems.config import Phase
from cs_systems.formulas.memory.model import Components, MemoryPrediction

BUILT = "built"
STAGES = (BUILT, Phase.FORWARD.value, Phase.BACKWARD.value, Phase.OPTIMIZER.value)
SPLIT = {"parameters": "parameters", "gradients": "gradients", "optimizer_state": "optimizer"}
"""Component → what a strategy says that it splits."""


def of_a_rank(components: Components, splits: Collection[str], world_size: int) -> Components:
    """The components of one process's step as they are on each rank."""
    return {name: -(-size // world_size) if SPLIT.get(name) in splits else size for name, size in components.items()}


def step_memory_of_a_rank(
    whole: MemoryPrediction,
    splits: Collection[str],
    world_size: int,
    buckets: float = 0.0,
    *,
    gradients_in_buckets: bool = False,
) -> MemoryPrediction:
    """The prediction for a rank whose own part of the batch `whole` is of.

    buckets: as a strategy says it, in Ψ; they are there at every moment. Parameters that are split are gathered for a
    time in the dtype that is computed in, so that autocast makes no copies of them; what is gathered is left out.
    """
    moments = {}
    for name, alive in whole.moments.items():
        if SPLIT["parameters"] in splits:
            alive = {component: size for component, size in alive.items() if component != "weight_copies"}
        kept = round(buckets * alive.get("parameters", 0))
        if gradients_in_buckets:
            kept -= alive.get("gradients", 0)
        moments[name] = of_a_rank(alive, splits, world_size) | ({"buckets": kept} if kept else {})
    return MemoryPrediction(moments, whole.largest_allocation)


def state_by_stage(
    parameter_bytes: int, splits: Collection[str], world_size: int, moments: int = 2
) -> dict[str, Components]:
    """Stage of the first step → bytes by component when it has ended, the gradients averaged.

    parameter_bytes: of all parameters that are trained. moments: what the optimizer keeps, in Ψ: 2 of AdamW.
    """
    components = of_a_rank(
        {
            "parameters": parameter_bytes,
            "gradients": parameter_bytes,
            "optimizer_state": moments * parameter_bytes,
        },
        splits,
        world_size,
    )
    begins = {"parameters": BUILT, "gradients": Phase.BACKWARD, "optimizer_state": Phase.OPTIMIZER}
    return {
        stage: {name: size if STAGES.index(begins[name]) <= number else 0 for name, size in components.items()}
        for number, stage in enumerate(STAGES)
    }
