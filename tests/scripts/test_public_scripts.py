"""Test of the benchmark that compares a script under `cs-systems run` with the script alone."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

SCRIPT = """
import sys
import time

import torch


class Net(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x)


def train():
    net = Net(4, 4)
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(8):
        net(torch.randn(2, 4)).sum().backward()
        optimizer.step()


train()
print("took", time.time(), "s")
print("cs_systems" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.timeout(180)  # it starts Python with torch several times
def test_output_that_depends_on_the_recorder_is_a_difference_and_the_parameters_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "train.py").write_text(SCRIPT)
    scripts, table = tmp_path / "scripts.toml", tmp_path / "table.json"
    scripts.write_text(
        '[[script]]\nname = "own"\nfolder = "own"\ncommand = ["train.py"]\n'
        'clocks = {forward = ["__main__:Net.forward"]}\n'
    )
    bench = importlib.import_module("benchmarks.public_scripts")
    bench.main([str(scripts), "--root", str(tmp_path), "--clocked", "1", "--steps", "1:5", "--json", str(table)])

    (row,) = json.loads(table.read_text())["scripts"]
    differs = row["differs"]["kineto"]
    assert differs["output"] == "False → True"
    assert not differs.keys() & {"status", "parameters", "gradients", "optimizers", "modes", "counters", "hooks"}
    assert row["repeats itself"] == [{}]
    assert row["tensors"] == {"rank0": 2}
    assert {"forward", "backward", "optimizer", "step"} <= row["phases"].keys()
    assert row["phases"]["forward"]["same_steps_s"]["clocked"] >= 0.02
    assert "| own | no | 1 of 1 | kineto: output" in capsys.readouterr().out
