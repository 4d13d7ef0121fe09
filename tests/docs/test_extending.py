"""The plug-ins that docs/extending.md shows are ones."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cs_systems.analysis.diagnosis import Unknown
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.replay import HostScaled
from cs_systems.config import RunConfig
from cs_systems.measure.profilers import Profiler
from cs_systems.measure.workloads import Cell
from cs_systems.model.attention import AttentionBackend
from cs_systems.model.attention.naive import attention
from cs_systems.model.parallel import ParallelStrategy

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
CODE = {
    match[1]: match[0] for match in re.finditer(r"# cs_systems/(?:\w+/)*(\w+)/mine\.py.*?(?=^```$)", PAGE, re.M | re.S)
}


def _namespace(kind: str) -> dict[str, Any]:
    made: dict[str, Any] = {"__name__": f"shown_{kind}"}
    exec(compile(CODE[kind], kind, "exec"), made)
    return made


def test_page_shows_every_kind_of_plug_in() -> None:
    assert sorted(CODE) == ["attention", "diagnosis", "parallel", "parts", "profilers", "readers", "workloads"]


@pytest.mark.parametrize("causal", [False, True])
def test_attention_agrees_with_the_reference(causal: bool) -> None:
    backend = _namespace("attention")["BACKEND"]
    assert isinstance(backend, AttentionBackend)
    q, k, v = torch.randn(3, 2, 2, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(backend(q, k, v, causal=causal), attention(q, k, v, causal=causal))


def test_rule_finds_its_cause_or_says_that_it_cannot_tell() -> None:
    find = _namespace("diagnosis")["RULE"].find
    tables: dict[str, Any] = {
        "steps": [{"device": 0, "wall_s": 0.010, "busy_share": 0.5}],
        "ranges": [{"range": "log", "total_s": 0.004}],
    }
    unknown = find(Evidence(tables=tables))
    assert isinstance(unknown, Unknown)
    assert unknown.text.startswith("whether the GPU waits for the range log")
    found = find(Evidence(tables={**tables, "gaps": []}))
    assert found.sentence == "40% of the step the host logs: log each tenth step; not below 6.4 ms, now 10 ms"
    assert isinstance(found.change, HostScaled)
    assert find(Evidence(tables={**tables, "ranges": []})) is None


def test_workload_is_measured() -> None:
    workload = _namespace("workloads")["WORKLOAD"](Cell(RunConfig(batch_size=2)), SimpleNamespace(torch="cpu"))
    workload.prepare()
    assert [name for name, run in workload.step() if run() is None] == ["first", "second"]
    assert workload.y.shape == (2, 64, 64)


def test_strategy_and_profiler_have_their_hooks(tmp_path: Path) -> None:
    assert isinstance(_namespace("parallel")["STRATEGY"], ParallelStrategy)
    profiler = _namespace("profilers")["PROFILER"]
    assert isinstance(profiler, Profiler)
    with profiler.region(tmp_path / "cell-0", None, None):
        pass
    assert profiler.collect(tmp_path / "cell-0", None).results["collections"][0]["collections"] >= 0


def test_format_is_recognised_and_read(tmp_path: Path) -> None:
    format = _namespace("readers")["FORMAT"]
    (path := tmp_path / "a.mine").write_text("MINE 1\ngemm 0.5 0.75\n")
    assert format.matches(path.read_bytes(), path)
    (kernel,) = format.read(path).kernels
    assert (kernel.function.name, kernel.end_s - kernel.start_s) == ("gemm", 0.25)
