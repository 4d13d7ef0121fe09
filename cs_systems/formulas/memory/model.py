"""Predicted memory of a training step in one process: at its peak, and after each phase.

The prediction counts the tensors that eager PyTorch holds and, on CUDA, other memory that PyTorch's allocator counts:
cuBLAS's workspaces, and the rest of a block that is too small to be split off (`rounding`). No constant of the formula
is fitted to a measurement. `tensors` has the sizes, `instants` the possible peaks.

It leaves out fragmentation (reserved but free), the CUDA context, the unsplit rest of a reused block of another size
(up to 1 MiB per tensor: 4% of `small` at context 128), and the instant inside a norm, which is below the loss's unless
the vocabulary is smaller than d_model. The formula does not predict a compiled model, because the compiler decides
which tensors to keep (6% less in a measured one). fp8 is counted as bf16 and needs less.
"""

from __future__ import annotations

from cs_systems.config import Mode, Phase, RunConfig
from cs_systems.core.checkpoint_plan import Segment
from cs_systems.formulas.cost import AttentionAlgorithm
from cs_systems.formulas.memory.instants import ends, instants, without_state
from cs_systems.formulas.memory.prediction import Components, MemoryPrediction, PhaseMemory
from cs_systems.formulas.memory.tensors import StepTensors

__all__ = ["Components", "MemoryPrediction", "PhaseMemory", "kept_by_a_block", "phase_memory", "step_memory"]


def step_memory(config: RunConfig, algorithm: AttentionAlgorithm) -> MemoryPrediction:
    """Return the memory of a step of `config` at its peak.

    The step is a training step of BasicTransformerLM, or its first phases.
    """
    step = StepTensors(config, algorithm)
    threads = 1 if config.mode is Mode.FORWARD else 2
    at_instants = {name: step.on_device(alive, threads) for name, alive in instants(step).items()}
    return MemoryPrediction(at_instants, step.largest_allocation())


def kept_by_a_block(config: RunConfig, algorithm: AttentionAlgorithm, checkpoint: Segment | None = None) -> int:
    """Return the bytes that a block, or a `checkpoint`, keeps for backward, including copies of its weights."""
    step = StepTensors(config, algorithm)
    kept = step.block if checkpoint is None else step.kept_by(checkpoint)
    return kept.activations + kept.scores + kept.copies


def phase_memory(config: RunConfig, algorithm: AttentionAlgorithm, steps: int = 2) -> list[PhaseMemory]:
    """Return the bytes alive after each phase of the first `steps` steps, and at its peak.

    AdamW allocates its state in its first step; backward's thread has a workspace from its first backward on.
    """
    step = StepTensors(config, algorithm)
    at_instants = instants(step)
    found = [PhaseMemory(0, "built", built := step.on_device(step.stateless, 0), sum(built.values()))]
    for number in range(1, steps + 1):
        for phase, ended in ends(step).items():
            within = {instant: alive for instant, alive in at_instants.items() if instant.split(":")[0] == phase}
            if number == 1 and phase != Phase.OPTIMIZER:
                within = {instant: without_state(alive) for instant, alive in within.items()}
                ended = without_state(ended)
            peak = max(
                sum(step.on_device(alive, _threads(config, number, instant)).values())
                for instant, alive in within.items()
            )
            components = step.on_device(ended, _threads(config, number, phase))
            found.append(PhaseMemory(number, phase, components, peak))
    return found


def _threads(config: RunConfig, step: int, instant: str) -> int:
    """Return the number of threads that have called cuBLAS by that instant.

    Backward's own thread calls it only after the loss, because the loss's backward has no matrix product.
    """
    begun = step > 1 or (instant.startswith(("backward", "optimizer")) and instant != "backward: loss")
    return 2 if begun and config.mode is not Mode.FORWARD else 1
