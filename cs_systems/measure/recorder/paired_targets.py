"""Observer of losses that broadcast: each prediction of a batch is compared with the targets of all others.

A prediction of shape N × 1 and a target of shape N give N × N differences, and their mean has no part that knows which
target belongs to which input. The graph below the loss shows it: an elementwise operator makes N × N elements from the
model's result and a tensor without a gradient, and from there on all operators are elementwise, until one number.

Losses that pair on purpose differ, and are left out: both operands have gradients (pairwise ranking), the other operand
has N × N elements of its own (risk sets, masks, weights), or rows are summed up before the whole (softmax).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cs_systems.analysis.comparison.loop_findings import PAIRED_TARGETS, PairedTargetsRow
from cs_systems.measure.recorder.graph_size import MOST_NODES, inputs_first
from cs_systems.measure.recorder.observers import FewSteps, ModelCall
from cs_systems.measure.workloads._batches import tensors_in

MOST_STEPS = 3  # of each period
FEWEST, MOST = 8, 1 << 13  # predictions of a batch; the look reads as many elements as pairs
MOST_RESULTS = 8  # of a step; their graphs live until its end
MOST_COMPARED = 256  # rows and columns of the pairs that are compared
# Nodes by their names before "Backward": losses, which save their target; sums of all elements; operators of two
# operands; those that change no element; and elementwise ones.
LOSSES = frozenset({"MseLoss", "SmoothL1Loss", "HuberLoss"})
TO_ONE_NUMBER = LOSSES | {"Mean", "Sum", "Norm", "LinalgVectorNorm"}
DIFFERENCES, FACTORS = frozenset({"Sub", "Add"}), frozenset({"Mul", "Div"})
SAME = frozenset({"View", "UnsafeView", "ReshapeAlias", "Squeeze", "Select", "Slice", "ToCopy", "Alias", "Clone"})
OF_ONE = (
    "Abs Atan Clamp Cos Cosh Elu Erf Exp Expm1 Gelu Hardtanh LeakyRelu Log Log10 Log1P Log2 LogSigmoid NanToNum Neg "
    "Pow Reciprocal Relu Rsqrt Rsub Sigmoid Sign Silu Sinh Softplus Sqrt Tanh Threshold"
)
SAME_SIZE = SAME | DIFFERENCES | FACTORS | {*OF_ONE.split(), "Maximum", "Minimum", "Where", "Expand"}
Edge = tuple[Any, int]  # a node and the number of its output


class Single(Enum):
    """Origin of an output that has one element for each prediction."""

    PREDICTIONS = 0  # the same numbers, in another shape or precision
    OF_THEM = 1
    WITH_OTHERS = 2  # perhaps the targets


class Result(NamedTuple):
    """Result of a model's call: one number for each sample of the batch."""

    edge: Edge
    values: Tensor
    inputs: float  # the sum of the call's inputs


class Pairs(NamedTuple):
    """Pairs of a batch, and the target that each prediction is paired with."""

    result: Result
    shape: tuple[int, ...]
    targets: Tensor


class PairedTargets(FewSteps):
    """Observer of the elements that a loss makes from the models' results, in a few steps."""

    def __init__(self) -> None:
        super().__init__()
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._steps = 0
        self._found: list[Pairs] = []
        self._forget()

    def _forget(self) -> None:
        self._inputs: list[Tensor] = []
        self._results: list[Result] = []
        self._here: dict[Edge, Pairs | None] = {}  # by result; None if a backward pass uses it otherwise
        self._passes = 0

    def look_at_call(self, call: ModelCall) -> None:
        self._inputs = [*tensors_in(call.arguments)] if call.is_recorded else []

    def look_at_result(self, result: Any, is_in_update: bool) -> None:
        rows = {each.shape[0] for each in self._inputs if each.dim()}
        for each in tensors_in(result):
            is_plain = type(each) is Tensor and each.grad_fn is not None and each.is_floating_point()
            count = each.numel() if is_plain else 0
            if FEWEST <= count <= MOST and each.shape[0] == count and count in rows:
                of = sum(
                    float(tensor.detach().sum(dtype=torch.float64)) for tensor in self._inputs if _has_numbers(tensor)
                )
                # more results than these come from an evaluation with its graph, which is not to be kept
                self._results = self._results[1 - MOST_RESULTS :]
                self._results.append(Result((each.grad_fn, each.output_nr), each.detach(), of))
        self._inputs = []

    def look_before_backward(self, roots: Any) -> None:
        self._passes += 1
        if self._results:
            for result, pairs in pairs_below(roots, self._results):
                self._here[result.edge] = pairs if self._here.get(result.edge, pairs) is not None else None

    def look_after_step(self) -> None:
        if self._passes:
            self._steps += 1
            pairs = next((each for each in self._here.values() if each is not None), None)
            if pairs is not None:
                result = pairs.result._replace(edge=(None, 0))  # so that no graph is kept
                self._found.append(pairs._replace(result=result))
        self._forget()
        super().look_after_step()
        if self._steps and self._steps % MOST_STEPS == 0:
            self.stop_looking()

    def stop_looking(self) -> None:
        super().stop_looking()
        self._forget()

    def end(self) -> None:
        row = _row(self._found, self._steps)
        self.keep(PAIRED_TARGETS, [row] if row else [])
        self._found.clear()


