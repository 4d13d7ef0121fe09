"""Expandable segments of the allocator: fewer calls of cudaMalloc, and fewer gaps in a GPU's memory."""

from __future__ import annotations

from collections.abc import Sequence

from cs_systems.advise.lever import Lever, Option, ScriptChange, Situation

NO_CALL = "no timed step calls cudaMalloc"


def options(situation: Situation) -> Sequence[Option] | str:
    if not situation.on_gpu:
        return "a CPU's memory is not cached by PyTorch"
    if situation.config.allocator == "expandable_segments":
        return "it is set already"
    if situation.goal == "memory":
        return "it changes the reserved memory, and not the peak of what is allocated"
    return NO_CALL if situation.allocates is False else [Option({"allocator": "expandable_segments"})]


def unfit(situation: Situation) -> str | None:
    if not situation.on_gpu:
        return "a CPU's memory is not cached by PyTorch"
    return NO_CALL if situation.allocates is False else None


VARIABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
LEVER = Lever(
    "",
    options,
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    0.02,
    ScriptChange("expandable segments of the allocator", unfit, VARIABLE),
    remedies=("fragmentation", "device-allocation", "returned-segments"),
)
