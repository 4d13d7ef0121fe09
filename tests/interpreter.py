"""Triton's interpreter without work that it repeats: that took a quarter of the time of the kernels of these tests."""

from __future__ import annotations

import functools
import inspect
from typing import Any


def repeat_less() -> None:
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
