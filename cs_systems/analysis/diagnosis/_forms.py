"""Diagnoses of one form that several rules share: of memory by category, of kernels by name, and of a training."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._findings import Diagnosis, Expected
from cs_systems.analysis.diagnosis._memory_use import MemoryUse
from cs_systems.core.tables import Row


def of_category(
    evidence: Evidence, category: str, what: str, remedy: str, notable: float = 0.0, **fields: Any
) -> Diagnosis | None:
    """Return the diagnosis of a category at the peak, if it takes a notable share; its bound is the peak without it.

    Args:
        evidence: the numbers of the step.
        category: a category of memory.
        what: the category with its verb, such as "logits and loss take".
        remedy: the change to make.
        notable: the least share of the peak.
        fields: fields of the cell that carry out the remedy.
    """
    memory = evidence.memory
    if memory is None or not (size := memory.of(category)) or size < notable * memory.peak_bytes:
        return None
    cause = f"{what} {size / memory.peak_bytes:.0%} of the memory at the peak"
    at_best, then = memory.at_best(category), expected(memory, **fields) if fields else None
    return Diagnosis(cause, remedy, memory.peak_bytes, at_best, "bytes", memory.rows, expected=then)


def expected(memory: MemoryUse, **changes: Any) -> Expected | None:
    """Return the peak by formula with these fields changed; None if no formula applies, as for a snapshot."""
    peak = memory.forecast.peak(**changes) if memory.forecast else None
    return Expected(*peak, how="forecast") if peak else None


def of_kernels(
    evidence: Evidence,
    pattern: re.Pattern[str],
    what: str,
    remedy: str,
    notable: float,
    families: Collection[str] = (),
    *,
    is_known: bool = False,
) -> Diagnosis | None:
    """Return the diagnosis of kernels with a pattern in their names, if they take a notable share of the step.

    Args:
        evidence: the numbers of the step.
        pattern: of the names.
        what: what these kernels are.
        remedy: the change to make.
        notable: the least share of the step.
        families: the families of the kernels; empty for all.
        is_known: whether a remedy can remove all of their time, which gives the bound.
    """
    step_s = evidence.step_s
    rows, time_s = evidence.kernels_named(pattern, families)
    if step_s is None or time_s < notable * step_s:
        return None
    cause = f"{time_s / step_s:.0%} of the step is {what}"
    return Diagnosis(cause, remedy, step_s, step_s - time_s if is_known else None, evidence=rows, takes=time_s)


def of_training(cause: str, remedy: str, rows: Sequence[Row], share: float = 1.0) -> Diagnosis:
    """Return the diagnosis of a fault that makes this share of a training useless, however long its steps take."""
    return Diagnosis(cause, remedy, 1.0, unit="share", takes=share, evidence=tuple(rows))


def of_class(name: str, kind: str) -> str:
    """Return the name of a module in its model with its class in torch.nn; only the class if it is in no model."""
    return f"{name} (nn.{kind})" if "." in name else f"nn.{kind}"
