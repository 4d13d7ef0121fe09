"""Containers and arrays of a program that get longer in each step, and the lines that read all of their elements.

Such a line takes longer with each step, which a few timed steps may not show.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.nn import Parameter

from cs_systems.instrument.compiler import untraced
from cs_systems.measure.recorder.kept import CONTAINERS, GROWS, named_values
from cs_systems.measure.recorder.stacks import Line, source_of

# functions and methods that read all elements of their first argument, or of their object
_READERS = (
    "sum|sorted|(?:arg)?sort|a?min|a?max|list|tuple|set|any|all|array|asarray|tensor|as_tensor|from_numpy|cat|"
    "concat|concatenate|[vhd]?stack|mean|median|std|var|quantile|percentile|unique|bincount|histogram|cumsum|dumps?|"
    "DataFrame|deepcopy|join|tolist"
)
_ITEMS = r"(?:\.(?:items|values|keys)\(\))?"


class Longer(NamedTuple):
    """Container or array that gets longer: its name, its elements now and per step, and the file that uses it."""

    name: str
    elements: int
    per_step: float
    file: str


@untraced
def of(frame: FrameType | None) -> dict[tuple[str, str], int]:
    """Return the numbers of elements of the containers and arrays in the program's frames, by file and name."""
    named = ((each.file, name, _length(each.value)) for name, each in named_values(frame))
    return {(file, name): length for file, name, length in named if length is not None}


def grown(before: Mapping[tuple[str, str], int], now: Mapping[tuple[str, str], int], steps: int) -> list[Longer]:
    """Return what has got longer in `steps` steps, with the file that uses it; by at least an element in two steps."""
    made = ((key, length, length - before[key]) for key, length in now.items() if key in before)
    return [
        Longer(name, length, more / steps, file) for (file, name), length, more in made if more >= max(GROWS * steps, 2)
    ]


def read_at(line: Line, longer: Sequence[Longer]) -> Longer | None:
    """Return the longest of these of which a line reads all elements, by the line's text."""
    text, file = source_of(line), line[0].co_filename
    return max((each for each in longer if each.file == file and reads(text, each.name)), key=_elements, default=None)


def reads(text: str, name: str) -> bool:
    """Return whether a line of Python reads all elements of a variable, or of an attribute by the last part."""
    last = rf"(?:\w+\.)*{re.escape(name.rpartition('.')[2])}"
    patterns = (
        rf"\bin\s+(?:enumerate\(|reversed\(|zip\()?{last}{_ITEMS}\s*(?:[\]\):,}}]|$|\bif\b)",
        rf"(?<!\w)(?:{_READERS})\(\s*\[?{last}{_ITEMS}\s*[,\)\]]",
        rf"(?<![\w.]){last}\.(?:{_READERS})\(",
    )
    loops = re.search(r"\bfor\b", text)
    return any(re.search(pattern, text) for pattern in (patterns if loops else patterns[1:]))


def _length(value: Any) -> int | None:
    if type(value) in CONTAINERS:
        return None if getattr(value, "maxlen", None) is not None else len(value)  # a full deque grows no more
    if isinstance(value, Tensor):
        return None if isinstance(value, Parameter) or value.grad_fn is not None else value.numel()
    return value.size if type(value) is np.ndarray else None


def _elements(longer: Longer) -> int:
    return longer.elements
