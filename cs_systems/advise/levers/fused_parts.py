"""Fused parts of the built-in model: loss, norms, rotation, activation, and on Hopper the update of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from cs_systems.advise.lever import Lever, Option, Situation, only_built_in
from cs_systems.config import Mode
from cs_systems.core.optimizers import optimizer
from cs_systems.core.recipes import FAST_PARTS

LOSS = "fused_cross_entropy"
# replacements for the two parts of the fast recipe that are CUDA C++ kernels
BY_TRITON = {"fused_feed_forward": "fused_swiglu", "fused_weight_update": "update_in_backward"}


def options(situation: Situation) -> Sequence[Option] | str:
    config = situation.config
    if reason := only_built_in(situation):
        return reason
    if not situation.on_gpu:
        return "its kernels need a GPU"
    if find_spec("triton") is None:
        return "Triton is not installed"
    wanted = [*FAST_PARTS]
    if config.mode is Mode.TRAIN_STEP and optimizer(config.optimizer).has_master_weights:
        wanted.append("fused_weight_update")
    if config.mode is Mode.FORWARD:
        wanted.remove(LOSS)
    if not (situation.is_hopper and _has_cuda_core()):
        wanted = [BY_TRITON.get(name, name) for name in wanted]
    if {*wanted} <= {*config.parts}:
        return "the parts are fused already"
    found = [Option({"parts": tuple(wanted)})]
    if LOSS in wanted and situation.goal == "memory" and LOSS not in config.parts:
        found.append(Option({"parts": (*config.parts, LOSS)}))
    return found


def _has_cuda_core() -> bool:
    """Return whether the package that compiles CUDA C++ is installed."""
    return find_spec("cuda") is not None and find_spec("cuda.core") is not None


LEVER = Lever(
    "sums in another order inside of fused kernels",
    options,
    "fused kernels such as Liger's, or the parts of cs_systems.model.training",
    0.25,
    remedies=("unfused-elementwise",),
    cost=4.0,
)
