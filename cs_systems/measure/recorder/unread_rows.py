"""Rows of a linear layer's result that get no gradient, such as all positions of a sequence but the last.

The graph below a backward pass shows the layers' products, and what follows each: if the only reader of a result takes
a slice of its rows, perhaps after functions of each row alone, no gradient comes from the others. Rows that an index
picks are left out, because the program may choose them by the result itself. Whether it uses the other rows without a
gradient, such as for a metric, the graph does not show. A layer counts only if all of its products in a step are so.

The layer is timed after the last step, with all rows and with those that are read.
"""

from __future__ import annotations

import math
from collections import defaultdict
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cs_systems.analysis.comparison.loop_findings import UNREAD_ROWS, UnreadRowsRow
from cs_systems.measure.recorder.graph_size import (
    inputs_first,
    is_weight_of_a_layer,
    operator_of,
    shape_of,
    through_views,
)
from cs_systems.measure.recorder.operator_times import compared_s
from cs_systems.measure.recorder.warmup_graphs import WarmupGraphs

MOST_READ = 0.25  # share of the rows; the other half of a batch is often used without a gradient
FEWEST_ELEMENTS, MOST_ELEMENTS = 1 << 14, 1 << 25  # of a result; the latter also of the input and the weight
# Names of operators of torch.
_PRODUCTS, _PICKS, _OF_ROWS = {"Addmm", "Mm"}, {"Select", "Slice"}, {"LogSoftmax", "Softmax"}
_VIEWS = {"View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Transpose", "Permute"}
_OF_ELEMENTS = {"ToCopy", "Relu", "Gelu", "Tanh", "Sigmoid", "Silu", "NativeDropout", "Mul", "Add", "Sub", "Div"}


class _Layer(NamedTuple):
    """Linear layer with a result of which rows are not read."""

    name: str
    inner: int
    outer: int
    dtype: torch.dtype
    needs_input: bool  # its input needs a gradient


class _Product(NamedTuple):
    """Product of a layer in a step, with all its rows and those that are read."""

    layer: _Layer
    rows: int
    read: int

    @property
    def is_told(self) -> bool:
        sizes = (self.rows * self.layer.outer, self.rows * self.layer.inner, self.layer.inner * self.layer.outer)
        return 0 < self.read <= MOST_READ * self.rows and sizes[0] >= FEWEST_ELEMENTS and max(sizes) <= MOST_ELEMENTS


class UnreadRows(WarmupGraphs[_Layer]):
    """Observer of the readers of linear layers' results in a few warm-up steps."""

    def restart(self) -> None:
        super().restart()
        self._rows: dict[_Layer, list[tuple[int, int]]] = defaultdict(list)  # all rows, and those that are read

    def _start(self) -> None:
        super()._start()
        self._products: dict[int, _Product] = {}  # of this step, by their numbers

    def _look(self, roots: Any) -> None:
        readers: dict[Any, list[Any]] = defaultdict(list)
        nodes = []
        for node, _ in inputs_first(roots):
            for below, _ in node.next_functions:
                if below is not None:
                    readers[below].append(node)
            if operator_of(node) in _PRODUCTS:
                nodes.append(node)
        for node in nodes:
            number = node._sequence_nr()
            if number in self._products:  # another pass may read the other rows
                self._products[number] = self._products[number]._replace(read=self._products[number].rows)
            elif (product := self._product(node, readers)) is not None:
                self._products[number] = product

    def _product(self, node: Any, readers: dict[Any, list[Any]]) -> _Product | None:
        """Return a product of a layer; None for one of other factors."""
        inputs, weight = [each for each, _ in node.next_functions][-2:]
        if weight is None or not is_weight_of_a_layer(weight):
            return None
        parameter = through_views(weight).variable
        rows, outer = shape_of(node)
        if (name := self._name_of(parameter)) is None:
            return None
        inner, dtype = parameter.numel() // outer, node._input_metadata[0].dtype
        return _Product(_Layer(name, inner, outer, dtype, inputs is not None), rows, _rows_read(node, readers))

    def _name_of(self, weight: Tensor) -> str | None:
        """Return the name of the nn.Linear with this weight, else of the weight; a head may share an embedding's."""
        layers = (
            f"{type(model).__name__}.{name}".rstrip(".")
            for model in self._subject.models
            for name, each in model.named_modules()
            if isinstance(each, nn.Linear) and each.weight is weight
        )
        return next(layers, None) or self._subject.name_of(weight)

    def _step_ends(self) -> None:
        others = {each.layer.name for each in self._products.values() if not each.is_told}
        for product in self._products.values():
            if product.layer.name not in others:
                self._here[product.layer] += 1
                self._rows[product.layer].append((product.rows, product.read))
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
    now, shape = node, shape_of(node)
    width = shape[-1]
    while len(readers[now]) == 1 and _keeps_rows(readers[now][0], shape):
        (now,) = readers[now]
        before, shape = shape, shape_of(now)
        # with another dimension as long as the rows, none tells whether they are still the last
        if shape[-1:] != (width,) or max(before.count(width), shape.count(width)) > 1:
            return math.prod(before) // width
    return math.prod(shape) // width


def _keeps_rows(node: Any, shape: tuple[int, ...]) -> bool:
    """Return whether a node takes a slice of the rows of a result, or computes each row from that row alone.

    shape: of the result that the node reads.
    """
    name = operator_of(node)
    with_gradients = [each for each, _ in node.next_functions if each is not None and not hasattr(each, "variable")]
    if name is None or len(with_gradients) != 1:
        return False
    if name in _OF_ROWS:
        return bool(node._saved_dim in (len(shape) - 1, (1 << 64) - 1))  # a negative one, unsigned
    return name in _PICKS or name in _VIEWS or (name in _OF_ELEMENTS and shape_of(node) == shape)


def _times_s(layer: _Layer, rows: int, read: int) -> tuple[float, float]:
    """Return the times of forward and backward of a layer, picking rows of its result and of its input."""
    weight = torch.full((layer.outer, layer.inner), 0.01, dtype=layer.dtype, requires_grad=True)
    inputs = torch.full((rows, layer.inner), 0.5, dtype=layer.dtype, requires_grad=layer.needs_input)
    wanted = [weight, inputs] if layer.needs_input else [weight]
    return compared_s(lambda: [(inputs @ weight.t())[:read]], lambda: [inputs[:read] @ weight.t()], wanted)
