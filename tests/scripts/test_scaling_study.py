"""The study scaling_limits: what it computes before anything was measured, and what it makes of records."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest

from cs_systems.config import RunConfig, preset
from cs_systems.core.collectives import CollectiveShape
from cs_systems.formulas.scaling import Layout, Sharing


@pytest.fixture(scope="module")
def a6() -> Any:
    return importlib.import_module("scaling_limits")


def test_without_records_it_takes_data_sheets_and_says_so(a6: Any) -> None:
    said = "\n".join(a6.explain([]))
    assert "at 396 TFLOP/s: 40% of the peak (NVIDIA H200 data sheet" in said
    assert "450 GB/s of busbw, a collective of two ranks takes 10.0 µs at least: NVIDIA H200 data sheet" in said
    assert "xl has 25 heads: no number of ranks divides them and a node of 8" in said
    limits = a6.tables([], "csv")
    assert [table.count("\n") >= 16 for table in limits] == [True] * 3


def test_what_was_measured_replaces_what_was_assumed(a6: Any, skeleton: Any, builders: Any) -> None:
    """The rate of one GPU, the link by its fit, and the steps of two ranks beside the simulated ones."""
    alone = [builders.ok(config, 0.1, 4e13, 10**9) for config in a6.full() if not config.is_distributed]
    several = [builders.ok(config, 0.2, 4e13, 10**9) for config in a6.full() if config.strategy == "fsdp"]
    calls = [
        builders.ok(RunConfig("collective", collective=CollectiveShape(size_bytes=size), world_size=2), 1e-3, 1, 1)
        for size in (2**10, 2**20, 2**24)
    ]
    for record in calls:
        shape = record.config["collective"]
        seconds = 20e-6 + shape["size_bytes"] / 300e9
        samples = tuple(replace(s, phases_s={"transfer": seconds}) for s in record.measurement.samples)
        object.__setattr__(record, "measurement", replace(record.measurement, samples=samples))
    cells = skeleton.cells([*alone, *several, *calls])
    given = a6.inputs(cells)
    assert "measured, NVIDIA H200, 2.7B ctx 512" in given.rate_source
    assert given.link_bytes_per_s == pytest.approx(300e9, rel=1e-6)
    assert given.latency_s == pytest.approx(20e-6, rel=1e-6)
    rows = {(row["size"], row["strategy"]): row for row in a6.compared(cells, given)}
    assert rows["2.7B", "fsdp"]["measured_s"] == pytest.approx(0.2, rel=0.01)
    assert rows["2.7B", "ddp_bucketed"]["measured_s"] is None
    assert 0.05 < rows["2.7B", "tp"]["simulated_s"] < rows["2.7B", "fsdp"]["simulated_s"] < 0.11
    assert "2.7B, fsdp on 2: simulated" in "\n".join(a6.explain(cells))


def test_a_cpu_tells_nothing_of_a_cluster(a6: Any, skeleton: Any, builders: Any) -> None:
    records = [builders.ok(config, 0.1, 4e13, 10**9) for config in a6.small()]
    environment = replace(records[0].environment, device="cpu", device_name="some CPU", compute_capability=None)
    cells = skeleton.cells([replace(record, environment=environment) for record in records])
    given = a6.inputs(cells)
    assert given == a6.inputs([])
    assert [row["size"] for row in a6.compared(cells, given)] == ["tiny"] * 3


def test_a_profiled_step_is_no_rate(a6: Any, skeleton: Any, builders: Any) -> None:
    config = replace(a6.full()[0], profiler="kineto")
    given = a6.inputs(skeleton.cells([builders.recorded(builders.ok(config, 0.1, 4e13, 10**9))]))
    assert given.rate_source.startswith("40% of the peak")


def test_layouts_are_what_a_model_and_its_rows_allow(a6: Any) -> None:
    assert [layout.ranks for layout in a6.layouts(preset("xl"), "tp")] == [1, 5, 25]
    assert max(layout.dp for layout in a6.layouts(preset("8B"), "fsdp")) == 32
    assert {layout.tp for layout in a6.layouts(preset("2.7B"), "fsdp+tp")} == {2, 4, 8}
    assert Layout(Sharing.SHARDED, 64, 2) in a6.layouts(preset("2.7B"), "fsdp+tp")


@pytest.mark.parametrize(
    ("network", "less"), [("NVLink throughout", "50 GB/s a GPU"), ("50 GB/s a GPU", "50 GB/s a node")]
)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp", "fsdp+tp"])
def test_a_slower_network_ends_it_no_later(a6: Any, strategy: str, network: str, less: str) -> None:
    given = a6.inputs([])
    for share in (0.9, 0.5):
        fast, slow = (a6.farthest(a6.points("2.7B", strategy, name, given), share) for name in (network, less))
        assert slow.layout.ranks <= fast.layout.ranks


def test_it_is_at_most_as_efficient_as_one_gpu(a6: Any) -> None:
    for size in a6.SIZES:
        for strategy in a6.STRATEGIES:
            found = a6.points(size, strategy, "50 GB/s a GPU", a6.inputs([]))
            assert all(0 < point.efficiency <= 1 + 1e-9 for point in found)


def test_its_figure_has_a_panel_for_each_model_and_network(a6: Any, tmp_path: Any) -> None:
    from cs_systems.report.figures import plot

    plot.write(lambda: a6.draw([]), tmp_path / "figure.svg")
    assert "<svg" in (tmp_path / "figure.svg").read_text()
    assert len(a6.draw([]).axes) == 8
