"""`cs-systems attention`: its cells, records, table and error messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from cs_systems import run
from cs_systems.cli import main
from cs_systems.cli._options import Steps
from cs_systems.cli.attention import AttentionCells
from cs_systems.config import AttentionShape, ConfigError, Mode, Precision, RunConfig
from cs_systems.record import read_records

SMALL = ("--device", "cpu", "--batch", "1", "--heads", "2", "--d-head", "8", "--warmup", "1", "--steps", "3")


def cells(**given: object) -> list[RunConfig]:
    return AttentionCells(**given).configs(Steps())  # type: ignore[arg-type]


def test_defaults_are_one_shape_two_backends_and_three_modes() -> None:
    configs = cells()
    assert [(c.attention, c.mode) for c in configs] == [(a, m) for a in ("naive", "sdpa_flash") for m in MODES]
    assert {(c.workload, c.precision, c.l2) for c in configs} == {("attention", Precision.BF16, "warm")}
    (shape,) = {c.shape for c in configs}
    assert shape is not None
    assert (shape.batch, shape.heads, shape.seq, shape.d_head, shape.causal) == (8, 16, 1024, 64, False)


MODES = (Mode.FORWARD, Mode.BACKWARD, Mode.FORWARD_BACKWARD)


def test_cells_are_the_product_of_all_options() -> None:
    configs = cells(
        attention=("naive",), batch=(1, 2), heads=(4,), heads_kv=(2, 4), seq=(8, 16), seq_k=(32,), d_head=(16, 32),
        precision=("fp32", "fp16"), causal=("both",), align="lower_right", mode=("forward",), l2="clear",
    )  # fmt: skip
    assert len(configs) == len({c.key() for c in configs}) == 2 * 2 * 2 * 2 * 2 * 2
    shapes = [c.shape for c in configs if c.shape]
    assert {s.heads_kv for s in shapes} == {2, 4}
    assert {s.seq_k for s in shapes} == {32}
    assert {s.align for s in shapes} == {"lower_right"}
    assert {c.l2 for c in configs} == {"clear"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), [True]),  # `--causal` alone
        (("true",), [True]),
        (("False",), [False]),
        (("both",), [False, True]),
        (("true", "false"), [True, False]),
        (("both", "true"), [False, True]),
    ],
)
def test_causal_is_a_flag_or_takes_values(words: tuple[str, ...], expected: list[bool]) -> None:
    configs = cells(attention=("naive",), mode=("forward",), causal=words)
    assert [c.shape.causal for c in configs if c.shape] == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"causal": ("yes",)}, "unknown value of --causal 'yes'; choose among false, true, both"),
        (
            {"mode": ("train-step",)},
            "mode is train-step, which workload attention does not have; set mode to forward, backward or forward-",
        ),
        ({"precision": ("bf61",)}, "unknown dtype 'bf61'; did you mean bf16"),
        ({"l2": "cold"}, "unknown l2 state 'cold'"),
        ({"heads": (6,), "heads_kv": (4,)}, "heads 6 is not a multiple of heads_kv 4"),
        ({"seq": (0,)}, "seq is 0; it must be at least 1"),
        ({"align": "upper_right"}, "unknown alignment 'upper_right'; did you mean"),
    ],
)
def test_invalid_value_is_refused_with_remedy(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        cells(**given)
    assert message in str(error.value)


def test_unknown_backend_exits_2_before_any_cell(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["attention", *SMALL, "--attention", "naiv", "--out", str(tmp_path / "runs")]) == 2
    assert "unknown attention backend 'naiv'; did you mean naive" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_attention_records_cells_and_prints_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs"
    monkeypatch.setenv("COLUMNS", "200")
    words = [*SMALL, "--seq", "16", "--causal", "--dtype", "fp32", "--attention", "naive", "sdpa_cudnn"]
    assert main(["attention", *words, "--out", str(out)]) == 0
    printed, error = capsys.readouterr()
    records, complaints = read_records(out)
    assert complaints == []
    assert [(r.config["attention"], r.config["mode"], r.status) for r in records] == [
        *(("naive", mode.value, "ok") for mode in MODES),
        *(("sdpa_cudnn", mode.value, "unavailable") for mode in MODES),
    ]
    assert all(r.run_config.shape.causal for r in records if r.run_config.shape)
    assert "attention" in printed
    assert "executed" in printed
    assert f"records: {out / 'records.jsonl'}" in printed
    assert "sdpa_cudnn: torch has no CUDNN_ATTENTION kernel on the CPU" in error


def test_memory_measures_the_attention_call_of_a_layer(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--workload", "attention", "--size", "tiny", "--context-length", "16", "32", "--dry-run"]
    assert main(["memory", *words]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert [f"4×4×{length}×16 causal · naive · fp32 · forward-backward" in printed for length in (16, 32)] == [True] * 2
    assert main(["memory", *words, "--num-layers", "3"]) == 2
    assert "is one call, of heads and their size; leave out --num-layers" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["backward", "forward-backward"])
def test_memory_before_backward_is_inputs_outputs_and_saved_tensors(mode: str) -> None:
    shape = AttentionShape(batch=2, heads=4, seq=1024, d_head=64)
    config = RunConfig(workload="attention", shape=shape, mode=mode, warmup=1, steps=2, device="cuda")  # type: ignore[arg-type]
    record = run(config)
    (found,) = record.frame()["before_backward_bytes"].unique()
    tensor, weights = 4 * 2 * 4 * 1024 * 64, 4 * 2 * 4 * 1024**2
    known = 5 * tensor + weights  # q, k, v, the output, its gradient, and the weights
    assert known <= found <= known + 2 * tensor, (found, known)
    assert record.measurement is not None
    assert found < (record.measurement.peak_allocated_bytes or 0)
