"""Cells are checked once where they enter, and the names in them are looked up once where they are measured."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cs_systems.cli._options import Sweep
from cs_systems.config import ConfigError, Mode, RunConfig, preset
from cs_systems.core import plugins
from cs_systems.measure.runtime.execute import run_cells
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


@pytest.mark.parametrize("rounds", [1, 2])
def test_names_of_a_cell_are_looked_up_once(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found, get = Counter[tuple[str, str]](), plugins.get

    def counted(package: str, name: str) -> Any:
        found[package, name] += 1
        return get(package, name)

    monkeypatch.setattr(plugins, "get", counted)
    config = RunConfig(
        model=preset("tiny"), batch_size=1, seq_len=8, mode=Mode.FORWARD_BACKWARD, attention="sdpa_math",
        warmup=0, steps=2, rounds=rounds, device="cpu",
    )  # fmt: skip
    replies: list[Any] = []
    run_cells([config], emit=replies.append)
    assert replies[-1].record["status"] == "ok", replies[-1].record["reason"]
    named = {"workloads": "train_step", "profilers": "none", "attention": "sdpa_math", "parallel": "single"}
    assert found == dict.fromkeys(named.items(), 1)
