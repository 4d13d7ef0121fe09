"""The user's own code compared with the code it replaces: differences as rows of a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, TypedDict

from cs_systems.analysis.comparison.strategies import name
from cs_systems.core.fields import Subject
from cs_systems.core.tables import Column, Table
from cs_systems.record import RunRecord


class OwnCodeRow(TypedDict):
    """The user's own code that a step called, compared with the code it replaces, on the same small inputs.

    same: the answer of `sameness`, or "failed" with the exception as note.
    """

    option: str
    code: str
    reference: str
    same: Annotated[str, Column("same")]
    error: Annotated[
        float | None,
        Column("difference", "difference: the largest, over the largest value of the reference", form=".1e"),
    ]
    note: str


OWN_CODE = Table("own_code", OwnCodeRow, "your own code next to the built-in")
SAME_VALUES = 1e-3  # a different order of adding epsilon or decaying weights changes AdamW's parameters by less

# A different order of sums gives the built-in strategies less than 1e-5; missing averages of gradients give more than
# 0.1.
SAME = 1e-4
SAME_LOSS = 1e-5  # the loss changes less: missing averages of gradients give more than 1e-4
LOW_PRECISION = 2e-2  # gradients or parameters in bf16, with a unit roundoff of 2⁻⁸, over a few steps


class StrategyErrorRow(TypedDict):
    """Parameters of ranks trained with a strategy, compared with one process on the whole batch."""

    strategy: str
    ranks: int
    steps: Annotated[int, Column(drop=1)]
    error: Annotated[
        float | None,
        Column("from one", "from one: distance of the parameters from one process, over their change", form=".1e"),
    ]
    between_ranks: Annotated[
        float | None,
        Column("between ranks", "between ranks: largest distance from rank 0, likewise", form=".1e", drop=3),
    ]
    loss_error: Annotated[float | None, Column("loss", "loss: relative error of the last loss", form=".1e", drop=1)]
    begins_equal: Annotated[
        bool | None, Column("rank 0 first", "rank 0 first: all ranks get the parameters of rank 0 at first", drop=2)
    ]
    note: str


class JudgedRow(StrategyErrorRow):
    """Row with the answer: "yes", "in low precision", "no", or "failed"."""

    same: Annotated[str, Column("as one process")]


STRATEGY_ERROR = Table("strategy_error", StrategyErrorRow, "ranks next to one process")
JUDGED = Table(
    "strategies_checked",
    JudgedRow,
    "each strategy on gloo next to one process on the whole batch",
    "strategy ranks same error between_ranks loss_error begins_equal note",
)


def judged(records: Iterable[RunRecord]) -> list[JudgedRow]:
    """Return a row for each strategy that was compared with one process, including strategies with failed code."""
    rows: list[JudgedRow] = []
    for record in records:
        if record.subject is Subject.STRATEGY_ERROR:
            failed: StrategyErrorRow = {
                "strategy": name(record.run_config), "ranks": record.run_config.world_size, "steps": 0, "error": None,
                "between_ranks": None, "loss_error": None, "begins_equal": None, "note": record.reason or record.status,
            }  # fmt: skip
            row = next(iter(STRATEGY_ERROR.of(record.results)), failed)
            rows.append({**row, "same": same_as_one_process(row)})
    return rows


def same_as_one_process(row: StrategyErrorRow) -> str:
    """Return the answer of a row; judged by the loss alone if the parameters cannot be read."""
    if row["error"] is None or row["between_ranks"] is None:
        return "failed" if row["loss_error"] is None else "yes" if row["loss_error"] <= SAME_LOSS else "no"
    return sameness(max(row["error"], row["between_ranks"]), SAME)


def sameness(error: float, limit: float = SAME_VALUES) -> str:
    """Return the answer for a difference: "yes", "in low precision", or "no", also for NaN."""
    return "yes" if error <= limit else "in low precision" if error <= LOW_PRECISION else "no"


def compared(records: Iterable[RunRecord]) -> list[OwnCodeRow]:
    """Return, for each of the user's own functions and each answer, the row with the largest difference."""
    rows = [row for record in records for row in OWN_CODE.of(record.results)]
    rows.sort(key=lambda row: row["error"] or 0.0)
    return [*{(row["option"], row["code"], row["same"]): row for row in rows}.values()]