def _has_numbers(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_complex()


def _row(found: Sequence[Pairs], steps: int) -> PairedTargetsRow | None:
    """Return the row of pairs, unless what the predictions are paired with may be constants of the loss.

    Thresholds, quantiles and bins are constants; there may be as many of them as samples by chance.
    """
    if len(found) < 2:
        return None
    first, last = found[0], found[-1]
    have_other_inputs = any(each.result.inputs != first.result.inputs for each in found)
    if all(_are_close(each.targets, first.targets) for each in found):
        steps_between = first.targets.diff()
        if have_other_inputs or bool((steps_between >= 0).all() or (steps_between <= 0).all()):
            return None
    return {
        "steps": len(found),
        "of_steps": steps,
        "predictions": len(last.targets),
        "shape": _text(last.result.values.shape),
        "paired": _text(last.shape),
    }


def _are_close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=0.0, atol=1e-4 * float(other.abs().max()))


def _text(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))


def pairs_below(roots: Any, results: Sequence[Result]) -> list[tuple[Result, Pairs | None]]:
    """Return the results of models below the roots of a backward pass, each with the pairs that the loss makes of it.

    None for a result that the loss uses otherwise.
    """
    nodes = [node for node, _ in inputs_first(roots)]
    if len(nodes) >= MOST_NODES:
        return []
    users = {edge for node in nodes for edge in node.next_functions}
    return [(each, _Graph(each, nodes).pairs()) for each in results if each.edge in users]


