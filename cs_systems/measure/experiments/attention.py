"""Experiment: each distinct unfused attention call of a step, and the same call in the fused kernels of PyTorch.

An unfused call is a product, operators on its scores with a softmax among them, and a product with the values. It is
repeated as the program wrote it, operator by operator. The hidden scores are read from the attention weights of random
scores, so that the fused call gets the same mask.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from cs_systems.core.experiments import ExperimentRow
from cs_systems.core.units import counted
from cs_systems.machine.device import Device
from cs_systems.measure.experiments._calls import ROUNDS, Layout, add, in_backward, times_s, watched
from cs_systems.measure.runtime.experimenting import Experiment, Spread, Step, row

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
MOST_OPERATORS = 30  # most operators between the two products
COST_STEPS = 6.0
_SOFTMAX = frozenset({"aten::_softmax", "aten::_safe_softmax"})
_DROPOUT = "aten::native_dropout"
_OTHER_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::baddbmm", "aten::convolution"})


class Operator(NamedTuple):
    """Operator of a call; `arguments` has None in place of the scores, at position `scores_at`."""

    function: Any
    arguments: tuple[Any, ...]
    scores_at: int
    form: Any  # structure of the arguments, for unflattening

    def __call__(self, scores: Tensor) -> Tensor:
        flat = [*self.arguments]
        flat[self.scores_at] = scores
        args, kwargs = tree_unflatten(flat, self.form)
        result = self.function(*args, **kwargs)
        return result if isinstance(result, Tensor) else result[0]

    @property
    def name(self) -> str:
        return str(self.function.name().partition(".")[0])


class Call(NamedTuple):
    """Unfused attention call: query and transposed key as in the first product, and the values."""

    query: Layout
    key: Layout
    operators: tuple[Operator, ...]
    value: Layout | None = None

    @property
    def kind(self) -> Any:
        """Properties that equal calls share; masks are compared by their layout."""
        operators = [
            (each.name, tuple(Layout.of(a) if isinstance(a, Tensor) else repr(a) for a in each.arguments))
            for each in self.operators
        ]
        return self.query, self.key, self.value, tuple(operators)

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        scores = torch.bmm(query, key)
        for operator in self.operators:
            scores = operator(scores)
        return scores

    @property
    def dropout(self) -> float:
        return next((float(each.arguments[1]) for each in self.operators if each.name == _DROPOUT), 0.0)


class _Calls(TorchDispatchMode):
    """Finder of unfused attention: it keeps for each tensor the operators that made it from a batched product."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, dict[Any, Call]] = {}  # memory address → location in it → the call so far
        self.found, self.first, self.has_backward = Counter[Any](), dict[Any, Call](), False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if in_backward():
            self.has_backward = True
        elif function is not torch.ops.aten.detach.default:  # the tensor is saved for backward
            flat, form = tree_flatten((args, kwargs or {}))
            self._note(result, flat, self._made_by(function, args, flat, form))
        return result

    def _note(self, result: Any, flat: list[Any], made: Call | None) -> None:
        """Remember how the first result was made; the origin of other results is unknown."""
        results = [each for each in (result if isinstance(result, tuple | list) else [result]) if _is_plain(each)]
        operands = [each for each in flat if _is_plain(each)]
        for index, tensor in enumerate(results):
            memory, place = _memory(tensor)
            is_new = all(_memory(each)[0] != memory for each in operands)
            is_changed = any(each is tensor for each in operands)
            if is_new or is_changed:
                self._made.pop(memory, None)
            if made is not None and index == 0:
                self._made.setdefault(memory, {})[place] = made

    def _of(self, value: Any) -> Call | None:
        """Return the call that a tensor belongs to so far."""
        if not _is_plain(value):
            return None
        memory, place = _memory(value)
        return self._made.get(memory, {}).get(place)

    def _made_by(self, function: Any, args: tuple[Any, ...], flat: list[Any], form: Any) -> Call | None:
        """Return the call so far that a result belongs to; count a call that ends here."""
        name = function.name().partition(".")[0]
        if name == "aten::bmm":
            known = self._of(args[0])
            if known is None or not any(each.name in _SOFTMAX for each in known.operators):
                return Call(Layout.of(args[0]), Layout.of(args[1]), ())
            call = known._replace(value=Layout.of(args[1]))
            self.first.setdefault(call.kind, call)
            self.found[call.kind] += 1
            return None
        from_scores = [(index, known) for index, each in enumerate(flat) if (known := self._of(each)) is not None]
        if len(from_scores) != 1 or name in _OTHER_PRODUCTS or name.endswith("_like"):
            return None
        index, known = from_scores[0]
        if len(known.operators) >= MOST_OPERATORS:
            return None
        kept = (each.detach() if isinstance(each, Tensor) else each for each in flat)
        others = tuple(None if at == index else each for at, each in enumerate(kept))
        return known._replace(operators=(*known.operators, Operator(function, others, index, form)))


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


