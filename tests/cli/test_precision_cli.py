"""`cs-systems precision`: its tables, records and error messages. Cells start workers, so tests check much at once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cs_systems.cli import _sweep, main
from cs_systems.config import RunConfig
from cs_systems.record import RunRecord, append_record, read_records
from cs_systems.report.figures import plot

STEPS = """
import torch
from torch import nn

model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)), torch.randn(4, 8)

def outside():
    with torch.autocast("cpu", torch.bfloat16):
        y = x
    model(y).mean().backward()

def nothing():
    torch.zeros(1)

def factory(config, device):
    return nn.Linear(8, 8), torch.randn(config.batch_size, 8)
"""


@pytest.fixture(scope="module")
def dtypes(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[RunRecord], Path]:
    """Return the printed tables, the records and the folder of one run of --dtypes, in which two steps fail."""
    folder = tmp_path_factory.mktemp("dtypes")
    (folder / "steps.py").write_text(STEPS)
    models = ["toy", *(f"{folder}/steps.py:{name}" for name in ("outside", "nothing"))]
    out, tables = folder / "out", folder / "tables.txt"
    words = ["precision", "--dtypes", "--model", *models, "--device", "cpu", "--out", str(out)]
    assert main([*words, "--output", str(tables)]) == 3
    return tables.read_text(), read_records(out)[0], out


def test_dtypes_of_the_toy_model_are_printed(dtypes: tuple[str, list[RunRecord], Path]) -> None:
    text, (record, *_), out = dtypes
    assert text.startswith("toy · bf16 on ")
    assert re.search(r"^fc1 +fp32 +fp32 +bf16 +bf16 +bf16 +fp32 +down$", text, re.MULTILINE)
    assert re.search(r"^ln +fp32 +bf16 +bf16 +fp32 +bf16 +fp32 +–$", text, re.MULTILINE)
    assert re.search(r"^loss +– +– +fp32 ", text, re.MULTILINE)
    assert max(map(len, text.split("steps.py")[0].splitlines())) <= 80
    assert [row["what"] for row in record.results["dtypes"]][-2:] == ["logits", "loss"]
    assert "profiled" in {w.code for w in record.warnings}
    assert sorted(path.name for path in out.iterdir() if path.suffix == ".json") == []


def test_model_called_outside_autocast_is_an_error_with_its_table(
    dtypes: tuple[str, list[RunRecord], Path],
) -> None:
    printed, (_, outside, nothing), _ = dtypes
    text = " ".join(printed.split())
    cause = "autocast was entered for cpu, but Sequential was called outside of it, in its parameters' dtype; call"
    assert f'error: {cause} Sequential inside torch.autocast("cpu", torch.bfloat16)' in text
    assert "0 Linear fp32 fp32 fp32 fp32 fp32 fp32 1 LayerNorm fp32" in text
    assert "the step called no nn.Module; call the model as a module" in text
    assert (outside.status, outside.measurement) == ("error", None)
    assert {row["outputs"] for row in outside.results["dtypes"]} == {"float32"}
    assert nothing.status == "error"
    assert "dtypes" not in nothing.results


def test_repeated_cell_replaces_its_earlier_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps, out = tmp_path / "steps.py", tmp_path / "out"
    words = ["precision", "--dtypes", "--model", f"{steps}:step", "--device", "cpu", "--out", str(out)]
    steps.write_text("def step():\n    raise ValueError('no data')\n")
    assert main(words) == 3
    steps.write_text(f"{STEPS}\ndef step():\n    with torch.autocast('cpu', torch.bfloat16):\n        model(x)\n")
    capsys.readouterr()
    assert main(words) == 0
    assert "no data" not in capsys.readouterr().out
    assert [record.status for record in read_records(out)[0]] == ["error", "ok"]


@pytest.fixture(scope="module")
def rounding(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[RunRecord]]:
    """Return the printed tables and the records of one run of --accumulation and --normalization."""
    out = tmp_path_factory.mktemp("rounding")
    words = ["--accumulation", "--normalization", "--precision", "fp16", "bf16", "fp32", "--device", "cpu"]
    assert main(["precision", *words, "--out", str(out), "--output", str(out / "tables.txt")]) == 0
    return (out / "tables.txt").read_text(), read_records(out)[0]


def test_accumulation_and_normalization_errors_are_printed(rounding: tuple[str, list[RunRecord]]) -> None:
    printed, records = rounding
    assert re.search(r"^fp16 \+ fp16 +1,000 +9\.9531 +-0\.047$", printed, re.MULTILINE)
    text = " ".join(printed.split())
    same = "fp32 + fp16 and fp32 + (fp16 → fp32), 1,000 times: 0.01 is 0.010002136 in fp16"
    assert text.count(same) == 1
    assert "fp16 RMSNorm: overflows from σ = 8 (sum of squares)" in text
    assert "unavailable: normalization requires a low precision, got fp32; use bf16 or fp16" in text
    assert [r.status for r in records].count("ok") == 5


def test_tables_of_two_precisions_fit_80_columns(
    rounding: tuple[str, list[RunRecord]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for record in rounding[1]:
        append_record(tmp_path, record)
    monkeypatch.setattr("cs_systems.cli.precision.terminal_width", lambda output=None: 80)
    assert main(["precision", "--show", str(tmp_path)]) == 0
    text = re.sub(r"\x1b\[\d+m", "", capsys.readouterr().out)
    paths = ("recorded ", "records: ")  # commands and paths are not broken
    assert [line for line in text.splitlines() if len(line) > 80 and not line.startswith(paths)] == []
    assert "standard deviation σ at which one low-precision step fails" in " ".join(text.split())


def test_explanations_of_speed_ups_wrap_at_terminal_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cs_systems.cli.precision.terminal_width", lambda output=None: 80)
    assert main(["precision", "--show", str(Path(__file__).parents[2] / "profiles" / "top_kernels")]) == 0
    lines = re.sub(r"\x1b\[\d+m", "", capsys.readouterr().out).splitlines()
    assert any("is launch-bound" in line for line in lines)
    assert [line for line in lines if len(line) > 80 and not line.startswith("records: ")] == []


def test_precisions_are_compared_with_fp32(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeps, sweep = [], _sweep.sweep

    def spy(configs: Sequence[RunConfig], **options: Any) -> Iterator[RunRecord]:
        sweeps.append(({config.workload for config in configs}, options["interleave"]))
        return sweep(configs, **options)

    monkeypatch.setattr(_sweep, "sweep", spy)
    words = ["--size", "tiny", "--context-length", "8", "--precision", "tf32", "bf16", "fp8", "--device", "cpu"]
    steps = ["--warmup", "1", "--steps", "4", "--rounds", "2", "--train-steps", "3"]
    assert main(["precision", *words, *steps, "--out", str(tmp_path)]) == 0
    printed, progress = capsys.readouterr()
    assert f"{tmp_path} has no records yet; measuring 12 cells (--show DIR prints an earlier run)" in progress
    assert re.search(r"^fp8 .*\d× +", printed, re.MULTILINE)
    assert "fp8: the linear layers of the blocks run in fp8, attention and lm_head in bf16" in " ".join(printed.split())
    assert "MFU" not in printed, "the peak of a CPU is unknown"
    assert max(map(len, printed.split("relative error")[1].split("figure:")[0].splitlines())) <= 80
    assert re.search(r"^bf16 .*\d× +(\d.*–\d|too noisy)", printed, re.MULTILINE)
    text = " ".join(printed.split())
    assert "gain: fp32's step time over this precision's; interval: 95% confidence, from thirds of the steps" in text
    assert "from thirds of the steps, of fewer than 3 rounds" in text
    assert text.count("tf32: unavailable: tf32 needs an NVIDIA GPU of compute capability 8.0 or newer; use fp32") == 3
    assert "relative error against float64 of the same parameters and batch" in text
    records = read_records(tmp_path)[0]
    timed = [r for r in records if r.config["workload"] == "train_step"]
    assert sorted(r.config["precision"] for r in timed) == ["bf16", "fp32", "fp8", "tf32"]
    rounds = [[s.round for s in r.measurement.timed] for r in timed if r.measurement]
    assert rounds == [[0, 0, 1, 1]] * 3
    assert sweeps == [({"train_step"}, True), ({"precision_error", "training_curve"}, False)]
    assert "<svg" in (tmp_path / "training.svg").read_text()
    quality_lines = [line for line in progress.splitlines() if re.search("precision_error|training_curve", line)]
    assert {re.split("[:;] ", line)[-1].partition(" (")[0] for line in quality_lines} == {"done", "use fp32"}, (
        "cells that are not timed show no time"
    )
    assert main(["report", str(tmp_path)]) == 0
    _, clean, errors, curves, origin = capsys.readouterr().out.split("\n\n")
    assert origin.startswith("recorded ")
    assert "not timed" not in clean
    for table in (errors, curves):
        assert ", not timed; constant: size tiny" in " ".join(table.split())
        assert "to see the results: cs-systems precision --show DIR" in table
        assert "median" not in table
    assert plot.kinds([r for r in records if r.config["workload"] == "precision_error"]) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device that must be missing")
def test_precisions_of_a_users_own_model_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    words = ["--precision", "bf16", "--steps", "2", "--warmup", "1", "--rounds", "1", "--device", "cpu"]
    assert (
        main(["precision", "--workload", f"{tmp_path}/steps.py:factory", *words, "--out", str(tmp_path / "out")]) == 0
    )
    cells = [(r.config["precision"], r.config["profiler"], r.status) for r in read_records(tmp_path / "out")[0]]
    assert cells == [("fp32", "none", "ok"), ("bf16", "none", "ok"), ("bf16", "precision_error", "ok")]
    printed = "".join(capsys.readouterr().out.split())  # a line may break anywhere, as the path before it is long
    assert "steps.py:factory:timeofastep" in printed
    assert "factory:relativeerroragainstfloat32ofthesameparametersandbatchprecisionoutputsloss" in printed
    assert "logits" not in printed


def test_missing_device_is_reported_once_per_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--size", "tiny", "--precision", "bf16", "--device", "cuda", "--explain", "--out", str(tmp_path)]
    assert main(["precision", *words]) == 3
    text = capsys.readouterr().out
    assert text.count("not explained: only traces of a GPU contain kernels; profile on a GPU\n") == 1
    assert len(re.findall(r"^(?:fp32|bf16) +unavailable$", text, re.MULTILINE)) == 4
    reasons = re.findall(r"fp32, bf16: unavailable: no CUDA: [^;]*; (.*?) is enough", " ".join(text.split()))
    assert reasons == ["see cs-systems doctor, or use device cpu where a CPU"] * 2
    assert "gain:" not in text


def test_show_prints_gpu_profiles_without_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).parents[2] / "profiles" / "top_kernels"
    before = (folder / "records.jsonl").read_bytes()
    assert main(["precision", "--show", str(folder)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "train-step, bf16: 1.29× fp32's speed (0.77–2.17): 67% of the step is launch-bound; matrix products take 12 ms"
        in text
    )
    assert (folder / "records.jsonl").read_bytes() == before
    assert main(["precision", "--show", str(folder), "--format", "csv", "--output", f"{tmp_path}/t.csv"]) == 0
    assert (tmp_path / "t.csv").read_text().startswith("precision,forward_s,")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"csv: {tmp_path}/t.csv" in printed.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size", "smal"], "unknown size 'smal'; did you mean small?"),
        (["--precision", "bf61"], "unknown precision 'bf61'; did you mean bf16?"),
        (["--mode", "train"], "unknown mode 'train'; did you mean train-step?"),
        (["--train-steps", "-1"], "--train-steps is -1; it must be at least 0"),
        (["--steps", "2"], "--steps is 2, less than --rounds 5; give at least one step for each round"),
        (["--dtypes", "--model", "tinny"], "unknown model 'tinny'; did you mean tiny or toy?"),
        (["--dtypes", "--precision", "bf61"], "unknown precision 'bf61'; did you mean bf16?"),
        (["--dtypes", "--model", "nowhere:step"], "module 'nowhere' (from 'nowhere:step') was not found"),
        (
            ["--show", "no_such_folder"],
            "no_such_folder does not exist; give the folder",
        ),
        (
            ["--show", "profiles/attention_sample_run"],
            "has no results of cs-systems precision; measure them with cs-systems",
        ),
        (["--dtypes", "--size", "tiny"], "--size has no effect with --dtypes; use --model tiny"),
        (["--model", "medium"], "--model requires --dtypes; add --dtypes, or use --size medium for timings"),
        (["--model", "toy"], "--model requires --dtypes; add --dtypes, or leave out --model"),
        (["--accumulation", "--model", "medium"], "--model requires --dtypes; add --dtypes, or leave out --model"),
        (
            ["--dtypes", "--train-steps", "5"],
            "--train-steps has no effect with --dtypes; leave out --train-steps",
        ),
        (["--accumulation", "--explain"], "--explain has no effect with --accumulation; leave out --explain"),
        (["--show", "profiles/precision", "--size", "xl"], "--show only prints recorded results; leave out --size"),
        (["--accumulation", "--mode", "forward", "--batch-size", "1"], "no model; leave out --mode --batch-size"),
        (
            ["--dtypes", "--context-length", "8"],
            "--context-length cannot be applied to the model toy; add a preset, such as --model small, or leave",
        ),
        (["--dtypes", "--mode", "backward"], "mode backward requires workload attention"),
        (["--workload", "toy"], "--workload must be path.py:name or package.module:name, got toy; name a model"),
        (
            ["--workload", "json:loads", "--model", "medium"],
            "--model has no effect with --workload, which names the model; leave out --model",
        ),
        (
            ["--workload", "json:loads", "--accumulation"],
            "no effect on --accumulation; leave out --workload or --accumulation",
        ),
        (["--workload", "json:loads", "--train-steps", "3"], "names another; leave out --train-steps"),
    ],
)
def test_invalid_options_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["precision", *words]) == 2
    assert message in capsys.readouterr().err


def test_records_of_unknown_precision_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = Path(__file__).parents[2] / "profiles" / "precision" / "records.jsonl"
    (tmp_path / "records.jsonl").write_text(recorded.read_text().replace('"precision":"bf16"', '"precision":"fp4"'))
    assert main(["precision", "--show", str(tmp_path)]) == 2
    assert "unknown precision 'fp4'" in capsys.readouterr().err


def test_show_keeps_the_caveats_of_timings(capsys: pytest.CaptureFixture[str]) -> None:
    recorded = Path(__file__).parents[2] / "profiles" / "precision"
    assert main(["precision", "--show", str(recorded)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert re.search(r"launch-bound \(\d cells?\): ", output)
    assert re.search(r"unstable \(\d cells?\): ", output)
