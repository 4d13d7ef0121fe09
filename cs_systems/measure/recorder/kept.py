"""Containers of a program that grow from step to step, found by name in its frames; they are only measured.

A list of losses, or a running sum of losses, keeps the graph of each step alive.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import re
import sys
import tokenize
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

from cs_systems.analysis.comparison.loop_findings import RESULTS
from cs_systems.core.units import human
from cs_systems.instrument.compiler import untraced
from cs_systems.measure.recorder.stacks import holds_locals, is_own

CONTAINERS = (list, dict, set, deque)
ARRAYS = (torch.Tensor, np.ndarray)
CACHE = functools._lru_cache_wrapper
DEPTH = 2  # levels of objects of the program's own classes: self.memory, and its attributes
MOST_NAMES = 1000  # most names in one namespace
MOST_KEYS = 50  # most keys of a dict with lists
GROWS = 0.5  # least growth, in elements per step
# least size of a storage, and its ratio to the tensor in it, from which the storage is named
LARGE_BYTES, LARGER = 1 << 16, 16
_ADDS = r"\s*(?:\.(?:append|extend|add|appendleft|update)\(|\+=|\[[^\]]*\]\s*=[^=])"


class Kept(NamedTuple):
    """Growing container, or tensor with a growing graph: its name, its contents, and the line that adds to it."""

    name: str
    what: str
    place: str | None


class Named(NamedTuple):
    """Value, the file whose lines use it by the last part of its name, and its function or its object's class."""

    value: Any
    file: str
    owner: CodeType | type


@untraced
def sizes(frame: FrameType | None) -> dict[str, int]:
    """Return the sizes of the containers in the program's frames, by name."""
    return {name: size for name, each in named_values(frame) if (size := _size(each.value)) is not None}


@untraced
def grown(frame: FrameType | None, before: Mapping[str, int], steps: int) -> Kept | None:
    """Return the container that has grown in `steps` steps since `before`; one that keeps graphs takes precedence."""
    found: list[tuple[bool, bool, int, Kept]] = []
    for name, each in named_values(frame):
        size = _size(each.value)
        if size is None or size - before.get(name, 0) < max(GROWS * steps, 2):
            continue
        what = _elements(each.value)
        place = _place(name, each.file) if what != RESULTS else _begin(each.value)
        kept = Kept(name, what, place)
        found.append(
            ("graph" in what, what == RESULTS or "tensor" in what or "array" in what, size - before.get(name, 0), kept)
        )
    return max(found, key=lambda each: each[:3])[3] if found else None


def named_values(frame: FrameType | None) -> Iterator[tuple[str, Named]]:
    """Yield the variables of the program's frames, and the containers of its objects, the innermost frame first.

    Functions that may keep the dictionary of their variables are left out, because a look would change it.
    """
    seen: set[int] = set()
    while frame is not None:
        file, is_function = frame.f_code.co_filename, frame.f_code.co_flags & inspect.CO_OPTIMIZED
        if is_own(file) and not (is_function and holds_locals(frame.f_code)):
            names = frame.f_locals
            for name, value in [*names.items()][:MOST_NAMES]:
                if name.startswith("__") or id(value) in seen:
                    continue
                seen.add(id(value))
                yield from _inside(name, value, file, frame.f_code)
            if is_function and isinstance(names, dict):
                names.clear()  # Python stores this copy in the frame, so it would keep the tensors alive
            del names
        frame = frame.f_back


