"""Put the headline table into README.md, from committed records.

Question: what does a training step of each model size take on one H200, and how far is that from the chip's peak?
Method: of the records of scripts/c2_size_by_context.py, the presets' training steps at one context, naive attention.
Output: the part of README.md between the `headline` marks.

    python scripts/readme_table.py            # or: make readme
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cs_systems.config import PRESETS, Mode
from cs_systems.record import RunRecord, read_records
from cs_systems.report.table import render

ROOT = Path(__file__).resolve().parent.parent
STUDY = "c2_size_by_context"
MARKS = re.compile(r"(<!-- headline[^\n]*-->\n).*?(<!-- /headline -->)", re.S)
COLUMNS = (
    *("size", "precision", "forward.median_ms", "backward.median_ms", "optimizer.median_ms", "median_ms"),
    *("tokens_per_s", "mfu", "peak_allocated_gib", "note"),
)
CONTEXT = 512
INTRODUCTION = f"""\
A training step of each preset on one H200, at batch 4 and context {CONTEXT}, with naive attention, in medians; the
other contexts, every sample and what they say are in [profiles/{STUDY}](profiles/{STUDY}/table.md).
"""


def headline(folder: Path) -> str:
    """Introduction and table. Raises ValueError, with the remedy, where the folder holds no such records."""
    records = read_records(folder)[0] if folder.exists() else []
    if not (chosen := [record for record in records if _belongs(record)]):
        raise ValueError(f"no records for the headline in {folder}: run scripts/{STUDY}.py first")
    return f"{INTRODUCTION}\n{render(chosen, 'markdown', COLUMNS)}"


def _belongs(record: RunRecord) -> bool:
    config = record.run_config
    return (
        config.model.context_length == CONTEXT
        and config.model.label in PRESETS  # as it is, with nothing overridden
        and config.attention == "naive"
        and config.mode == Mode.TRAIN_STEP
        and config.profiler == "none"
        and record.repeat == 0
    )


def main() -> int:
    file = ROOT / "README.md"
    try:
        text = headline(ROOT / "profiles" / STUDY)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    file.write_text(MARKS.sub(lambda m: f"{m[1]}{text}{m[2]}", file.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
