"""Rule for recomputation: checkpoints compute blocks again in backward, which saves only memory."""

from __future__ import annotations

from dataclasses import replace

from cs_systems.analysis.attribution.recomputed import recomputed
from cs_systems.analysis.attribution.usual_steps import Usual
from cs_systems.analysis.comparison.loop_findings import REPEATED_FORWARD
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.config import ConfigError, Phase
from cs_systems.core.fields import Subject
from cs_systems.core.tables import Row
from cs_systems.formulas.cost import COST, recomputed_flops

NOTABLE = 0.05  # share of the step
WHERE_IT_FITS = "where memory allows, checkpoint fewer blocks, or none"
REMEDY = "leave out --checkpoint, or checkpoint fewer blocks: by prediction, all activations fit the device"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the recomputed share of backward; of a cell, if the step without checkpoints fits by prediction."""
    if evidence.is_loop:
        return _of_loop(evidence)
    config, step_s = evidence.config, evidence.step_s
    if evidence.usual is not None and config is None and step_s is not None:
        return _of_trace(evidence.usual, step_s)
    if config is None or step_s is None or config.subject is not Subject.STEP or config.checkpoint == "none":
        return None
    from cs_systems.formulas.memory.fit import algorithm_of, needed_bytes  # only few steps have checkpoints

    on_gpu = replace(config, device="cuda")
    try:
        algorithm, needed = algorithm_of(on_gpu), needed_bytes(replace(on_gpu, checkpoint="none"))
    except ConfigError:
        return None
    costs = {row["phase"]: row for row in COST.of(evidence.tables)}
    executed = costs[Phase.BACKWARD].get("hardware_flops") if Phase.BACKWARD in costs else None
    backward_s = evidence.phase_s(Phase.BACKWARD) or _kernels_s(evidence)
    if evidence.device_bytes is None or needed > evidence.device_bytes or not executed or not backward_s:
        return None
    again = recomputed_flops(config.model, config.batch_size, config.tokens_per_sequence, algorithm, config.checkpoint)
    gain_s = backward_s * min(1.0, again / executed)
    cause = f"--checkpoint {config.checkpoint} computes {again / executed:.0%} of backward a second time"
    row: Row = {"phase": Phase.BACKWARD.value, "time_s": backward_s, "flops": executed, "recomputed_flops": again}
    return Diagnosis(cause, REMEDY, step_s, step_s - gain_s, evidence=(row,))


def _of_trace(usual: Usual, step_s: float) -> Diagnosis | None:
    found = recomputed(usual.profile)
    return _repeated(found.time_s, step_s, is_estimated=found.is_estimated)


def _of_loop(evidence: Evidence) -> Diagnosis | None:
    row = REPEATED_FORWARD.first(evidence.tables)
    step_s, backward_s = evidence.step_s, evidence.phase_s(Phase.BACKWARD)
    if row is None or step_s is None or not backward_s:
        return None
    return _repeated(backward_s * min(1.0, row["backward_share"]), step_s, is_estimated=False)


def _repeated(time_s: float, step_s: float, *, is_estimated: bool) -> Diagnosis | None:
    again_s, about = min(step_s, time_s), "about " if is_estimated else ""
    if again_s < NOTABLE * step_s:
        return None
    share = f"{about}{again_s / step_s:.0%} of the step"
    cause = f"{share} is forward passes that backward computes again (activation checkpoints)"
    row: Row = {"phase": Phase.BACKWARD.value, "time_s": again_s}
    at_best = None if is_estimated else step_s - again_s
    return Diagnosis(cause, WHERE_IT_FITS, step_s, at_best, evidence=(row,), takes=again_s)


def _kernels_s(evidence: Evidence) -> float:
    return float(sum(row["time_s"] for row in evidence.rows_of("all", phases=(Phase.BACKWARD,))))


RULE = Rule(find, shortens_kernels=True)
