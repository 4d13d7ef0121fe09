"""Tests of collective records as frame, table and figure, with rates against the link's ceiling."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cs_systems.config import RunConfig
from cs_systems.core.collectives import CollectiveShape
from cs_systems.record import Measurement, RunRecord, Sample
from cs_systems.report import collectives, frame
from cs_systems.report.figures import plot
from cs_systems.report.tables import records as table
from tests.test_record import ENVIRONMENT

ALPHA_S, BETA = 10e-6, 300e9
LINK = {"peak_bytes_per_s": 450e9, "source": "NVIDIA H200 data sheet, SXM: NVLink, one direction"}
SETUP = {"start_s": 4.0, "init_process_group_s": 0.9, "new_group_s": 0.2, "first_call_s": 0.05}


def record(shape: CollectiveShape, ranks: int = 2, device: str = "NVIDIA H200") -> RunRecord:
    """Return a record of calls that take exactly α + n/β, after waiting for a late rank."""
    transfer = shape.calls * (ALPHA_S + shape.size_bytes / BETA)
    phases = {"skew": 5e-3, "queue": 2e-3, "transfer": transfer}
    sample = Sample(0, False, sum(phases.values()), phases, phases)
    config = RunConfig(workload="collective", collective=shape, world_size=ranks)
    return RunRecord(
        key=config.key(),
        config=config.to_dict(),
        status="ok",
        environment=replace(ENVIRONMENT, device_name=device),
        measurement=Measurement("cuda_event", (sample,) * 5, setup_s=1.0),
        results={"ran": [{"backend": "nccl 2.28.9"}], "setup": [SETUP], "link": [LINK]},
    )


SIZES = [2**k for k in range(10, 31, 4)]
RECORDS = [record(CollectiveShape(name, n, calls=20)) for name in ("all_reduce", "all_to_all") for n in SIZES]


def test_call_time_is_per_call_without_waiting() -> None:
    data = frame.frame(RECORDS)
    steps = data[data["phase"] == "step"].to_dict("records")
    for row in steps:
        expected = ALPHA_S + row["size_bytes"] / BETA
        factor = 1.0 if row["collective"] == "all_reduce" else 0.5
        assert row["call_s"] == pytest.approx(expected)
        assert row["busbw_bytes_per_s"] == pytest.approx(factor * row["size_bytes"] / expected)
        assert row["link_share"] == pytest.approx(row["busbw_bytes_per_s"] / 450e9)
    assert len(steps) == len(RECORDS)


def test_fit_recovers_latency_and_bandwidth_of_each_line() -> None:
    rows = collectives.fits(RECORDS)
    assert [row["collective"] for row in rows] == ["all_reduce", "all_to_all"]
    for row, bus in zip(rows, (BETA, BETA / 2), strict=True):
        assert row["latency_s"] == pytest.approx(ALPHA_S)
        assert row["algbw_bytes_per_s"] == pytest.approx(BETA)
        assert row["busbw_bytes_per_s"] == pytest.approx(bus)
        assert row["half_bandwidth_bytes"] == pytest.approx(ALPHA_S * BETA)
        assert row["worst_residual_share"] < 1e-9


def test_lines_separate_ranks_dtypes_and_profiled_calls() -> None:
    """Calls with other ranks, other dtypes or a profiler are not points of a line."""
    others = [record(CollectiveShape("all_reduce", n), ranks=4) for n in SIZES[:2]]
    others += [record(CollectiveShape("all_reduce", n, "bf16")) for n in SIZES[:2]]
    profiled = record(CollectiveShape("all_reduce", SIZES[0]))
    profiled = replace(profiled, config=profiled.config | {"profiler": "nsys"})
    found = collectives.lines([*others, *RECORDS[: len(SIZES)], profiled])
    sizes = {tuple(line): [r.config["collective"]["size_bytes"] for r in of] for line, of in found.items()}
    assert sizes == {
        ("all_reduce", "fp32", 4): SIZES[:2],
        ("all_reduce", "bf16", 2): SIZES[:2],
        ("all_reduce", "fp32", 2): SIZES,
    }
    assert len(collectives.fits([*others, *RECORDS[: len(SIZES)]])) == 1, "a fit needs three sizes"


def test_one_rank_has_no_bandwidth_and_no_fit() -> None:
    alone = [record(CollectiveShape("all_reduce", n), ranks=1) for n in SIZES]
    for r in alone:
        assert (collectives.step(r)["algbw_bytes_per_s"], collectives.step(r)["busbw_bytes_per_s"]) == (None, None)
    assert collectives.fits(alone) == []
    assert "collectives" in plot.kinds(alone)
    plot.figure(alone, "collectives")


def test_table_shows_sizes_with_units_and_link_ceiling() -> None:
    text = table.render(RECORDS, "markdown")
    assert all(f" {size} |" in text for size in ("1 KiB", "16 KiB", "256 KiB", "4 MiB", "64 MiB", "1 GiB"))
    (shown,) = table.tables(RECORDS)
    (sizes,) = (column for column in shown.columns if column.name == "size_bytes")
    assert sizes.values == (*SIZES, *SIZES), "a page sorts by these values"
    assert "of the link (%)" in text
    assert "- skew: longest time that a rank waited for the others before the calls" in text
    assert "450 GB/s (NVIDIA H200 data sheet, SXM: NVLink, one direction)" in text
    assert "constant: dtype fp32, ranks 2, calls 20" in text


def test_figure_draws_calls_fits_and_link_ceiling() -> None:
    assert plot.kinds(RECORDS)[0] == "collectives"
    times, rates = plot.figure(RECORDS).axes
    assert [line.get_linestyle() for line in times.lines] == ["-", ":"] * 2
    assert rates.lines[-1].get_ydata()[0] == 450
    assert [text.get_text() for text in rates.texts] == ["450 GB/s\nNVIDIA H200 data sheet, SXM\nNVLink, one direction"]


def test_record_of_other_workload_has_no_collective_columns() -> None:
    other = replace(RECORDS[0], config=RunConfig().to_dict())
    assert collectives.cell(other) is None
    assert collectives.step(other) is None
    assert collectives.call_s(other) is None
