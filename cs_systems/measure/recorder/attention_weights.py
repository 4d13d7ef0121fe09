"""Calls of nn.MultiheadAttention that return weights which the caller drops, so that attention cannot run fused.

The calls are seen in a few untimed steps on a CPU; the instructions of the caller show that it drops the weights.
Nothing is said where something else could read them: a hook, a mode of torch, a function that replaces one of
attention's, or hooks on the tensors that autograd keeps. A loop that differentiates gradients is left out, because
fused attention has no second derivatives.

After the last step, forward and backward are timed with and without the weights, in another module of the same sizes,
on inputs of the same shapes.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import BuiltinFunctionType, FrameType, FunctionType, MethodDescriptorType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from cs_systems.analysis.comparison.loop_findings import ATTENTION_WEIGHTS, AttentionWeightsRow
from cs_systems.measure.recorder.dropped_results import drops_second
from cs_systems.measure.recorder.graph_size import leaves_below
from cs_systems.measure.recorder.guard import as_guest
from cs_systems.measure.recorder.hooks import ModuleCall
from cs_systems.measure.recorder.module_calls import CallObserver, SeenCall
from cs_systems.measure.recorder.observers import EnginePass, Period
from cs_systems.measure.recorder.operator_times import fastest_s, is_packing
from cs_systems.measure.recorder.stacks import Line, function_of, is_own, place_of
from cs_systems.measure.recorder.warmup_graphs import FEWEST_STEPS

MOST_SCORES, MOST_TIMED = 1 << 26, 4  # elements of a call that is timed, and such calls of different sizes
ROUNDS_S = 1.0  # to time one of them, because other programs make some rounds longer
_NAMES = (*inspect.signature(nn.MultiheadAttention.forward).parameters,)[1:]
_TORCH = f"{Path(torch.__file__).parent}/"
_PACKAGE = f"{Path(__file__).parents[2]}/"
_BUILT_IN = BuiltinFunctionType, MethodDescriptorType, type


class _Given(NamedTuple):
    """Tensor given to a call. first: the name of the first argument that it is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs: bool
    first: str


class Attention(NamedTuple):
    """Call of nn.MultiheadAttention that can be made again.

    sizes: the arguments that make the module. trained: the parameters with gradients. given: the arguments by name.
    """

    sizes: tuple[Any, ...]
    trained: tuple[str, ...]
    given: tuple[tuple[str, Any], ...]
    autocast: torch.dtype | None
    scores: tuple[int, ...]
    elements: int  # of all scores


class AttentionWeights(CallObserver):
    """Observer of the weights that attention returns."""

    def __init__(self) -> None:
        super().__init__()
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._steps = list[Counter[Attention]]()
        self._shares = list[dict[Attention, float]]()  # of the modules' time in the same steps
        self._known: dict[Attention, tuple[str, Line]] = {}
        self._differentiates_twice = False
        self.step_failed()

    def step_failed(self) -> None:
        self._here, self._times_s = Counter[Attention](), defaultdict[Attention, float](float)

    def begins(self, period: Period) -> None:
        self.is_looking = period is Period.WARMUP
        self.step_failed()

    @as_guest
    def call_seen(self, call: SeenCall) -> None:
        if type(call.module) is not nn.MultiheadAttention:
            return
        frame = _caller(sys._getframe(1))
        attention = _attention(call, call.module)
        if attention is None or frame is None or not is_own(frame.f_code.co_filename) or _may_be_read_inside():
            return
        line = drops_second(call.module, frame)
        if line is not None:
            self._here[attention] += 1
            self._times_s[attention] += call.time_s
            self._known.setdefault(attention, (call.named(), line))

    def look_at_pass(self, each: EnginePass) -> None:
        if self._here:
            gradients = (*each.gradients, *(leaf.grad for leaf in leaves_below(each.roots)))
            self._differentiates_twice |= any(one is not None and one.requires_grad for one in gradients)

    @as_guest
    def step_seen(self, modules_s: float) -> None:
        self._steps.append(self._here)
        self._shares.append({each: time_s / modules_s for each, time_s in self._times_s.items() if modules_s})
        self.step_failed()

    def end(self) -> None:
        if len(self._steps) >= FEWEST_STEPS and not self._differentiates_twice:
            found = [each for each in self._known if all(step[each] for step in self._steps)]
            found.sort(key=lambda each: each.elements * self._steps[0][each], reverse=True)
            self.keep(ATTENTION_WEIGHTS, [self._row(each) for each in found[:MOST_TIMED]])
        self._steps.clear()
        self._known.clear()

    def _row(self, attention: Attention) -> AttentionWeightsRow:
        calls = min(step[attention] for step in self._steps)
        now_s, other_s = times_s(attention)
        module, line = self._known[attention]
        return {
            "module": module,
            "calls": calls,
            "heads": attention.sizes[1],
            "scores": " × ".join(map(str, attention.scores)),
            "steps": len(self._steps),
            "share": median(each.get(attention, 0.0) for each in self._shares),
            "time_s": calls * now_s,
            "other_s": calls * other_s,
            "function": function_of(line),
            "place": place_of(line),
        }


