"""Tests that figures of profiles/ can be drawn again from their committed records."""

import importlib

import matplotlib
import pytest

from cs_systems.report.figures.plot import STYLE
from scripts.studies._legible import problems
from tests.scripts.conftest import ROOT

PROFILES = ROOT / "profiles"
# Drawn by their own commands.
OF_BENCHMARKS = (
    *("training_step/figure.svg", "training_step/gains.svg", "training_step/curves_h200/curves.svg"),
    "advise/figure.svg",
)
SHOWN = (  # one of each kind, and those that a study draws by itself
    *("step_time/figure.svg", "attention_sequence_length/figure.svg", "attention_out_of_memory/figure.svg"),
    *("attention_h200/lengths/d128_causal.svg", "all_reduce/figure.svg", "comm/figure.svg", "warmup_steps/figure.svg"),
    *("low_precision_sums/figure.svg", "autocast_dtypes/figure.svg", "precision/training.svg"),
    *("fully_sharded/figure.svg", "top_kernels/figure.svg", "memory_peaks/figure.svg"),
    *("triton_tile_sizes/figure.svg", "cuda_kernel_ablation/figure.svg", "scaling_limits/figure.svg"),
    "saved_for_backward/figure.svg",
)


@pytest.mark.parametrize("file", SHOWN)
def test_committed_records_give_a_legible_figure(file: str) -> None:
    draw = dict(importlib.import_module("_gallery").gallery())[PROFILES / file]
    with matplotlib.rc_context(STYLE):
        assert problems(draw()) == []


def test_gallery_holds_every_committed_figure() -> None:
    drawn = {file for file, _ in importlib.import_module("_gallery").gallery()}
    assert drawn == {*PROFILES.rglob("*.svg")} - {PROFILES / file for file in OF_BENCHMARKS}


def test_committed_figures_hold_no_raw_latex() -> None:
    assert [file for file in PROFILES.rglob("*.svg") if "mathdefault" in file.read_text(encoding="utf-8")] == []
