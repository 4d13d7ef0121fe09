"""Tests of the table of frozen predictions and the measured memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests import forks

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "profiles/foreign_memory"
FROZEN = FOLDER / "frozen.json"


def page(frozen: Path, measured: Path) -> str:
    script = ROOT / "scripts/benchmarks/foreign_memory.py"
    done = forks.python(str(script), "--compare", str(frozen), str(measured))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_frozen_predictions_name_every_family_and_their_versions() -> None:
    frozen = json.loads(FROZEN.read_text())
    assert set(frozen["made"]) >= {"date", "commit", "torch", "transformers"}
    assert len({row["family"] for row in frozen["rows"] if row["kind"] == "held out"}) >= 10
    assert all((row["peak_bytes"] is None) == bool(row["reason"]) for row in frozen["rows"])


def test_comparison_states_errors_and_leaves_out_another_model(tmp_path: Path) -> None:
    structure = {"parameters": 4, "shapes": "a"}
    plain: dict[str, Any] = {"kind": "held out", "reason": None, "kernels": ["math"], "structure": structure}
    rows = [
        {"family": name, "precision": "fp32", "peak_bytes": size * 2**20, **plain}
        for name, size in [("close", 99), ("far", 150), ("other", 100), ("failed", 100)]
    ]
    rows.append({"family": "silent", "precision": "fp32", **plain, "peak_bytes": None, "reason": "reads values"})
    found = [
        {"family": row["family"], "precision": "fp32", "error": None, "peak_bytes": 100 * 2**20, "kernels": ["math"]}
        | {"structure": structure if row["family"] != "other" else {"parameters": 5, "shapes": "b"}}
        for row in rows
    ]
    found[0]["kernels"] = ["flash"]
    found[3] = {"family": "failed", "precision": "fp32", "error": "OutOfMemoryError: x"}
    (tmp_path / "frozen.json").write_text(json.dumps({"made": {"date": "2026-01-01"}, "rows": rows}))
    (tmp_path / "measured.jsonl").write_text("\n".join(map(json.dumps, [{"device": "GPU"}, *found])))
    printed = page(tmp_path / "frozen.json", tmp_path / "measured.jsonl")
    assert printed.startswith("# Memory of 5 families, predicted before it was measured\n")
    assert "| close | held out | fp32 | 99 | 100 | -1.0% | flash | predicted with math |" in printed
    assert "| other | held out | fp32 | 100 | 100 |  | math | another model than predicted: 5 parameters |" in printed
    assert "| failed | held out | fp32 | 100 |  |  | math | OutOfMemoryError: x |" in printed
    assert "| silent | held out | fp32 |  | 100 |  | math | not predicted: reads values |" in printed
    assert "- held out: 1 of 2 within 5%, median error 25.5%, worst +50.0% (far fp32)" in printed


def test_committed_page_is_made_from_its_predictions_and_measurement() -> None:
    assert page(FROZEN, FOLDER / "measured.jsonl") == (FOLDER / "held_out.md").read_text()
