"""Rows of a linear layer's result that get no gradient, such as all positions of a sequence but the last.

The graph below a backward pass shows the layers' products, and what follows each: if the only reader of a result picks
some of its rows, perhaps after functions of each row alone, no gradient comes from the others. Whether the program uses
them in another way, such as for a metric, the graph does not show. A layer that two passes of a step go through is left
out.

The layer is timed after the last step, with all rows and with those that are read.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cs_systems.analysis.comparison.loop_findings import UNREAD_ROWS, UnreadRowsRow
from cs_systems.measure.recorder.graph_size import inputs_first, is_weight_of_a_layer, through_views
from cs_systems.measure.recorder.operator_times import compared_s
from cs_systems.measure.recorder.warmup_graphs import WarmupGraphs

MOST_READ = 0.25  # share of the rows; the other half of a batch is often used without a gradient
FEWEST_ELEMENTS, MOST_ELEMENTS = 1 << 14, 1 << 26  # of a result
_PRODUCTS = ("Addmm", "Mm")
_PICKS = ("Select", "Slice", "Index", "Gather")  # parts of the names of nodes that pick rows
_OF_ROWS = ("LogSoftmax", "Softmax")  # along the last dimension
_VIEWS = ("View", "Unsqueeze", "Squeeze", "Transpose", "Permute", "ToCopy")
_OF_ELEMENTS = ("Relu", "Gelu", "Tanh", "Sigmoid", "Silu", "Dropout", "Mul", "Add", "Sub", "Div")


class _Layer(NamedTuple):
    """Linear layer with a result of which rows are not read."""

    name: str
    inner: int
    outer: int
    dtype: torch.dtype
    needs_input: bool  # its input needs a gradient


class UnreadRows(WarmupGraphs[_Layer]):
    """Observer of the readers of linear layers' results in a few warm-up steps."""

    def restart(self) -> None:
        super().restart()
        self._rows: dict[_Layer, list[tuple[int, int]]] = defaultdict(list)  # all rows, and those that are read

    def _start(self) -> None:
        super()._start()
        self._products: dict[int, tuple[_Layer, int, int] | None] = {}  # of this step, by their numbers

    def _look(self, roots: Any) -> None:
        readers: dict[Any, list[Any]] = defaultdict(list)
        products = []
        for node, _ in inputs_first(roots):
            for below, _ in node.next_functions:
                if below is not None:
                    readers[below].append(node)
            if node.name().partition("Backward")[0] in _PRODUCTS:
                products.append(node)
        for node in products:
            number = node._sequence_nr()
            self._products[number] = None if number in self._products else self._layer(node, readers)

    def _layer(self, node: Any, readers: dict[Any, list[Any]]) -> tuple[_Layer, int, int] | None:
        """Return the layer of a product, its rows and those that are read; None if most are, or it is no layer."""
        operands = [each for each, _ in node.next_functions][-2:]
        rows, outer = _shape(node)
        if operands[1] is None or not is_weight_of_a_layer(operands[1]):
            return None
        if not FEWEST_ELEMENTS <= rows * outer <= MOST_ELEMENTS:
            return None
        read = _rows_read(node, readers)
        weight = through_views(operands[1]).variable
        if read > MOST_READ * rows or (name := self._name_of(weight)) is None:
            return None
        return _Layer(name, weight.shape[1], outer, node._input_metadata[0].dtype, operands[0] is not None), rows, read

    def _name_of(self, weight: Tensor) -> str | None:
        """Return the name of the nn.Linear with this weight, else of the weight; a head may share an embedding's."""
        for model in self._subject.models:
            layers = (
                name for name, each in model.named_modules() if isinstance(each, nn.Linear) and each.weight is weight
            )
            weights = (name for name, each in model.named_parameters() if each is weight)
            if (name := next(itertools.chain(layers, weights), None)) is not None:
                return f"{type(model).__name__}.{name}" if name else type(model).__name__
        return None

    def _step_ends(self) -> None:
        for layer, rows, read in filter(None, self._products.values()):
            self._here[layer] += 1
            self._rows[layer].append((rows, read))
        super()._step_ends()

    def end(self) -> None:
        self.keep(UNREAD_ROWS, [self._row(each) for each in self._in_each_step()])
        self._steps.clear()
        self._rows.clear()

    def _row(self, layer: _Layer) -> UnreadRowsRow:
        products = min(step[layer] for step in self._steps)
        rows, read = (round(median(counts)) for counts in zip(*self._rows[layer], strict=True))
        time_s, read_s = _times_s(layer, rows, read)
        return {
            "layer": layer.name,
            "rows": rows,
            "read": read,
            "products": products,
            "steps": len(self._steps),
            "time_s": products * time_s,
            "read_s": products * read_s,
        }


def _rows_read(node: Any, readers: dict[Any, list[Any]]) -> int:
    """Return how many rows of a product's result are read, as far as the only reader of each result shows."""
    now, shape = node, _shape(node)
    width = shape[-1]
    while len(readers[now]) == 1 and _keeps_rows(readers[now][0]):
        (now,) = readers[now]
        before, shape = shape, _shape(now)
        # with another dimension as long as the rows, none tells whether they are still the last
        if shape[-1:] != (width,) or max(before.count(width), shape.count(width)) > 1:
            return math.prod(before) // width
    return math.prod(shape) // width


def _keeps_rows(node: Any) -> bool:
    """Return whether a node picks rows of one result, or computes each of its rows from that row alone."""
    name = node.name()
    with_gradients = [each for each, _ in node.next_functions if each is not None and not hasattr(each, "variable")]
    if len(with_gradients) != 1 or len(node._input_metadata) != 1:
        return False
    if any(word in name for word in _OF_ROWS):
        return bool(node._saved_dim in (len(_shape(node)) - 1, (1 << 64) - 1))  # a negative one, unsigned
    return any(name.startswith(word) for word in _PICKS) or any(word in name for word in (*_VIEWS, *_OF_ELEMENTS))


def _shape(node: Any) -> tuple[int, ...]:
    """Return the shape of the result of a node with one result."""
    return tuple(node._input_metadata[0].shape)


def _times_s(layer: _Layer, rows: int, read: int) -> tuple[float, float]:
    """Return the times of forward and backward of a layer, picking rows of its result and of its input."""
    weight = torch.full((layer.outer, layer.inner), 0.01, dtype=layer.dtype, requires_grad=True)
    inputs = torch.full((rows, layer.inner), 0.5, dtype=layer.dtype, requires_grad=layer.needs_input)
    wanted = [weight, inputs] if layer.needs_input else [weight]
    return compared_s(lambda: [(inputs @ weight.t())[:read]], lambda: [inputs[:read] @ weight.t()], wanted)
