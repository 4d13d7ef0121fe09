"""Cells of a sweep are checked once, where they enter."""

from pathlib import Path

import pytest

from cs_systems.cli._options import Sweep
from cs_systems.config import ConfigError, RunConfig
from cs_systems.measure.runtime.sweep import check


def test_checked_cells_are_not_checked_again(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def step():\n    pass\n")
    cells = check([RunConfig(workload=f"{file}:step", seed=seed) for seed in range(4)])
    file.unlink()
    assert check(cells) is cells
    part = Sweep(part="1/2").of_share(cells)
    assert [cell.seed for cell in check(part)] == [1, 3]
    with pytest.raises(ConfigError, match="does not exist"):
        check([*cells])
    with pytest.raises(ConfigError, match="repeats is 0"):
        check(cells, repeats=0)