def _inside(
    name: str, value: Any, file: str, owner: CodeType | type, depth: int = DEPTH
) -> Iterator[tuple[str, Named]]:
    yield name, Named(value, file, owner)
    if type(value) is dict and len(value) <= MOST_KEYS:
        for key, inner in value.items():
            if isinstance(key, str) and type(inner) in (list, deque):
                yield f"{name}[{key!r}]", Named(inner, file, owner)
    elif (own := _own_file(type(value))) is not None and isinstance(getattr(value, "__dict__", None), dict):
        for attribute, inner in [*vars(value).items()][:MOST_NAMES]:
            if attribute.startswith("_"):
                continue
            if type(inner) in (*CONTAINERS, *ARRAYS):
                yield f"{name}.{attribute}", Named(inner, own, type(value))
            elif depth > 1 and _own_file(type(inner)) is not None:
                yield from _inside(f"{name}.{attribute}", inner, own, type(value), depth - 1)
        for attribute, inner in [*vars(type(value)).items()][:MOST_NAMES]:
            if isinstance(inner, CACHE):
                yield f"{type(value).__name__}.{attribute}", Named(inner, own, type(value))


def _own_file(kind: type) -> str | None:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file if file and is_own(file) else None


def _size(value: Any) -> int | None:
    if type(value) in CONTAINERS:
        return len(value)
    if isinstance(value, CACHE):
        return value.cache_info().currsize
    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
        return _additions(value.grad_fn)
    return None


def _additions(node: Any) -> int:
    """Return the number of consecutive additions at the end of a graph."""
    count = 0
    while node is not None and node.name().startswith("AddBackward") and count < 100_000:
        count += 1
        before = [inner for inner, _ in node.next_functions if inner is not None]
        node = next((inner for inner in before if inner.name().startswith("AddBackward")), None)
    return count


def _elements(value: Any) -> str:
    """Return the contents of a container as text, judged by its last element."""
    if isinstance(value, torch.Tensor):
        return "a running sum with the graph of each step"
    if isinstance(value, CACHE):
        return RESULTS
    last = next(iter(reversed(value if isinstance(value, list | deque) else [*value])), None)
    if isinstance(value, dict):
        last = value[last]
    inner = [*last.values()] if isinstance(last, dict) else [*last] if isinstance(last, list | tuple) else [last]
    tensors = [each for each in inner if isinstance(each, torch.Tensor)]
    if any(each.grad_fn is not None for each in tensors):
        return "tensors with their graphs"
    if tensors:
        return _tensors(tensors)
    return "arrays" if any(type(each).__module__ == "numpy" for each in inner) else "objects"


def _tensors(tensors: Sequence[torch.Tensor]) -> str:
    """Return a description of tensors; a small tensor may keep a large storage, such as a loss computed on a CPU."""
    stored = max((each for each in tensors if each.layout is torch.strided), key=_stored_bytes, default=None)
    if stored is None or _stored_bytes(stored) < max(LARGE_BYTES, LARGER * stored.nbytes):
        return "tensors"
    return f"tensors in storages of {human(_stored_bytes(stored), 'bytes')}"


def _stored_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _begin(cache: Any) -> str | None:
    """Return the line at which a function with a cache begins, with its decorator."""
    code = getattr(inspect.unwrap(cache), "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code is not None else None


def _place(name: str, file: str) -> str | None:
    """Return the line that adds to a container, by the source."""
    last = re.escape(name.rpartition(".")[2])
    adds = re.compile(
        rf"(?<!\w){last}{_ADDS}" if "[" not in name else rf"{re.escape(name.partition('[')[0])}\[.*{_ADDS}"
    )
    again = re.compile(rf"(?<![\w.]){last}\s*=\s*{last}\s*\+")
    texts = _texts(file)
    for number, line in enumerate(linecache.getlines(file), 1):
        found = adds.search(line) or again.search(line)
        if found and not any(first <= (number, found.start()) < last for first, last in texts):
            return f"{Path(file).name}:{number}"
    return None


def _texts(file: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return where the strings and comments of a source begin and end, by line and column."""
    lines = iter(linecache.getlines(file))
    with suppress(tokenize.TokenError, SyntaxError):
        tokens = tokenize.generate_tokens(lambda: next(lines, ""))
        return [(each.start, each.end) for each in tokens if each.type in (tokenize.STRING, tokenize.COMMENT)]
    return []