class _Graph:
    """Part of a graph between a model's result and the loss.

    nodes: all nodes below the loss, each after its operands' nodes.
    """

    def __init__(self, result: Result, nodes: Sequence[Any]) -> None:
        self._result, self._nodes, self._count = result, nodes, result.values.numel()
        # outputs with one element for each prediction, and by node that makes N × N elements: the nodes that use them
        self._single: dict[Edge, Single] = {result.edge: Single.PREDICTIONS}
        self._users: dict[Any, list[Any]] = {}
        self._conditions: list[Tensor] = []

    def pairs(self) -> Pairs | None:
        """Return the pairs, if the loss uses the result for them alone, and all pairs have the same weight."""
        first: list[Any] = []
        for node in self._nodes:
            of = [each for each in node.next_functions if each[0] is not None]
            if any(each in self._single or each[0] in self._users for each in of):
                if not self._is_sound(node, of):
                    return None
                if node in self._users and all(each in self._single for each in of):
                    first.append(node)
        if not all(self._users.values()):
            return None  # these are themselves a root
        partners = [each for node in first for each in self._partners(node)]
        known = [each for each in partners if each is not None]
        if not known or len(known) < len(partners):
            return None
        targets, differences = next((each for each in known if each[1] is not None), known[0])
        if not all(differences is not None and _divides(each, differences) for each in self._conditions):
            return None
        least, most = targets.aminmax()
        is_constant = most - least <= 64 * torch.finfo(targets.dtype).eps * targets.abs().max()
        return None if is_constant else Pairs(self._result, _shape(first[0]), targets)

    def _is_sound(self, node: Any, of: Sequence[Edge]) -> bool:
        """Return whether a node that uses the result or pairs is a part of a loss of pairs, and note what it makes."""
        size = math.prod(_shape(node)) if len(node._input_metadata) == 1 else 0
        pairs = [below for below, _ in of if below in self._users]
        others = [each for each in of if each not in self._single and each[0] not in self._users]
        for below in pairs:
            self._users[below].append(node)
        if any(_size_of(each) > self._count for each in others):
            return False
        if not pairs and size == self._count and not others and _is_of(node, SAME_SIZE):
            self._single[node, 0] = self._made(node, of)
            return True
        if not pairs and size == self._count**2 and len(node.next_functions) <= 2 and len(of) == 1 and not others:
            self._users[node] = []
            return _is_of(node, {"Expand", *DIFFERENCES, *FACTORS})
        if pairs and size == self._count**2 and _is_of(node, SAME_SIZE | LOSSES):
            self._users[node] = []
            return self._has_no_weights(node)
        return bool(pairs) and size == 1 and not others and _is_of(node, TO_ONE_NUMBER)

    def _made(self, node: Any, of: Sequence[Edge]) -> Single:
        """Return what an operator makes of the predictions, or of what others have made of them."""
        before = max((self._single[each] for each in of), key=lambda each: each.value)
        if _is_of(node, SAME):
            return before
        constant = _constant(node) if _is_of(node, FACTORS) else None
        is_own = constant.numel() == 1 if constant is not None else not _is_of(node, DIFFERENCES | FACTORS)
        return max(before, Single.OF_THEM if is_own else Single.WITH_OTHERS, key=lambda each: each.value)

    def _has_no_weights(self, node: Any) -> bool:
        """Return whether no operand without a gradient has other elements for each pair."""
        if _is_of(node, {"Where"}):
            condition = _saved(node, "condition")
            if condition is not None and condition.numel() > self._count:
                self._conditions.append(condition)
            return condition is not None
        if not _is_of(node, FACTORS):
            return True
        constant = _constant(node)
        return constant is None or constant.numel() <= self._count or 0 in constant.stride()

    def _partners(self, node: Any) -> Iterator[tuple[Tensor, Tensor | None] | None]:
        """Yield what each prediction is paired with at a node that makes the pairs, and their differences if known.

        Yields None for what cannot be known.
        """
        single = next(self._single[each] for each in node.next_functions if each[0] is not None)
        for user in self._users[node] if _is_of(node, {"Expand"}) else [node]:
            yield self._partner(user, single)

    def _partner(self, node: Any, single: Single) -> tuple[Tensor, Tensor | None] | None:
        if _is_of(node, LOSSES):
            target = _saved(node, "target")
            rows = None if target is None or 0 not in target.stride() else target.squeeze()
            if rows is None or rows.dim() != 2:
                return None
            return (rows[0] if rows.stride(0) == 0 else rows[:, 0]).double(), None
        if _is_of(node, FACTORS):
            constant = None if single is Single.WITH_OTHERS else _constant(node)  # then they may be weights
            is_one_each = constant is not None and constant.numel() == self._count
            return (constant.flatten().double(), None) if constant is not None and is_one_each else None
        if not _is_of(node, DIFFERENCES) or single is not Single.PREDICTIONS:
            return None
        differences = next((each for user in self._users[node] if (each := _saved(user, "self")) is not None), None)
        if differences is None or differences.shape != _shape(node):
            return None
        targets = self._subtracted(differences)
        return None if targets is None else (targets, differences)

    def _subtracted(self, differences: Tensor) -> Tensor | None:
        """Return the targets, if the predictions and the differences show that there is one of each for all of them."""
        predictions = self._result.values
        for below in self._nodes:  # a squeezed result is expanded along another dimension
            if self._single.get((below, 0)) is Single.PREDICTIONS and _is_of(below, SAME):
                predictions = predictions.reshape(_shape(below))
        pairs, expanded = differences.squeeze(), predictions.expand(differences.shape).squeeze()
        if expanded.stride(0) == 0:
            pairs, expanded = pairs.T, expanded.T
        some = [each[:MOST_COMPARED, :MOST_COMPARED].double() for each in (expanded, pairs)]
        error = 16 * torch.finfo(differences.dtype).eps * sum(each.abs().max() for each in some)
        for of_expanded, of_pairs in ((1, -1), (1, 1), (-1, 1)):
            targets = of_expanded * some[0] + of_pairs * some[1]
            if (targets - targets[:1]).abs().max() <= error:
                return of_expanded * expanded[0].double() + of_pairs * pairs[0].double()
        return None


def _is_of(node: Any, names: Collection[str]) -> bool:
    return node.name().partition("Backward")[0] in names


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node._input_metadata[0].shape)


def _size_of(edge: Edge) -> int:
    return math.prod(edge[0]._input_metadata[edge[1]].shape)


def _constant(node: Any) -> Tensor | None:
    """Return the operand without a gradient of a product or ratio; None if there is none."""
    ends = [below is None for below, _ in node.next_functions]
    return _saved(node, ("self", "other")[ends.index(True)]) if ends.count(True) == 1 else None


def _saved(node: Any, name: str) -> Tensor | None:
    """Return a tensor that a node has saved; None if it saves no such one, or it was changed or packed since.

    To unpack one would call the program's hooks, such as a checkpoint's, which compute the loss again.
    """
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None or getattr(raw, "unpack_hook", raw) is not None:
        return None
    try:
        saved = getattr(node, f"_saved_{name}", None)
    except RuntimeError:
        return None
    return saved.detach() if isinstance(saved, Tensor) else None


def _divides(condition: Tensor, differences: Tensor) -> bool:
    """Return whether a condition follows from the differences or their absolute values, by a threshold."""
    if condition.shape != differences.shape:
        return False
    chosen = condition.squeeze()[:MOST_COMPARED, :MOST_COMPARED]
    some = differences.squeeze()[:MOST_COMPARED, :MOST_COMPARED]
    if bool(chosen.all()) or not bool(chosen.any()):
        return True
    pairs = [(values[chosen], values[~chosen]) for values in (some, some.abs())]
    return any(bool(one.max() <= other.min() or other.max() <= one.min()) for one, other in pairs)
