"""FLOPs and kept memory of any model, by module, measured on one untimed step.

FLOPs count matrix products, convolutions and attention: see `flop_counter`. A kernel that is not a PyTorch operator
counts as 0. An operation belongs to the modules that are open when it is dispatched; in backward, to the modules that
were open when forward made its node (see `hooks`).

Backward runs without autograd's recording. An operation that autograd records during backward is therefore a
recomputation by an activation checkpoint: it counts as executed, but not as model FLOPs.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cs_systems.config import Phase
from cs_systems.core.range_names import with_ancestors
from cs_systems.formulas.cost import PhaseCost
from cs_systems.instrument.annotate import annotate
from cs_systems.instrument.attention_calls import Algorithm
from cs_systems.instrument.flop_counter import FlopCounter
from cs_systems.instrument.hooks import annotated
from cs_systems.instrument.saved_tensors import SavedTensor, saved_tensors
from cs_systems.instrument.structure import as_table, named_modules, rows

Phases = Iterable[tuple[str, Callable[[], Any]]]
_TOTAL = "total"  # key of a whole phase, regardless of the open modules
_PATH = "\0"  # prefix of a module's range, as opposed to a range of `annotate`


@dataclass(frozen=True)
class MeasuredCost:
    """Result of `measured_cost`.

    Attributes:
        phases: The cost of each phase, in the order in which they ran; the bytes moved are unknown.
        modules: The table `modules`: {path, class, range, stack, block, layer, part, parameters, forward_flops,
            backward_flops, kept_bytes}. FLOPs and bytes include everything inside the module; None where unknown.
            FLOPs are executed FLOPs.
        unknown_masks: The number of attention calls that are counted with the whole score matrix although a mask may
            hide a part of it.
    """

    phases: dict[str, PhaseCost]
    modules: list[dict[str, Any]]
    unknown_masks: int = 0


def measured_cost(
    model: nn.Module, phases: Phases, *, kept: bool = True, algorithm: Algorithm | None = None
) -> MeasuredCost:
    """Run one step and return the FLOPs of its phases and modules. Compiled modules run uncompiled.

    Args:
        model: The model that the step runs.
        phases: The phases of the step as a workload's `step()` yields them. All of them run, the optimizer's too.
        kept: Whether to measure the memory that forward keeps for backward as well.
        algorithm: Returns the tiles of an attention backend, as in `attention_calls.attention_flops`.
    """
    tracker = _Tracker()
    counter = FlopCounter(lambda: tracker.keys, lambda: tracker.is_again, algorithm)
    ran: dict[str, None] = {}
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code dispatches no operator
        saved = stack.enter_context(saved_tensors(model)) if kept else None
        stack.enter_context(annotated(tracker, model, names={path: _PATH + path for path in named_modules(model)}))
        stack.enter_context(counter.counting())
        for name, run in phases:
            ran[name] = None
            tracker.phase = name
            with annotate(name):
                run()
    table = as_table(rows(model))
    kept_bytes = None if saved is None else _kept(saved.rows)
    for row in table:
        for phase in (Phase.FORWARD.value, Phase.BACKWARD.value):
            row[f"{phase}_flops"] = counter.hardware[phase, row["path"]] if phase in ran else None
        row["kept_bytes"] = None if kept_bytes is None else kept_bytes[row["path"]]
    costs = {phase: PhaseCost(counter.model[phase, _TOTAL], counter.hardware[phase, _TOTAL], None) for phase in ran}
    return MeasuredCost(costs, table, counter.unknown)


def _kept(saved: Iterable[SavedTensor]) -> Counter[str]:
    """Return a map from path to the bytes that forward keeps in the module for backward.

    Shared memory counts once, parameters do not count.
    """
    kept: Counter[str] = Counter()
    for row in saved:
        if row.parameter is None and not row.again:
            kept.update(dict.fromkeys(with_ancestors(row.module), row.bytes))
    return kept


class _Open(threading.local):
    def __init__(self) -> None:
        self.names: list[str] = []


class _Tracker:
    """Open modules of each thread, and the keys under which their operations count."""

    def __init__(self) -> None:
        self.phase = ""
        self._open = _Open()

    def push(self, name: str) -> None:
        self._open.names.append(name)

    def pop(self) -> None:
        self._open.names.pop()

    @property
    def keys(self) -> set[Any]:
        keys = {(self.phase, _TOTAL)}
        innermost = next((name for name in reversed(self._open.names) if name.startswith(_PATH)), None)
        if innermost is not None:
            keys |= {(self.phase, path) for path in with_ancestors(innermost.removeprefix(_PATH))}
        return keys

    @property
    def is_again(self) -> bool:
        return self.phase == Phase.BACKWARD and torch.is_grad_enabled()
