"""Code of the user's own next to what it replaces: differences as rows of a table."""

from __future__ import annotations

from typing import Annotated, TypedDict

from cs_systems.core.tables import Column, Table


class OptimizerErrorRow(TypedDict):
    """Optimizer of the user's own next to torch's of the same name: same parameters, gradients and options."""

    optimizer: str
    reference: str
    steps: int
    error: Annotated[
        float | None,
        Column("difference", "difference: distance from torch's parameters, over their change", form=".1e"),
    ]
    note: str  # why it is unknown


OPTIMIZER_ERROR = Table("optimizer_error", OptimizerErrorRow, "optimizers of your own next to torch's")
