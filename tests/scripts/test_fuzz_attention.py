"""Tests of the attention fuzzer: drawn cases, planted errors and messages."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

# A correct backend, into which a test plants an error before or after the call.
BACKEND = """
from dataclasses import replace
from cs_systems.model.attention import AttentionBackend
from cs_systems.model.attention import flash_torch

def attend(q, k, v, **options):
    {before}
    out = flash_torch.BACKEND(q, k, v, **options)
    {after}
    return out

backend = AttentionBackend(attend, unavailable={unavailable})
"""


@pytest.fixture(scope="module")
def fuzz() -> Any:
    return importlib.import_module("fuzz_attention")


def planted(folder: Path, *, before: str = "", after: str = "", unavailable: str = "lambda call: None") -> str:
    (folder / "planted.py").write_text(BACKEND.format(before=before, after=after, unavailable=unavailable))
    return f"{folder / 'planted.py'}:backend"


SMALL = ["--device", "cpu", "--scores", "4096"]


def test_correct_backend_passes(fuzz: Any, capsys: Any) -> None:
    assert fuzz.main(["flash_torch", *SMALL, "--cases", "30", "--against", "naive"]) == 0
    output = capsys.readouterr().out
    assert "flash_torch on cpu, seed 0: 30 cases\n30 served, 0 failed, 0 refused" in output
    for result in ("out", "dq", "dk", "dv"):
        assert f"largest error, float16 {result}, worst row: " in output
        assert f"error over naive's, bfloat16 {result}: " in output


def test_bound_depends_on_score_size_when_scores_are_rounded(fuzz: Any, tmp_path: Path, capsys: Any) -> None:
    """Case 42 has bf16 scores of up to 15.5; naive rounds them, which changes weights by up to 6%."""
    drawn = ["--device", "cpu", "--scores", "16384", "--case", "42"]
    assert fuzz.main(["naive", *drawn]) == 0
    off = planted(tmp_path, after="out = out * 1.05")
    assert fuzz.main([off, *drawn]) == 1
    assert "beyond 0.02, of a row 0.04: out 0.05" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "found"),
    [
        ({"after": "out = out * (1 if q.shape[2] % 64 != 1 else 1.1)"}, "out 0.1"),
        ({"after": "out = out.clone(); out[-1, -1, -1] = out[-1, -1, -1] * (1 + (q.shape[2] > 32))"}, "worst row 1"),
        ({"before": "k = k.detach() + (k - k.detach()) * 1.5"}, "dk 0."),
        ({"before": "options['align'] = 'upper_left'"}, "out "),
        ({"after": "out = out / (q.shape[1] < 5)"}, "out inf"),
        ({"before": "assert q.is_contiguous(), 'no such layout'"}, "raised AssertionError: no such layout"),
    ],
    ids=["length", "one-row", "gradient", "alignment", "not-finite", "layout"],
)
def test_planted_error_is_found_and_reproduced_by_printed_command(
    fuzz: Any, error: dict[str, str], found: str, tmp_path: Path, capsys: Any
) -> None:
    backend = planted(tmp_path, **error)
    assert fuzz.main([backend, *SMALL, "--cases", "300"]) == 1
    output = capsys.readouterr().out
    assert found in output
    command = next(line for line in output.splitlines() if "--case " in line).split()
    assert command[:3] == ["python", "scripts/fuzz_attention.py", backend]
    assert fuzz.main(command[2:]) == 1
    again = capsys.readouterr().out
    assert "1 cases\n" in again
    assert again.splitlines()[:2] == output.splitlines()[:2]


def test_fuzzing_stops_after_ten_failures(fuzz: Any, tmp_path: Path, capsys: Any) -> None:
    assert fuzz.main([planted(tmp_path, after="out = 0 * out"), *SMALL, "--cases", "100"]) == 1
    assert "10 cases of 100: the budget was spent or 10 had failed" in capsys.readouterr().out


def test_fuzzing_stops_when_budget_is_spent(fuzz: Any, capsys: Any) -> None:
    assert fuzz.main(["flash_torch", *SMALL, "--budget-s", "-1"]) == fuzz.EXIT_NOTHING
    assert "0 cases of 10000: the budget was spent" in capsys.readouterr().out


def test_refusals_are_counted_by_reason_and_forward_is_tried_alone(fuzz: Any, tmp_path: Path, capsys: Any) -> None:
    refuses = "lambda call: 'no fp16: use bf16' if call.dtype == 'float16' else 'forward' * call.needs_backward"
    assert fuzz.main([planted(tmp_path, unavailable=refuses), *SMALL, "--cases", "40"]) == 0
    output = capsys.readouterr().out
    assert "40 refused" in output
    assert " × no fp16: use bf16\n" in output
    assert " × forward\n" in output
    assert "bfloat16 out" in output
    assert "bfloat16 dq" not in output
    assert "float16 out" not in output.replace("bfloat16", "")


def test_larger_errors_than_compared_backend_fail(fuzz: Any, tmp_path: Path, capsys: Any) -> None:
    noisy = planted(tmp_path, after="out = out + 0.001 * out.detach().abs().mean()")
    assert fuzz.main([noisy, *SMALL, "--cases", "30", "--against", "sdpa_math"]) == 1
    output = capsys.readouterr().out
    assert "30 served, 0 failed" in output
    assert ": above 1.2 (" in output


@pytest.mark.parametrize("after", ["out = 0 * out", "raise RuntimeError('no such launch')"], ids=["wrong", "raises"])
def test_cases_that_fail_in_compared_backend_are_excluded(fuzz: Any, tmp_path: Path, after: str, capsys: Any) -> None:
    wrong = planted(tmp_path, after=after)
    assert fuzz.main(["flash_torch", *SMALL, "--cases", "5", "--against", wrong]) == 1
    output = capsys.readouterr().out
    assert f"{wrong} raised, or is beyond flash_torch's bound, in 5 cases: [0, 1, 2, 3, 4]" in output
    assert f"no case was served by both flash_torch and {wrong}" in output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["flash_tritn"], "did you mean flash_triton"),
        pytest.param(["naive", "--device", "cuda"], "no CUDA: ", marks=pytest.mark.skipif("torch.cuda.is_available()")),
        (["naive", "--cases", "0"], "--cases is 0; it must be at least 1"),
        (["naive", "--scores", "3"], "--scores is 3; it must be at least 64"),
    ],
)
def test_malformed_option_exits_with_remedy(fuzz: Any, arguments: list[str], text: str, capsys: Any) -> None:
    try:
        status = fuzz.main(["--device", "cpu", *arguments])
    except SystemExit as stopped:
        status = stopped.code
    assert status == fuzz.EXIT_MALFORMED
    assert text in capsys.readouterr().err


@given(st.integers(0, 2**31), st.integers(0, 10**6), st.sampled_from([64, 4096, 2**14, 2**23]))
def test_drawn_case_is_within_limits_and_reproducible(seed: int, number: int, scores: int) -> None:
    fuzz = importlib.import_module("fuzz_attention")
    choice = fuzz.kinds(seed, 12)
    case = fuzz.drawn(seed, number, choice, scores)
    assert case == fuzz.drawn(seed, number, fuzz.kinds(seed, 12), scores)
    assert min(case.batch, case.heads_kv, case.seq_q, case.seq_k) >= 1
    assert case.batch * case.heads_q * case.seq_q * case.seq_k <= scores
    assert case.heads_kv == 1 or case.kind.several_heads
    assert case.kind.lengths != "equal" or case.seq_q == case.seq_k or case.batch * case.heads_q > 65_535


def test_gpu_cases_cover_all_kinds_and_lengths(fuzz: Any) -> None:
    choice = fuzz.kinds(0, 36)
    cases = [fuzz.drawn(0, number, choice, fuzz.SCORES["cuda"]) for number in range(2000)]
    assert {(c.kind.dtype, c.kind.d_head) for c in cases} == {(t, d) for t in fuzz.DTYPES for d in fuzz.D_HEADS}
    assert any(c.batch * c.heads_q > 65_535 for c in cases)
    assert any(c.seq_q == 1 and c.seq_k > 1000 for c in cases)
    assert max(c.seq_q for c in cases) > 2000
    assert {c.kind.align for c in cases if c.kind.causal and c.seq_q > c.seq_k} == {"upper_left", "lower_right"}
    assert {c.kind.layout for c in cases} == {"contiguous", "transposed", "sliced"}
    assert any(c.kind.group > 1 for c in cases)
    for seq in (lambda c: c.seq_q, lambda c: c.seq_k):
        assert {seq(c) % 16 == 0 for c in cases} == {True, False}
        assert any(seq(c) % 64 == 63 for c in cases)
        assert any(seq(c) % 64 == 1 for c in cases)


def test_cases_compile_few_kernels(fuzz: Any) -> None:
    """Triton compiles again, for seconds, when a number becomes 1 or a multiple of 16."""
    choice = fuzz.kinds(0, 24)
    cases = [fuzz.drawn(0, number, choice, fuzz.SCORES["cuda"]) for number in range(5000)]
    compiled = set()
    for c in cases:
        offset = c.seq_k - c.seq_q if c.kind.align == "lower_right" else 0
        numbers = (c.seq_q, c.seq_k, c.heads_q, c.heads_kv, offset)
        compiled.add((c.kind, *((n == 1, n % 16 == 0) for n in numbers)))
    assert len(compiled) < 4 * len(choice)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
def test_tensors_have_layout_of_case(fuzz: Any, layout: str) -> None:
    kind = fuzz.Kind("bfloat16", 32, True, "upper_left", 2, "equal", False, False, True, layout, "expanded", None)
    case = fuzz.Case(kind, 2, 3, 5, 5)
    q, k, v, gradient = fuzz.tensors(case, 0, 0, torch.device("cpu"))
    assert [x.shape for x in (q, k, v, gradient)] == [(2, 6, 5, 32), (2, 3, 5, 32), (2, 3, 5, 32), (2, 6, 5, 32)]
    assert q.is_contiguous() == (layout == "contiguous")
    assert q.stride(2) == {"contiguous": 32, "transposed": 6 * 32, "sliced": 48}[layout]
    assert gradient.stride() == (0, 0, 0, 0)
    assert torch.equal(q, fuzz.tensors(case, 0, 0, torch.device("cpu"))[0])
    assert not torch.equal(q, fuzz.tensors(case, 0, 1, torch.device("cpu"))[0])


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter: TRITON_INTERPRET=1")
def test_flash_triton_passes_in_interpreter(fuzz: Any, capsys: Any) -> None:
    """test_flash_triton.py runs this test in its process."""
    status = fuzz.main(["flash_triton", *SMALL[:2], "--scores", "1024", "--cases", "16"])
    output = capsys.readouterr().out
    if "fails with numpy" in output:
        pytest.skip("the interpreter of this triton fails with numpy of this version: pip install 'triton>=3.7'")
    assert status == 0, output
    assert "interpreter computes wrong bfloat16 products; use float32 or float16" in output
    assert " served, 0 failed, " in output


@pytest.mark.gpu
@pytest.mark.timeout(300)  # each kind compiles
@pytest.mark.parametrize("name", ["flash_triton", "flash_cuda"])
def test_backends_pass_on_gpu(fuzz: Any, name: str, capsys: Any) -> None:
    status = fuzz.main([name, "--cases", "200", "--kinds", "8", "--budget-s", "120"])
    output = capsys.readouterr().out
    if status == fuzz.EXIT_NOTHING:
        pytest.skip(output)
    assert status == 0, output
