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
        return str(report("display").as_text(*self._displayed()))

    def _repr_html_(self) -> str:
        return str(report("display").as_html(*self._displayed()))


def report(module: str) -> Any:
    """Return a module of `report/`, imported by name: its wing is above those of the objects that it shows."""
    return importlib.import_module(f"cs_systems.report.{module}")