def _memory(tensor: Tensor) -> tuple[int, Any]:
    """Return the address of a tensor's memory, and its location in it."""
    return tensor.untyped_storage().data_ptr(), (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


class Calls(NamedTuple):
    """Distinct unfused attention calls of a step with their counts; `has_backward`: the step computes gradients."""

    counts: list[tuple[Call, int]]
    has_backward: bool


def distinct_calls(step: Step) -> Calls:
    """Run one more step, and return its unfused attention calls."""
    mode = _Calls()
    watched(step, mode)
    return Calls([(mode.first[kind], count) for kind, count in mode.found.items()], mode.has_backward)


def _concerns(step: Step) -> bool:
    return step.device.is_cuda and step.is_eager


def _run(step: Step) -> list[ExperimentRow]:
    calls = distinct_calls(step)
    if not calls.counts:
        return []
    with torch.enable_grad(), torch.autocast(step.device.torch.type, enabled=False):
        return _timed(step.device, calls)


def _timed(device: Device, calls: Calls) -> list[ExperimentRow]:
    now = [0.0] * ROUNDS
    fused: dict[str, list[float]] = {name: [0.0] * ROUNDS for name in KERNELS}
    for call, count in calls.counts:
        leaves = _leaves(device, call, calls.has_backward)
        add(now, times_s(device, _whole(lambda q, k, v, call=call: torch.bmm(call.weights(q, k), v), leaves)), count)
        for name, times in _fused_times(device, call, leaves, {*fused}):
            if times is None:
                del fused[name]
            else:
                add(fused[name], times, count)
    passes = "forward and backward" if calls.has_backward else "forward"
    total = sum(count for _, count in calls.counts)
    what = f"{counted(total, 'call')} of scaled_dot_product_attention, {len(calls.counts)} distinct, {passes}"
    baseline_s = Spread.of(now).value
    return [
        row(name, "attention", Spread.of(times), baseline_s, f"{what}, by the kernel {name}")
        for name, times in fused.items()
    ]


def _leaves(device: Device, call: Call, needs_gradients: bool) -> list[Tensor]:
    assert call.value is not None
    made = [layout.random(device) for layout in (call.query, call.key, call.value)]
    return [tensor.requires_grad_(needs_gradients) for tensor in made]


def _whole(attend: Callable[..., Tensor], leaves: list[Tensor]) -> Callable[[], object]:
    """Return a function that runs forward, and backward too if the leaves need gradients."""

    def run() -> None:
        out = attend(*leaves)
        if out.requires_grad:
            torch.autograd.grad(out, leaves, torch.ones_like(out))

    return run


def _fused_times(
    device: Device, call: Call, leaves: list[Tensor], names: set[str]
) -> Iterator[tuple[str, list[float] | None]]:
    """Yield the times of a call in each fused kernel; None for a kernel that does not support it."""
    query, key, value = (leaf.detach() for leaf in leaves)
    hidden = _mask(call, query, key)
    # all sequences become the heads of one sequence, which is the same work
    fused = [each.unsqueeze(0).contiguous() for each in (query, key.transpose(-2, -1), value)]
    fused = [each.requires_grad_(leaves[0].requires_grad) for each in fused]
    options: dict[str, Any] = {"dropout_p": call.dropout, **hidden}
    for name in names:

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return scaled_dot_product_attention(q, k, v, **options)

        try:
            # the warnings say why a kernel refuses
            with sdpa_kernel(KERNELS[name]), warnings.catch_warnings(action="ignore"):
                yield name, times_s(device, _whole(attend, fused))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            yield name, None


@torch.no_grad()
def _mask(call: Call, query: Tensor, key: Tensor) -> dict[str, Any]:
    """Return the arguments by which a fused call hides the same scores."""
    upto = next(i for i, each in enumerate(call.operators) if each.name in _SOFTMAX)
    weights = call._replace(operators=call.operators[: upto + 1]).weights(query, key)
    shown = weights.reshape(-1, *weights.shape[-2:]) > 0
    if bool(shown.all()):
        return {}
    if torch.equal(shown, torch.ones_like(shown[:1]).tril().expand_as(shown)):
        return {"is_causal": True}
    return {"attn_mask": shown.unsqueeze(0)}


EXPERIMENT = Experiment(_concerns, lambda step: COST_STEPS * step.step_s, _run)
