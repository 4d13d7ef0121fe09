"""Samples that cut a gradient: `sample()` where a model needs `rsample()`, such as for the code of an autoencoder.

In a few steps, the `sample()` of distributions and their divergences are observed. A sample is told only if all of this
holds, so that nothing but the divergence trains what gives the distribution its parameters:

- the distribution has `rsample()`, its parameters have gradients, and gradients are recorded;
- a product below the loss, such as of a linear layer, takes the sample;
- parameters of the model get a gradient only through `kl_divergence` of such a distribution from a fixed one, the same
  for each sample of a batch. A policy has its score function (`log_prob`), and a student has its teacher.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributions
from torch.distributions import Distribution, kl

from cs_systems.analysis.comparison.loop_findings import CUT_SAMPLES, CutSamplesRow
from cs_systems.instrument.compiler import Observation, Undo, is_tracing, passed_through, replaced
from cs_systems.measure.recorder.graph_size import MOST_NODES, is_product, nodes_below
from cs_systems.measure.recorder.guard import as_guest
from cs_systems.measure.recorder.observers import Period, Replacing, is_profiled
from cs_systems.measure.recorder.operator_times import is_packing, packing_noted
from cs_systems.measure.recorder.stacks import Line, function_of, own_lines, place_of
from cs_systems.measure.recorder.subject import Subject, module_with
from cs_systems.measure.recorder.tracker import Tracker

MOST_DRAWS, MOST_CALLS = 8, 64  # of a step: samples, and divergences with the graphs of their distributions
_OPERANDS = ("self", "mat1", "mat2", "input", "weight")  # of products, as autograd names what it keeps
_ALL: Iterator[Any] = (getattr(distributions, name) for name in distributions.__all__)
_WITH_SAMPLE: Iterator[type[Distribution]] = (
    each for each in _ALL if isinstance(each, type) and "sample" in vars(each)
)
# those that have rsample() or are the base of others, which may have it
_KINDS = [each for each in _WITH_SAMPLE if each is Distribution or each.has_rsample is not False]
_Key = tuple[str, Line]


class _Draw(NamedTuple):
    """Result of `sample()`, with the tensors of its distribution that have gradients."""

    key: _Key
    value: Tensor
    parameters: list[Tensor]


class _Divergence(NamedTuple):
    """Call of kl_divergence: the numbers of its operators, and the tensors of both distributions.

    None of the second one if it has no batch, and so is the same for each sample.
    """

    operators: range
    of: list[Tensor]
    second: list[Tensor]


class CutSamples(Replacing):
    """Observer of the samples that a loop draws from distributions, in a few steps."""

    def __init__(self, subject: Subject, tracker: Tracker) -> None:
        super().__init__()
        self._subject, self._tracker = subject, tracker
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._steps: dict[_Key, int] = {}
        self._leaves: dict[_Key, set[int]] = {}  # that only a divergence trains, by their `id`
        self._users: dict[_Key, int] = {}  # a parameter that is multiplied with the sample
        self._others: set[int] = set()  # leaves that something else trains, too
        self._start()

    def _start(self) -> None:
        self._draws: list[_Draw] = []
        self._divergences: list[_Divergence] = []
        self._here: dict[_Key, set[int]] = {}
        self._depth, self._is_unknown = 0, False

    def begins(self, period: Period) -> None:
        super().begins(period)
        if self.is_looking:
            self._start()
            self._installed = Observation()
            for kind in _KINDS:
                self._installed.add(partial(_watched, kind, self._begins, self._drawn), is_guarded=True)
            self._installed.add(self._watch_divergences, is_guarded=True)
            self._installed.add(partial(packing_noted, self._packs), is_guarded=True)

    def _watch_divergences(self) -> Undo:
        known: Any = _Noting(kl._KL_MEMOIZE, self._begins, self._compared)
        return replaced(kl, "_KL_MEMOIZE", known)

    def _observes(self) -> bool:
        if not (self.is_looking and torch.is_grad_enabled() and self._tracker.observes()):
            return False
        is_plain: bool = torch._C._functorch.peek_interpreter_stack() is None
        return is_plain and not is_tracing() and not is_profiled()

    @as_guest
    def _begins(self) -> int | None:
        """Begin a call, and return the number of the next operator; None if the call is not observed."""
        if not self._tracker.observes():
            return None
        self._depth += 1
        return int(torch._C._autograd._get_sequence_nr())

    @as_guest
    def _drawn(self, begin: int | None, value: Any, of: Distribution, *_: Any) -> None:
        if begin is None:
            return
        self._depth -= 1
        if self._depth or not of.has_rsample or len(self._draws) >= MOST_DRAWS or not self._observes():
            return
        parameters = [each for each in _tensors_of(of) if each.requires_grad]
        line = own_lines(sys._getframe(1))[1]
        if line is not None and parameters and type(value) is Tensor and not value.requires_grad:
            self._draws.append(_Draw((type(of).__name__, line), value, parameters))

    @as_guest
    def _compared(self, begin: int | None, _: Any, of: Distribution, second: Distribution) -> None:
        if begin is None:
            return
        self._depth -= 1
        if self._depth or not self._observes():
            return
        if len(self._divergences) >= MOST_CALLS:
            self._is_unknown = True
            return
        operators = range(begin, int(torch._C._autograd._get_sequence_nr()))
        of_batch = [*_tensors_of(second)] if second.batch_shape else []
        self._divergences.append(_Divergence(operators, [*_tensors_of(of)], of_batch))

    @as_guest
    def _packs(self) -> None:
        """Note that an operand is not to be read, because that may run forward again."""
        self._is_unknown = True

    def look_before_backward(self, roots: Any) -> None:
        if not self._draws and not self._steps:
            return
        # hooks that were entered before the observer looked pack tensors, too
        self._is_unknown |= is_packing()
        fixed = [each for each in self._divergences if _is_fixed(each)]
        operators = {number for each in fixed for number in each.operators}
        self._others |= {id(leaf) for leaf in _leaves(_reached(roots, operators))}
        if not self._draws or not operators or self._is_unknown:
            return
        nodes = nodes_below(roots)
        if len(nodes) >= MOST_NODES or any("Checkpoint" in node.name() for node in nodes):
            self._is_unknown = True
            return
        below = {id(leaf) for leaf in _leaves(nodes)}
        compared = {id(leaf) for each in fixed for leaf in _leaves_of(each.of)}
        products = [node for node in nodes if is_product(node)]
        for draw in self._draws:
            user = next((node for node in products if _uses(node, draw.value)), None)
            of = {id(leaf) for leaf in _leaves_of(draw.parameters)}
            if user is not None and (trained := of & below & compared):
                self._here.setdefault(draw.key, set()).update(trained)
                leaf = next(_leaves([user, *(each for each, _ in user.next_functions if each is not None)]), None)
                if leaf is not None:
                    self._users[draw.key] = id(leaf)

    def look_after_step(self) -> None:
        super().look_after_step()
        if not self._is_unknown:
            for key, leaves in self._here.items():
                self._steps[key] = self._steps.get(key, 0) + 1
                self._leaves[key] = self._leaves.get(key, leaves) & leaves
        self._start()

    def end(self) -> None:
        self.keep(CUT_SAMPLES, [row for key in self._steps if (row := self._row(key))])
        self._start()

    def _row(self, key: _Key) -> CutSamplesRow | None:
        names = self._subject.names()
        trained = [name for which, name in names.items() if which in self._leaves[key] - self._others]
        if not trained:
            return None
        kind, line = key
        return {
            "distribution": kind,
            "function": function_of(line),
            "place": place_of(line),
            "module": module_with(trained),
            "parameters": len(trained),
            "user": (names.get(self._users.get(key, 0)) or "").rpartition(".")[0] or None,
            "steps": self._steps[key],
        }


class _Noting(dict[Any, Any]):
    """Functions that kl_divergence looks up by two types; each shows its calls."""

    def __init__(self, own: Any, begins: Callable[[], Any], ended: Callable[..., Any]) -> None:
        super().__init__()
        self._own, self._begins, self._ended = own, begins, ended

    def __getitem__(self, key: Any) -> Any:
        if key not in self._own:
            self._own[key] = kl._dispatch_kl(*key)
        function = self._own[key]
        return function if function is NotImplemented else self._watched(function)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own[key] = value

    def clear(self) -> None:
        self._own.clear()

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return _shown(function, self._begins, self._ended)


def _shown(own: Callable[..., Any], begins: Callable[[], Any], ended: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with calls before and after it, which get what the first one returned and its result."""

    @passed_through
    @functools.wraps(own)
    def shown(*args: Any, **kwargs: Any) -> Any:
        begin, result = begins(), None
        try:
            result = own(*args, **kwargs)
        finally:
            ended(begin, result, *args)
        return result

    return shown


