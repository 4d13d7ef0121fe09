"""Picture of everything that objects reach, to be compared before and after: `picture(model, optimizer)`."""

from __future__ import annotations

import ctypes
import functools
import gc
import random
from collections import OrderedDict, deque
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy
from torch import Generator, Tensor
from torch.nn.parameter import is_lazy

_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_NOT_FOLLOWED = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
_MACHINERY = ("torch._dynamo", "torch._inductor", "torch.fx", "torch.distributed", "threading", "enum", "weakref")
_HEAP_TYPE = 1 << 9


class Picture(dict[int, Any]):
    """Content of each object by its id: which objects it holds, or values. It keeps the objects alive."""

    objects: list[Any]


def picture(*roots: Any) -> Picture:
    """Return what the roots reach, without a call of a method of theirs: two are equal if nothing has changed."""
    found, waiting = Picture(), [*roots]
    found.objects = [*roots]
    while waiting:
        value = waiting.pop()
        if id(value) in found or (isinstance(type(value), type) and issubclass(type(value), _NOT_FOLLOWED)):
            continue
        content, children = _content(value)
        found[id(value)] = type(value), content
        found.objects.append(value)
        waiting += children
    return found


def _content(value: Any) -> tuple[Any, list[Any]]:
    kind = type(value)
    if issubclass(kind, _PLAIN):
        return value, []
    if issubclass(kind, Tensor):
        return _of_tensor(value)
    if issubclass(kind, Generator):
        return value.get_state().tolist(), []
    if kind is random.Random:
        return value.getstate(), []
    if kind.__module__.startswith("numpy.random"):
        bits = value.bit_generator if hasattr(value, "bit_generator") else value._bit_generator
        return repr(bits.state), []
    if issubclass(kind, numpy.ndarray):
        return value.tobytes(), []
    named: list[tuple[Any, Any]] = []
    if issubclass(kind, dict):
        base: Any = OrderedDict if issubclass(kind, OrderedDict) else dict
        named += [(id(key), dict.__getitem__(value, key)) for key in base.__iter__(value)]
        children = [*dict.keys(value)]
    else:
        children = []
    if issubclass(kind, (list, tuple, deque)):
        named += enumerate(kind.__mro__[-2].__iter__(value))
    elif issubclass(kind, (set, frozenset)):
        named += sorted((id(each), each) for each in value)
    elif issubclass(kind, bytearray):
        return bytes(value), []
    elif kind is MappingProxyType:
        named += enumerate(gc.get_referents(value))
    elif kind is functools.partial:
        named += enumerate((value.func, value.args, value.keywords))
    named += [*_attributes(value, kind)]
    return [(key, id(each)) for key, each in named], children + [each for _, each in named]


def _attributes(value: Any, kind: type) -> list[tuple[str, Any]]:
    if any(str(base.__module__).startswith(_MACHINERY) for base in kind.__mro__) or kind is functools.partial:
        return []
    found = []
    names = [name for base in kind.__mro__ for name in vars(base).get("__slots__", ())]
    for name in [*names, "__dict__"] if kind.__flags__ & _HEAP_TYPE or kind is SimpleNamespace else []:
        try:
            held = object.__getattribute__(value, name)
        except AttributeError:
            continue
        found += [*held.items()] if name == "__dict__" else [(name, held)] if name != "__weakref__" else []
    return found


def _of_tensor(tensor: Tensor) -> tuple[Any, list[Any]]:
    if is_lazy(tensor) or tensor.is_meta:
        return "no values", []
    dense = tensor.to_dense() if tensor.is_sparse else tensor.dequantize() if tensor.is_quantized else tensor
    storage = dense.detach().resolve_conj().contiguous().clone().cpu().untyped_storage()
    # Read past torch: where the measured code takes a picture, FLOPs are counted, at the cost of a call for each byte.
    values = ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""
    gradient = tensor.grad if tensor.is_leaf else None
    where = None if tensor.is_sparse else tensor.data_ptr()
    form = tensor.dtype, tensor.device, tensor.shape, tensor.requires_grad, where, id(gradient)
    return (values, form, [(name, id(each)) for name, each in vars(tensor).items()]), [gradient, *vars(tensor).values()]
