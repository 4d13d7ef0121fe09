"""Fewer threads: two threads of one core share its units, and more threads than cores wait for each other."""

from __future__ import annotations

import os

from cs_systems.advise.edits import replaced_argument
from cs_systems.advise.lever import Lever, ScriptChange, Situation
from cs_systems.machine.cores import usable_cores

THREADS = max(1, usable_cores() // 2)
SETS = "torch.set_num_threads"


def unfit(situation: Situation) -> str | None:
    if situation.on_gpu:
        return "the step computes on a GPU"
    if situation.has_ranks:
        return "torchrun sets the number of threads of each rank"
    is_set = SETS in situation.source or "OMP_NUM_THREADS" in os.environ
    if is_set and "too-many-threads" not in situation.causes:
        return "the number of threads is set already"
    return "the script may use one core" if usable_cores() == 1 else None


def hook() -> None:
    import torch

    torch.set_num_threads(THREADS)

    def stay(nthreads: int) -> None:
        """Keep the number of threads."""

    torch.set_num_threads = stay


LEVER = Lever(
    "sums in another order",
    None,
    f"OMP_NUM_THREADS={THREADS}",
    0.05,
    ScriptChange(
        f"{THREADS} thread{'s' if THREADS > 1 else ''}",
        unfit,
        {"OMP_NUM_THREADS": str(THREADS)},
        hook,
        replaced_argument(SETS, str(THREADS)),
    ),
    remedies=("too-many-threads",),
    shortens_input=True,
)
