"""`cs-systems comm`: its calls, the tables and figure of two gloo ranks, and its error messages."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from cs_systems.cli import main
from cs_systems.cli._options import Steps
from cs_systems.cli.comm import CommCells, parse_sizes
from cs_systems.config import RunConfig
from cs_systems.core.collectives import COLLECTIVES, CollectiveShape
from cs_systems.formulas.communication import SETUP
from cs_systems.record import RunRecord, read_records
from cs_systems.report import collectives, frame

MIB = 2**20
WORDS = ("--size", "1KiB:16KiB", "--dtype", "fp32", "fp8", "--device", "cpu", "--warmup", "1", "--steps", "3")


def cells(**given: object) -> list[RunConfig]:
    return CommCells(**given).configs(Steps())  # type: ignore[arg-type]


def shapes(**given: object) -> list[CollectiveShape]:
    return [config.collective for config in cells(**given) if config.collective]


def test_defaults_are_all_collectives_from_1_kib_to_1_gib_on_two_ranks() -> None:
    configs = cells()
    assert {(c.workload, c.world_size) for c in configs} == {("collective", 2)}
    expected = [(name, 2**k) for name in COLLECTIVES for k in range(10, 31, 2)]
    assert [(shape.collective, shape.size_bytes) for shape in shapes()] == expected


def test_cells_are_the_product_of_options_with_one_call_if_large() -> None:
    found = cells(collective=("broadcast",), size=("1KiB", "1GiB"), dtype=("bf16", "int8"), world_size=(1, 2, 4))
    assert len({config.key() for config in found}) == 2 * 2 * 3
    assert {(s.size_bytes, s.calls) for s in (c.collective for c in found) if s} == {(1024, 20), (2**30, 1)}
    assert {shape.calls for shape in shapes(calls=3)} == {3}


def test_range_is_rounded_to_multiples_that_ranks_can_divide() -> None:
    three = shapes(collective=("all_reduce", "all_to_all"), size=("1KiB:4KiB",), world_size=(3,))
    assert [shape.size_bytes for shape in three] == [1024, 4096, 1020, 4092]


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("4KiB", [4096]), ("1KiB:16KiB", [1024, 4096, 16384]), ("1MiB:5MiB:2", [MIB, 2 * MIB, 4 * MIB]), ("7B:7B", [7])],
)
def test_size_is_one_value_or_a_range(text: str, sizes: list[int]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--size", "1KiB:2KiB:1"),
            "--size '1KiB:2KiB:1' is not a range of sizes; write FIRST:LAST, such as 1KiB:1GiB, or",
        ),
        (("--size", "1KiB:"), "--size '1KiB:' is not a range of sizes; write FIRST:LAST, such as 1KiB:1GiB"),
        (("--size", "2KiB:1KiB"), "--size '2KiB:1KiB' begins above its end; give the smaller size first"),
        (("--size", "many"), "'many' is not a size in bytes"),
        (("--size", "0B"), "--size '0B' is less than 1 byte; use a form such as 8GiB or 512B"),
        (
            ("--size", "1KiB", "--world-size", "3"),
            "all_gather of 1,024 bytes is not a whole number of fp32 elements for each of 3",
        ),
        (("--collective", "allreduce"), "unknown collective 'allreduce'; did you mean all_reduce"),
        (("--dtype", "fp12"), "unknown dtype 'fp12'; did you mean"),
        (("--world-size", "0"), "--world-size is 0; it must be at least 1"),
        (("--calls", "0"), "calls is 0; it must be at least 1"),
        (("--device", "cuda:1"), "device cuda:1 is a single GPU, but each rank needs its own; use device cuda"),
    ],
)
def test_invalid_options_exit_2_before_any_process_starts(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["comm", *words, "--out", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@dataclass(frozen=True)
class Ran:
    folder: Path
    out: str
    records: list[RunRecord]


def command(*words: str) -> tuple[str, str]:
    """Run the command with 80 columns and return what it printed on the two streams."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        assert main(["comm", *words]) == 0, err.getvalue()
    return out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("comm")
    out, _ = command(*WORDS, "--out", str(folder))
    return Ran(folder, out, read_records(folder)[0])


