"""Phases of a step."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """Named phase of a step in the tables; `zero_grad` has no phase, because it is untimed preparation."""

    INPUT = "input"  # waiting for the next batch, and its copy to the device
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    SYNCHRONIZE = "synchronize"  # rest of the gradient averaging, after backward
    CLIP = "clip"  # clipping of the gradients' norm
    OPTIMIZER = "optimizer"
    GRAPH = "graph"  # all phases, replayed as one CUDA graph
