"""Tests of `attention --window`: which cells run, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from cs_systems.cli import main
from cs_systems.record import read_records

CELL = ["attention", "--seq", "32", "--batch", "1", "--heads", "2", "--precision", "fp32", "--mode", "forward"]


def test_window_is_an_axis_and_backends_without_one_are_unavailable(tmp_path: Path) -> None:
    words = ["--attention", "naive", "flash_torch", "--causal", "--window", "4", "16", "--device", "cpu"]
    assert main([*CELL, *words, "--warmup", "0", "--steps", "3", "--out", str(tmp_path)]) == 0
    records, _ = read_records(tmp_path)
    found = {(r.config["attention"], r.config["shape"]["window"]): r.status for r in records}
    assert found == {
        ("naive", 4): "ok",
        ("naive", 16): "ok",
        ("flash_torch", 4): "unavailable",
        ("flash_torch", 16): "unavailable",
    }
    reasons = [str(r.reason) for r in records if r.status == "unavailable"]
    assert all("a sliding window is not supported; use flash_triton, flex or naive" in text for text in reasons)


@pytest.mark.parametrize("causal", [[], ["--causal", "both"]])
def test_window_requires_causal_attention(causal: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CELL, *causal, "--window", "4"]) == 2
    got = " ".join(causal) or "--causal false"
    assert f"--window requires a causal mask in every cell, got {got}; use --causal true" in capsys.readouterr().err
