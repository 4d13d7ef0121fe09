"""Peak memory of forward and of a training step, and the owner of the largest allocation.

Question: how much memory do inference and training of large take, in fp32 and bf16, and what does it hold?
Method: large with 32 layers and the preset's 36, contexts 128, 256, 512; xl and xl-2026 at 128 and 2048; two
    steps each, the second with the optimizer's state; the peak by the caching allocator, next to the closed form.
Output: peaks, predicted and measured; of each prediction what the peak consists of; the largest allocation by name.
Why: A list of allocations without names does not say what to make smaller. The largest is often the embedding,
    vocabulary × d_model × 4 bytes; four times the parameters are a floor below every training step.

    python scripts/studies/memory_peaks.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from _cells import Cell, place
from _study import Study, index, row_table, run

from cs_systems.config import Mode, Precision, RunConfig, grid, preset
from cs_systems.core.units import human
from cs_systems.formulas.cost import PARAMETER_BYTES, parameter_count
from cs_systems.formulas.memory.fit import algorithm_of
from cs_systems.formulas.memory.model import MemoryPrediction, step_memory
from cs_systems.record import Row
from cs_systems.report.tables.records import render

LARGE_OF_32_LAYERS = preset("large", num_layers=32)
MODES = (Mode.FORWARD, Mode.TRAIN_STEP)
PRECISIONS = (Precision.FP32, Precision.BF16)
BASE = RunConfig(warmup=1, steps=2)
COLUMNS = ("size", "context_length", "precision", "mode", "peak_allocated_gib", "predicted_peak_gib", "note")


def full() -> list[RunConfig]:
    larges = [LARGE_OF_32_LAYERS, preset("large")]
    axes = {"precision": PRECISIONS, "mode": MODES}
    return [
        *grid(BASE, model=larges, context_length=(128, 256, 512), **axes),
        *grid(BASE, model=[preset("xl"), preset("2.7B")], context_length=(128, 2048), attention=["sdpa_flash"],
              precision=PRECISIONS[1:], mode=MODES),
    ]  # fmt: skip


def small() -> list[RunConfig]:
    return grid(BASE, size=("tiny",), context_length=(32, 64), precision=PRECISIONS, mode=MODES)


def predicted(cell: Cell) -> MemoryPrediction:
    config = cell.record.run_config
    environment = cell.record.environment
    where = "cpu" if environment is not None and environment.device == "cpu" else "cuda"
    config = replace(config, device=where)
    return step_memory(config, algorithm_of(config))


def floor_bytes(cell: Cell) -> int:
    """Return the bytes of the parameters and, for training, of gradients and both moments."""
    config = cell.record.run_config
    times = 4 if config.mode is Mode.TRAIN_STEP else 1
    return times * parameter_count(config.model) * PARAMETER_BYTES[config.precision]


def composition(cells: Sequence[Cell]) -> list[Row]:
    rows = []
    for cell in (c for c in cells if c.measured):
        prediction = predicted(cell)
        name, size = prediction.largest_allocation
        measured, components = cell["peak_allocated_bytes"], prediction.components
        of_model = sum(components.get(k, 0) for k in ("parameters", "gradients", "optimizer_state"))
        rows.append(
            {
                **{k: cell[k] for k in ("size", "context_length", "precision", "mode")},
                "peak_at": prediction.peak_at,
                "of_the_model_bytes": of_model,
                "kept_bytes": sum(components.get(k, 0) for k in ("activations", "attention_scores", "weight_copies")),
                "predicted_bytes": prediction.peak_bytes,
                "measured_bytes": measured,
                "off": f"{prediction.peak_bytes / measured - 1:+.2%}" if measured else "–",
                "largest": name,
                "largest_bytes": size,
            }
        )
    return rows


def tables(cells: list[Cell], format: str) -> list[str]:
    caption = "where the peak is and what it consists of, by the closed form; the largest single allocation"
    return [render([c.record for c in cells], format, COLUMNS), *row_table(composition(cells), caption, format)]


def explain(cells: list[Cell]) -> list[str]:
    notes = []
    named: dict[str, list[Cell]] = {}
    for cell in (c for c in cells if c.measured):
        name, size = predicted(cell).largest_allocation
        named.setdefault(f"{name}, {human(size, 'bytes')}", []).append(cell)
    for name, same in named.items():
        first, model = same[0], same[0].record.run_config.model
        why = (
            f" (vocabulary {model.vocab_size} × d_model {model.d_model} × 4 bytes)"
            if "token_embeddings" in name
            else ""
        )
        others = f" and {len(same) - 1} more" if same[1:] else ""
        notes.append(f"the largest allocation of {first.label('attention')}{others}: {name}{why}")
    for cell in (c for c in cells if c.measured and c["mode"] == Mode.TRAIN_STEP):
        peak = cell["peak_allocated_bytes"] or predicted(cell).peak_bytes
        share = floor_bytes(cell) / peak
        which = "measured" if cell["peak_allocated_bytes"] else "predicted"
        notes.append(
            f"{cell.label('attention', 'mode')}: four times the parameters are {share:.0%} of the {which} peak"
        )
    return notes


def answer(cells: list[Cell]) -> str:
    by = index(cells, "size", "context_length", "precision", "mode")
    steps = [key for key in by if key[3] == Mode.TRAIN_STEP and key[2] == Precision.FP32]
    sizes = [key for key in steps if key[0] == "large"] or steps
    if not sizes:
        return ""
    size, context, precision, mode = max(sizes, key=lambda key: key[1])
    peaks = []
    for which in (mode, Mode.FORWARD.value):
        cell = by.get((size, context, precision, which))
        if cell is None:
            return ""
        peak = cell["peak_allocated_bytes"]
        peaks.append(human(peak or predicted(cell).peak_bytes, "bytes") + ("" if peak else " (predicted)"))
    name, largest = predicted(by[size, context, precision, mode]).largest_allocation
    return (
        f"{place(cells)}, a training step of {size} at context {context} in fp32 peaks at {peaks[0]}, forward alone at "
        f"{peaks[1]}; the largest single allocation of the step is {name}, {human(largest, 'bytes')}."
    )


STUDY = Study(
    __file__,
    __doc__,
    "What is the peak memory of forward and of a training step, what is the largest allocation, and whose is it?",
    full,
    small,
    tables,
    explain,
    answer,
    figure="memory",
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
