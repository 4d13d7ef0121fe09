"""CUDA graph of the whole step: one launch instead of one per kernel."""

from __future__ import annotations

from collections.abc import Sequence

from cs_systems.advise.lever import Lever, Option, Situation, only_built_in
from cs_systems.config import CAPTURED_COMPILE_MODES


def options(situation: Situation) -> Sequence[Option] | str:
    config = situation.config
    if reason := only_built_in(situation):
        return reason
    if not situation.on_gpu:
        return "it needs a GPU"
    if config.graph == "step":
        return "the step is a CUDA graph already"
    if config.compile in CAPTURED_COMPILE_MODES:
        return f"compile {config.compile} captures CUDA graphs itself"
    return [Option({"graph": "step"}, situation.after_experiment("device-only"))]


LEVER = Lever(
    "nothing, if the capture is right",
    options,
    "with torch.cuda.graph(graph): step()  # then graph.replay(), with inputs copied in place",
    0.1,
    remedies=("launch-bound",),
    frees_host=True,
)
