"""Calls of nn.MultiheadAttention for weights that the program does not read, for which all scores are kept.

The statement of the call shows it: it takes the first result alone, or gives the second one a name that its function
does not read. Other statements are left out, and modules with hooks, which may read the weights.

The call is timed after the last step, with inputs of the same sizes, with and without need_weights=False.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as calls_of_modules

from cs_systems.analysis.comparison.loop_findings import ATTENTION_WEIGHTS, AttentionWeightsRow
from cs_systems.measure.recorder.guard import as_guest
from cs_systems.measure.recorder.module_calls import CallObserver, SeenCall
from cs_systems.measure.recorder.observers import Period
from cs_systems.measure.recorder.operator_times import compared_s
from cs_systems.measure.recorder.stacks import Line, function_of, is_own, place_of, position_of

FEWEST_STEPS, MOST_TIMED = 2, 4  # steps, and calls of different sizes
FEWEST_SCORES, MOST_SCORES = 1 << 16, 1 << 25
_PLAIN = nn.MultiheadAttention.forward  # a program may replace it, to read the weights
_FORWARD = inspect.signature(_PLAIN)
_MADE_WITH = ("embed_dim", "num_heads", "dropout", "batch_first", "kdim", "vdim")
_CALLING = ("cs_systems.", calls_of_modules.__name__)  # modules around a call
_HOLD_NAMES = {"locals", "vars", "eval", "exec"}
_Tensors = tuple[tuple[tuple[int, ...], torch.dtype, bool] | None, ...]


class _Call(NamedTuple):
    """Call of an attention: how the module was made, and its tensors.

    numbers: of each tensor, equal ones for the same tensor. tensors: query, key, value and both masks.
    """

    module: tuple[tuple[str, Any], ...]
    training: bool
    numbers: tuple[int, ...]
    tensors: _Tensors
    is_causal: bool
    averages: bool
    name: str
    line: Line


class AttentionWeights(CallObserver):
    """Observer of the calls of nn.MultiheadAttention in a few warm-up steps."""

    def __init__(self) -> None:
        super().__init__()
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._steps: list[Counter[_Call]] = []
        self.step_failed()

    def step_failed(self) -> None:
        self._here = Counter[_Call]()

    def begins(self, period: Period) -> None:
        self.step_failed()

    @as_guest
    def call_seen(self, call: SeenCall) -> None:
        module = call.module
        is_plain = type(module).forward is _PLAIN
        if is_plain and "forward" not in vars(module) and isinstance(module, nn.MultiheadAttention):
            found = _call(module, call, sys._getframe(1))
            self._here.update([] if found is None else [found])

    @as_guest
    def step_seen(self, modules_s: float) -> None:
        self._steps.append(self._here)
        self.step_failed()

    def end(self) -> None:
        found = [each for each in (self._steps[0] if self._steps else ()) if all(step[each] for step in self._steps)]
        if len(self._steps) >= FEWEST_STEPS:
            self.keep(ATTENTION_WEIGHTS, [*self._rows(found)])
        self._steps = []

    def _rows(self, found: list[_Call]) -> Iterator[AttentionWeightsRow]:
        times = dict[_Call, tuple[float, float]]()
        for each in found:
            size = each._replace(name="", line=found[0].line)
            if size not in times and len(times) >= MOST_TIMED:
                continue
            time_s, fused_s = times[size] = times.get(size) or _times_s(each)
            count = min(step[each] for step in self._steps)
            yield {
                "module": each.name,
                "function": function_of(each.line),
                "place": place_of(each.line),
                "calls": count,
                "steps": len(self._steps),
                "time_s": count * time_s,
                "fused_s": count * fused_s,
            }


def _call(module: nn.MultiheadAttention, call: SeenCall, frame: FrameType | None) -> _Call | None:
    """Return a call for weights that are not read; None for another call, or if that is not certain."""
    positional, named = call.inputs
    given = _FORWARD.bind(module, *positional, **named)
    given.apply_defaults()
    of: Mapping[str, Any] = given.arguments
    if not of["need_weights"] or _has_hooks(module) or not _is_usual(module) or torch.is_autocast_enabled("cpu"):
        return None
    tensors = [of[name] for name in ("query", "key", "value", "key_padding_mask", "attn_mask")]
    result = call.result[0]
    if not (isinstance(result, Tensor) and result.requires_grad):
        return None
    if any(type(each) not in (Tensor, nn.Parameter) or each.layout is not torch.strided for each in tensors[:3]):
        return None
    heads = module.num_heads if of["average_attn_weights"] else 1
    if not FEWEST_SCORES <= call.result[1].numel() * heads <= MOST_SCORES:
        return None
    line = _caller(frame)
    if line is None or not is_first_result_alone(line):
        return None
    made = {name: getattr(module, name) for name in _MADE_WITH}
    made["bias"] = module.in_proj_bias is not None
    described = tuple(None if each is None else (tuple(each.shape), each.dtype, each.requires_grad) for each in tensors)
    numbers = tuple(next(i for i, one in enumerate(tensors) if one is each) for each in tensors)
    return _Call(
        tuple(made.items()),
        module.training,
        numbers,
        described,
        bool(of["is_causal"]),
        bool(of["average_attn_weights"]),
        call.named(),
        line,
    )


def _has_hooks(module: nn.Module) -> bool:
    """Return whether hooks may read the result, or change what is asked for."""
    of_all = calls_of_modules._global_forward_hooks or calls_of_modules._global_forward_pre_hooks
    return bool(module._forward_hooks or module._forward_pre_hooks or of_all)


def _is_usual(module: nn.MultiheadAttention) -> bool:
    is_single = all(each.dtype is torch.float32 for each in module.parameters())
    return module.bias_k is None and not module.add_zero_attn and is_single


def _caller(frame: FrameType | None) -> Line | None:
    """Return the line that called the module, if it is the program's own."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_CALLING):
        frame = frame.f_back
    return (frame.f_code, frame.f_lasti) if frame is not None and is_own(frame.f_code.co_filename) else None


