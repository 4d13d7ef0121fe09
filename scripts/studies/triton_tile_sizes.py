"""Tile sizes of a FlashAttention kernel in Triton: the fastest, and those that do not fit a GPU.

Question: at batch 1, over head sizes and lengths, what do tiles of 16, 32, 64 and 128 cost or gain, what do they change
    of memory, and which do not fit the shared memory of a multiprocessor?
Method: flash_triton, causal, one head, d_head 16 … 128 × length 128 … 32768, bf16 and fp32, each of its kernels with
    the same square tile, 3 stages (Triton's default) and 4 warps, for tile 128 twice that (fp32 without tile 128, which
    fits nowhere); forward and backward in one step, each timed; naive attention next to it for the memory. Shared
    memory, registers and spills by compiling for sm_80, sm_86 and sm_90, which takes no GPU; a call whose block does
    not fit is refused with the bytes and the limit before it is launched.
Output: time of forward, of both, and peak memory by tile; what a block of each kernel takes, and what fits where.
Why: A tile that needs more shared memory than a block may have fails at its launch, and memory grows with the whole
    matrix where there are no tiles. Both can be known before a kernel runs.

    python scripts/studies/triton_tile_sizes.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from _attention import PYTORCH, QUICK, calls, growth
from _cells import Cell, place, script
from _numerics import not_measured
from _study import Study, index, row_table, run

from cs_systems.config import AttentionShape, Mode, Precision, RunConfig
from cs_systems.core.units import human
from cs_systems.record import Row
from cs_systems.report.tables.records import render

TILES = script("_tiles.py")
LENGTHS = tuple(2**n for n in range(7, 16))
D_HEADS = (16, 32, 64, 128)
SIZES = {Precision.BF16: (16, 32, 64, 128), Precision.FP32: (16, 32, 64)}
STEPS: dict[Precision, dict[str, Any]] = {  # a tile that spills makes fp32 steps of seconds
    Precision.BF16: {"warmup": 3, "steps": 10},
    Precision.FP32: {"warmup": 1, "steps": 3},
}
ARCHITECTURES = ("sm_80", "sm_86", "sm_90")
COMPILED = (  # precision, d_head, tiles: around the limits
    (Precision.FP32, 64, (16, 32, 64)),
    (Precision.FP32, 128, (16, 32)),
    (Precision.BF16, 64, (64, 128)),
    (Precision.BF16, 128, (32, 64, 128)),
)
EXAMPLE_BYTES, EXAMPLE_LIMIT_BYTES = 107_008, 101_376
SHOWN = (64, 128)  # the head sizes of the figure
VALUES = ("forward.median_us", "median_us", "peak_allocated_mib")


def tile(size: int) -> str:
    return f"{TILES}:tile_{size}"


def full() -> list[RunConfig]:
    shapes = [AttentionShape(1, 1, seq, d, causal=True) for d in D_HEADS for seq in LENGTHS]
    made = []
    for precision, sizes in SIZES.items():
        made += calls(shapes, (*map(tile, sizes), PYTORCH), precision=precision, **STEPS[precision])
    return [*made, *limits()]


def limits() -> list[RunConfig]:
    """Return the cells that compile for each architecture, on any machine."""
    base = RunConfig(mode=Mode.FORWARD_BACKWARD, device="cpu", warmup=0, steps=1)
    return [
        replace(
            base,
            workload=f"{TILES}:{architecture}",
            attention=tile(size),
            precision=precision,
            shape=AttentionShape(1, 1, 2048, d_head, causal=True),
        )
        for architecture in ARCHITECTURES
        for precision, d_head, sizes in COMPILED
        for size in sizes
    ]


def small() -> list[RunConfig]:
    """Return cells for a machine without a GPU: kernels compile but do not run, which takes up to three minutes."""
    shape = AttentionShape(1, 1, 128, 64, causal=True)
    return [*limits(), *calls([shape], (PYTORCH, tile(64)), precision=Precision.FP32, **QUICK)]


def taken(cells: Sequence[Cell]) -> list[Row]:
    """Return a row per compiled kernel."""
    return [row for cell in cells for row in cell.record.results.get("resources", ())]


def fitting(cells: Sequence[Cell]) -> list[Row]:
    """Return a row per tile and architecture: the largest block's needs of the three kernels, and whether they fit."""
    made = []
    for (architecture, precision, d_head, size), kernels in groupby(taken(cells), _tile_of):
        same = list(kernels)
        over = [row["kernel"] for row in same if not row["fits"]]
        made.append(
            {
                "architecture": architecture,
                "precision": precision,
                "d_head": d_head,
                "tile": size,
                **{f"{row['kernel']} (B)": f"{row['shared_bytes']:,}" for row in same},
                "limit (B)": f"{same[0]['limit_bytes']:,}",
                "registers": max(row["registers"] for row in same),
                "spills": sum(row["spills"] for row in same),
                "does not fit": ", ".join(over),
            }
        )
    return made


def _tile_of(row: Row) -> tuple[Any, ...]:
    return row["architecture"], row["precision"], row["d_head"], row["tile"]


