"""State of a live model and everything it holds, which a measurement must leave unchanged: `ObjectState(setup)`.

A measurement works on the caller's own objects and not on copies, which would take the device's memory twice. For each
object that the setup reaches, only its own content is kept: the values of a tensor, on the host, and the objects in a
container or an instance. This runs none of the caller's code, neither a property nor `__eq__`, `__setattr__`, `update`
or `__deepcopy__`: objects that refuse changes or react to them are read and written below their methods.
"""

from __future__ import annotations

import gc
import random
import re
import sys
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from functools import partial
from itertools import chain
from types import GetSetDescriptorType, MappingProxyType, MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cs_systems.config import ConfigError
from cs_systems.measure.workloads._setup import TrainingSetup

# most objects besides modules, tensors and optimizer, the nearest first: takes one to two seconds
MOST_OBJECTS = 100_000
_PARTS = ("model", "optimizer", "scheduler", "loss", "forward", "batch")  # attributes of a TrainingSetup
_MISSING = object()


class Stage(IntEnum):
    """Order in which the parts of the state are restored."""

    WEIGHTS = 0
    BUFFERS = 1
    GRADIENTS = 2  # after the values, because assigning a gradient can depend on dtypes
    GRADIENT_OF = 3
    MODULES = 4  # modes, hooks and other attributes
    OPTIMIZER = 5
    OTHERS = 6


class ObjectState:
    """Values and structure of all objects that a setup reaches, except its `batches` and objects held by functions."""

    def __init__(self, setup: TrainingSetup | None = None, **others: Any) -> None:
        """Keep the state. Raises ConfigError if a parameter or buffer of the model has no values yet.

        others: further objects by name, which may include modules and optimizers.
        """
        self._kept: list[_Kept] = []
        parts = {} if setup is None else {part: getattr(setup, part) for part in _PARTS}
        parts |= others
        seen: dict[int, Any] = {}
        with torch._C.DisableTorchFunctionSubclass():
            for name, model in parts.items():
                if isinstance(model, nn.Module):
                    _check_values(model)
                    for path, tensor in _named_tensors(model):  # the attributes of a scripted model do not include them
                        self._kept += _walk(_Node(tensor, None, f"{name}.{path}", Stage.BUFFERS), seen)
            for name, part in parts.items():
                is_update = name in ("optimizer", "scheduler") or isinstance(part, Optimizer)
                stage = Stage.OPTIMIZER if is_update else Stage.OTHERS
                self._kept += _walk(_Node(part, None, name, stage), seen)
        self._kept.sort(key=lambda kept: kept.stage)

    def restore(self, stages: Iterable[Stage] = Stage) -> list[str]:
        """Restore changed content stage by stage; return the names of objects that cannot be restored, with reasons."""
        chosen, lost = {*stages}, []
        for kept in self._kept:
            if kept.stage not in chosen:
                continue
            try:
                with torch._C.DisableTorchFunctionSubclass():
                    kept.undo()
            except Exception as error:  # an error in one must not prevent restoring the others
                lost.append(f"{kept.node.path()} ({''.join(traceback.format_exception_only(error)).strip():.80})")
        return lost


class _Node(NamedTuple):
    """Object with the path that leads to it from a part of the setup."""

    value: Any
    parent: _Node | None
    label: str
    stage: Stage

    def path(self) -> str:
        labels, node = [self.label], self.parent
        while node is not None:
            labels.append(node.label)
            node = node.parent
        return re.sub(r"\._(modules|parameters|buffers)\['([^']*)'\]", r".\2", "".join(reversed(labels)))


class _Kept(NamedTuple):
    stage: Stage
    node: _Node
    undo: Callable[[], object]


class _Content(NamedTuple):
    """Part of an object's content: the function that restores it, and the objects in it with their labels."""

    undo: Callable[[], object] | None
    children: Iterable[tuple[str, Any]] = ()
    stage: Stage | None = None  # None means the stage of the object


