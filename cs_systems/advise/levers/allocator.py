"""Expandable segments of the allocator: fewer calls of cudaMalloc, and fewer gaps in a GPU's memory."""

from __future__ import annotations

from collections.abc import Sequence

from cs_systems.advise.lever import Lever, Option, ScriptChange, Situation


def options(situation: Situation) -> Sequence[Option] | str:
    if not situation.on_gpu:
        return "a CPU's memory is not cached by PyTorch"
    if situation.config.allocator == "expandable_segments":
        return "it is set already"
    if situation.goal == "memory":
        return "it changes the reserved memory, and not the peak of what is allocated"
    measurement = situation.record.measurement if situation.record else None
    if measurement and not any(sample.device_mallocs for sample in measurement.timed):
        return "no timed step calls cudaMalloc"
    return [Option({"allocator": "expandable_segments"})]


def unfit(situation: Situation) -> str | None:
    return None if situation.on_gpu else "a CPU's memory is not cached by PyTorch"


VARIABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
LEVER = Lever(
    "",
    options,
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    0.02,
    ScriptChange("expandable segments of the allocator", unfit, VARIABLE),
    remedies=("fragmentation", "device-allocation", "returned-segments"),
)