def _watched(kind: type, begins: Callable[[], Any], ended: Callable[..., Any]) -> Undo:
    return replaced(kind, "sample", _shown(vars(kind)["sample"], begins, ended))


def _tensors_of(of: Distribution) -> Iterator[Tensor]:
    """Yield the tensors of a distribution and of those inside it."""
    for value in vars(of).values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Distribution):
            yield from _tensors_of(value)


def _is_fixed(divergence: _Divergence) -> bool:
    """Return whether the second distribution is the same for each sample of a batch."""
    rows = (
        each.detach().reshape(-1, each.shape[-1] if each.dim() > 1 else 1) for each in divergence.second if each.numel()
    )
    return all(bool((each == each[:1]).all()) for each in rows)


def _leaves(nodes: Iterable[Any]) -> Iterator[Tensor]:
    return (node.variable for node in nodes if hasattr(node, "variable"))


def _leaves_of(tensors: Collection[Tensor]) -> list[Tensor]:
    """Return the leaves that these tensors are, or are made of."""
    return [*(each for each in tensors if each.is_leaf and each.requires_grad), *_leaves(nodes_below([*tensors]))]


def _reached(roots: Any, but: Collection[int]) -> set[Any]:
    """Return the nodes below the roots of a backward pass that it reaches without these operators."""
    tensors = [roots] if isinstance(roots, Tensor) else [each for each in roots if isinstance(each, Tensor)]
    waiting = [each.grad_fn for each in tensors if each.grad_fn is not None]
    seen = {*waiting}
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable") or node._sequence_nr() not in but:
            new = {each for each, _ in node.next_functions if each is not None} - seen
            seen |= new
            waiting += new
    return seen


def _uses(node: Any, sample: Tensor) -> bool:
    """Return whether a product takes a sample, alone or with other columns after or before it."""
    for name in _OPERANDS:
        try:
            operand = getattr(node, f"_saved_{name}", None)
        except RuntimeError:  # freed by an earlier backward pass, or changed in place
            continue
        if type(operand) is Tensor and operand.layout is torch.strided and _has(operand, sample):
            return True
    return False


def _has(operand: Tensor, sample: Tensor) -> bool:
    if not sample.numel() or not sample.dim() or not operand.dim() or operand.device != sample.device:
        return False
    if operand.untyped_storage().data_ptr() == sample.untyped_storage().data_ptr():
        return True
    width = sample.shape[-1]
    rows, values = operand.reshape(-1, operand.shape[-1]), sample.to(operand.dtype).reshape(-1, width)
    if len(rows) != len(values) or rows.shape[1] < width:
        return False
    return torch.equal(rows[:, :width], values) or torch.equal(rows[:, -width:], values)