def _check_values(model: nn.Module) -> None:
    tensors = _named_tensors(model)
    if any(is_lazy(tensor) for _, tensor in tensors):
        raise ConfigError("the model has lazy parameters without a shape; call it once before it is measured")
    if on_meta := next((name for name, tensor in tensors if tensor.is_meta), None):
        kind = "parameter" if on_meta in dict(model.named_parameters()) else "buffer"
        raise ConfigError(
            f"{kind} {on_meta} of the model is on the meta device, without values; load the model without "
            "offloading. If all of it is on meta, call model.to_empty(device='cpu') and initialise it"
        )


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _walk(root: _Node, seen: dict[int, Any]) -> Iterator[_Kept]:
    """Yield the content to keep of each object that a part of the setup reaches: modules first, then the nearest.

    seen: the objects reached before, by id; it is extended, and keeps them alive.
    """
    if id(root.value) in seen:
        return
    seen[id(root.value)] = root.value
    waiting, most = deque([root]), len(seen) + MOST_OBJECTS
    while waiting:
        node = waiting.popleft()
        for undo, children, stage in _readable(node.value):
            stage = node.stage if stage is None else stage
            if undo is not None:
                yield _Kept(stage, node, undo)
            for label, child in children:
                if type(child) in _ATOMS or id(child) in seen:
                    continue
                found = _Node(child, node, label, _stage(node, stage, label))
                if found.stage is not Stage.OTHERS:
                    waiting.appendleft(found)
                elif len(seen) < most:
                    waiting.append(found)
                else:
                    continue
                seen[id(child)] = child


def _readable(value: Any) -> Iterator[_Content]:
    """Yield the content of an object; for unreadable content, a function that reports it at the end."""
    try:
        yield from _contents(value)
    except Exception as error:  # such as a tensor of a class with unreadable values
        yield _Content(partial(_raise, error))


def _raise(error: Exception) -> None:
    raise error


_ATOMS = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
_REGISTRIES = {"._parameters": Stage.WEIGHTS, "._modules": Stage.WEIGHTS, "._buffers": Stage.BUFFERS}


def _stage(owner: _Node, stage: Stage, label: str) -> Stage:
    """Return the stage for an object that is held by an object of this stage."""
    if not issubclass(type(owner.value), nn.Module):
        return stage
    return _REGISTRIES.get(label, Stage.MODULES if "_hooks" in label else Stage.OTHERS)


def _contents(value: Any) -> Iterator[_Content]:
    """Yield the content of an object in parts: as tensor, as container, by attributes; nothing if it is not kept."""
    kind = type(value)
    if issubclass(kind, Tensor):
        yield from _tensor_contents(value)
        yield _attributes(value)
        return
    if issubclass(kind, (ModuleType, type)):
        return
    for base, contents in _CONTAINERS.items():
        if issubclass(kind, base):
            yield contents(value)
            break
    else:
        if (undo := _state_of_generator(value) or _array(value)) is not None:
            yield _Content(undo)
            return
    if kind.__flags__ & _HEAP_TYPE and _is_followed(kind):
        stage = Stage.MODULES if issubclass(kind, nn.Module) else None
        yield _attributes(value)._replace(stage=stage)
        yield from _slots(value)
        yield _Content(partial(_restore_class, value, kind), stage=stage)


_HEAP_TYPE = 1 << 9  # flag of classes made by a `class` statement
_OF_LIBRARY = {  # standard-library modules with classes that are containers or base classes of data
    *("abc", "argparse", "builtins", "collections", "contextlib", "dataclasses", "functools", "types", "typing")
}
_OF_TORCH = ("torch.nn", "torch.optim", "torch.amp", "torch.ao")


def _is_followed(kind: type) -> bool:
    """Return whether attributes of a class's instances are kept; not for threads, locks, files and loaders."""
    if issubclass(kind, nn.Module):
        return True
    for base in kind.__mro__:
        root, module = str(base.__module__).partition(".")[0], str(base.__module__)
        if root in sys.stdlib_module_names and root not in _OF_LIBRARY:
            return False
        if root == "torch" and not module.startswith(_OF_TORCH):
            return False
    return True


def _restore_class(value: Any, kind: type) -> None:
    if type(value) is not kind:
        object.__setattr__(value, "__class__", kind)


def _attributes(value: Any) -> _Content:
    """Return the content of an object's `__dict__`, even if its class also defines other kinds of attributes."""
    for base in type(value).__mro__:
        found = vars(base).get("__dict__")
        if isinstance(found, (GetSetDescriptorType, MemberDescriptorType)):
            attributes = found.__get__(value)
            return _mapping(attributes, as_attributes=True) if type(attributes) is dict else _Content(None)
    return _Content(None)


def _slots(value: Any) -> Iterator[_Content]:
    for base in type(value).__mro__:
        if "__slots__" in vars(base):
            for name, slot in vars(base).items():
                if isinstance(slot, MemberDescriptorType):
                    content = _slot(value, slot)
                    yield _Content(partial(_restore_slot, value, slot, content), [(f".{name}", content)])


def _slot(value: Any, slot: MemberDescriptorType) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return _MISSING