def _caller(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame outside this package."""
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return frame


def _may_be_read_inside() -> bool:
    """Return whether something of the program may read the weights before attention returns them."""
    modes = _get_current_function_mode_stack()  # DeviceContext is that of torch.set_default_device
    if torch._C._len_torch_dispatch_stack() or any(type(each) is not DeviceContext for each in modes):
        return True
    return is_packing() or any(_is_replaced(each) for each in _inner_functions())


def _inner_functions() -> Iterator[Any]:
    """Yield the functions that a call of nn.MultiheadAttention runs, as far as they can be replaced."""
    attention = functional.multi_head_attention_forward
    yield from (nn.Module.__call__, nn.Module._wrapped_call_impl, nn.Module._call_impl)
    yield from (nn.MultiheadAttention.forward, attention)
    for name in attention.__code__.co_names:
        yield from (vars(each).get(name) for each in (functional, torch, Tensor))


def _is_replaced(function: Any) -> bool:
    """Return whether a function is not that of torch, apart from this package's around it."""
    while isinstance(function, ModuleCall) or _is_from(function, _PACKAGE):
        function = function.__wrapped__
    return callable(function) and not isinstance(function, _BUILT_IN) and not _is_from(function, _TORCH)


def _is_from(function: Any, folder: str) -> bool:
    return isinstance(function, FunctionType) and function.__code__.co_filename.startswith(folder)


def _attention(call: SeenCall, module: nn.MultiheadAttention) -> Attention | None:
    """Return a call that returns weights and records a graph; None for another, or one that cannot be made again."""
    result = call.result
    is_pair = type(result) is tuple and len(result) == 2 and all(type(each) is Tensor for each in result)
    if not is_pair or not result[0].requires_grad or not module.training or "forward" in vars(module):
        return None
    parts = dict(module.named_parameters())
    weight = module.out_proj.weight
    is_plain = type(module.out_proj) is NonDynamicallyQuantizableLinear and type(weight) is nn.Parameter
    if not is_plain or any(type(each) is not nn.Parameter or each.device.type != "cpu" for each in parts.values()):
        return None
    tensors = dict(zip(_NAMES, call.inputs[0], strict=False)) | call.inputs[1]
    given = dict[str, Any]()
    for name, each in tensors.items():
        if not isinstance(each, Tensor):
            given[name] = each
        elif type(each) in (Tensor, nn.Parameter) and each.layout is torch.strided:
            first = next(other for other, one in tensors.items() if one is each)
            given[name] = _Given(tuple(each.shape), each.dtype, each.requires_grad, first)
        else:
            return None
    given.pop("need_weights", None)
    elements = result[1].numel() * (module.num_heads if given.get("average_attn_weights", True) else 1)
    if elements > MOST_SCORES:
        return None
    sizes = (
        *(module.embed_dim, module.num_heads, module.dropout, module.in_proj_bias is not None),
        *(module.bias_k is not None, module.add_zero_attn, module.kdim, module.vdim, module.batch_first),
        *(None, weight.dtype),
    )
    trained = tuple(name for name, each in parts.items() if each.requires_grad)
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return Attention(sizes, trained, (*given.items(),), autocast, tuple(result[1].shape[-2:]), elements)


def times_s(attention: Attention) -> tuple[float, float]:
    """Return the times of forward and backward with the weights, and without them."""
    with torch.random.fork_rng(devices=[]):
        module = nn.MultiheadAttention(*attention.sizes)
        for name, each in module.named_parameters():
            each.requires_grad_(name in attention.trained)
        inputs = dict[str, Any]()
        for name, given in attention.given:
            if not isinstance(given, _Given):
                inputs[name] = given
            elif given.first != name:
                inputs[name] = inputs[given.first]
            else:
                made = torch.zeros if "mask" in name else torch.randn
                inputs[name] = made(given.shape).to(given.dtype).requires_grad_(given.needs)

        def results(*, need_weights: bool) -> list[Tensor]:
            with torch.autocast("cpu", attention.autocast, enabled=attention.autocast is not None):
                return [nn.MultiheadAttention.forward(module, **inputs, need_weights=need_weights)[0]]

        of_inputs = [each for each in inputs.values() if isinstance(each, Tensor)]
        wanted = [*dict.fromkeys(each for each in (*of_inputs, *module.parameters()) if each.requires_grad)]
        return fastest_s(lambda: results(need_weights=True), lambda: results(need_weights=False), wanted, ROUNDS_S)
