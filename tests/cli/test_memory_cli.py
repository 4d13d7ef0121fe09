"""`cs-systems memory`: its phases and components, --fits, --best-checkpoint and its error messages."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from cs_systems.cli import _memory_text, main
from cs_systems.cli._forecasts import ACCURACY, ACCURACY_OF_FORMULA
from cs_systems.cli.memory import _result_in_budget
from cs_systems.config import PRESETS, RunConfig
from cs_systems.formulas.memory.fit import CONTEXT_BYTES, algorithm_of
from cs_systems.formulas.memory.model import step_memory
from cs_systems.record import RunRecord, read_records

PROFILES = Path(__file__).parents[2] / "profiles"
TINY = ["memory", "--size", "tiny", "--device", "cpu"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[RunRecord]:
    folder = tmp_path_factory.mktemp("memory")
    words = ["--mode", "forward", "train-step", "--precision", "bf16", "--checkpoint", "none", "every:1"]
    assert main([*TINY, *words, "--out", str(folder)]) == 0
    records = {(r.config["mode"], r.config["checkpoint"]): r for r in read_records(folder)[0]}
    assert records["forward", "every:1"].status == "unavailable"
    return [records["forward", "none"], records["train-step", "every:1"]]


def test_two_steps_have_rows_of_every_phase(measured: list[RunRecord]) -> None:
    forward, whole = (record.results["memory_phases"] for record in measured)
    assert [(row["step"], row["phase"]) for row in forward] == [(0, "built"), (1, "forward"), (2, "forward")]
    names = ["forward", "loss", "backward", "optimizer"]
    assert [(row["step"], row["phase"]) for row in whole] == [(0, "built"), *((n, p) for n in (1, 2) for p in names)]
    for row in whole:  # a CPU has the memory of the process only, not that of CUDA's allocator
        assert row["resident_bytes"] > 50 * 2**20
        assert row["predicted_allocated_bytes"] > 0
        unknown = ("allocated_bytes", "reserved_bytes", "device_used_bytes", "peak_allocated_bytes", "residual_bytes")
        assert [row[name] for name in unknown] == [None] * len(unknown)
    assert "memory_parts" not in measured[1].results


def test_components_add_up_to_predicted_bytes(measured: list[RunRecord]) -> None:
    record = measured[1]
    predicted = {(r["step"], r["phase"]): r["predicted_allocated_bytes"] for r in record.results["memory_phases"]}
    for key, expected in predicted.items():
        rows = [r for r in record.results["memory_components"] if (r["step"], r["phase"]) == key]
        assert sum(row["bytes"] for row in rows) == expected
    config = replace(record.run_config, device="cpu")
    peak = max(r["predicted_peak_bytes"] or 0 for r in record.results["memory_phases"])
    assert peak == step_memory(config, algorithm_of(config)).peak_bytes


def test_memory_records_are_marked_as_profiled(measured: list[RunRecord]) -> None:
    assert all("profiled" in [w.code for w in record.warnings] for record in measured)
    assert {record.run_config.profiler for record in measured} == {"memory"}


def test_memory_prints_phases_within_80_columns_and_a_refused_snapshot(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*TINY, "--snapshot", "--mode", "forward", "--out", str(tmp_path)]) == 0
    memory, snapshot = read_records(tmp_path)[0]
    assert (memory.status, snapshot.status) == ("ok", "unavailable")
    assert snapshot.reason == "a memory snapshot requires a CUDA device; leave it out or run on a GPU"
    output, progress = capsys.readouterr()
    first = r"\[1/2\] tiny ctx 64 batch 4 · naive · fp32 · forward · under memory: done \(\d+ s\)\n"
    assert re.match(first, progress)
    assert "tiny ctx 64 batch 4 · naive · fp32 · forward" in output
    assert "process: resident memory, Python and torch included" in output
    assert re.search(r"^parameters +449 +449$", output, re.MULTILINE)
    assert re.search(r"^ +predicted +predicted peak +process$", output, re.MULTILINE)  # without measured columns
    assert "unavailable: a memory snapshot requires a CUDA device" in output
    assert max(map(len, output.split("under memory_snapshot")[0].splitlines())) <= 80


def test_show_prints_recorded_memory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    profiles = Path(__file__).parents[2] / "profiles"
    assert main(["memory", "--show", str(profiles / "nvidia_smi_memory")]) == 0
    output = capsys.readouterr().out
    assert "small ctx 512 batch 4 · naive · fp32 · train-step · under memory" in output
    assert "context and modules" in output
    assert "off: measured peak minus predicted peak" in output
    cells = re.findall(r"^(small|medium|large|xl) +(?:fp32|bf16) +[\d.]+ ", output, re.MULTILINE)
    assert cells == ["small"] * 2 + ["medium"] * 2 + ["large"] * 2 + ["xl"] * 2  # the peaks of all in one table
    assert max(map(len, output.splitlines())) <= 80
    assert main(["memory", "--show", str(profiles / "attention_memory")]) == 2
    assert "has no memory results; measure them with cs-systems memory --out DIR" in capsys.readouterr().err


def test_report_of_memory_run_shows_peaks_and_no_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(Path(__file__).parents[2] / "profiles" / "nvidia_smi_memory")]) == 0
    output = capsys.readouterr().out
    assert re.search(r"^ +peak +reserved +predicted$", output, re.MULTILINE)
    assert "under memory, not timed" in " ".join(output.split())
    assert not re.search(r"few-samples|launch-bound| ms", output)


def test_fits_predicts_without_running_any_cell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "--size", "2.7B", "--context-length", "2048", "--fits", "80GiB"]) == 0
    output = capsys.readouterr().out
    assert (
        "2.7B ctx 2048 batch 4 · naive · fp32 · train-step: 173 GiB with the CUDA context, does not fit 80.0 GiB"
        in output
    )
    assert "largest that fits: batch 1, or context 884" in output
    assert "change first: --attention flash_triton --checkpoint selective:matmul" in output
    assert main(["memory", "--size", "small", "--context-length", "2048", "--fits", "80GiB"]) == 0
    output = capsys.readouterr().out
    assert "small ctx 2048 batch 4 · naive · fp32 · train-step: 20.8 GiB with the CUDA context, fits 80.0 GiB" in output
    assert main(["memory", "--size", "8B", "--fits", "24GiB"]) == 0
    output = capsys.readouterr().out
    assert "largest that fits: none; batch 1 or context 1 still needs more" in output
    assert "change first: no combination is enough; shard the model over several devices" in output
    assert main(["memory", "--size", "tiny", "--fits", "8TiB"]) == 0
    assert "largest that fits: batch 1,048,576 or more, or context" in capsys.readouterr().out, "the search ends there"


def test_fits_of_several_cells_is_a_table_in_every_format(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    words = ["memory", "--size", "small", "2.7B", "--context-length", "2048", "--precision", "bf16", "--fits", "80GiB"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "predicted memory of a step with the CUDA context, on 80.0 GiB; ctx 2048 batch 4 · naive ·"
    )
    assert [line.split()[:5] for line in lines[-3:-1]] == [
        ["small", "22.5", "yes", "15", "4299"],
        ["2.7B", "187", "no", "0", "854"],
    ]
    assert lines[-2].endswith("--attention sdpa_flash --checkpoint selective:matmul")
    assert main([*words, "--format", "csv"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "cell,needed_bytes,fits,largest_batch,largest_context,first"
    assert main(["memory", "--size", "tiny", "--fits", "8TiB", "--format", "markdown"]) == 0
    assert "1,048,576: the search ends there; more may fit" in capsys.readouterr().out
    assert main([*words, "--format", "html"]) == 0
    page = capsys.readouterr().out
    assert "<h1>What fits 80.0 GiB</h1>" in page
    assert "of 2 cells, 1 fit 80.0 GiB by prediction" in page
    assert main(["memory", "--size", "small", "--format", "csv"]) == 2
    assert "only --fits has a table in other formats" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fits", "much"], "--fits 'much' is not a size in bytes; use a form such as 8GiB or 512B"),
        (["--fits", "0GiB"], "--fits '0GiB' is less than 1 byte; use a form such as 8GiB or 512B"),
        (["--fits", "80"], "'80' has no unit; use 80GiB, 80GB, or 80B for bytes"),
        (["--best-checkpoint", "--budget", "40"], "'40' has no unit"),
        (["--fits", "80GiB", "--compile", "default"], "the compiler decides which tensors a compiled model keeps"),
        (["--no-caching-allocator"], "--no-caching-allocator requires --nsys; add --nsys, or leave"),
        (["--budget", "40GiB"], "--best-checkpoint and --budget require each other"),
        (["--best-checkpoint"], "--best-checkpoint and --budget require each other"),
        (["--best-checkpoint", "--budget", "752MiB"], "use --fits 752MiB instead of --best-checkpoint and --budget"),
        (["--checkpoint", "evry:1"], "unknown checkpoint 'evry:1'; did you mean every?"),
        (["--fits", "1GiB", "--attention", "json:loads"], "the memory that attention json:loads needs is unknown"),
        (["--show", "d", "--batch-size", "1"], "--show only prints recorded results; leave out --"),
        (
            ["--fits", "1GiB", "--snapshot", "--dry-run"],
            "--fits predicts memory without measuring a step; leave out --dry-run --snap",
        ),
        (
            ["--fits", "1GiB", "--device", "cpu"],
            "--fits predicts memory without measuring a step; leave out --device",
        ),
        (
            ["--fits", "1GiB", "--memory-limit", "1GiB"],
            "--fits predicts memory without measuring a step; leave out --memory-limit",
        ),
        (
            ["--best-checkpoint", "--budget", "4GiB", "--checkpoint", "every:2"],
            "chooses its checkpoint plan and memory limit by --budget; leave out --checkpoint",
        ),
        (["--best-checkpoint", "--budget", "4GiB", "--memory-limit", "1GiB"], "by --budget; leave out --memory-limit"),
        (
            ["--best-checkpoint", "--budget", "4GiB", "--part", "0/2"],
            "runs every cell, and chooses its checkpoint plan and memory limit by --budget; leave out --part",
        ),
        (
            ["--best-checkpoint", "--budget", "4GiB", "--compile", "default"],
            "--best-checkpoint cannot predict memory with --compile",
        ),
        (
            ["--fits", "4GiB", "--recipe", "compiled"],
            "because the compiler decides which tensors a compiled model keeps; leave out --recipe compiled",
        ),
        (
            ["--keep-graph"],
            "--keep-graph requires mode forward, because the other modes always keep the graph; leave out --keep-graph",
        ),
        (
            ["--mode", "forward", "--optimizer", "adamw"],
            "--optimizer requires mode train-step, got forward; leave out --optimizer",
        ),
        (
            ["--fits", "1GiB", "--workload", "json:loads"],
            "the memory cannot be predicted: json:loads(s, *",
        ),
        (
            ["--fits", "1GiB", "--workload", "toy"],
            "--fits works only with --workload train_step or a model of your own, and the workload is toy; use "
            "--workload train_step, or leave out --fits",
        ),
    ],
)
def test_invalid_options_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    own = TINY[:1] if "toy" in words else TINY[:3] if "--fits" in words else TINY  # toy has no size
    assert main([*own, *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_compiled_model_has_no_predicted_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--mode", "forward-backward", "--compile", "aot_eager", "--context-length", "8", "--residuals"]
    assert main([*TINY, *words, "--steps", "1", "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    kept = output.split("tensors that forward keeps for backward")[1]
    assert re.search(r"^operation +shape +dtype +count +(B|KiB) +of all$", kept, re.MULTILINE)
    assert re.search(r"^outside of modules +\d+$", kept, re.MULTILINE)
    assert "a model that is compiled as a whole has no blocks: use --compile-scope block" in kept
    assert "predicted" not in kept
    assert "–" not in kept


ROUTED = """
import torch
from torch import nn
class Routed(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y[y[:, 0] > 0]
def routed(config, device): return Routed(4, 4), torch.randn(8, 4)
"""


def test_memory_that_was_not_predicted_has_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(ROUTED)
    words = ["memory", "--workload", f"{tmp_path}/mine.py:routed", "--device", "cpu", "--out", str(tmp_path / "run")]
    assert main(words) == 0
    printed = " ".join(capsys.readouterr().out.split())
    said = "Routed.forward (mine.py, line 7) reads values of tensors (aten.nonzero.default), but the prediction runs on"
    assert f"predicted memory: unknown; {said}" in printed
    (record,) = read_records(tmp_path / "run")[0]
    ((reason,),) = (row.values() for row in record.results["memory_unpredicted"])
    assert reason.startswith(said)
    assert "memory_forecast" not in record.results


def test_sentences_wrap_at_terminal_width(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_memory_text, "terminal_width", lambda: 80)
    assert main(["memory", "--size", "2.7B", "--context-length", "2048", "--fits", "80GiB"]) == 0
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= 80
    assert "\n  context, does not fit 80.0 GiB\n  largest that fits: batch 1, or context 884\n  change first:" in output


@pytest.mark.parametrize(("profiler", "artifacts", "told"), [
    ("memory_snapshot", {}, True), ("memory_snapshot", {"snapshot": "a.pickle"}, False), ("memory", {}, False),
])  # fmt: skip
def test_cell_out_of_memory_without_its_snapshot_says_why(
    profiler: str, artifacts: dict[str, str], told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig(profiler=profiler).to_dict()
    _memory_text.print_memory(RunRecord("key", config, "oom", reason="too large", artifacts=artifacts), Path("run"))
    printed = " ".join(capsys.readouterr().out.split())
    assert ("no snapshot: memory ran out while the model was built or in the warm-up" in printed) == told
    assert ("use --warmup 0, or a smaller model or batch" in printed) == told


def test_best_checkpoint_verifies_each_cell_in_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--batch-size", "1", "2", "--mode", "forward", "--best-checkpoint", "--budget", "40GiB", "--steps", "1"]
    assert main([*TINY, *words, "--fresh", "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    proofs = [line for line in output.splitlines() if "run on a GPU to verify" in line]
    assert [re.findall(r"batch \d", line) for line in proofs] == [["batch 1"], ["batch 2"]]
    assert output.endswith(f"records: {tmp_path}/records.jsonl\n")
    assert [record.config["batch_size"] for record in read_records(tmp_path)[0]] == [
        1,
        2,
    ]  # both are in one file


def test_best_checkpoint_is_found_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = RunConfig(model=PRESETS["tiny"], batch_size=64, attention="sdpa_flash", device="cpu")
    needed = step_memory(plain, algorithm_of(plain)).peak_bytes
    budget = CONTEXT_BYTES + needed * 3 // 4
    words = ["--batch-size", "64", "--attention", "sdpa_flash", "--best-checkpoint", "--budget", f"{budget}B"]
    assert main([*TINY, *words, "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    (record,) = read_records(tmp_path)[0]
    assert record.status == "ok"
    assert record.config["checkpoint"] != "none"
    assert re.search(rf"--checkpoint {record.config['checkpoint']}: \d+ MiB predicted, \d+\.\d% more FLOPs", output)
    assert "more FLOPs" in output
    assert ACCURACY_OF_FORMULA in " ".join(output.split())
    assert "the memory of a CPU is not limited; run on a GPU to verify that it fits" in output


def test_best_checkpoint_of_an_own_model_states_its_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "mine.py"
    source.write_text(
        "import torch\n"
        "from torch import nn\n\n"
        "class Block(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.wide, self.narrow = nn.Linear(64, 1024), nn.Linear(1024, 64)\n\n"
        "    def forward(self, x):\n"
        "        return x + self.narrow(torch.relu(self.wide(x)))\n\n"
        "def make(config, device):\n"
        "    return nn.Sequential(*[Block() for _ in range(8)]), torch.randn(65536, 64)\n"
    )
    words = ["memory", "--workload", f"{source}:make", "--best-checkpoint", "--dry-run", "--budget"]
    assert main([*words, "1TiB"]) == 0
    plain = " ".join(capsys.readouterr().out.split())
    assert plain.endswith(f"0.0% more FLOPs {ACCURACY}")
    assert main([*words, "2GiB"]) == 0
    planned = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"--checkpoint (blocks|every|selective):\S+: [\d.]+ GiB predicted, [1-9]\d*\.\d% more FLOPs", planned
    )
    assert planned.endswith(f"{ACCURACY}; checkpoints were not among them")


@pytest.mark.parametrize(("predicted", "off"), [(75, "25.0% too low"), (104, "4.0% too high")])
def test_measured_plan_shows_how_far_the_prediction_was_off(
    measured: list[RunRecord], predicted: int, off: str
) -> None:
    measurement = measured[1].measurement
    assert measurement is not None
    record = replace(measured[1], measurement=replace(measurement, peak_allocated_bytes=100 * 2**20))
    said = _result_in_budget(record, 2**30, predicted * 2**20)
    assert said.endswith(f"CUDA context; the prediction was {predicted}.0 MiB, {off}".replace("104.0", "104"))


def test_stated_errors_match_the_committed_measurements() -> None:
    """Errors of the own models by family in percent, held out and not, and those of the built-in one's cells."""
    held_out: dict[str, list[float]] = {}
    others: dict[str, list[float]] = {}
    text = (PROFILES / "foreign_memory" / "held_out.md").read_text()
    for family, kind, error in re.findall(r"^\| (\w+) \| (\w+ \w+) \|.* [+-](\S+)% ", text, re.MULTILINE):
        (held_out if kind == "held out" else others).setdefault(family, []).append(float(error))
    mended = len(others)
    text = (PROFILES / "foreign_memory" / "table.md").read_text()
    for family, ratio in re.findall(r"^\| (\w+) \|.*\| (\d\.\d{3}) \|", text, re.MULTILINE):
        others.setdefault(family, []).append(100 * abs(float(ratio) - 1))
    assert "8 of them were mended after it" in text
    for families, said in [
        (held_out, "{:.1f}% for {} held-out families, predicted before one H100 measured them"),
        (others, f"{{:.1f}}% for {{}} others, with rules mended for {mended + 8} of them"),
    ]:
        assert said.format(max(map(max, families.values())), len(families)) in ACCURACY
    text = (PROFILES / "memory_prediction" / "table.md").read_text()
    within = [int(count) for count in re.findall(r"(\d+) of \1 cells within 5%", text)]
    assert f"within 5% in each of {sum(within)} cells" in ACCURACY_OF_FORMULA
