"""Tests of scripts/lab5.py: its options, output keys and arithmetic."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from cs_systems.config import AttentionShape, ConfigError, Mode, Precision, RunConfig
from cs_systems.record import Measurement, RunRecord, Sample

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "lab5.py"
KEYS = ("forward", "backward", "forward_backward", "peak_memory_usage(MB)")
SMALL = ("--batch_size", "2", "--seq_len", "64", "--num_heads", "4", "--emb_dim", "64", "--repeats", "3")


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("lab5", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def has_flash2() -> bool:
    try:
        return hasattr(importlib.import_module("flash_attn"), "flash_attn_qkvpacked_func")
    except ImportError:
        return False


def test_help_shows_command_on_two_lines(script: Any) -> None:
    assert "--causal \\\n        --repeats 30" in script.__doc__


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """Run the script in this process. Raises SystemExit with its status."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_output_file_has_expected_keys_and_flop_convention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "x.json"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="0"):
        run(monkeypatch, *SMALL, "--impl", "naive", "--device", "cpu", "--causal", "--output", str(output))
    text = output.read_text()
    result = json.loads(text)
    assert text == json.dumps(result, indent=2) + "\n"
    assert tuple(result)[:4] == KEYS
    assert json.loads(capsys.readouterr().out) == {key: result[key] for key in KEYS}
    flops = 4 * 2 * 64**2 * 4 * 16 // 2
    for name, factor in (("forward", 1), ("backward", 2.5), ("forward_backward", 3.5)):
        assert tuple(result[name]) == ("time(s)", "FLOPS(TFLOPs/s)")
        assert result[name]["FLOPS(TFLOPs/s)"] * result[name]["time(s)"] * 1e12 == pytest.approx(factor * flops)
    for name in ("forward", "backward"):
        samples = result["samples"][f"{name}(s)"]
        assert len(samples) == 3
        assert result[name]["time(s)"] == pytest.approx(fmean(samples))
    both = result["forward"]["time(s)"] + result["backward"]["time(s)"]
    assert result["forward_backward"]["time(s)"] == pytest.approx(both)
    assert result["peak_memory_usage(MB)"] is None  # not measured on a CPU
    assert result["inputs"]["causal"] is True
    assert result["environment"]["device"] == "cpu"


def test_defaults_match_documented_command(script: Any) -> None:
    args = script._parser().parse_args([])
    given = (args.batch_size, args.seq_len, args.num_heads, args.emb_dim, args.impl, args.causal, args.repeats)
    assert given == (32, 1024, 32, 2048, "Flash2", False, 30)
    assert args.output == "benchmark_result.json"
    config = script._config(args)
    assert config.shape == AttentionShape(32, 32, 1024, 64, causal=False)
    assert (config.mode, config.precision, config.steps) == (Mode.FORWARD_BACKWARD, Precision.FP16, 30)


def test_impl_pytorch_selects_naive_and_memory_limit_is_applied(script: Any) -> None:
    config = script._config(script._parser().parse_args(["--impl", "Pytorch", "--memory_limit", "8GiB"]))
    assert (config.attention, config.memory_limit_bytes) == ("naive", 8 * 2**30)


def test_packed_workload_matches_attention_of_unpacked_tensor(script: Any) -> None:
    import torch

    from cs_systems.machine.device import resolve
    from cs_systems.model.attention.naive import attention

    shape = AttentionShape(2, 3, 5, 8, causal=True)
    config = RunConfig(workload="attention", shape=shape, mode=Mode.FORWARD_BACKWARD, attention="flash_torch")
    workload = script.packed(config, resolve("cpu"))
    workload.prepare()
    for _, part in workload.step():
        part()
    (qkv,) = workload.problem.leaves
    assert qkv.shape == (2, 5, 3, 3, 8)
    expected = attention(*(x.transpose(1, 2) for x in qkv.unbind(2)), causal=True).transpose(1, 2)
    torch.testing.assert_close(workload._out, expected)
    torch.testing.assert_close(
        workload._gradients, torch.autograd.grad(expected, (qkv,), workload._out_gradient), rtol=1e-4, atol=1e-5
    )


def record(**fields: Any) -> RunRecord:
    shape = AttentionShape(3, 1, 3, 3, causal=True)
    config = RunConfig(workload="attention", shape=shape, mode=Mode.FORWARD_BACKWARD)
    memory = {"predicted_peak_bytes": 2**21, "failed_allocation_bytes": fields.pop("failed", None)}
    return RunRecord("key", config.to_dict(), results={"memory": [memory]}, **fields)


