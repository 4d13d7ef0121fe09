"""Memory of one of N ranks by formula: the state of one process, partly divided among the ranks by a strategy.

A rank holds all parameters, gradients and optimizer state, or 1/N of those that its strategy divides
(`ParallelStrategy.splits`; Rajbhandari et al. 2020, figure 1). With Ψ bytes of parameters and AdamW's two moments, that
is 4Ψ in one process, 2Ψ + 2Ψ/N with a divided optimizer, and 4Ψ/N with everything divided. The memory of a batch is
each rank's own.

Gradients exist from backward on, the optimizer state from the optimizer's first step on.
"""

from __future__ import annotations

from collections.abc import Collection

from cs_systems.config import Phase
from cs_systems.formulas.memory.instants import END_OF_BACKWARD
from cs_systems.formulas.memory.model import Components, MemoryPrediction

BUILT = "built"
STAGES = (BUILT, Phase.FORWARD.value, Phase.BACKWARD.value, Phase.OPTIMIZER.value)
SPLIT = {"parameters": "parameters", "gradients": "gradients", "optimizer_state": "optimizer"}
"""Component → its name in `ParallelStrategy.splits`."""


def of_a_rank(components: Components, splits: Collection[str], world_size: int) -> Components:
    """Return the bytes by component on each rank, given the bytes of one process's step."""
    return {name: -(-size // world_size) if SPLIT.get(name) in splits else size for name, size in components.items()}


def step_memory_of_a_rank(
    whole: MemoryPrediction,
    splits: Collection[str],
    world_size: int,
    buckets: float = 0.0,
    *,
    gradients_in_buckets: bool = False,
    gradient_copies: float = 0.0,
) -> MemoryPrediction:
    """Return the prediction for one rank, given the prediction `whole` for its share of the batch in one process.

    Args:
        whole: the prediction for one process.
        splits: the objects that the strategy divides.
        world_size: number of ranks.
        buckets: bytes of the strategy's buckets in units of Ψ; they are alive at every instant.
        gradients_in_buckets: the gradients are views of the buckets, and not counted twice.
        gradient_copies: bytes of copies of the gradients after backward, in units of Ψ.

    Divided parameters are gathered temporarily in the compute dtype, so that autocast makes no copies of them. The
    gathered parameters are left out.
    """
    instants = {}
    for name, alive in whole.instants.items():
        if SPLIT["parameters"] in splits:
            alive = {component: size for component, size in alive.items() if component != "weight_copies"}
        kept = round(buckets * alive.get("parameters", 0))
        if gradients_in_buckets:
            kept -= alive.get("gradients", 0)
        instants[name] = of_a_rank(alive, splits, world_size) | ({"buckets": kept} if kept else {})
    if gradient_copies and (begins := instants.get(END_OF_BACKWARD)):
        copies = round(gradient_copies * begins.get("gradients", 0))
        instants["averaging"] = {**begins, "workspace": 0, "buckets": begins.get("buckets", 0) + copies}
    return MemoryPrediction(instants, whole.largest_allocation)


def state_by_stage(parameter_bytes: int, splits: Collection[str], world_size: int) -> dict[str, Components]:
    """Return the stages of the first step with the bytes by component at the end of each, gradients averaged.

    The optimizer state is AdamW's two moments.

    Args:
        parameter_bytes: bytes of all trained parameters.
        splits: the objects that the strategy divides.
        world_size: number of ranks.
    """
    components = of_a_rank(
        {
            "parameters": parameter_bytes,
            "gradients": parameter_bytes,
            "optimizer_state": 2 * parameter_bytes,
        },
        splits,
        world_size,
    )
    begins = {"parameters": BUILT, "gradients": Phase.BACKWARD, "optimizer_state": Phase.OPTIMIZER}
    return {
        stage: {name: size if STAGES.index(begins[name]) <= number else 0 for name, size in components.items()}
        for number, stage in enumerate(STAGES)
    }
