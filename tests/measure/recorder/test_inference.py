"""Manual recording of a loop that only computes forward passes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import nn

from cs_systems import Recorder
from cs_systems.analysis.comparison.loop_findings import OWN_PYTHON
from cs_systems.analysis.diagnosis import diagnose


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_forward_passes_of_inference_are_its_work(
    context: Callable[[], AbstractContextManager], tmp_path: Path
) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).eval()
    with Recorder(model, out=tmp_path, profile="none") as recorder, context():
        for _ in range(300):
            with recorder.step():
                model(torch.ones(64, 256)).argmax(1)
    rows = OWN_PYTHON.of(recorder.records[0].results)
    assert "forward" in {row["phase"] for row in rows}
    assert "forward without gradients" not in {row["phase"] for row in rows}
    answer = diagnose(recorder.records)
    assert "rollouts" not in {each.code for each in answer.diagnoses}
    assert "model()" in answer.longest