def test_each_call_is_a_row_within_80_columns(ran: Ran) -> None:
    assert max(map(len, ran.out.splitlines()[:-1])) <= 80
    for collective in COLLECTIVES:
        rows = [line.split() for line in ran.out.splitlines() if line.startswith(collective) and "KiB" in line]
        measured = [row for row in rows if "unavailable" not in row and row[1] == "fp32"]
        assert [row[2] for row in measured] == ["1", "4", "16"]


def test_call_unsupported_by_gloo_is_unavailable_with_reason(ran: Ran) -> None:
    refused = [record for record in ran.records if record.status != "ok"]
    assert {(r.status, r.config["collective"]["dtype"]) for r in refused} == {("unavailable", "fp8")}
    assert len(refused) == 3 * len(COLLECTIVES)
    for record in refused:
        name = record.config["collective"]["collective"]
        assert record.reason == f"gloo does not support {name} of fp8; choose another dtype"


def test_record_separates_set_up_skew_and_transfer(ran: Ran) -> None:
    for record in ran.records:
        if record.measurement is None:
            continue
        assert record.measurement.phase_names() == ("skew", "transfer")
        assert set(record.results["setup"][0]) == set(SETUP.columns)
        assert all(value > 0 for value in record.results["setup"][0].values())
        ranks = {(row["rank"], row["phase"]) for row in record.results["ranks"]}
        assert {(rank, phase) for rank in (0, 1) for phase in ("skew", "transfer")} <= ranks
        (call,) = record.results["ran"]
        shape = record.run_config.collective
        assert shape is not None
        assert max(call["sent_bytes"], call["received_bytes"]) == shape.size_bytes
        assert (call["backend"], call["world_size"], call["calls"]) == ("gloo", 2, 20)


def test_frame_has_rates_of_one_call(ran: Ran) -> None:
    data = frame.frame(ran.records)
    steps = data[data["phase"] == "step"]
    assert len(steps) == 3 * len(COLLECTIVES)
    for row in steps.to_dict("records"):
        transfer = data[(data["record"] == row["record"]) & (data["phase"] == "transfer")]["median_s"].item()
        factor = {"all_reduce": 1.0, "broadcast": 1.0}.get(row["collective"], 0.5)
        assert row["call_s"] == pytest.approx(transfer / 20)
        assert row["algbw_bytes_per_s"] == pytest.approx(row["size_bytes"] / row["call_s"])
        assert row["busbw_bytes_per_s"] == pytest.approx(factor * row["algbw_bytes_per_s"])
        assert row["link_share"] != row["link_share"], "the bandwidth of a CPU's link is unknown"


def test_each_collective_has_a_fit_and_set_up_times(ran: Ran) -> None:
    fits, setups = collectives.fits(ran.records), collectives.setups(ran.records)
    assert [(r["collective"], r["dtype"], r["world_size"]) for r in fits] == [(n, "fp32", 2) for n in COLLECTIVES]
    assert all(r["sizes"] == 3 for r in fits)
    assert [r["size_bytes"] for r in setups] == [1024] * len(COLLECTIVES)
    assert "t(n) = α + n/β" in ran.out
    assert "set-up, before the first sample" in ran.out


def test_figure_is_written_beside_the_records(ran: Ran) -> None:
    assert (ran.folder / "figure.svg").read_text().startswith("<?xml")
    assert f"figure:  {ran.folder / 'figure.svg'}" in ran.out


def test_rerun_resumes_and_writes_csv(ran: Ran) -> None:
    file = ran.folder / "calls.csv"
    _, error = command(*WORDS, "--out", str(ran.folder), "--format", "csv", "--output", str(file))
    assert "30 cells are already recorded" in error
    assert file.read_text().splitlines()[0].endswith("call_s,algbw_bytes_per_s,busbw_bytes_per_s,link_share")
    assert read_records(ran.folder)[0] == ran.records


def test_report_shows_calls_and_not_steps(ran: Ran, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(ran.folder), "--format", "markdown"]) == 0
    heading = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| collective"))
    titles = [title.partition("(")[0].strip() for title in heading.strip("|").split("|")]
    assert titles == ["collective", "dtype", "size", "per call", "algbw", "busbw", "skew", "note"]
