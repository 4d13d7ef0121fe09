"""Products of three matrices in the costlier order, such as (q kᵀ) v where q (kᵀ v) needs a small matrix only.

The graph below a backward pass shows them: a product whose result goes, through nothing but views, transposes and
multiplications by a number, into other products and sums over the same dimension. A softmax, a mask, a norm or any
other operator in between leaves no other order.

Only shapes are read, and factors of an elementwise multiplication, unless anything in the step packs the tensors that
autograd keeps: unpacking one may run forward again.

Both orders are timed after the last step, on random numbers of the same shapes. Only loops on a CPU are observed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cs_systems.analysis.comparison.loop_findings import PRODUCT_ORDERS, ProductOrderRow
from cs_systems.measure.recorder.graph_size import MOST_NODES, first_nodes, nodes_below, through_views
from cs_systems.measure.recorder.operator_times import compared_s
from cs_systems.measure.recorder.warmup_graphs import WarmupGraphs

FEWEST_ELEMENTS = 1 << 12  # of the matrix in the middle
CHEAPER = 0.5  # largest share of the arithmetic that the other order needs
MOST_VIEWS = 12  # between two products
# Nodes by their names before "Backward", each with the numbers of its two factors.
_FACTORS = {"Mm": (0, 1), "Bmm": (0, 1), "Mv": (0, 1), "Addmm": (1, 2)}
_PURE = ("Mm", "Bmm")  # without a further term
_RESHAPED = frozenset({"View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Clone", "Alias", "Neg"})
Shape = tuple[int, ...]
Users = Mapping[Any, Sequence[tuple[Any, int]]]  # node → nodes that use its result, each with the operand's number
Places = tuple[int | None, int | None]  # dimensions of the rows and of the columns


class Use(NamedTuple):
    """Product that uses a matrix, or a sum over one of its dimensions.

    batches: of the product. rows: of the matrix, in each batch. width: of the other factor; 0 for a sum. needs: whether
    the other factor gets a gradient. may_be_weight: it is a parameter, or gets no gradient.
    """

    batches: int
    rows: int
    width: int
    needs: bool
    may_be_weight: bool


class Order(NamedTuple):
    """Three matrices that are multiplied in one order, by the sizes in (left right) other.

    left: batches × rows × inner. right: batches × inner × summed. uses: of their product, which sum over its last
    dimension. needs: whether left and right get a gradient.
    """

    batches: int
    rows: int
    inner: int
    summed: int
    uses: tuple[Use, ...]
    needs: tuple[bool, bool]
    dtype: torch.dtype

    def flops(self) -> tuple[float, float]:
        """Return the multiplications of forward and backward, as the program does them and in the other order."""
        left, right = self.needs
        now = self.batches * self.rows * self.summed * self.inner * (1 + left + right)
        other = 0
        for each in self.uses:
            batches, of_matrix = max(self.batches, each.batches), each.batches * each.rows
            width = max(1, each.width)
            now += of_matrix * self.summed * width * (2 + each.needs) if each.width else 0
            first = batches * self.inner * self.summed * width if each.width else batches * self.inner * self.summed
            other += first * (1 + right + each.needs)
            other += of_matrix * self.inner * width * (1 + left + (right or each.needs))
        return now, other

    def copies(self, use: Use) -> int:
        """Return how often a use repeats the matrix, by broadcasting it."""
        return use.batches * use.rows // (self.batches * self.rows)


class ProductOrders(WarmupGraphs[Order]):
    """Observer of the products below the backward passes of a few warm-up steps."""

    def _start(self) -> None:
        super()._start()
        self._roots: set[int] = set()  # numbers of the roots of this step; a graph may have several passes

    def _look(self, roots: Any) -> None:
        numbers = {node._sequence_nr() for node in first_nodes(roots)}
        if not numbers <= self._roots:
            self._roots |= numbers
            self._here.update(costly_orders(roots, may_read=self._may_read()))

    def end(self) -> None:
        self.keep(PRODUCT_ORDERS, [self._row(each) for each in self._in_each_step()])
        self._steps.clear()

    def _row(self, order: Order) -> ProductOrderRow:
        count = min(step[order] for step in self._steps)
        now, other = order.flops()
        widths = [each.width for each in order.uses if each.width]
        now_s, other_s = times_s(order)
        return {
            "batches": order.batches,
            "rows": order.rows,
            "inner": order.inner,
            "summed": order.summed,
            "width": max(widths),
            "products": count,
            "steps": len(self._steps),
            "flops_share": other / now,
            "time_s": count * now_s,
            "other_s": count * other_s,
        }


def costly_orders(roots: Any, *, may_read: bool = False) -> Iterator[Order]:
    """Yield the products of three matrices below the roots that need much less arithmetic in their other order.

    may_read: whether factors that autograd keeps may be read.
    """
    nodes = nodes_below(roots)
    if len(nodes) >= MOST_NODES:
        return
    first = [node for node in nodes if _name(node) in _PURE and _elements(node) >= FEWEST_ELEMENTS]
    if not first:
        return
    # a root has a user outside of the graph
    users: dict[Any, list[tuple[Any, int]]] = {node: [(None, 0)] for node in first_nodes(roots)}
    for node in nodes:
        for number, (below, _) in enumerate(node.next_functions):
            if below is not None:
                users.setdefault(below, []).append((node, number))
    for node in first:
        order = _order(node, users, may_read)
        if order is not None:
            now, other = order.flops()
            if other <= CHEAPER * now:
                yield order


def _order(node: Any, users: Users, may_read: bool) -> Order | None:
    """Return the products that a product goes into; None if it is used otherwise, too."""
    shape = _shape(node)
    batches, rows, columns = (1, *shape) if len(shape) == 2 else shape
    (left, of_left), (right, of_right) = node.next_functions[:2]
    inner = of_left_shape[-1] if (of_left_shape := _operand(left, of_left)) else None
    if inner is None:
        inner = of_right_shape[-2] if (of_right_shape := _operand(right, of_right)) else None
    found = _uses(node, shape, batches, users, may_read) if inner else None
    if not found or inner is None or not any(use.width for _, use in found):
        return None
    summed = {dim for dim, _ in found}
    if len(summed) > 1:
        return None
    uses = tuple(use for _, use in found)
    if summed == {0}:  # over its rows: the factors change their roles
        rows, columns, left, right = columns, rows, right, left
    # two linear layers in a row are one on purpose, or by a forgotten function between them
    are_layers = _is_leaf(right) and not _is_leaf(left)
    if are_layers and all(use.may_be_weight for use in uses if use.width):
        return None
    if any(use.batches * use.rows % (batches * rows) for use in uses):
        return None
    needs = left is not None, right is not None
    return Order(batches, rows, inner, columns, uses, needs, node._input_metadata[0].dtype)


def _uses(node: Any, shape: Shape, batches: int, users: Users, may_read: bool) -> list[tuple[int, Use]] | None:
    """Return each use of a product's result, with its summed dimension: 0 for the rows, 1 for the columns.

    None if anything but a product or a sum uses it. The position of the rows and of the columns is followed through the
    views; it is None after the rows were merged with the batches.
    """
    found: list[tuple[int, Use]] = []
    products = set[Any]()
    sizes = shape[-2:]
    places: Places = (len(shape) - 2, len(shape) - 1)
    waiting: list[tuple[Any, Shape, Places, int]] = [(node, shape, places, 0)]
    while waiting:
        of, shape, places, views = waiting.pop()
        if of not in users or views > MOST_VIEWS:
            return None
        for user, number in users[of]:
            if user is None:
                return None
            name, after = _name(user), _shape(user)
            if name in _FACTORS:
                use = _of_product(user, number, shape, places, sizes, batches)
                if use is None or user in products:
                    return None
                products.add(user)
                found.append(use)
            elif name == "Sum" or name == "Mean":
                dims = getattr(user, "_saved_dim", None)
                dims = [dims] if isinstance(dims, int) else dims
                if not dims or len(dims) != 1 or None in places:
                    return None
                at = _signed(dims[0]) % len(shape)
                if at not in places:
                    return None
                which = places.index(at)
                found.append((which, Use(batches, sizes[1 - which], 0, False, True)))
            elif name in ("Mul", "Div") and _is_by_number(user, number, may_read):
                waiting.append((user, after, places, views + 1))
            else:
                moved = _moved(user, name, shape, after, places)
                if moved is None:
                    return None
                waiting.append((user, after, moved, views + 1))
    return found


def _of_product(
    user: Any, number: int, shape: Shape, places: Places, sizes: Shape, batches: int
) -> tuple[int, Use] | None:
    """Return the use of a matrix as a factor of a product; None if it does not sum over the rows or the columns."""
    factors, result = _FACTORS[_name(user)], _shape(user)
    if number not in factors:
        return None
    is_left = number == factors[0]
    dim = len(shape) - 1 if is_left else len(shape) - 2
    if dim not in places:
        return None
    which = places.index(dim)
    kept = places[1 - which]
    others, free = math.prod(shape[:-2]), shape[-2] if is_left else shape[-1]
    is_kept = kept is not None and kept >= len(shape) - 2
    # batches of both products are the same ones, or one of the two products has none
    is_same = (is_kept and others == batches) or batches == 1 or others == 1
    if not is_same:
        return None
    other, _ = user.next_functions[factors[1] if is_left else factors[0]]
    width = 1 if _name(user) == "Mv" else result[-1] if is_left else result[-2]
    return which, Use(others, free, width, other is not None, other is None or _is_leaf(other))


def _is_by_number(node: Any, number: int, may_read: bool) -> bool:
    """Return whether an elementwise operator multiplies an operand with a number, or divides it by one."""
    if number == 1 and _name(node) == "Div":
        return False
    factor, output = node.next_functions[1 - number]
    if factor is not None:
        return _operand(factor, output) == ()
    if number == 1 or not may_read:
        return False
    other = node._saved_other
    return isinstance(other, Tensor) and other.dim() == 0


def _moved(user: Any, name: str, shape: Shape, after: Shape, places: Places) -> Places | None:
    """Return where a view has the rows and the columns; None for those that it merges, and for other operators."""
    if name == "T":
        return _swapped(places, 0, 1)
    if name == "Transpose":
        dims = (_signed(user._saved_dim0) % len(shape), _signed(user._saved_dim1) % len(shape))
        return _swapped(places, *dims)
    if name == "Permute":
        order = [_signed(each) % len(shape) for each in user._saved_dims]
        return tuple(None if each is None else order.index(each) for each in places)  # type: ignore[return-value]
    if name == "Expand":
        added, (rows, columns) = len(after) - len(shape), places
        if math.prod(after) != math.prod(shape):  # only a single matrix may be repeated, and only as a whole
            if rows is None or columns is None or math.prod(shape) != shape[rows] * shape[columns]:
                return None
            if (after[rows + added], after[columns + added]) != (shape[rows], shape[columns]):
                return None
        return None if rows is None else rows + added, None if columns is None else columns + added
    if name not in _RESHAPED or math.prod(shape) != math.prod(after):
        return None
    rows, columns = (None if each is None else _same_dim(shape, each, after) for each in places)
    return None if rows is columns is None else (rows, columns)


def _swapped(places: Places, one: int, other: int) -> Places:
    to = {one: other, other: one}
    first, second = (None if each is None else to.get(each, each) for each in places)
    return first, second


def _same_dim(shape: Shape, dim: int, after: Shape) -> int | None:
    """Return the dimension of the same elements after a view; None if it is split, or merged with others."""
    before, size = math.prod(shape[:dim]), shape[dim]
    return next((at for at, each in enumerate(after) if each == size and math.prod(after[:at]) == before), None)


def _signed(dim: int) -> int:
    return dim - (1 << 64) if dim >= 1 << 63 else dim


def _name(node: Any) -> str:
    name: str = node.name()
    return name.partition("Backward")[0]


def _shape(node: Any) -> Shape:
    return tuple(node._input_metadata[0].shape) if len(node._input_metadata) == 1 else ()


def _elements(node: Any) -> int:
    return math.prod(_shape(node))


def _operand(node: Any, number: int) -> Shape | None:
    """Return the shape of an operand with a gradient."""
    return None if node is None else tuple(node._input_metadata[number].shape)


def _is_leaf(node: Any) -> bool:
    """Return whether an operand is a parameter, or a view of one."""
    return hasattr(through_views(node), "variable")


def times_s(order: Order) -> tuple[float, float]:
    """Return the times of forward and backward, as the program multiplies and in the other order."""
    left, right = (
        torch.full(shape, 0.5, dtype=order.dtype, requires_grad=needs)
        for shape, needs in zip(
            ((order.batches, order.rows, order.inner), (order.batches, order.inner, order.summed)),
            order.needs,
            strict=True,
        )
    )
    others = [
        torch.full((use.batches, order.summed, use.width), 0.5, dtype=order.dtype, requires_grad=use.needs)
        for use in order.uses
    ]

    def in_use(matrix: Tensor, use: Use) -> Tensor:
        copies = order.copies(use)
        if copies > 1:
            matrix = matrix.expand(copies, *matrix.shape)
        return matrix.reshape(use.batches, use.rows, matrix.shape[-1])

    def now() -> list[Tensor]:
        whole = left @ right
        pairs = zip(order.uses, others, strict=True)
        return [in_use(whole, use) @ other if use.width else whole.sum(-1) for use, other in pairs]

    def after() -> list[Tensor]:
        results = list[Tensor]()
        for use, other in zip(order.uses, others, strict=True):
            if not use.width:
                results.append(left @ right.sum(-1, keepdim=True))
            elif use.batches == 1:
                results.append(left @ (right @ other))
            else:
                results.append(in_use(left, use) @ (right @ other))
        return results

    wanted = [each for each in (left, right, *others) if each.requires_grad]
    return compared_s(now, after, wanted)
