"""Tests of run comparison: the differing fields, matched cells and verdicts."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cs_systems.analysis.comparison.profiles import difference_of_records
from cs_systems.analysis.comparison.runs import _in_any_folder, compare, opening, said
from cs_systems.cli import main
from cs_systems.config import PRESETS, ConfigError, Mode, RunConfig, preset
from cs_systems.core.caveats import Caveat
from cs_systems.record import Measurement, Origin, RunRecord, Sample, append_record, read_records
from tests.test_record import ENVIRONMENT

BASE = RunConfig(model=PRESETS["tiny"], rounds=4, steps=20)


def record(config: RunConfig, seconds: float, repeat: int = 0, noise: float = 0.002) -> RunRecord:
    """Return a record of steps that take `seconds`, with relative noise that depends on the arguments."""
    dice = random.Random(f"{config.key()} {repeat} {seconds}")
    samples = tuple(
        Sample(i // 5, False, t := seconds * dice.lognormvariate(0, noise), {"forward": t / 3}, {"forward": t / 9})
        for i in range(20)
    )
    return RunRecord(
        config.key(), config.to_dict(), "ok", repeat, None, ENVIRONMENT, Measurement("monotonic", samples, 0.0)
    )


def test_compare_finds_differing_field_and_matches_cells() -> None:
    modes = (Mode.FORWARD, Mode.TRAIN_STEP)
    a = [record(replace(BASE, mode=m), 1.0 + i) for i, m in enumerate(modes)]
    b = [record(replace(BASE, mode=m, attention="flex"), (1.0 + i) / 2) for i, m in enumerate(reversed(modes))]
    found = compare(a, b)
    assert found.compared == {"attention": ("naive", "flex")}
    assert [row["cell"] for row in found.rows] == [
        "tiny ctx 64 batch 4 · fp32 · forward",
        "tiny ctx 64 batch 4 · fp32 · train-step",
    ]
    assert found.doubts == []
    assert found.rows[0]["ratio"] == pytest.approx(1.0, rel=0.01)
    assert found.rows[1]["ratio"] == pytest.approx(0.25, rel=0.01)
    assert [row["verdict"] for row in found.rows] == ["no difference", "faster"]


def test_old_record_without_a_field_is_comparable() -> None:
    old = record(BASE, 1.0)
    del old.config["checkpoint"]
    assert compare([old], [record(BASE, 1.0)]).compared == {}
    assert len(compare([old], [record(BASE, 1.0)]).rows) == 1


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "no difference"), (1.1, "slower"), (0.9, "faster")])
@pytest.mark.parametrize("repeats", [1, 3])
def test_verdict_matches_planted_difference(factor: float, verdict: str, repeats: int) -> None:
    a = [record(BASE, 1.0, r) for r in range(repeats)]
    b = [record(BASE, factor, 100 + r) for r in range(repeats)]
    (row,) = compare(a, b).rows
    assert row["verdict"] == verdict
    assert row["ratio_low"] < factor < row["ratio_high"]
    assert ("a run used one process" in (row["unseen"] or "")) == (repeats == 1)


def test_cell_label_omits_compared_fields() -> None:
    a, b = (replace(BASE, model=preset("tiny", context_length=n), batch_size=n) for n in (32, 64))
    found = compare([record(a, 1.0)], [record(b, 2.0, 1)])
    assert found.compared == {"model.context_length": (32, 64), "batch_size": (32, 64)}
    assert [row["cell"] for row in found.rows] == ["tiny · naive · fp32 · train-step"]


def test_compare_matches_cells_of_different_sizes() -> None:
    b = replace(BASE, model=preset("small", context_length=64))
    found = compare([record(BASE, 1.0)], [record(b, 2.0, 1)])
    assert found.compared["model.name"] == ("tiny", "small")
    assert [row["cell"] for row in found.rows] == ["ctx 64 batch 4 · naive · fp32 · train-step"]


def test_each_chosen_phase_has_a_row() -> None:
    rows = compare([record(BASE, 1.0)], [record(BASE, 2.0, 1)], ["step", "forward", "optimizer"]).rows
    assert [row["phase"] for row in rows] == ["step", "forward"]  # neither has an optimizer phase
    assert rows[1]["a_median_s"] == pytest.approx(1 / 3, rel=0.01)


def test_doubts_list_unmatched_cells_other_versions_and_caveats() -> None:
    elsewhere = replace(ENVIRONMENT, torch="2.11")
    b = replace(record(BASE, 1.0, 1), environment=elsewhere, warnings=(Caveat("unstable", "m", "r"),))
    alone = record(replace(BASE, batch_size=8), 1.0)
    doubts = compare([record(BASE, 1.0), alone], [b]).doubts
    assert doubts == [
        "1 cell only in the baseline",
        "torch differs: 2.13 in the baseline, 2.11 in the candidate",
        "caveats of the candidate: unstable",
    ]


def test_phase_of_0_s_is_left_out() -> None:
    """A recorded loop has 0 s where a phase did not occur in a step."""
    idle = record(BASE, 2.0, 1)
    assert idle.measurement
    samples = tuple(replace(sample, phases_s={"forward": 0.0}) for sample in idle.measurement.samples)
    idle = replace(idle, measurement=replace(idle.measurement, samples=samples))
    found = compare([record(BASE, 1.0)], [idle], ["step", "forward"])
    assert [row["phase"] for row in found.rows] == ["step"]
    assert found.doubts == ["left out: phase forward of 1 cell, absent or 0 s in one of the runs"]


def test_phase_that_no_matched_cell_has_is_rejected() -> None:
    text = "no cell of both runs has the phase optimizer with times above 0; choose a phase of both"
    with pytest.raises(ConfigError, match=text):
        compare([record(BASE, 1.0)], [record(BASE, 2.0, 1)], ["optimizer"])


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ("forward", r"^phases is 'forward'; give a list of at least one phase, such as \['step', 'forward'\]$"),
        ([], r"^phases is \[\]; give a list of at least one phase"),
    ],
)
def test_phases_other_than_a_list_of_names_are_rejected(phases: Sequence[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compare([record(BASE, 1.0)], [record(BASE, 2.0, 1)], phases)


def test_run_with_only_failed_and_profiled_cells_was_not_timed() -> None:
    failed = replace(record(BASE, 1.0), status="oom", measurement=None)
    profiled = record(replace(BASE, profiler="kineto", rounds=1), 1.0)
    with pytest.raises(ConfigError, match=r"^the candidate has no cell timed without a profiler; measure"):
        compare([record(BASE, 1.0)], [failed, profiled])
    with pytest.raises(ConfigError, match=r"^the baseline w/pk has no cell timed without a profiler; "):
        compare([profiled], [record(BASE, 1.0)], paths=(Path("w/pk"), Path("w/b")))
    with pytest.raises(ConfigError, match=r"^the baseline has no measured cell; see the reasons in its records$"):
        compare([failed], [record(BASE, 1.0)])
    with pytest.raises(ConfigError, match=r"^the baseline has no records; give those of a run, such as read_records"):
        compare([], [record(BASE, 1.0)])


def test_run_with_nan_losses_is_rejected_with_the_cause() -> None:
    broken = replace(record(BASE, 1.0), warnings=(Caveat("nan-loss", "the loss is NaN", "r"),))
    message = (
        "the candidate has no valid timing, because its loss is NaN or infinite; lower the learning rate or use "
        "another precision"
    )
    with pytest.raises(ConfigError, match=f"^{message}$"):
        compare([record(BASE, 1.0)], [broken])


def test_runs_without_matching_cells_are_rejected() -> None:
    a = [record(replace(BASE, batch_size=1), 1.0), record(replace(BASE, batch_size=2), 1.0)]
    b = [record(replace(BASE, batch_size=3), 1.0), record(replace(BASE, batch_size=4), 1.0)]
    with pytest.raises(
        ConfigError, match=r"no cell of the baseline, such as '.* batch 1 .*', matches .* such as '.* batch 3 "
    ):
        compare(a, b)


def test_table_of_noisy_cells_fits_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [replace(BASE, model=preset(name, context_length=64)) for name in ("tiny", "small")]
    for name, factor in (("a", 1.0), ("b", 99.0)):
        (tmp_path / name).mkdir()
        for config, seconds in zip(sizes, (0.000949, 2.59), strict=True):
            append_record(tmp_path / name, record(config, factor * seconds, noise=2.0))
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    printed = capsys.readouterr().out
    assert "too noisy" in printed
    assert "interval" not in printed.partition("finds:")[0]
    assert printed.count("not measured: e.g. the variance between processes") == 1
    assert max(map(len, printed.splitlines())) <= 80


def test_output_file_shows_both_sides_in_one_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seconds in (("a", 0.9), ("b", 1.2)):
        (tmp_path / name).mkdir()
        append_record(tmp_path / name, record(BASE, seconds, noise=1e-5))
    page = tmp_path / "new" / "ratio.md"
    sides = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(["compare", *sides, "--format", "markdown", "--output", str(page)]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"markdown: {page}\n")
    assert "interval: 95% confidence interval of the ratio, from rounds" in page.read_text()
    first, _, _, _, heading, *_ = page.read_text().splitlines()
    ratio = r"1\.333 \(1\.\d+ … 1\.\d+\) times the baseline's time"
    assert re.fullmatch(rf"the candidate is slower: {ratio} \(.*, step\)", first)
    assert ("baseline (s)" in heading) == ("candidate (s)" in heading)
    assert ("baseline (ms)" in heading) == ("candidate (ms)" in heading)
    assert "| ratio |" in re.sub(r" +", " ", heading)


def folders(tmp_path: Path, *seconds: float, peaks: tuple[int | None, ...] = (None, None)) -> list[str]:
    """Write a run of one cell for each of these step times, and return their folders."""
    names = [f"run{number}" for number in range(len(seconds))]
    for name, time_s, peak in zip(names, seconds, peaks, strict=True):
        (tmp_path / name).mkdir()
        made = record(BASE, time_s, noise=1e-5)
        assert made.measurement is not None
        measurement = replace(made.measurement, peak_allocated_bytes=peak)
        append_record(tmp_path / name, replace(made, measurement=measurement))
    return [str(tmp_path / name) for name in names]


@pytest.mark.parametrize(
    ("seconds", "peaks", "fail_on", "status", "said"),
    [
        ((1.0, 1.2), (None, None), ["slower"], 1, "slower"),
        ((1.0, 0.8), (None, None), ["slower", "larger"], 0, ""),
        ((1.0, 1.0), (1000, 1020), ["larger"], 1, "larger"),
        ((1.0, 1.2), (1000, 1005), ["larger"], 0, ""),
    ],
)
def test_fail_on_gives_exit_status_1_and_names_the_cell(
    seconds: tuple[float, float],
    peaks: tuple[int | None, int | None],
    fail_on: list[str],
    status: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sides = folders(tmp_path, *seconds, peaks=peaks)
    assert main(["compare", *sides, "--fail-on", *fail_on]) == status
    printed, error = capsys.readouterr()
    assert error.strip().endswith(f"step: {said}") if said else not error
    assert ("; the peak memory is larger in 1 of 1" in " ".join(printed.split())) == (said == "larger")


def test_github_summary_has_counts_table_and_folded_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *folders(tmp_path, 1.0, 1.2, peaks=(1000, 2000)), "--format", "github"]) == 0
    heading, _, _, _, table, *rest = capsys.readouterr().out.splitlines()
    assert heading == "### 1 slower, 1 larger"
    assert table.startswith("| cell")
    assert "<details><summary>Notes</summary>" in rest
    assert any("| slower" in line for line in rest)


def test_page_of_a_comparison_shows_verdicts_and_ratios(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    sides = folders(tmp_path, 1.0, 1.2)
    assert main(["compare", *sides, "--open", "--output", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert opened == [(tmp_path / "page.html").as_uri()]
    assert page.count("<svg") == 1
    assert ">slower<" in page
    assert "http" not in re.sub(r"xmlns(:xlink)?=\"[^\"]*\"", "", page), "it fetches nothing"
    assert main(["compare", *sides, "--open"]) == 0
    assert opened[1].endswith("/compare.html")
    assert main(["compare", *sides, "--open", "--format", "csv"]) == 2
    assert "--open requires --format html, got --format csv; leave out one of them" in capsys.readouterr().err


def test_unknown_failure_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *folders(tmp_path, 1.0, 1.0), "--fail-on", "slow"]) == 2
    assert "did you mean slower" in capsys.readouterr().err


def test_compare_command_prints_table_and_csv(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name, seconds in (("a", 1.0), ("b", 1.2)):
        (tmp_path / name).mkdir()
        append_record(tmp_path / name, record(BASE, seconds, noise=1e-5))
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    printed = capsys.readouterr().out
    assert "step time, candidate compared with baseline; same configuration in both" in printed
    assert "1.200" in printed
    assert "slower" in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--format", "csv"]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split(",")[:3] == ["cell", "phase", "a_median_s"]
    assert ",slower," in line


@pytest.fixture(scope="module")
def profiled() -> dict[str, list[RunRecord]]:
    """Profiles of `large` on one H200 by precision."""
    records, _ = read_records(Path(__file__).parents[3] / "profiles" / "top_kernels")
    chosen = [
        r for r in records if "families" in r.results and r.run_config.model == preset("large", context_length=256)
    ]
    return {name: [r for r in chosen if r.config["precision"] == name] for name in ("fp32", "bf16")}


def test_compare_splits_profiled_cells_by_phase_family_and_layer(
    profiled: dict[str, list[RunRecord]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, records in profiled.items():
        (tmp_path / name).mkdir()
        for record in records:
            append_record(tmp_path / name, record)
    assert main(["compare", str(tmp_path / "fp32"), str(tmp_path / "bf16")]) == 0
    printed = capsys.readouterr().out
    assert "large ctx 256 batch 4 · naive · train-step" in printed
    assert [
        printed.count(f"kernel time per step by {by}, candidate compared with baseline")
        for by in ("phase", "family", "layer")
    ] == [3] * 3
    assert "29 more with smaller differences" in printed.replace("\n", " ")
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize("by", ["phase", "family", "layer"])
def test_difference_rows_sum_to_total(profiled: dict[str, list[RunRecord]], by: str) -> None:
    for a, b in zip(profiled["fp32"], profiled["bf16"], strict=True):
        *rows, whole = difference_of_records(a, b, by)
        assert sum(row["difference_s"] for row in rows) == pytest.approx(whole["difference_s"])
        assert sum(row["share"] for row in rows) == pytest.approx(whole["share"])
        assert whole["a_s"] == pytest.approx(a.results["coverage"][0]["kernel_s"] / a.results["coverage"][0]["steps"])


def test_compare_of_two_traces_prints_the_same_as_analyze(capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(Path(__file__).parents[2] / "data" / "kineto_h200_small2.json.gz")
    assert main(["compare", trace, trace]) == 0
    compared = capsys.readouterr().out
    assert main(["analyze", trace, trace]) == 0
    assert compared == capsys.readouterr().out
    assert main(["compare", trace, trace, "--all"]) == 2
    assert "a comparison of two traces shows every row already; leave out --all" in capsys.readouterr().err


def test_table_of_one_phase_fits_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cs_systems.cli.compare.terminal_width", lambda output: 80)
    recorded = str(Path(__file__).parents[3] / "profiles" / "step_time")
    assert main(["compare", recorded, recorded]) == 0
    printed = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    first = "no change of a time is sure: 44 no difference, 4 too noisy"
    caption = (
        "step time, candidate compared with baseline; same configuration in both; in all cells: batch 4 · naive · "
        "train-step"
    )
    assert printed.replace("\n", " ").startswith(f"{first}  {caption}")
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("small ctx 128 · ") for line in lines)
    assert main(["compare", recorded, recorded, "--format", "csv"]) == 0
    assert "\nsmall ctx 128 batch 4 · naive · fp32 · train-step," in capsys.readouterr().out


def test_side_without_measured_cells_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timed = record(BASE, 1.0)
    append_record(tmp_path / "a.jsonl", timed)
    append_record(tmp_path / "b.jsonl", replace(timed, status="error", reason="it broke", measurement=None))
    assert main(["compare", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]) == 2
    b = tmp_path / "b.jsonl"
    assert f"the candidate {b} has no measured cell; see cs-systems report {b}" in capsys.readouterr().err


def test_csv_of_two_traces_is_rejected_and_names_analyze(capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(Path(__file__).parents[2] / "data" / "kineto_h200_step.json.gz")
    assert main(["compare", trace, trace, "--format", "csv"]) == 2
    assert (
        f"or, unless they are ranks of one job, use cs-systems analyze {trace} {trace} --format csv --table phases"
        in capsys.readouterr().err
    )
    assert main(["analyze", trace, trace, "--format", "csv", "--table", "phases"]) == 0


@pytest.mark.parametrize("role", ["attention", "inputs", "parts"])
def test_changed_code_of_own_attention_inputs_or_part_is_a_doubt(role: str) -> None:
    options: dict[str, Any] = {
        "attention": {"workload": "package.module:Model", "attention": "here/mine.py:it"},
        "inputs": {"workload": "package.module:Model", "inputs": "here/mine.py:it"},
        "parts": {"parts": ("fused_rmsnorm", "here/mine.py:it")},
    }
    config = RunConfig(**options[role])
    before, after, same = (
        [replace(record(config, 0.01), results={"ran": [{f"{role}_sha256": digest}]})] for digest in "121"
    )
    doubt = "the code of mine.py:it differs between baseline and candidate"
    assert doubt in compare(before, after).doubts
    assert doubt not in compare(before, same).doubts


def test_earlier_version_of_a_script_is_left_out_of_a_comparison() -> None:
    def run(digest: str, seconds: float, repeat: int = 0) -> RunRecord:
        config = RunConfig(workload="loop train", rounds=1)
        ran: Any = [{"workload_sha256": digest}] if digest else [{}]
        return replace(record(config, seconds, repeat), key=f"{digest}-{repeat}", results={"ran": ran})

    found = compare([run("old", 9.0), run("new", 1.0, 1), run("new", 1.0, 2)], [run("other", 1.0)])
    assert found.rows[0]["a_median_s"] == pytest.approx(1.0, rel=0.01)
    assert found.doubts == [
        "left out: 1 record of the baseline of earlier versions of its code",
        "the code of loop train differs between baseline and candidate",
    ]
    unknown = compare([run("", 1.0), run("new", 1.0, 1)], [run("new", 1.0)])
    assert unknown.doubts == []


def test_cells_of_own_workloads_match_by_name_in_any_folder() -> None:
    def run(folder: str, digest: str, precisions: tuple[str, ...] = ("fp32", "bf16")) -> list[RunRecord]:
        configs = [
            RunConfig(workload=f"{folder}mine.py:{name}", precision=precision)  # type: ignore[arg-type]
            for name in ("llama", "resnet")
            for precision in precisions
        ]
        return [replace(record(c, 0.01), results={"ran": [{"workload_sha256": digest}]}) for c in configs]

    found = compare(run("here/", "1"), run("/there/", "2"))
    assert found.compared == {}
    assert [row["cell"] for row in found.rows] == [
        "here/mine.py:llama",
        "here/mine.py:llama · bf16",
        "here/mine.py:resnet",
        "here/mine.py:resnet · bf16",
    ]
    assert {"the code of mine.py:llama differs between baseline and candidate"} <= {*found.doubts}
    assert not any("the code" in doubt for doubt in compare(run("", "1"), run("x/", "1")).doubts)
    two_files = [*run("a/", "1"), *run("b/", "1")]
    assert len(compare(two_files, two_files).rows) == 8
    llama, resnet = run("", "1")[:2], run("", "1")[2:]
    assert [row["cell"] for row in compare(llama, resnet).rows] == ["fp32 · train-step", "bf16"]


def test_cells_of_different_workloads_are_not_compared_silently() -> None:
    def run(workload: str) -> list[RunRecord]:
        return [record(RunConfig(workload=workload), 0.01)]

    for a, b in (("loop train", "train_step"), ("train_step", "mine.py:make"), ("loop train", "live net")):
        message = (
            f"the baseline measures {a} and the candidate {b}, which are different steps; compare runs of one workload"
        )
        with pytest.raises(ConfigError, match=re.escape(message)):
            compare(run(a), run(b))
    for a, b in (("loop before", "loop after"), ("mine.py:plain", "mine.py:fast")):
        doubt = (
            f"the workload differs: {a} in the baseline, {b} in the candidate; times compare only if both do the same "
            "work"
        )
        assert doubt in compare(run(a), run(b)).doubts
    assert compare(run("loop train"), run("loop train")).doubts == []


def test_comparison_of_a_trace_with_a_missing_file_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(Path(__file__).parents[2] / "data" / "kineto_h200_step.json.gz")
    assert main(["compare", trace, "nowhere"]) == 2
    assert "nowhere does not exist; give two traces, or two runs" in capsys.readouterr().err


def loop(seconds: float, command: str, spread: float = 1.0, repeat: int = 0) -> RunRecord:
    """Return a record of a loop in which steps take up to `spread` times as long as `seconds`, in no order."""
    made = record(RunConfig(workload="loop train", rounds=1), seconds, repeat)
    assert made.measurement is not None
    steps = [seconds * (1 + (spread - 1) * (i * 7 % 20) / 19) for i in range(20)]
    samples = tuple(Sample(0, False, t, {"forward": t}, {"forward": t}) for t in steps)
    return replace(made, measurement=replace(made.measurement, samples=samples), origin=Origin(0.0, command))


BEFORE, AFTER = "cs-systems run --out before -- train.py", "cs-systems run --out after -- train.py"


@pytest.mark.parametrize("slower", [False, True])
def test_steps_far_apart_in_one_process_a_side_are_a_likely_change(
    slower: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = [loop(1.7, BEFORE, 3.0), loop(0.1, AFTER, 3.0)]
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file, side in zip(files, reversed(sides) if slower else sides, strict=True):
        append_record(file, side)
    assert main(["compare", *map(str, files), "--fail-on", "slower"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert " ".join(printed.split()).startswith(
        "no change of a time is sure: 1 likely slower. The candidate took 17 times the baseline's time, and nine in "
        "ten samples of the candidate are over twice as long as nine in ten of the baseline; but one process a side "
        "cannot show how much processes vary"
        if slower
        else "no change of a time is sure: 1 likely faster. The candidate took 0.0588 times the baseline's time, and "
        "nine in ten samples of the baseline are over twice as long as nine in ten of the candidate; but one process a "
        "side cannot show how much processes vary"
    )
    assert "…" not in printed, "an interval was not measured"
    for command in (BEFORE, AFTER):
        assert f"to decide, run this twice more into the same folder: {command}" in " ".join(printed.split())


def test_change_that_three_processes_a_side_prove_has_a_verdict_despite_the_noise() -> None:
    a, b = ([loop(scale * seconds, "", 3.0, i) for i, scale in enumerate((1, 1.9, 3))] for seconds in (17.0, 0.1))
    (row,) = compare(a, b).rows
    assert row["resolution"] is not None
    assert row["resolution"] > 1
    assert said(row) == "faster"
    assert opening([row]).startswith("the candidate is faster: 0.006 (0.0")


@pytest.mark.parametrize(
    "candidate",
    [
        loop(1.0, AFTER, 20.0),  # ten times by the medians, but its quickest steps are as quick as the baseline's
        loop(0.9, AFTER, 9.0),
        loop(1.5, AFTER, 3.0),
    ],
)
def test_change_within_the_spread_of_the_steps_is_too_noisy_to_tell(candidate: RunRecord) -> None:
    found = compare([loop(1.0, BEFORE, 3.0)], [candidate])
    assert opening(found.rows) == "no change of a time is sure: 1 too noisy"
    assert found.doubts == [
        f"to decide, run this twice more into the same folder: {command}" for command in (BEFORE, AFTER)
    ]


def test_cells_of_a_sweep_are_decided_by_repeats() -> None:
    a, b = (
        [replace(record(BASE, seconds, noise=1.0), origin=Origin(0.0, f"cs-systems time --out {name}"))]
        for name, seconds in (("a", 1.0), ("b", 2.0))
    )
    doubts = compare(a, b).doubts
    assert doubts == [f"to decide: cs-systems time --out {name} --repeats 3" for name in "ab"]


def compared(cell: str, ratio: float, verdict: str, **more: Any) -> Any:
    return {"cell": cell, "phase": "step", "ratio": ratio, "ratio_low": ratio / 2, "ratio_high": ratio * 2,
            "verdict": verdict, "resolution": 0.1, "unseen": "processes", "apart": False, "a_peak_bytes": 100,
            "b_peak_bytes": 100 + 9 * more.pop("larger", False), **more}  # fmt: skip


def test_opening_counts_verdicts_and_names_the_largest_sure_change() -> None:
    rows = [
        compared("a", 9.0, "no difference"), compared("b", 1.5, "slower"), compared("c", 0.5, "faster", larger=True),
        compared("d", 16.0, "slower", resolution=1.5), compared("e", 1.25, "slower"), compared("f", 1.0, "unknown"),
    ]  # fmt: skip
    assert opening(rows) == (
        "of 6 times of the candidate: 2 slower, 1 faster, 1 no difference, 1 too noisy, 1 unknown; most changed: c, "
        "step: 0.500 (0.250 … 1.000) times the baseline's time; the peak memory is larger in 1 of 6"
    )
    assert opening(rows[:1]) == "no change of a time is sure: 1 no difference"
    assert opening(rows[1:2]) == "the candidate is slower: 1.500 (0.750 … 3.000) times the baseline's time (b, step)"
    assert opening([]) == ""
    likely = compared("d", 16.0, "slower", resolution=1.5, apart=True)
    assert opening([rows[0], likely]).startswith(
        "no change of a time is sure: 1 likely slower, 1 no difference. The candidate took 16 times the baseline's "
        "time (d, step), and nine in ten samples of the candidate"
    )


@pytest.mark.parametrize(
    ("source", "name"), [("folder/mine.py:step", "mine.py:step"), ("sdpa_flash", "sdpa_flash"), (None, "")]
)
def test_code_in_a_file_is_named_without_its_folder(source: str | None, name: str) -> None:
    assert _in_any_folder(source) == name
