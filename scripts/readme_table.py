"""Put the headline table into README.md, from committed records.

Question: what does a training step of each model size take on one H200, and how far is that from the chip's peak?
Method: the records of scripts/c2_size_by_context.py.
Output: the part of README.md between the `headline` marks.

    python scripts/readme_table.py            # or: make readme
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cs_systems.record import read_records
from cs_systems.report.table import render

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "profiles" / "c2_size_by_context" / "records.jsonl"
MARKS = re.compile(r"(<!-- headline[^\n]*-->\n).*?(<!-- /headline -->)", re.S)
COLUMNS = (
    *("size", "context_length", "attention", "precision", "forward.median_ms", "backward.median_ms"),
    *("optimizer.median_ms", "median_ms", "tokens_per_s", "mfu", "peak_allocated_gib", "note"),
)
CONTEXT = 512


def headline() -> str:
    records, _ = read_records(RECORDS)
    chosen = [
        r
        for r in records
        if r.config["model"]["context_length"] == CONTEXT and r.config["mode"] == "train-step" and r.repeat == 0
    ]
    return render(chosen, "markdown", COLUMNS)


def readme(text: str) -> str:
    """The text with the table of the records between its marks."""
    return MARKS.sub(lambda m: f"{m[1]}{headline()}{m[2]}", text)


if __name__ == "__main__":
    file = ROOT / "README.md"
    file.write_text(readme(file.read_text()))
    sys.stdout.write(headline())
