"""Objects that a prompt and a notebook show as a table instead of their fields."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any


class Displayed:
    """Mixin of an object with a table: text at a prompt, HTML in a notebook."""

    @abstractmethod
    def _displayed(self) -> tuple[str, Sequence[Any]]:
        """Return a heading, or "", and the records or the configurations to show."""

    def __repr__(self) -> str:
        return str(_report().as_text(*self._displayed()))

    def _repr_html_(self) -> str:
        return str(_report().as_html(*self._displayed()))


def _report() -> Any:
    """Return the module that makes the tables, imported by name: its room is above those of the objects."""
    return importlib.import_module("cs_systems.report.display")
