"""Compare two commands, two scripts, or two revisions of a script: pairs of processes until the verdict is safe.

Compares the duration of a step if the loops of both scripts can be recorded, as `run` does, and otherwise of the whole
process. Equal programs are called different in at most 1 of 100 comparisons, however long they run.
"""

from __future__ import annotations

from cs_systems.cli._ab_options import Ab

ARGS = Ab


def run(args: Ab) -> int:
    from cs_systems.cli._ab import compare

    return compare(args)