def test_report_has_means_rates_and_megabytes(script: Any) -> None:
    phases = [{"forward": 1.0, "backward": 4.0}, {"forward": 3.0, "backward": 6.0}]
    samples = tuple(Sample(0, False, 9.0, p, p) for p in phases)
    measured = Measurement("cuda_event", (Sample(0, True, 9.0, {"forward": 99.0, "backward": 99.0}, {}), *samples), 0.0)
    result = script.report(record(status="ok", measurement=measured))
    flops = 4 * 3 * 3**2 * 1 * 3 // 2
    assert result["forward"] == {"time(s)": 2.0, "FLOPS(TFLOPs/s)": flops / 2 / 1e12}
    assert result["backward"] == {"time(s)": 5.0, "FLOPS(TFLOPs/s)": 2.5 * flops / 5 / 1e12}
    assert result["forward_backward"] == {"time(s)": 7.0, "FLOPS(TFLOPs/s)": 3.5 * flops / 7 / 1e12}
    assert result["predicted_peak_memory(MB)"] == 2.0


def test_out_of_memory_gives_null_results(script: Any) -> None:
    result = script.report(record(status="oom", reason="Tried to allocate 2.00 GiB", failed=2**31))
    nothing = {"time(s)": None, "FLOPS(TFLOPs/s)": None}
    assert [result[key] for key in KEYS] == [nothing, nothing, nothing, None]
    assert (result["status"], result["failed_allocation(MB)"]) == ("oom", 2048.0)


@pytest.mark.parametrize(
    ("result", "found"), [("v[..., :4]", r"a tensor of shape \(2, 3, 5, 4\)"), ("(v, v)", "a tuple")]
)
def test_output_of_another_shape_is_an_error_in_the_layout_of_the_call(
    script: Any, tmp_path: Path, result: str, found: str
) -> None:
    from cs_systems.machine.device import resolve

    source = tmp_path / "mine.py"
    source.write_text(f"def attend(q, k, v, *, causal, scale=None, align=None): return {result}\n")
    shape = AttentionShape(2, 3, 5, 8)
    config = RunConfig(workload="attention", shape=shape, mode=Mode.FORWARD_BACKWARD, attention=f"{source}:attend")
    with pytest.raises(ConfigError, match=rf"{found}; return a tensor of q's shape, \(2, 3, 5, 8\)$"):
        script.packed(config, resolve("cpu"))


def test_predicted_flash2_peak_matches_published_value(script: Any) -> None:
    """Batch 32, length 1024, 32 heads of 64 took 1288.0 MB with FlashAttention-2 on a packed tensor."""
    from cs_systems.formulas.memory.attention import attention_memory
    from cs_systems.model.attention import AttentionCall

    algorithm = script.FLASH2.algorithm(AttentionCall("cuda", "float16", 64, 1024, 1024, 32, 32))
    prediction = attention_memory(AttentionShape(32, 32, 1024, 64), Mode.FORWARD_BACKWARD, 2, algorithm)
    assert prediction.peak_bytes / 1024**2 == 1288.0


@pytest.mark.skipif(has_flash2(), reason="FlashAttention-2 is installed")
def test_missing_flash_attn_names_extra_and_other_backends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "x.json"
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, *SMALL, "--device", "cpu", "--output", str(output))
    error = capsys.readouterr().err
    assert "FlashAttention-2 is not installed" in error
    assert "pip install --no-build-isolation 'cs-systems[flash-attn]'" in error
    named = error.split("--impl ")[1].strip().split(", ")
    assert {"Pytorch", "naive", "flash_torch", "sdpa_flash"} <= set(named)
    assert not {"sdpa_cudnn", "flash_attn"} & set(named)  # they are unavailable without a GPU
    assert not output.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--impl", "flash2"), "unknown impl 'flash2'; did you mean Flash2"),
        (("--num_heads", "3"), "emb_dim 2048 is not divisible by num_heads 3; change one of them"),
        (("--repeats", "0"), "argument --repeats: '0' is not a count; give a whole number of at least 1"),
        (("--batch_size", "abc"), "argument --batch_size: 'abc' is not a count; give a whole number of at least 1"),
        (("--memory_limit", "much"), "'much' is not a size in bytes; use a form such as 8GiB"),
        (
            ("--output", "no/such/folder/x.json"),
            "--output no/such/folder/x.json is in no existing folder; make no/such/folder first, or name another file",
        ),
    ],
)
def test_malformed_option_exits_with_2_and_remedy(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, *words)
    printed, error = capsys.readouterr()
    assert printed == ""
    assert message in error
