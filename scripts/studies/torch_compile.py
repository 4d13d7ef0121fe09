"""Gain from torch.compile for attention and for a training step, with compiling counted apart.

Question: how much of FlashAttention's gain is fusion alone, and after how many steps has compiling paid for itself?
Method: batch 8, one head, d_head 16 … 128 × length 256 … 16384, bf16: naive, compiled (naive through
    torch.compile), torch's sdpa_flash and our flash_triton; then a training step of large at context 256, eager and
    compiled. Each new shape compiles anew and takes seconds, so compiled runs along one line of lengths and one of
    head sizes.
Output: times, compile seconds of each cell apart, recompiles in timed steps flagged.
Why: A first call that compiles inside the timing hides what a step takes. A step that compiles is warm-up, its
    seconds stand in a column of their own, and a compilation in a timed step is a caveat of the row.

    python scripts/studies/torch_compile.py
"""

from __future__ import annotations

from dataclasses import replace

from _attention import PYTORCH, QUICK, by_backend, calls, speed_up
from _cells import Cell, place
from _study import Study, bounded, index, row_table, run

from cs_systems.config import AttentionShape, Mode, Precision, RunConfig, preset
from cs_systems.core.units import human
from cs_systems.record import Row
from cs_systems.report.tables.records import render

COMPILED = "compiled"
BACKENDS = (PYTORCH, COMPILED, "sdpa_flash", "flash_triton")
D_HEADS = (16, 32, 64, 128)
LENGTHS = (256, 1024, 4096, 8192, 16384)
# Where `compiled` is measured: every length at one head size, every head size at one length.
COMPILED_D_HEAD, COMPILED_LENGTH = 64, 4096
WORKLOADS = ("attention", "train_step")
TIMES = ("forward.median_ms", "backward.median_ms", "median_ms", "compile_s", "note")


def full() -> list[RunConfig]:
    shapes = [AttentionShape(8, 1, seq, d) for d in D_HEADS for seq in LENGTHS]
    grid = calls(shapes, BACKENDS, precision=Precision.BF16, warmup=3, steps=10)
    return [c for c in grid if c.attention != COMPILED or _on_a_line(c)] + end_to_end("large", 256, "default")


def small() -> list[RunConfig]:
    """Return cells with the model through aot_eager, since generating code for a CPU takes too long."""
    return calls([AttentionShape(1, 1, seq, COMPILED_D_HEAD) for seq in (128, 256)], BACKENDS, **QUICK) + end_to_end(
        "tiny", 32, "aot_eager"
    )


def end_to_end(size: str, context: int, mode: str) -> list[RunConfig]:
    eager = RunConfig(model=preset(size, context_length=context), mode=Mode.TRAIN_STEP, warmup=3, steps=10)
    return bounded([eager, replace(eager, compile=mode)])


def _on_a_line(config: RunConfig) -> bool:
    assert config.shape
    return config.shape.d_head == COMPILED_D_HEAD or config.shape.seq == COMPILED_LENGTH


def compile_times(cells: list[Cell]) -> list[Row]:
    rows = []
    for cell in cells:
        if cell.measured and cell["compile_s"] and cell.record.measurement:
            rows.append(
                {
                    "cell": cell.label(),
                    "compile_s": cell["compile_s"],
                    "first_step_s": cell.record.measurement.samples[0].wall_s,
                    "median_s": cell["median_s"],
                    "in timed steps": sum(s.compiles or 0 for s in cell.record.measurement.timed),
                }
            )
    return rows


def tables(cells: list[Cell], format: str) -> list[str]:
    caption = "compiling, apart from the timed steps; compilations in timed steps should be 0"
    attention, steps = ([c.record for c in cells if c.record.config["workload"] == name] for name in WORKLOADS)
    return [
        *([render(attention, format, ("attention", "d_head", "seq", *TIMES))] if attention else []),
        *([render(steps, format, ("size", "context_length", "compile", *TIMES))] if steps else []),
        *row_table(compile_times(cells), caption, format),
    ]


def explain(cells: list[Cell]) -> list[str]:
    attention = [cell for cell in cells if cell.record.config["workload"] == "attention"]
    notes = speed_up(attention, "d_head", "seq")
    for name, same in by_backend(attention).items():
        if spent := sum(cell["compile_s"] or 0 for cell in same):
            worst = max(same, key=lambda cell: cell["compile_s"] or 0)
            most, steps = human(worst["compile_s"], "s"), worst["compile_s"] / worst["median_s"]
            notes.append(
                f"{name}: compiling took {human(spent, 's')} over {len(same)} shapes, at most {most}, as long as "
                f"{steps:,.0f} of that cell's steps"
            )
    late = [row["cell"] for row in compile_times(cells) if row["in timed steps"]]
    return [*notes, *_end_to_end(cells), f"compilations in timed steps: {', '.join(late) or 'none'}"]


def _end_to_end(cells: list[Cell]) -> list[str]:
    by = index([cell for cell in cells if cell.record.config["workload"] == "train_step"], "size", "compile")
    notes = []
    for (size, mode), cell in by.items():
        eager = by.get((size, "none"))
        if eager and mode != "none":
            gain, spent = eager["median_s"] - cell["median_s"], cell["compile_s"] or 0
            times = f"{human(eager['median_s'], 's')} eager and {human(cell['median_s'], 's')} with compile={mode}"
            paid = f", paid back after {spent / gain:,.0f} steps" if gain > 0 and spent else ""
            notes.append(f"{size}: a step takes {times}; compiling took {human(spent, 's')}{paid}")
    return notes


def answer(cells: list[Cell]) -> str:
    notes = _end_to_end(cells)
    by = index([cell for cell in cells if cell.record.config["workload"] == "attention"], "attention", "d_head", "seq")
    shares = [
        cell["median_s"] / by[PYTORCH, *key]["median_s"]
        for (name, *key), cell in by.items()
        if name == COMPILED and (PYTORCH, *key) in by
    ]
    if not notes or not shares:
        return ""
    return (
        f"{place(cells)}, attention through torch.compile takes {min(shares):.2f} to {max(shares):.2f} of the time of "
        f"{PYTORCH}; for {'; '.join(notes)}."
    )


STUDY = Study(
    __file__,
    __doc__,
    "What does torch.compile give attention and a whole training step, once compiling is counted apart?",
    full,
    small,
    tables,
    explain,
    answer,
    figure="time",
    drawn=lambda cell: cell.record.config["workload"] == "attention" and cell["d_head"] == COMPILED_D_HEAD,
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
