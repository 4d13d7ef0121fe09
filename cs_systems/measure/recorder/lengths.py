"""Containers and arrays of a program that get longer in each step, and the lines that read all of their elements.

Such a line takes longer with each step, which a few timed steps may not show. Sentences of different lengths do not
get longer in each of several looks, nor at the same pace.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.nn import Parameter

from cs_systems.instrument.compiler import untraced
from cs_systems.measure.recorder.kept import CONTAINERS, GROWS, named_values
from cs_systems.measure.recorder.stacks import Line, source_of

FEWEST_LOOKS = 3
SLACK = 1.5  # steps by which a look may be ahead of an even pace, or behind it
# functions and methods that read all elements of their first argument, or of their object
_READERS = (
    "sum|sorted|(?:arg)?sort|a?min|a?max|list|tuple|set|array|asarray|tensor|as_tensor|from_numpy|cat|"
    "concat|concatenate|[vhd]?stack|mean|median|std|var|quantile|percentile|unique|bincount|histogram|cumsum|dumps?|"
    "DataFrame|deepcopy|join|tolist"
)
_ITEMS = r"(?:\.(?:items|values|keys)\(\))?"
_STOPS = re.compile(r"\b(?:next|any|all|islice|takewhile|break)\b")  # may read the first elements alone
_TARGET = r"\bfor\b(?:(?!\bin\b).)*"  # up to `in` of the same `for`: `if name not in seen` is another
NUMBER_S, OBJECT_S, ELEMENT_S = 5e-7, 2e-6, 2e-8  # most time to read a number, another object, and one of an array


class Length(NamedTuple):
    """Number of elements, and the most time in which a line reads one."""

    elements: int
    each_s: float


class Of(NamedTuple):
    """Name of a container, the file that uses it, and the code of the variable or the class of the attribute."""

    name: str
    file: str
    owner: CodeType | type


class Longer(NamedTuple):
    """Container or array that gets longer: its elements now and per step, and the most time to read one."""

    of: Of
    elements: int
    per_step: float
    each_s: float

    @property
    def name(self) -> str:
        return self.of.name


Look = Mapping[Of, Length]


@untraced
def of(frame: FrameType | None) -> dict[Of, Length]:
    """Return the numbers of elements of the containers and arrays in the program's frames."""
    named = ((Of(name, each.file, each.owner), _length(each.value)) for name, each in named_values(frame))
    return {key: length for key, length in named if length is not None}


def grown(looks: Sequence[tuple[int, Look]]) -> list[Longer]:
    """Return what has got longer from look to look at an even pace, by at least an element in two steps.

    looks: each with the number of finished steps.
    """
    if len(looks) < FEWEST_LOOKS:
        return []
    found = [each for key in looks[-1][1] if (each := _longer(key, looks)) is not None]
    told = {each.of for each in found}
    # another object of the class, with an attribute that does not get longer, may be the one that is read
    others = {_attribute(key) for key in looks[-1][1] if key not in told and isinstance(key.owner, type)}
    return [each for each in found if _attribute(each.of) not in others]


def _longer(key: Of, looks: Sequence[tuple[int, Look]]) -> Longer | None:
    points = [(step, look[key].elements) for step, look in looks if key in look]
    if len(points) < len(looks):
        return None
    (first, before), (last, now) = points[0], points[-1]
    pace = (now - before) / max(1, last - first)
    is_even = all(abs(length - before - pace * (step - first)) <= SLACK * pace for step, length in points)
    if pace < GROWS or now - before < 2 or not is_even:
        return None
    return Longer(key, now, pace, looks[-1][1][key].each_s)


def _attribute(key: Of) -> tuple[CodeType | type, str]:
    return key.owner, key.name.rpartition(".")[2]


def read_at(line: Line, longer: Sequence[Longer], line_s: float = 0.0) -> Longer | None:
    """Return the longest of these of which a line reads all elements, by the line's text.

    line_s: time of the line in a step; if the elements explain less, something else at the line takes the time.
    """
    text = source_of(line)
    found = (each for each in longer if line_s <= each.elements * each.each_s and _is_read(line[0], text, each.of))
    return max(found, key=_elements, default=None)


def _is_read(code: CodeType, text: str, of: Of) -> bool:
    """Return whether a line of this code reads all of a container, and not another with the same name."""
    if code.co_filename != of.file:
        return False
    if isinstance(of.owner, CodeType):
        return sees(code, of.owner, of.name) and reads(text, of.name)
    is_method = any(code.co_qualname.startswith(f"{kind.__qualname__}.") for kind in of.owner.__mro__)
    name = of.name.rpartition(".")[2]
    return reads(text, f"self.{name}") if is_method else not of.name.startswith("self.") and reads(text, of.name)


def sees(code: CodeType, owner: CodeType, name: str) -> bool:
    """Return whether a name in a function's code is the variable of the function, or module, that owns it."""
    if code is owner:
        return True
    if name in (*code.co_varnames, *code.co_cellvars):
        return False
    return owner.co_name == "<module>" or code.co_qualname.startswith(f"{owner.co_qualname}.<locals>.")


def reads(text: str, name: str) -> bool:
    """Return whether a line of Python reads all elements of a variable, or of an attribute, of this name."""
    text = text.partition("#")[0]
    if _STOPS.search(text):
        return False
    this = rf"(?<![\w.]){re.escape(name)}"
    return any(
        re.search(pattern, text)
        for pattern in (
            rf"{_TARGET}\bin\s+(?:enumerate\(\s*)?{this}{_ITEMS}\s*(?:[\]\):,}}]|$|\bif\b)",
            rf"(?<!\w)(?:{_READERS})\(\s*\[?{this}{_ITEMS}\s*[,\)\]]",
            rf"{this}\.(?:{_READERS})\(",
        )
    )


def _length(value: Any) -> Length | None:
    if type(value) in CONTAINERS:
        if isinstance(value, deque) and value.maxlen is not None:
            return None  # its size is fixed: it only fills up
        return Length(len(value), NUMBER_S if isinstance(next(iter(value), None), int | float) else OBJECT_S)
    if isinstance(value, Tensor):
        is_kept = isinstance(value, Parameter) or value.grad_fn is not None
        return None if is_kept else Length(value.numel(), ELEMENT_S)
    return Length(value.size, ELEMENT_S) if type(value) is np.ndarray else None


def _elements(longer: Longer) -> int:
    return longer.elements
