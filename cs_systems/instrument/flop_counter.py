"""Counter of the FLOPs of everything that runs inside it: both model FLOPs and executed FLOPs.

Operators are seen as they are dispatched, composite ones as their components. Products and convolutions are counted by
PyTorch's own formulas, fused attention by `attention_calls`.

Unfused attention is a product, a softmax and another product, with a mask somewhere before the softmax, or before the
exponential of a softmax written by hand. The input of either shows which scores the mask hides, however it was written;
the two products, and the products of their gradients, are credited with the visible share of the scores. To find them,
for each memory the products are kept from which it was computed by elementwise operations, and the visible share of its
elements.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cs_systems.formulas.cost import twice_credited_scores
from cs_systems.instrument.attention_calls import Algorithm, Counted, attention_flops, counting, is_attention
from cs_systems.instrument.flex_calls import FLEX, flex_flops
from cs_systems.instrument.score_masks import Shown, shown_in

Shape = tuple[int, ...]
_MOST_PRODUCTS = 8  # latest products that are kept for a memory
_PLAIN_SOFTMAX = ("_softmax", "_safe_softmax")
_SOFTMAX = (*_PLAIN_SOFTMAX, "_log_softmax")  # _log_softmax is usually part of a loss
_EXPONENTIAL = ("exp", "exp_", "exp2", "exp2_")
_RESIZING = ("cat", "constant_pad_nd", "slice_backward")  # results may be larger than the operands
# operators that only query the size of a tensor, if Python knows it
_OF_SIZES = frozenset(
    ("sym_is_contiguous", "is_contiguous", "is_strides_like_format", "is_non_overlapping_and_dense", "size", "sym_size",
     "stride", "sym_stride", "storage_offset", "sym_storage_offset", "numel", "sym_numel", "dim", "layout")
)  # fmt: skip


class _Product:
    """Counted operation, which gets less credit once its mask is known."""

    def __init__(self, flops: int, keys: Collection[Hashable]) -> None:
        self.flops, self.keys, self.is_lowered = flops, keys, False


class _Memory(NamedTuple):
    products: tuple[_Product, ...]  # products from which it was computed by elementwise operations
    shown: Shown | None = None  # visible share of scores after their softmax, and of their gradients
    shown_by_logarithm: Shown | None = None  # visible share of logarithms of weights, which may belong to a loss


class _Calls(TorchFunctionMode):
    """Causality of the current `scaled_dot_product_attention` call, known even if tensors have no values."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: Shown | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention or not (args[5] if len(args) > 5 else kwargs.get("is_causal")):
            return func(*args, **kwargs)
        query, key = (args[place] if len(args) > place else kwargs[name] for place, name in enumerate(("query", "key")))
        queries, keys = query.shape[-2], key.shape[-2]
        self.shown = Shown(twice_credited_scores(queries, keys, offset=0), 2 * queries * keys)
        try:
            return func(*args, **kwargs)
        finally:
            self.shown = None


