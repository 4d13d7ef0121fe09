"""Tests of the study scaling_limits, without and with records."""

from __future__ import annotations

import csv
import importlib
import io
from dataclasses import replace
from typing import Any

import pytest

from cs_systems.config import RunConfig, preset
from cs_systems.core.collectives import CollectiveShape


@pytest.fixture(scope="module")
def limits_study() -> Any:
    return importlib.import_module("scaling_limits")


def test_explanation_without_records_uses_data_sheets(limits_study: Any) -> None:
    text = "\n".join(limits_study.explain([]))
    assert "at 396 TFLOP/s: 40% of the peak (NVIDIA H200 data sheet" in text
    assert "450 GB/s of busbw, a collective of two ranks takes 10.0 µs at least: NVIDIA H200 data sheet" in text
    assert "xl has 25 heads: no number of ranks divides them and a node of 8" in text
    limits = limits_study.tables([], "csv")
    assert [table.count("\n") for table in limits] == [17, 17, 17, 13]
    rows = list(csv.DictReader(io.StringIO(limits[0])))
    assert all(row["sending = computing"] != row["with gradients in bf16"] for row in rows if row["strategy"] == "ddp")
    assert all(row["sending = computing"] == row["with gradients in bf16"] for row in rows if row["strategy"] == "fsdp")


def test_measured_rates_replace_assumed_ones(limits_study: Any, skeleton: Any, builders: Any) -> None:
    """Records give the rate of one GPU, the fitted link, and steps of two ranks to compare with simulated ones."""
    alone = [builders.ok(config, 0.1, 4e13, 10**9) for config in limits_study.full() if not config.is_distributed]
    several = [builders.ok(config, 0.2, 4e13, 10**9) for config in limits_study.full() if config.strategy == "fsdp"]
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
    given = limits_study.inputs(cells)
    assert "measured, NVIDIA H200, 2.7B ctx 512" in given.rate_source
    assert given.link_bytes_per_s == pytest.approx(300e9, rel=1e-6)
    assert given.latency_s == pytest.approx(20e-6, rel=1e-6)
    rows = {(row["size"], row["strategy"]): row for row in limits_study.compared(cells, given)}
    assert rows["2.7B", "fsdp"]["measured_s"] == pytest.approx(0.2, rel=0.01)
    assert rows["2.7B", "ddp_bucketed"]["measured_s"] is None
    assert 0.05 < rows["2.7B", "tp"]["simulated_s"] < rows["2.7B", "fsdp"]["simulated_s"] < 0.11
    assert "2.7B, fsdp on 2: simulated" in "\n".join(limits_study.explain(cells))


def test_cpu_records_do_not_change_assumed_rates(limits_study: Any, skeleton: Any, builders: Any) -> None:
    records = [builders.ok(config, 0.1, 4e13, 10**9) for config in limits_study.small()]
    environment = replace(records[0].environment, device="cpu", device_name="some CPU", compute_capability=None)
    cells = skeleton.cells([replace(record, environment=environment) for record in records])
    given = limits_study.inputs(cells)
    assert given == limits_study.inputs([])
    assert [row["size"] for row in limits_study.compared(cells, given)] == ["tiny"] * 3


def test_profiled_step_does_not_set_rate(limits_study: Any, skeleton: Any, builders: Any) -> None:
    config = replace(limits_study.full()[0], profiler="kineto")
    given = limits_study.inputs(skeleton.cells([builders.recorded(builders.ok(config, 0.1, 4e13, 10**9))]))
    assert given.rate_source.startswith("40% of the peak")


def test_layouts_are_limited_by_heads_and_rows(limits_study: Any) -> None:
    assert [layout.ranks for layout in limits_study.layouts(preset("xl"), "tp")] == [1, 5, 25]
    assert max(layout.dp for layout in limits_study.layouts(preset("8B"), "fsdp")) == 32
    assert {layout.tp for layout in limits_study.layouts(preset("2.7B"), "fsdp+tp")} == {2, 4, 8}
    assert limits_study.Layout(limits_study.Sharing.SHARDED, 64, 2) in limits_study.layouts(preset("2.7B"), "fsdp+tp")


@pytest.mark.parametrize(
    ("network", "less"), [("NVLink throughout", "50 GB/s a GPU"), ("50 GB/s a GPU", "50 GB/s a node")]
)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp", "fsdp+tp"])
def test_slower_network_never_allows_more_ranks(limits_study: Any, strategy: str, network: str, less: str) -> None:
    given = limits_study.inputs([])
    for share in (0.9, 0.5):
        fast, slow = (
            limits_study.farthest(limits_study.points("2.7B", strategy, name, given), share) for name in (network, less)
        )
        assert slow.layout.ranks <= fast.layout.ranks


def test_efficiency_is_at_most_1(limits_study: Any) -> None:
    for size in limits_study.SIZES:
        for strategy in limits_study.STRATEGIES:
            found = limits_study.points(size, strategy, "50 GB/s a GPU", limits_study.inputs([]))
            assert all(0 < point.efficiency <= 1 + 1e-9 for point in found)


def test_figure_has_panel_for_each_model_and_network(limits_study: Any, tmp_path: Any) -> None:
    from cs_systems.report.figures import plot

    plot.write(lambda: limits_study.draw([]), tmp_path / "figure.svg")
    assert "<svg" in (tmp_path / "figure.svg").read_text()
    assert len(limits_study.draw([]).axes) == 8
