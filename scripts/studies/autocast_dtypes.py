"""Dtypes that autocast gives each part of a model, and the steps of a norm that need fp32.

Question: of a toy model, fc1 → relu → LayerNorm → fc2, which dtype have parameters, fc1's output, LayerNorm's output,
    logits, loss and gradients; why may all of them be fp32 though autocast is on; which step of LayerNorm, RMSNorm and
    softmax is it that cannot be done in fp16 or bf16?
Method: the toy model and a small language model's training step in fp32, under autocast in fp16 and bf16, and in pure
    bf16, with every module's dtypes read by hooks; the same with three mistakes; then each step of the three operations
    alone in low precision, the rest in float64, over inputs of many sizes.
Output: the dtypes as tables; the mistakes by name; the error of each step in unit roundoffs, and the size of the input
    at which it breaks.
Why: Autocast with the wrong device type, or outside of forward, does nothing without a warning. A step that does not
    run in the requested precision is an error that names its cause.

    python scripts/studies/autocast_dtypes.py
"""

from __future__ import annotations

from dataclasses import replace

from _cells import Cell, place, script
from _numerics import not_measured
from _study import Study, declared_table, row_table, run

from cs_systems.analysis.comparison.dtypes import SHORT, collapsed, recorded
from cs_systems.analysis.comparison.numerics import normalized, ranges, verdicts, where
from cs_systems.config import PRESETS, Precision, RunConfig, grid
from cs_systems.record import Row

LOW = (Precision.FP16, Precision.BF16)
PRECISIONS = (Precision.FP32, *LOW, Precision.BF16_PURE)
MISTAKES = ("other_device", "outside", "no_context")
EVERY_STEP = "all steps, sums pairwise"
ANSWERED = (  # title, module, column of the table of dtypes
    ("parameters", "fc1", "parameters"),
    ("the output of a linear layer", "fc1", "outputs"),
    ("that of LayerNorm", "ln", "outputs"),
    ("loss", "loss", "outputs"),
)
COLUMNS = {
    "what": "module", "parameters": "parameters", "inputs": "input", "outputs": "output", "on_cuda": "output on CUDA",
    "output_gradients": "gradient of output", "parameter_gradients": "gradient of parameters",
}  # fmt: skip


def cells() -> list[RunConfig]:
    """Return the cells, the same on every machine, since they take seconds."""
    base = RunConfig(warmup=0, steps=1)
    watched = replace(base, profiler="dtypes")
    mistakes = [f"{script('_autocast_mistakes.py')}:{name}" for name in MISTAKES]
    return [
        *grid(watched, workload=["toy"], precision=PRECISIONS),
        *grid(watched, workload=["train_step"], model=[PRESETS["tiny"]], precision=[Precision.BF16]),
        *grid(watched, workload=mistakes, precision=[Precision.BF16]),
        *grid(base, workload=["normalization"], precision=LOW),
    ]


def name(cell: Cell) -> str:
    workload = cell.record.config["workload"]
    return f"{'language model' if workload == 'train_step' else workload}, {cell.record.config['precision']}"


def dtypes(cell: Cell) -> list[Row]:
    rows = collapsed(recorded(cell.record.results))
    shown = [column for column in COLUMNS if column != "on_cuda" or any(row["on_cuda"] for row in rows)]
    return [{COLUMNS[column]: _short(row[column]) for column in shown} for row in rows]


def _given(row: Row, column: str) -> str | None:
    """Return a dtype of a row. Of outputs it is the dtype on CUDA, which a record of a CPU predicts."""
    return _short((row.get("on_cuda") if column == "outputs" else None) or row[column])


def _short(value: str | None) -> str | None:
    return value and ", ".join(SHORT.get(part, part) for part in value.split(", "))


def is_mistake(cell: Cell) -> bool:
    """Return True for a planted mistake, which is meant to end with the status error."""
    return ":" in cell.record.config["workload"] and "dtypes" in cell.record.results


def mistaken(cells: list[Cell]) -> list[Row]:
    found = [cell.record for cell in cells if is_mistake(cell)]
    return [{"step": r.config["workload"].rpartition(":")[2], "status": r.status, "reason": r.reason} for r in found]


def tables(cells: list[Cell], format: str) -> list[str]:
    records = [cell.record for cell in cells]
    shown = [cell for cell in cells if not is_mistake(cell)]
    return [
        *not_measured(shown, format),
        *(table for cell in shown for table in row_table(dtypes(cell), f"dtypes of the {name(cell)}", format)),
        *row_table(mistaken(cells), "bf16 autocast without effect, and the reason that is given", format),
        *declared_table(normalized, normalized(records), "relative error, one step alone in low precision", format),
        *declared_table(
            ranges, ranges(records), "where one step alone breaks: inputs of mean 0 and standard deviation σ", format
        ),
    ]


def explain(cells: list[Cell]) -> list[str]:
    notes = where([cell.record for cell in cells])
    for cell in cells:
        rows = {row["what"]: row for row in cell.record.results.get("dtypes", ())}
        if cell.record.config["workload"] == "toy" and rows and cell.record.config["precision"] in LOW:
            parts = {"parameters": ("fc1", "parameters"), "fc1 gives": ("fc1", "outputs")}
            parts |= {
                "LayerNorm gives": ("ln", "outputs"),
                "logits": ("logits", "outputs"),
                "loss": ("loss", "outputs"),
            }
            parts |= {"gradients of parameters": ("fc1", "parameter_gradients")}
            values = ", ".join(f"{title} {_given(rows[row], part)}" for title, (row, part) in parts.items())
            where_it_is = ", as on CUDA" if any(row.get("on_cuda") for row in rows.values()) else ""
            notes.append(f"under {cell.record.config['precision']} autocast{where_it_is}: {values}")
    return [*notes, *(sentence for cell in cells for sentence in verdicts(cell.record))]


def answer(cells: list[Cell]) -> str:
    toy = [cell for cell in cells if name(cell) == f"toy, {Precision.BF16.value}"]
    cell = next((cell for cell in toy if cell.record.results.get("dtypes")), None)
    rows = [row for row in normalized([cell.record for cell in cells]) if row["operation"] == "LayerNorm"]
    every = {row["case"]: row["error"]["bf16"] for row in rows if row["step"] == EVERY_STEP}
    if cell is None or not every:
        return ""
    seen = {row["what"]: row for row in cell.record.results["dtypes"]}
    given = ", ".join(f"{title} {_given(seen[row], part)}" for title, row, part in ANSWERED)
    errors = ", ".join(f"{error} at {input}" for input, error in every.items())
    return (
        f"{place(cells)}, bf16 autocast gives {given}; LayerNorm still needs fp32 for inputs with a large mean, "
        f"because with every step in bf16 and pairwise sums it is off by {errors} (u: unit roundoff of bf16)."
    )


STUDY = Study(
    __file__,
    __doc__,
    "Which dtypes does autocast give each part of a model, and does bf16 still need LayerNorm in fp32?",
    cells,
    cells,
    tables,
    explain,
    answer,
    figure="steps",
    drawn=lambda cell: bool(cell.record.config["workload"] == "normalization"),
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