class FlopCounter(TorchDispatchMode):
    """Counter of FLOPs by key.

    Attributes:
        model: key → FLOPs that the mathematics needs, without recomputation.
        hardware: key → FLOPs that are executed.
        unknown: The number of attention calls that are counted in full although a mask may hide scores.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        keys: Callable[[], Collection[Hashable]],
        is_again: Callable[[], bool] = lambda: False,
        algorithm: Algorithm | None = None,
    ) -> None:
        """Initialise a counter.

        Args:
            keys: Returns, when an operation runs, the keys under which it counts.
            is_again: Returns whether the operation is a recomputation, which does not count as model FLOPs.
            algorithm: As in `attention_flops`.
        """
        super().__init__()
        self.model, self.hardware, self.unknown = Counter[Hashable](), Counter[Hashable](), 0
        self._keys, self._is_again, self._algorithm = keys, is_again, algorithm
        self._memories: dict[int, _Memory] = {}
        self._calls = _Calls()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the operations inside, including this package's attention kernels."""
        with self._calls, counting(), self:
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            return self._higher_order(func, args, kwargs)
        packet = func.overloadpacket
        name = packet.__name__
        if name in _OF_SIZES and func.namespace in ("aten", "prim"):
            return NotImplemented
        formula = _formula(packet)
        if formula is None and not is_attention(func) and func is not torch.ops.prim.device.default:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        weights = self._weights(name, args) if func.namespace == "aten" else None
        result = func(*args, **kwargs)
        if is_attention(func):
            self._count(attention_flops(func, args, kwargs, self._algorithm))
        elif formula is not None:
            flops = formula(*args, **kwargs, out_val=result)
            self._product(flops, _tensors((args, kwargs)), _tensors(result))
        elif weights is not None:
            self._remember(result, weights)
        elif name in ("_softmax_backward_data", "_log_softmax_backward_data"):
            self._softmax_backward(args[0], args[1], result)
        elif self._memories and name not in _SOFTMAX:
            self._elementwise(name, _tensors((args, kwargs)), _tensors(result))
        return result

    def _higher_order(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        name = func._name
        if name == "cond":
            condition, if_true, if_false, operands = args
            with self:
                return (if_true if condition else if_false)(*operands)
        result = func(*args, **kwargs)
        if name in FLEX:
            self._count(flex_flops(name, args))
        return result

    def _count(self, counted: Counted) -> _Product:
        """Count one operation under the current keys."""
        keys = () if self._is_again() else self._keys()
        for key in keys:
            self.model[key] += counted.model
        for key in self._keys():
            self.hardware[key] += counted.hardware
        self.unknown += not counted.known
        return _Product(counted.hardware, keys)

    def _product(self, flops: int, operands: Iterable[Tensor], results: Iterable[Tensor]) -> None:
        product = self._count(Counted(flops, flops))
        for memory in filter(None, map(self._memory, operands)):
            if memory.shown is not None:
                for scores in (product, *memory.products):
                    self._lower(scores, memory.shown)
        for result in results:
            self._remember(result, _Memory((product,)))

    def _lower(self, product: _Product, shown: Shown) -> None:
        """Reduce a product's model FLOPs to the share of visible scores."""
        if not product.is_lowered:
            for key in product.keys:
                self.model[key] -= product.flops - shown.of(product.flops)
        product.is_lowered = True

    def _weights(self, name: str, args: tuple[Any, ...]) -> _Memory | None:
        """Return the memory of a softmax's or exponential's result if its input is masked scores, else None."""
        is_softmax = name in _SOFTMAX
        if not (is_softmax or name in _EXPONENTIAL) or not (memory := self._memory(args[0])):
            return None
        if not is_softmax and (known := memory.shown or memory.shown_by_logarithm):
            return _Memory(memory.products, known)
        if memory.shown is not None:
            return None
        shown = self._calls.shown or shown_in(args[0], args[1] if is_softmax else -1)
        if shown.is_all or not (shown.known or name in _PLAIN_SOFTMAX):
            return None
        self.unknown += not shown.known
        if is_softmax and name not in _PLAIN_SOFTMAX:
            return _Memory(memory.products, shown_by_logarithm=shown)
        return _Memory(memory.products, shown)

    def _softmax_backward(self, gradient: Tensor, weights: Tensor, result: Tensor) -> None:
        memory, arriving = self._memory(weights) or _Memory(()), self._memory(gradient) or _Memory(())
        # the gradient of logarithms belongs to attention if it was multiplied by weights
        if (shown := memory.shown or (memory.shown_by_logarithm and arriving.shown)) is None:
            return
        for product in arriving.products:
            self._lower(product, shown)
        self._remember(result, _Memory((), shown))

    def _elementwise(self, name: str, operands: Iterable[Tensor], results: Iterable[Tensor]) -> None:
        known = [(tensor.numel(), memory) for tensor in operands if (memory := self._memory(tensor))]
        for result in results if known else ():
            mine = [memory for count, memory in known if count == result.numel() or name in _RESIZING]
            if mine:
                products = dict.fromkeys(product for memory in mine for product in memory.products)
                shown = next((memory.shown for memory in mine if memory.shown), None)
                logarithm = next((memory.shown_by_logarithm for memory in mine if memory.shown_by_logarithm), None)
                self._remember(result, _Memory(tuple(products)[-_MOST_PRODUCTS:], shown, logarithm))

    def _memory(self, tensor: Tensor) -> _Memory | None:
        storage = _storage(tensor)
        return None if storage is None else self._memories.get(storage._cdata)

    def _remember(self, tensor: Tensor, memory: _Memory) -> None:
        storage = _storage(tensor)
        if storage is None:
            return
        key = storage._cdata
        if key not in self._memories:
            weakref.finalize(storage, self._memories.pop, key, None).atexit = False
        self._memories[key] = memory


def executed_flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the FLOPs that one call of an operator executes; 0 if it has no formula."""
    if is_attention(func):
        return attention_flops(func, args, kwargs, None).hardware
    formula = _formula(func.overloadpacket)
    return 0 if formula is None else formula(*args, **kwargs, out_val=result)


def _formula(packet: Any) -> Callable[..., int] | None:
    """Return an operator's FLOP formula of its arguments and `out_val`.

    None for attention, and for operators without products.
    """
    from torch.utils.flop_counter import flop_registry  # imports triton, which not every worker needs

    return _of_shapes(EXTRA[packet]) if packet in EXTRA else flop_registry.get(packet)


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _storage(tensor: Tensor) -> Any:
    """Return the storage of a tensor; None if it has none, like a sparse tensor."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def _of_shapes(count: Callable[..., int]) -> Callable[..., int]:
    """Convert a formula of shapes to a formula of tensors, the form in PyTorch's registry."""

    def shaped(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [shaped(one) for one in value]
        return tuple(value.shape) if isinstance(value, Tensor) else value

    def formula(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return count(*map(shaped, args), **{name: shaped(value) for name, value in kwargs.items()})

    return formula


def _grouped_mm(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    """Return the FLOPs of grouped matrix products. A 2-D operand holds its groups one after another."""
    groups = a[0] if len(a) == 3 and len(b) == 2 else 1  # each group of a is multiplied only by its own columns of b
    return 2 * math.prod(a) * b[-1] // groups


def _recurrent(sequence: Shape, *weights: Any, **_: Any) -> int:
    """Return the FLOPs of the products in recurrent layers: each weight matrix with every input."""
    listed = weights[0] if weights and isinstance(weights[0], list) else weights[:2]
    return 2 * math.prod(sequence[:-1]) * sum(math.prod(weight) for weight in listed if len(weight) == 2)


def _recurrent_backward(sequence: Shape, *weights: Any, **_: Any) -> int:
    return 2 * _recurrent(sequence, *weights)


_aten: Any = torch.ops.aten
_counts: dict[str, Callable[..., int]] = {
    "_grouped_mm": _grouped_mm,
    "_cudnn_rnn": _recurrent,
    "_cudnn_rnn_backward": _recurrent_backward,
    "mkldnn_rnn_layer": _recurrent,
    "mkldnn_rnn_layer_backward": _recurrent_backward,
}
# operators that PyTorch's counter ignores → their FLOPs from the shapes of their arguments
EXTRA: dict[Any, Callable[..., int]] = {
    getattr(_aten, name): count for name, count in _counts.items() if hasattr(_aten, name)
}