def _restore_slot(value: Any, slot: MemberDescriptorType, content: Any) -> None:
    if _slot(value, slot) is content:
        return
    if content is _MISSING:
        slot.__delete__(value)
    else:
        slot.__set__(value, content)


def _mapping(owner: dict[Any, Any], as_attributes: bool = False) -> _Content:
    """Return the content of a dict of any class, which is restored item by item, in order."""
    kind: Any = OrderedDict if issubclass(type(owner), OrderedDict) else dict

    def items() -> list[tuple[Any, Any]]:
        return [(key, dict.__getitem__(owner, key)) for key in kind.__iter__(owner)]

    content = [*dict.items(owner)] if kind is dict else items()

    def undo() -> None:
        now = [*dict.items(owner)] if kind is dict else items()
        if _same(chain(*now), chain(*content)):
            return
        keys = {id(key) for key, _ in content}
        for key, _ in now:
            if id(key) not in keys:
                kind.__delitem__(owner, key)
        for key, value in content:
            if dict.get(owner, key, _MISSING) is not value:
                kind.__setitem__(owner, key, value)
        if not _same(kind.__iter__(owner), (key for key, _ in content)):
            for key, value in content:
                kind.__delitem__(owner, key)
                kind.__setitem__(owner, key, value)

    def children() -> Iterator[tuple[str, Any]]:
        for key, value in content:
            label = f"[{key!r}]" if type(key) in (str, int) else "[…]"
            yield f".{key}" if as_attributes else label, value
            yield f"{label} (key)", key

    return _Content(undo, children())


def _same(now: Iterable[Any], before: Iterable[Any]) -> bool:
    """Return whether two iterables yield the same objects in the same order."""
    now, before = [*now], [*before]
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def _list(owner: list[Any]) -> _Content:
    content = list.copy(owner)

    def undo() -> None:
        if not _same(list.__iter__(owner), content):
            list.__setitem__(owner, slice(None), content)

    return _Content(undo, _numbered(content))


def _deque(owner: deque[Any]) -> _Content:
    content = [*deque.__iter__(owner)]

    def undo() -> None:
        if not _same(deque.__iter__(owner), content):
            deque.clear(owner)
            deque.extend(owner, content)

    return _Content(undo, _numbered(content))


def _set(owner: set[Any]) -> _Content:
    content = {id(value): value for value in set.__iter__(owner)}

    def undo() -> None:
        if content.keys() != {id(value) for value in set.__iter__(owner)}:
            set.clear(owner)
            set.update(owner, content.values())

    return _Content(undo, _numbered(content.values()))


def _bytes(owner: bytearray) -> _Content:
    content = bytes(owner)

    def undo() -> None:
        if bytes(owner) != content:
            bytearray.__setitem__(owner, slice(None), content)

    return _Content(undo)


def _numbered(values: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"[{index}]", value) for index, value in enumerate(values))


def _tuple(owner: tuple[Any, ...]) -> _Content:
    return _Content(None, _numbered(tuple.__iter__(owner)))


def _frozenset(owner: frozenset[Any]) -> _Content:
    return _Content(None, _numbered(frozenset.__iter__(owner)))


def _proxied(owner: MappingProxyType[Any, Any]) -> _Content:
    mapping = gc.get_referents(owner)[0]
    is_of_class = type(mapping) is dict and "__module__" in mapping  # the attributes of a class are not kept
    return _Content(None, [] if is_of_class else [("", mapping)])


def _partial(owner: partial[Any]) -> _Content:
    return _Content(None, [(".func", owner.func), (".args", owner.args), (".keywords", owner.keywords)])


_CONTAINERS: dict[type, Callable[[Any], _Content]] = {
    dict: _mapping,
    list: _list,
    tuple: _tuple,
    set: _set,
    frozenset: _frozenset,
    deque: _deque,
    bytearray: _bytes,
    MappingProxyType: _proxied,
    partial: _partial,
    SimpleNamespace: _attributes,
}


