"""Triton's interpreter without work that it repeats: that took half of the time of the kernels of these tests."""

from __future__ import annotations

import builtins
import functools
import inspect
import math
from typing import Any


def repeat_less() -> None:
    """Let a launch replace Triton's language once, and make the objects that describe a shape once."""
    _replace_language_once()
    _describe_shapes_once()
    _find_numpy_types_once()


def _replace_language_once() -> None:
    """Let a launch replace Triton's language once, and not again for each call of a device function."""
    from triton.runtime import interpreter

    language = {id(interpreter.tl), id(interpreter.tl.core)}
    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: set[frozenset[int]] = set()

    @functools.cache
    def modules_of(function: Any) -> frozenset[int]:
        return frozenset(id(value) for value in function.__globals__.values() if inspect.ismodule(value)) & language

    def once(function: Any) -> Any:
        """Return what restores the language, which only a launch uses."""
        if (modules := modules_of(function)) in replaced:
            return None
        replaced.add(modules)
        return replace(function)

    def launched(self: Any, *arguments: Any, **options: Any) -> Any:
        replaced.clear()
        return launch(self, *arguments, **options)

    interpreter._patch_lang = once
    interpreter.GridExecutor.__call__ = launched


def _describe_shapes_once() -> None:
    """Let all tensors and types of a shape share its tuple and its number of elements, which nothing changes."""
    from triton.language import core

    make = core.block_type.__init__
    of_types: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    of_tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = (*(size.value if type(size) is core.constexpr else size for size in shape),)
        if (known := of_types.get(sizes)) is None:
            make(self, element_ty, shape)  # raises an error for a wrong shape
            of_types[sizes] = self.shape, self.numel, str(self.shape)
            return
        self.element_ty = element_ty
        self.shape, self.numel, text = known
        self.name = f"<{text}, {element_ty}>"

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        sizes = (*kind.shape.values,) if kind.is_block() else ()
        if (known := of_tensors.get(sizes)) is None:
            shape = core.tuple([core.constexpr(size) for size in sizes])
            known = of_tensors[sizes] = shape, core.constexpr(math.prod(sizes))
        self.shape, self.numel = known

    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
    unwrap = core._unwrap_if_constexpr
    collections = (list, builtins.tuple, core.tuple)

    def unwrap_if_constexpr(value: Any) -> Any:
        if isinstance(value, core.constexpr):
            return value.value
        return unwrap(value) if isinstance(value, collections) else value

    core._unwrap_if_constexpr = unwrap_if_constexpr


def _find_numpy_types_once() -> None:
    """Look the NumPy type of a Triton type up; the interpreter makes a dictionary of all types for each."""
    from triton.runtime import interpreter

    find, pointer = interpreter._get_np_dtype, interpreter.tl.pointer_type
    known: dict[str, Any] = {}

    def found(kind: Any) -> Any:
        scalar = kind.scalar
        if isinstance(scalar, pointer):
            return find(scalar)
        if (result := known.get(scalar.name)) is None:
            result = known[scalar.name] = find(scalar)
        return result

    interpreter._get_np_dtype = found
