"""Weights of the models of a loop, read between steps to be compared later."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from cs_systems.measure.recorder.gradients import evenly, some_values

MOST_PARAMETERS = 512  # most compared parameters
MOST_VALUES = 512  # most compared elements of a parameter


class Weights:
    """Elements of parameters at one point in time.

    Attributes:
        changed: whether an element has changed, by the identity of each compared parameter.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.changed: dict[int, bool] = {}
        self._before = [(weakref.ref(p), _digest(p)) for p in evenly(parameters, MOST_PARAMETERS)]

    def compare(self) -> None:
        """Compare the parameters that still exist with their earlier values."""
        for reference, before in self._before:
            if (parameter := reference()) is not None and before is not None:
                self.changed[id(parameter)] = _digest(parameter) != before


def _digest(parameter: Tensor) -> int | None:
    values = some_values(parameter, MOST_VALUES)
    return hash(values) if values else None
