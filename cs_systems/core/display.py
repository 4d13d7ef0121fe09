"""Display of objects as tables instead of their fields, at a Python prompt and in a notebook."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any


class Displayed:
    """Mixin that displays an object as a table: text at a prompt, HTML in a notebook."""

    @abstractmethod
    def _displayed(self) -> tuple[str, Sequence[Any]]:
        """Return a heading, or "", and the records or configurations to show."""

    def __repr__(self) -> str:
        return str(report("display").as_text(*self._displayed()))

    def _repr_html_(self) -> str:
        return str(report("display").as_html(*self._displayed()))


def report(module: str) -> Any:
    """Return a module of `report/`, imported by name because the displayed objects must not depend on `report/`."""
    return importlib.import_module(f"cs_systems.report.{module}")