def _state_of_generator(value: Any) -> Callable[[], object] | None:
    """Return a function that restores a random number generator; None for any other object."""
    numpy: Any = sys.modules.get("numpy")
    kind = type(value)
    if issubclass(kind, torch.Generator):
        return partial(value.set_state, value.get_state())
    if issubclass(kind, random.Random):
        return partial(random.Random.setstate, value, random.Random.getstate(value))
    if numpy is not None and issubclass(kind, numpy.random.RandomState):
        return partial(value.set_state, value.get_state())
    if numpy is not None and issubclass(kind, numpy.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


def _array(value: Any) -> Callable[[], object] | None:
    """Return a function that restores the values of a numpy array; None for other objects and memory-mapped files."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not issubclass(type(value), numpy.ndarray) or _in_file(value) or not value.flags.writeable:
        return None
    array = numpy.ndarray.view(value, numpy.ndarray)
    content = array.copy()

    def undo() -> None:
        if array.tobytes() != content.tobytes():
            array[...] = content

    return undo


def _in_file(array: Any) -> bool:
    numpy, base = sys.modules["numpy"], array
    while issubclass(type(base), numpy.ndarray):
        if issubclass(type(base), numpy.memmap):
            return True
        base = base.base
    return False


def _tensor_contents(tensor: Tensor) -> Iterator[_Content]:
    """Yield a tensor's values and its gradient. A wrapper tensor's inner tensors are among its attributes."""
    if is_lazy(tensor) or tensor.is_meta or _is_freed(tensor):
        return
    holds_values = not is_traceable_wrapper_subclass(tensor)
    stage = Stage.WEIGHTS if isinstance(tensor, nn.Parameter) else None
    yield _Content(_values(tensor) if holds_values else partial(_restore_flag, tensor, tensor.requires_grad), (), stage)
    if not holds_values:
        yield from _slots(tensor)
    if _has_gradient(tensor):
        gradient = tensor.grad
        yield _Content(None, [(".grad", gradient)], Stage.GRADIENTS)
        yield _Content(partial(_restore_gradient, tensor, gradient), (), Stage.GRADIENT_OF)


def _has_gradient(tensor: Tensor) -> bool:
    try:
        return tensor.is_leaf or tensor.retains_grad
    except RuntimeError:  # autograd raises for a view if its base has changed
        return False


def _restore_gradient(tensor: Tensor, gradient: Tensor | None) -> None:
    if tensor.grad is not gradient:
        tensor.grad = gradient


def _restore_flag(tensor: Tensor, requires_grad: bool) -> None:
    if tensor.requires_grad != requires_grad:
        tensor.requires_grad_(requires_grad)


def _values(tensor: Tensor) -> Callable[[], object]:
    """Return a function that restores a tensor's values, memory, device, dtype and flags."""
    device, shape, form, requires_grad = tensor.device, tensor.shape, _form(tensor), tensor.requires_grad
    memory = tensor.data if device.type == "cpu" else None  # device memory would add to the peak
    size_bytes = tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else 0
    version = None if tensor.is_inference() else tensor._version
    values = _once(tensor.detach()).to("cpu", copy=True)

    def undo() -> None:
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            if _form(tensor) != form:
                if _has_gradient(tensor):
                    tensor.grad = None  # the gradient has another form than the values, so it is restored after them
                tensor.data = values.expand(shape) if memory is None else memory
                if memory is None:  # if that fails, the values are at least on the host
                    tensor.data = values.to(device).expand(shape)
            if _is_freed(tensor):
                tensor.untyped_storage().resize_(size_bytes)
            if device.type != "cpu" or not _has_bits(_once(tensor.data), values):
                _copy(tensor, values)
        # a graph that will still run backward checks this version
        if version is not None and tensor._version != version:
            torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
        _restore_flag(tensor, requires_grad)

    return undo


def _copy(tensor: Tensor, values: Tensor) -> None:
    try:
        (_once(tensor.data) if tensor.layout is torch.strided else tensor).copy_(values)
    except Exception:
        if tensor.device.type != "cpu" and tensor.shape == values.shape:
            tensor.data = values  # the device has failed; the values are at least on the host
        raise


def _is_freed(tensor: Tensor) -> bool:
    """Return whether a tensor's memory was freed meanwhile, as sharded strategies do between steps."""
    if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
        return False
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """Return a tensor's properties except its values: device, dtype, shape, and on the host its address."""
    if tensor.layout is not torch.strided:
        return tensor.device, tensor.dtype, tensor.shape
    where = tensor.data_ptr() if tensor.device.type == "cpu" else None
    return tensor.device, tensor.dtype, tensor.shape, tensor.stride(), where


def _once(tensor: Tensor) -> Tensor:
    """Return a view that contains each stored element of an expanded tensor once."""
    if tensor.layout is torch.strided:
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dim] > 1:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _has_bits(tensor: Tensor, values: Tensor) -> bool:
    """Return whether two tensors on the host are bitwise equal; False if they cannot be compared."""
    has_own_bits = not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    if tensor.layout is not torch.strided or not has_own_bits or tensor.dtype.itemsize not in _BITS:
        return False
    kind = _BITS[tensor.dtype.itemsize]
    return torch.equal(tensor.view(kind), values.view(kind))
