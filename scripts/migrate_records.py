"""Migrate records of earlier schemas to the current one, in place.

Question: which records under a folder were written by an earlier version of cs_systems?
Method: each .jsonl file of records is rewritten line by line, with the fields that its schema lacked. Samples, times,
    keys and results that were measured stay; model FLOPs, which are arithmetic, are credited as docs/concepts.md says.
Output: each changed file with the number of its migrated records.
Command: python3 scripts/migrate_records.py profiles
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from cs_systems.config import RunConfig
from cs_systems.core import caveats, plugins
from cs_systems.record import SCHEMA_VERSION

CREDITED = 3  # from this schema on, an attention call's backward has twice the model FLOPs of its forward
SCORES = ("score_flops", "score_bytes")


def migrated(data: dict[str, Any]) -> dict[str, Any]:
    """Convert a record of any earlier schema to the current one. Raises ConfigError for an unreadable config."""
    if data["schema_version"] < CREDITED:
        _credit_anew(data)
    config = RunConfig.from_dict(data["config"])
    results = data["results"]
    for row in results.get("cost", ()):
        row |= {name: row.get(name) for name in SCORES}
    if blocks := results.get("residual_blocks"):
        results["residual_blocks"] = [{"checkpoint": False, "blocks": 1, **row} for row in blocks]
    return {
        **data,
        "config": json.loads(json.dumps(config.to_dict())),
        "predicted": data.get("predicted", False),
        "origin": data.get("origin"),
        "schema_version": SCHEMA_VERSION,
    }


def _credit_anew(data: dict[str, Any]) -> None:
    """Change the model FLOPs of an attention call; add a caveat where a user's model may hold attention.

    Earlier schemas credited the backward of an attention call with 2.5 times its forward, rounded down. For a user's
    own model they credited the whole score matrix of causal attention; what its mask showed is not in the record.
    """
    workload, rows = data["config"]["workload"], data["results"].get("cost", ())
    if workload == "attention":
        backward = next((row.get("model_flops") or 0 for row in rows if row["phase"] == "backward"), 0)
        excess = backward - (4 * backward + 2) // 5
        for row in rows:
            if row["phase"] in ("backward", "step") and row.get("model_flops") is not None:
                row["model_flops"] -= excess
    elif rows and plugins.is_foreign(workload) and any(map(_may_attend, data["results"].get("modules", ()))):
        data["warnings"].append(dataclasses.asdict(caveats.full_attention("an earlier version counted it so")))


def _may_attend(module: dict[str, Any]) -> bool:
    return "attention" in f"{module.get('class')}".lower() or "attn" in f"{module.get('path')}"


def main(folders: list[str]) -> int:
    for folder in folders:
        for file in sorted(Path(folder).rglob("*.jsonl")):
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            if not all("schema_version" in line for line in lines):
                continue  # rows of a benchmark
            older = sum(line["schema_version"] < SCHEMA_VERSION for line in lines)
            if older:
                texts = (json.dumps(migrated(line), separators=(",", ":"), allow_nan=True) for line in lines)
                file.write_text("".join(f"{text}\n" for text in texts))
                print(f"{file}: {older} of {len(lines)} records")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
