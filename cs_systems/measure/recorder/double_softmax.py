"""Losses that apply softmax or a sigmoid to numbers that went through it already, by the graph of backward."""

from __future__ import annotations

from typing import Any

from cs_systems.analysis.comparison.loop_findings import DOUBLE_SOFTMAX, DoubleSoftmaxRow
from cs_systems.measure.recorder.graph_size import nodes_below, through_views
from cs_systems.measure.recorder.observers import FewSteps

MOST_PASSES = 6  # a graph of thousands of nodes takes some milliseconds
# node of a loss that applies the function itself → that function's node, its name, and the loss
_TWICE = {
    "LogSoftmaxBackward0": ("SoftmaxBackward0", "softmax", "cross_entropy"),
    "BinaryCrossEntropyWithLogitsBackward0": ("SigmoidBackward0", "sigmoid", "binary_cross_entropy_with_logits"),
}


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
        if self._passes >= MOST_PASSES:
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
    first, function, loss = _TWICE.get(node.name(), ("", "", ""))
    below = through_views(node.next_functions[0][0]) if first else None
    return (function, loss) if below is not None and below.name() == first else None
