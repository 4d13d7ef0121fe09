"""Half as many threads as the CPU offers: two threads of one core share its units, and other work keeps a core."""

from __future__ import annotations

import os

from cs_systems.advise.lever import Lever, ScriptChange, Situation

THREADS = max(1, (os.cpu_count() or 2) // 2)


def unfit(situation: Situation) -> str | None:
    if situation.on_gpu:
        return "the step computes on a GPU"
    if "set_num_threads" in situation.source or "OMP_NUM_THREADS" in os.environ:
        return "the number of threads is set already"
    return "the CPU has one core" if (os.cpu_count() or 1) == 1 else None


LEVER = Lever(
    "sums in another order",
    None,
    f"OMP_NUM_THREADS={THREADS}",
    0.05,
    ScriptChange(f"{THREADS} thread{'s' if THREADS > 1 else ''}", unfit, {"OMP_NUM_THREADS": str(THREADS)}),
)
