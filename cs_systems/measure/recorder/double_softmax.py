"""Losses that apply softmax or a sigmoid to numbers that went through it already, by the graph of backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cs_systems.analysis.comparison.loop_findings import DOUBLE_SOFTMAX, DoubleSoftmaxRow
from cs_systems.measure.recorder.graph_size import MOST_GRAPHS, nodes_below, through_views
from cs_systems.measure.recorder.observers import FewSteps

# a loss by its nodes, the last first, with the function that it applies, and that function's name
_TWICE = (
    (("NllLossBackward0", "LogSoftmaxBackward0", "SoftmaxBackward0"), "softmax", "cross_entropy"),
    (("NllLoss2DBackward0", "LogSoftmaxBackward0", "SoftmaxBackward0"), "softmax", "cross_entropy"),
    (("BinaryCrossEntropyWithLogitsBackward0", "SigmoidBackward0"), "sigmoid", "binary_cross_entropy_with_logits"),
)


class DoubleSoftmax(FewSteps):
    """Observer of the graphs of a few backward passes."""

    runs_operators = False

    def __init__(self) -> None:
        super().__init__()
        self.restart()

    def restart(self) -> None:
        self.kept = {}
        self._passes = 0
        self._found: dict[str, DoubleSoftmaxRow] = {}

    def look_before_backward(self, roots: Any) -> None:
        if self._passes >= MOST_GRAPHS:
            return
        self._passes += 1
        for function, loss in {found for node in nodes_below(roots) if (found := _twice(node))}:
            row = self._found.setdefault(loss, {"function": function, "loss": loss, "passes": 0, "of_passes": 0})
            row["passes"] += 1

    def end(self) -> None:
        for row in self._found.values():
            row["of_passes"] = self._passes
        self.keep(DOUBLE_SOFTMAX, [*self._found.values()])


def _twice(node: Any) -> tuple[str, str] | None:
    """Return the function that a loss applies again, and the loss, if this node is such a loss."""
    for names, function, loss in _TWICE:
        chain = [node]
        while chain[-1] is not None and chain[-1].name() == names[len(chain) - 1]:
            if len(chain) == len(names):
                return (function, loss) if _is_of_one_dimension(chain[-2:]) else None
            chain.append(through_views(chain[-1].next_functions[0][0]))
    return None


def _is_of_one_dimension(nodes: Sequence[Any]) -> bool:
    """Return whether nodes work along the same dimension of tensors of the same shape, if they have dimensions."""
    dimensions = set[tuple[Any, ...]]()
    for node in nodes:
        shape, dimension = tuple(node._input_metadata[0].shape), getattr(node, "_saved_dim", None)
        if dimension is not None and shape:  # a negative one is written as an unsigned number
            dimensions.add((shape, (dimension - (dimension >= 1 << 63) * (1 << 64)) % len(shape)))
    return len(dimensions) <= 1
