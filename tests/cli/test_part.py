"""--part divides a sweep among jobs; the Slurm array job is run here without Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_systems.cli import main
from cs_systems.cli._options import Sweep
from cs_systems.config import ConfigError
from cs_systems.record import read_records

SLURM = Path(__file__).parents[2] / "scripts" / "slurm"


@given(st.integers(1, 40), st.integers(1, 9))
def test_shares_divide_all_cells_evenly(count: int, jobs: int) -> None:
    cells = list(range(count))
    shares = [list(Sweep(part=f"{k}/{jobs}").of_share(cells)) for k in range(min(jobs, count))]
    assert sorted(cell for share in shares for cell in share) == cells
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert Sweep().of_share(cells) == cells


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("4/4", "--part must be K/N with K below N, got '4/4'; for four jobs, use 0/4, 1/4, 2/4 and 3/4"),
        ("1", "--part must be K/N with K below N, got '1'"),
        ("0/0", "--part must be K/N with K below N, got '0/0'"),
        (
            "3/4",
            "--part 3/4 selects no cell, because the sweep has only 2 cells; use K/N with N at most 2, such as 0/2",
        ),
    ],
)
def test_invalid_share_is_refused(part: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Sweep(part=part).of_share([0, 1])


def test_share_of_a_precision_comparison_divides_all_its_cells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["precision", "--size", "tiny", "--context-length", "16", "--precision", "bf16", "--device", "cpu"]
    words += ["--warmup", "0", "--steps", "2", "--rounds", "1", "--part", "3/4", "--out", str(tmp_path)]
    assert main([*words, "--dry-run"]) == 0
    assert "1 cell\n" in capsys.readouterr().out
    assert main(words) == 0
    assert "measuring 1 cell" in capsys.readouterr().err
    (record,), _ = read_records(tmp_path)
    assert (record.config["workload"], record.config["precision"]) == ("precision_error", "bf16")


def test_array_task_measures_its_share(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    task = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "2", "PATH": path}
    words = [str(tmp_path / "out"), "time", "--size", "tiny", "--attention", "naive", "sdpa_math", "--device", "cpu"]
    job = ["bash", str(SLURM / "sweep_array.sbatch"), *words, "--warmup", "0", "--steps", "3"]
    done = subprocess.run(job, env=os.environ | task, capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stderr
    assert "[1/1]" in done.stderr
    (record,), _ = read_records(tmp_path / "out/part-1")
    assert record.config["attention"] == "sdpa_math"


@pytest.mark.parametrize("script", sorted(SLURM.iterdir()), ids=lambda path: path.name)
def test_job_script_without_arguments_names_them(script: Path) -> None:
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
    assert done.returncode != 0
    assert "give " in done.stderr