@functools.lru_cache(maxsize=64)
def is_first_result_alone(line: Line) -> bool:
    """Return whether the statement of a call with two results, and the function around it, read the first one alone."""
    first, last, begin, end = position_of(line)
    try:
        tree = ast.parse("".join(linecache.getlines(line[0].co_filename)))
    except SyntaxError:
        return False
    parents = {below: node for node in ast.walk(tree) for below in ast.iter_child_nodes(node)}
    at = (first, last, begin, end)
    calls = [
        node
        for node in parents
        if isinstance(node, ast.Call) and (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == at
    ]
    if len(calls) != 1:
        return False
    statement = parents[calls[0]]
    if isinstance(statement, ast.Subscript) and statement.value is calls[0]:
        return isinstance(statement.slice, ast.Constant) and statement.slice.value == 0
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return False
    (target,) = statement.targets
    if not isinstance(target, ast.Tuple) or len(target.elts) != 2 or not isinstance(target.elts[1], ast.Name):
        return False
    scope: ast.AST = statement
    while scope in parents and not isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
        scope = parents[scope]
    return not _may_be_read(target.elts[1].id, scope)


def _may_be_read(name: str, scope: ast.AST) -> bool:
    """Return whether a name is read in a function or a whole script, or whether that is not certain."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in {name, *_HOLD_NAMES}:
            return True
        if isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names:
            return True
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            return True
    return isinstance(scope, ast.Module) and name != "_"  # another file may import it


def _times_s(call: _Call) -> tuple[float, float]:
    """Return the times of forward and backward with the weights, and without them."""
    with torch.random.fork_rng(devices=[]):
        module = nn.MultiheadAttention(**dict(call.module)).train(call.training)
        made: list[Any] = []
        for number, each in zip(call.numbers, call.tensors, strict=True):
            if number < len(made):
                made.append(made[number])
            elif each is None:
                made.append(None)
            else:
                shape, dtype, requires_grad = each
                made.append(torch.zeros(shape, dtype=dtype, requires_grad=requires_grad))
        query, key, value, padding, mask = made
        masks = {"key_padding_mask": padding, "attn_mask": mask, "is_causal": call.is_causal}

        def attended(**weights: bool) -> list[Tensor]:
            return [module(query, key, value, **masks, **weights)[0]]

        inputs = {id(each): each for each in made if each is not None and each.requires_grad}
        wanted = [*module.parameters(), *inputs.values()]
        averages = call.averages
        return compared_s(lambda: attended(average_attn_weights=averages), lambda: attended(need_weights=False), wanted)
