"""Marks on tensors of the program, which tell whether anything uses them.

torch asks the class of a tensor that is given to an operator, or of which a method or property is used. So a marked
tensor has a class of this file until its first use, and is a plain one from then on. Nothing is copied or kept alive.
"""

from __future__ import annotations

import linecache
import re
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cs_systems.measure.recorder.stacks import is_own
from cs_systems.measure.workloads._batches import tensors_in

_NAME = "_cs_systems_uses"
_TAKES_TYPE = re.compile(r"(?<![\w.])type\((?!self\)|\w+\)\.__)|__class__(?!\.__)")


class Marked(Tensor):
    """Tensor that notes its first use, and is plain from then on; looks of this package are no use."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in tensors_in((args, kwargs)) if type(each) is Marked]
        if not given or all(use.is_looking() for each in given for use in vars(each)[_NAME]):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for each in given:
            _end_mark(each)
        return func(*args, **(kwargs or {}))


def _end_mark(tensor: Tensor) -> None:
    """Make a marked tensor plain, and note that it was used."""
    tensor.__class__ = Tensor
    for use in vars(tensor).pop(_NAME):
        use.is_used = True


def may_see_types() -> bool:
    """Return whether the program's own files ask for the class of something, which may be a marked tensor."""
    files = [getattr(each, "__file__", None) for each in [*sys.modules.values()]]
    lines = (line for file in files if file and is_own(file) for line in linecache.getlines(file))
    return any(_TAKES_TYPE.search(line) for line in lines)


class Uses:
    """Uses of some tensors.

    is_looking: whether this package looks at the program's tensors now.

    Attributes:
        is_used: something has used one of the tensors.
    """

    def __init__(self, is_looking: Callable[[], bool]) -> None:
        self.is_looking, self.is_used = is_looking, False
        self._tensors: list[weakref.ref[Tensor]] = []

    def mark(self, tensor: Tensor) -> None:
        vars(tensor).setdefault(_NAME, []).append(self)
        tensor.__class__ = Marked
        self._tensors.append(weakref.ref(tensor))

    def are_none(self) -> bool:
        """Return whether nothing has used the tensors, and nothing can from now on."""
        return not self.is_used and all(each() is None for each in self._tensors)

    def end(self) -> None:
        """End the marks of the tensors that still exist."""
        for reference in self._tensors:
            if (tensor := reference()) is not None and type(tensor) is Marked:
                _end_mark(tensor)