def tables(cells: list[Cell], format: str) -> list[str]:
    caption = "shared memory of a block of each kernel; the most registers of a thread; all spilling instructions"
    calls_made = [cell.record for cell in cells if cell.record.config["workload"] == "attention"]
    pivots = [render(calls_made, format, pivot=f"precision,d_head,seq:attention:{v}") for v in VALUES if calls_made]
    others = [cell for cell in cells if cell.record.config["workload"] != "attention"]
    return [*pivots, *not_measured(others, format), *row_table(fitting(cells), caption, format)]


def explain(cells: list[Cell]) -> list[str]:
    attended = [cell for cell in cells if cell.record.config["workload"] == "attention"]
    return [*_memory(attended), *_fastest(attended), *_limits(cells)]


def _size(cell: Cell) -> int:
    return int(cell["attention"].rpartition("_")[2])


def _memory(cells: list[Cell]) -> list[str]:
    """Return sentences on peak memory by tile and with the whole matrix, at the longest shared length."""
    by, notes = index(cells, "precision", "d_head", "attention", "seq"), []
    peaks = {key: cell["peak_allocated_bytes"] for key, cell in by.items() if cell["peak_allocated_bytes"]}
    largest = max((d_head for _, d_head, *_ in peaks), default=0)
    for precision in dict.fromkeys(key[0] for key in peaks):
        at: dict[str, dict[int, int]] = {}
        for (*which, name, seq), peak in sorted(peaks.items()):
            if which == [precision, largest]:
                at.setdefault(name, {})[seq] = peak
        lengths = sorted(set.intersection(*(set(line) for line in at.values()))) if at else []
        if PYTORCH not in at or len(at) < 2 or not lengths:
            continue
        matrix, longest = at.pop(PYTORCH), lengths[-1]
        last = [line[longest] for line in at.values()]
        tiles = human(min(last), "bytes") if min(last) == max(last) else f"{human(min(last), 'bytes')} and more"
        notes.append(
            f"{precision} d_head {largest}, length {longest}: {tiles} at the peak with any of {len(at)} tiles, "
            f"{human(matrix[longest], 'bytes')} with the whole matrix, {matrix[longest] / max(last):.1f} times as much"
        )
        long, one = lengths[len(lengths) // 2 :], next(iter(at.values()))
        if len(long) > 2:
            tiled, whole = (growth(long, [line[seq] for seq in long]) for line in (one, matrix))
            notes.append(
                f"{precision} d_head {largest}, from length {long[0]} to {longest}: memory grows as length^{tiled:.2f} "
                f"with tiles of any size, as length^{whole:.2f} with the matrix"
            )
    return notes


def _fastest(cells: list[Cell]) -> list[str]:
    """Return the fastest tile at the longest length, for forward and for both, and how much the slowest loses."""
    tiled = [cell for cell in cells if cell.measured and cell["attention"] != PYTORCH]
    notes = []
    for precision, d_head in dict.fromkeys((cell["precision"], cell["d_head"]) for cell in tiled):
        same = [cell for cell in tiled if (cell["precision"], cell["d_head"]) == (precision, d_head)]
        longest = max(cell["seq"] for cell in same)
        last = [cell for cell in same if cell["seq"] == longest]
        words = []
        for what, column in (("forward", "forward.median_s"), ("forward and backward", "median_s")):
            timed = sorted((cell[column], _size(cell)) for cell in last if cell[column])
            if timed:
                (best, size), (worst, slow) = timed[0], timed[-1]
                words.append(f"{what} {human(best, 's')} with tile {size}, {worst / best:.1f} times that with {slow}")
        if words:
            notes.append(f"{precision} d_head {d_head}, length {longest}: {'; '.join(words)}")
    return notes


def _limits(cells: list[Cell]) -> list[str]:
    rows, notes = taken(cells), []
    for architecture in dict.fromkeys(row["architecture"] for row in rows):
        same = [row for row in rows if row["architecture"] == architecture]
        over = [row for row in same if not row["fits"]]
        limit = same[0]["limit_bytes"]
        largest = {key: max(group, key=lambda row: row["shared_bytes"]) for key, group in _groups(over).items()}
        listed = "; ".join(
            f"{r['precision']} d_head {r['d_head']} tile {r['tile']} ({r['kernel']}: {r['shared_bytes']:,} B)"
            for r in largest.values()
        )
        compiled = len(_groups(same))
        head = f"{architecture}, {limit:,} B a block: {compiled - len(largest)} of {compiled} tiles fit"
        notes.append(f"{head}; not {listed}" if listed else head)
    if rows:
        found = {row["architecture"]: row["limit_bytes"] for row in rows}
        room = [name for name, limit in found.items() if limit >= EXAMPLE_BYTES]
        none = [name for name, limit in found.items() if limit == EXAMPLE_LIMIT_BYTES]
        notes.append(
            f"a block of {EXAMPLE_BYTES:,} B takes more than {EXAMPLE_LIMIT_BYTES:,} B, the limit of "
            f"{' and '.join(none) or 'none of these'}; it fits {' and '.join(room) or 'none of these'}"
        )
        spilling = [row for row in rows if row["spills"]]
        notes.append(f"{len(spilling)} of {len(rows)} kernels spill registers to memory")
    return notes


def _groups(rows: Sequence[Row]) -> dict[tuple[Any, ...], list[Row]]:
    made: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        made.setdefault(_tile_of(row), []).append(row)
    return made


def draw(cells: list[Cell]) -> Any:
    """Draw time against length by tile, where measured; below, the largest block of each tile and the limit."""
    from matplotlib.figure import Figure

    from cs_systems.report.figures.drawing import COLORS, MARKERS, WIDTH, log_scale, with_legend

    timed = [c for c in cells if c.measured and c["d_head"] in SHOWN and c.record.config["workload"] == "attention"]
    timed = [c for c in timed if c["attention"] != PYTORCH]
    pairs = list(dict.fromkeys((c["precision"], c["d_head"]) for c in timed))
    drawn = Figure(figsize=(WIDTH, 3.4 + 2.6 * bool(pairs)), layout="constrained")
    top, bottom = drawn.subfigures(2, 1, height_ratios=(2.6, 3.4)) if pairs else (None, drawn)
    panels = top.subplots(1, len(pairs), sharey=True, squeeze=False)[0] if top else []
    for axes, pair in zip(panels, pairs, strict=True):
        for size, color, marker in zip((16, 32, 64, 128), COLORS, MARKERS, strict=False):
            line = sorted(
                (c["seq"], 1e3 * c["median_s"])
                for c in timed
                if (c["precision"], c["d_head"]) == pair and _size(c) == size
            )
            axes.plot(*zip(*line, strict=True) if line else ([], []), color=color, marker=marker, label=f"tile {size}")
        axes.set_xscale("log", base=2)
        axes.set_xticks([2**7, 2**9, 2**11, 2**13, 2**15], ["128", "512", "2k", "8k", "32k"])
        axes.minorticks_off()
        log_scale(axes.yaxis)
        axes.grid()
        axes.set_title(f"{pair[0]} d_head {pair[1]}", fontsize=10)
        axes.set_xlabel("length")
    if top:
        panels[0].set_ylabel("forward and backward, ms")
    _draw_limits(bottom, taken(cells))
    return with_legend(drawn, panels[0]) if top else drawn


def _draw_limits(figure: Any, rows: Sequence[Row]) -> None:
    from cs_systems.report import palette
    from cs_systems.report.figures.drawing import filled

    architectures = list(dict.fromkeys(row["architecture"] for row in rows))
    if not architectures:
        return
    figure.suptitle("Shared memory of a tile's largest block, KiB; line: the limit; hatched: too large", fontsize=11)
    for axes, architecture in zip(
        figure.subplots(1, len(architectures), sharey=True, sharex=True, squeeze=False)[0], architectures, strict=True
    ):
        groups = _groups([row for row in rows if row["architecture"] == architecture])
        labels = [f"{precision} d {d_head} tile {size}" for _, precision, d_head, size in groups]
        most = [max(row["shared_bytes"] for row in group) / 1024 for group in groups.values()]
        limit = next(iter(groups.values()))[0]["limit_bytes"] / 1024
        for label, size in zip(labels, most, strict=True):
            look = palette.Paint("vermilion", "///") if size > limit else palette.Paint("grey")
            axes.barh(label, size, height=0.7, **filled(look))
        axes.axvline(limit, color="black", linewidth=1)
        axes.set_title(f"{architecture}: {limit:g} KiB", fontsize=10)
    axes.invert_yaxis()  # both axes share the y-axis


def answer(cells: list[Cell]) -> str:
    attended = [cell for cell in cells if cell.measured and cell.record.config["workload"] == "attention"]
    tiled = [cell for cell in attended if cell["attention"] != PYTORCH and cell["precision"] == Precision.BF16]
    notes = []
    if tiled:
        longest = max(cell["seq"] for cell in tiled)
        best = {}
        for d_head in dict.fromkeys(cell["d_head"] for cell in tiled):
            here = [cell for cell in tiled if (cell["d_head"], cell["seq"]) == (d_head, longest)]
            best[d_head] = _size(min(here, key=lambda cell: float(cell["median_s"])))
        named = ", ".join(f"{size} at d_head {d_head}" for d_head, size in best.items())
        notes.append(f"{place(tiled)}, at length {longest:,} in bf16 the fastest tile is {named}")
    rows, fits = fitting(cells), []
    for architecture in dict.fromkeys(row["architecture"] for row in rows):
        same = [row for row in rows if row["architecture"] == architecture]
        count = sum(not row["does not fit"] for row in same)
        fits.append(f"{count} of {len(same)} on {architecture} ({same[0]['limit (B)']} B)")
    if fits:
        of = "of" if notes else "Of"
        notes.append(f"{of} the compiled tiles, these fit the shared memory of a block: {', '.join(fits)}")
    return f"{'; '.join(notes)}." if notes else ""


STUDY = Study(
    __file__,
    __doc__,
    "Which tiles does a FlashAttention kernel in Triton want, and which does a GPU have no room for?",
    full,
    small,
    tables,
    explain,
    answer,
    figure="time",
    draw=draw,
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
