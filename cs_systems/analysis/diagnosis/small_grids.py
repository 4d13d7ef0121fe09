"""Rule for small grids: kernels of few or small blocks leave most multiprocessors, or most of a warp, without work."""

from __future__ import annotations

import math
import re
from collections.abc import Set

import numpy as np

from cs_systems.analysis.attribution.gaps import idle_during
from cs_systems.analysis.attribution.tables import KernelRow
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.core.tables import Row
from cs_systems.core.units import counted, human
from cs_systems.readers.forms.trace import UNIFIED, steps_of

# used if the number of multiprocessors is unknown; a GPU has at least 14, and a block runs on one of them
FEW_BLOCKS = 8
WARP, SCHEDULERS = 32, 4  # threads of a warp; warps that a multiprocessor can issue from at once
MOST_FILLED = 0.5  # share of the GPU that such a kernel can use
LONG_S = 50e-6  # a shorter kernel ends before more blocks would help
DOMINANT = 0.3  # share of the step
# Products of a library use at least a warp: if the block is smaller, the file does not hold the real launch.
OF_LIBRARY = re.compile(r"gemm_\w*\d+x\d+|cutlass|nvjet|xmma")
MANY_MOVES = 100  # pages of managed memory that moved while the kernels ran
FEW = "few blocks, which leave most of the GPU idle"
SMALL = "small blocks, which leave most of each warp idle"
REMEDY = "divide their work among more blocks, or run several of these kernels at once"
LARGER = "use blocks of at least 32 threads, better 128 or more"
PREFETCH = "; prefetch the managed memory (cudaMemPrefetchAsync), because its pages move while they run"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the time of long kernels with few or small blocks; the gain of more blocks is unknown."""
    step_s = evidence.step_s
    if step_s is None:
        return None
    count = _multiprocessors(evidence)
    computing = [row for row in evidence.kernels() if row["family"] != "collective" and row.get("mean_s", 0) > LONG_S]
    rows = [row for row in computing if _used(row, count) < MOST_FILLED and _is_known(row)]
    if not rows:
        return None
    time_s = min(step_s, sum(row["time_s"] for row in rows) - _hidden_s(evidence, {row["kernel"] for row in rows}))
    if time_s < DOMINANT * step_s:
        return None
    worst = max(rows, key=lambda row: row["time_s"])
    grid, block = worst.get("grid"), worst.get("block")
    are_small = _lanes(block) < _filled(grid, block, count)
    of = f" of {counted(int(_size(block)), 'thread')}" if _size(block) < SCHEDULERS * WARP else ""
    on = f" on {count} multiprocessors" if count and not are_small else ""
    evidence_rows: tuple[Row, ...] = tuple({**row} for row in rows)
    return Diagnosis(
        f"{time_s / step_s:.0%} of the step is kernels of {SMALL if are_small else FEW}",
        (LARGER if are_small else REMEDY) + (PREFETCH if _moves(evidence) > MANY_MOVES else ""),
        step_s,
        takes=time_s,
        evidence=evidence_rows,
        where=f"grid of {counted(int(_size(grid)), 'block')}{of}{on}, {human(worst['mean_s'], 's')} each: "
        f"{worst['kernel'][:60]}",
    )


def _hidden_s(evidence: Evidence, names: Set[str]) -> float:
    """Return the time per step in which kernels with these names overlap with each other or with other kernels."""
    if evidence.usual is None:
        return 0.0
    profile = evidence.usual.profile
    kernels = profile.trace.kernels
    these = np.asarray(kernels.function.codes_where(lambda function: function.name in names))
    inside = steps_of(kernels.launched_s, profile.steps)[1] & (kernels.device == profile.devices[0])
    own = these & inside
    within = np.array([kernels.start_s[own].min(initial=np.inf)]), np.array([kernels.end_s[own].max(initial=-np.inf)])
    if not own.any():
        return 0.0
    without_others, without_any = (idle_during(kernels, *within, which)[0] for which in (inside & ~these, inside))
    alone_s = without_others - without_any
    return max(0.0, float((kernels.end_s - kernels.start_s)[own].sum() - alone_s)) / len(profile.steps)


def _multiprocessors(evidence: Evidence) -> int | None:
    profile = evidence.usual.profile if evidence.usual else None
    return profile.trace.multiprocessors.get(profile.devices[0]) if profile and profile.devices else None


def _size(extent: str | None) -> float:
    """Return the number of blocks or threads of an extent written as `8×4×1`; infinite if it is unknown."""
    return math.prod(map(int, extent.split("×"))) if extent else math.inf


def _is_known(row: KernelRow) -> bool:
    """Return whether the recorded block size may be the real one of the launch."""
    return _size(row.get("block")) >= WARP or not OF_LIBRARY.search(row["kernel"])


def _used(row: KernelRow, multiprocessors: int | None) -> float:
    """Return the share of the GPU that the launch of a kernel can use."""
    block = row.get("block")
    return _filled(row.get("grid"), block, multiprocessors) * _lanes(block)


def _filled(grid: str | None, block: str | None, multiprocessors: int | None) -> float:
    """Return the share of the GPU's multiprocessors and schedulers that have a block and a warp; at most 1."""
    blocks = _size(grid)
    if not multiprocessors:
        return 0.0 if blocks <= FEW_BLOCKS else 1.0
    warps = blocks * math.ceil(_size(block) / WARP) if block else math.inf
    return min(1.0, blocks / multiprocessors, warps / (SCHEDULERS * multiprocessors))


def _lanes(block: str | None) -> float:
    """Return the share of active threads in the warps of a block."""
    threads = _size(block)
    return threads / (WARP * math.ceil(threads / WARP)) if math.isfinite(threads) else 1.0


def _moves(evidence: Evidence) -> int:
    """Return how many pages of managed memory moved to the GPU while kernels of the usual steps ran."""
    if evidence.usual is None:
        return 0
    trace = evidence.usual.profile.trace
    moved = trace.copies.name.codes_where(lambda name: name.endswith(UNIFIED) and name.startswith("H"))
    moved &= steps_of(trace.copies.start_s, evidence.usual.profile.steps)[1]
    start_s, end_s = trace.copies.start_s[moved], trace.copies.end_s[moved]
    return int((idle_during(trace.kernels, start_s, end_s) < end_s - start_s).sum())


RULE = Rule(find, shortens_kernels=True, refines=("double-precision", "own-products"))
