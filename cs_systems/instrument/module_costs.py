"""FLOPs and kept memory of any model, by module, measured on one untimed step.

FLOPs are those that PyTorch's FlopCounterMode counts: matrix products, convolutions and attention, the whole score
matrix also where attention is causal; and those of the operators in EXTRA, which it leaves out. A kernel that is no
operator of PyTorch's counts as 0. An operation belongs to the modules that are open when it is dispatched: in backward,
those that were open when forward made its node (see `hooks`).

Backward runs without autograd's recording. An operation in backward that is recorded is therefore one that an
activation checkpoint computes again: executed, but not credited to the model.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cs_systems.config import Phase
from cs_systems.formulas.cost import PhaseCost
from cs_systems.instrument.annotate import annotate
from cs_systems.instrument.hooks import annotated
from cs_systems.instrument.saved_tensors import SavedTensor, saved_tensors
from cs_systems.instrument.structure import as_table, named_modules, rows

Phases = Iterable[tuple[str, Callable[[], Any]]]
Shape = tuple[int, ...]
Flops = dict[Any, int]
_TOTAL = "Global"  # FlopCounterMode's name for everything
_AGAIN = "again"
_PATH = "\0"  # begins the range of a module, as opposed to one of `annotate`


@dataclass(frozen=True)
class MeasuredCost:
    """Result of `measured_cost`.

    Attributes:
        phases: The cost of each phase, in the order in which they ran; the bytes moved are unknown.
        modules: The table `modules`: {path, class, range, stack, block, layer, part, parameters, forward_flops,
            backward_flops, kept_bytes}. FLOPs and bytes are those of a module with everything inside it; None where
            they are unknown.
    """

    phases: dict[str, PhaseCost]
    modules: list[dict[str, Any]]


def measured_cost(model: nn.Module, phases: Phases, *, kept: bool = True) -> MeasuredCost:
    """Run one step and return the FLOPs of its phases and modules. Compiled modules run uncompiled.

    Args:
        model: The model that the step runs.
        phases: The phases of the step as a workload's `step()` yields them. All of them run, the optimizer's too.
        kept: Whether to measure the memory that forward keeps for backward as well.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports triton, which not every worker needs

    tracker = _Tracker()
    counter = FlopCounterMode(display=False, custom_mapping=EXTRA)
    counter.mod_tracker = tracker  # type: ignore[assignment]
    ran: dict[str, None] = {}
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code dispatches no operator
        saved = stack.enter_context(saved_tensors(model)) if kept else None
        stack.enter_context(annotated(tracker, model, names={path: _PATH + path for path in named_modules(model)}))
        stack.enter_context(counter)
        for name, run in phases:
            ran[name] = None
            tracker.phase = name
            with annotate(name):
                run()
    flops: Flops = {key: sum(counts.values()) for key, counts in counter.flop_counts.items()}
    table = as_table(rows(model))
    kept_bytes = None if saved is None else _kept(saved.rows)
    for row in table:
        for phase in (Phase.FORWARD.value, Phase.BACKWARD.value):
            row[f"{phase}_flops"] = flops.get((phase, row["path"]), 0) if phase in ran else None
        row["kept_bytes"] = None if kept_bytes is None else kept_bytes[row["path"]]
    return MeasuredCost({phase: _phase_cost(phase, flops) for phase in ran}, table)


def _phase_cost(phase: str, flops: Flops) -> PhaseCost:
    executed, again = flops.get((phase, _TOTAL), 0), flops.get((phase, _AGAIN), 0)
    return PhaseCost(executed - again, executed, None)


def _kept(saved: Iterable[SavedTensor]) -> Counter[str]:
    """Return path → the bytes that forward keeps in the module for backward: each memory once, no parameters."""
    kept: Counter[str] = Counter()
    for row in saved:
        if row.parameter is None and not row.again:
            kept.update(dict.fromkeys(_with_ancestors(row.module), row.bytes))
    return kept


def _with_ancestors(path: str) -> list[str]:
    words = path.split(".") if path else []
    return [".".join(words[:count]) for count in range(len(words) + 1)]


class _Open(threading.local):
    def __init__(self) -> None:
        self.names: list[str] = []


class _Tracker:
    """Open modules of each thread, as the `mod_tracker` of FlopCounterMode, which adds a count to each of `parents`."""

    def __init__(self) -> None:
        self.phase = ""
        self._open = _Open()

    def push(self, name: str) -> None:
        self._open.names.append(name)

    def pop(self) -> None:
        self._open.names.pop()

    @property
    def parents(self) -> set[Any]:
        keys: set[Any] = {_TOTAL, (self.phase, _TOTAL)}
        innermost = next((name for name in reversed(self._open.names) if name.startswith(_PATH)), None)
        if innermost is not None:
            keys |= {(self.phase, path) for path in _with_ancestors(innermost.removeprefix(_PATH))}
        if self.phase == Phase.BACKWARD and torch.is_grad_enabled():
            keys.add((self.phase, _AGAIN))
        return keys

    def __enter__(self) -> _Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        return


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Return the FLOPs of both products over the score matrix, (batch, heads, sequence, features) each."""
    batch, heads, queries, features = query
    return 2 * batch * heads * queries * key[-2] * (features + value[-1])


def _attention_backward(_grad: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Return the FLOPs of the scores again and of two gradients for each product, as FlopCounterMode counts them."""
    batch, heads, queries, features = query
    return 2 * batch * heads * queries * key[-2] * (3 * features + 2 * value[-1])


def _grouped_mm(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    """Return the FLOPs of products of groups. An operand with two dimensions holds its groups one after another."""
    groups = a[0] if len(a) == 3 and len(b) == 2 else 1  # each of a's groups meets its own columns of b alone
    return 2 * math.prod(a) * b[-1] // groups


def _recurrent(sequence: Shape, *weights: Any, **_: Any) -> int:
    """Return the FLOPs of the products of a recurrent layer, or of several: each weight matrix with every input."""
    listed = weights[0] if weights and isinstance(weights[0], list) else weights[:2]
    return 2 * math.prod(sequence[:-1]) * sum(math.prod(weight) for weight in listed if len(weight) == 2)


def _recurrent_backward(sequence: Shape, *weights: Any, **_: Any) -> int:
    return 2 * _recurrent(sequence, *weights)


_aten: Any = torch.ops.aten
_counts: dict[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_grouped_mm": _grouped_mm,
    "_cudnn_rnn": _recurrent,
    "_cudnn_rnn_backward": _recurrent_backward,
    "mkldnn_rnn_layer": _recurrent,
    "mkldnn_rnn_layer_backward": _recurrent_backward,
}
# Operators that FlopCounterMode counts as 0 → their FLOPs from the shapes of their arguments.
EXTRA: dict[Any, Callable[..., int]] = {
    getattr(_aten, name): count for name, count in _counts.items() if hasattr(_aten, name)
}
