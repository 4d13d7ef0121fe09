"""Tests of the CUDA C++ kernel steps: each compiles without spills and computes attention."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from cs_systems.config import ConfigError
from cs_systems.model.kernels.compile import SHARED_LIMIT_BYTES, read_machine_code
from scripts._cuda_steps import (
    FOLDER,
    LEFT_OUT,
    STEPS,
    attend,
    attend_from_host,
    attend_reference,
    compile_step,
)

D_HEADS = (32, 64, 128)
ALL = [pytest.param(step, id=name) for name, step in (STEPS | LEFT_OUT).items()]


def test_every_source_file_is_a_step() -> None:
    assert {path.stem for path in FOLDER.glob("*.cu")} == {step.source for step in STEPS.values()}


@pytest.mark.nvcc
@pytest.mark.slow
@pytest.mark.parametrize("step", ALL)
def test_nvcc_compiles_step_without_spills_within_shared_memory(step, tmp_path: Path) -> None:
    assert all(step.launch(d)[2] <= SHARED_LIMIT_BYTES[90] for d in D_HEADS)
    d = max(D_HEADS)  # takes the most registers; the NVRTC test below covers each d_head
    macros = [f"-D{macro}={value}" for macro, value in step.macros(d).items()]
    source, made = FOLDER / f"{step.source}.cu", tmp_path / f"{d}.cubin"
    command = ["nvcc", "-arch=sm_90a", "-cubin", "-Werror=all-warnings", "-Xptxas=-v", *macros, "-o", made, source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr


@pytest.mark.cuda_core
@pytest.mark.slow
@pytest.mark.parametrize("step", ALL)
def test_nvrtc_compiles_step_without_spills(step) -> None:
    for d in D_HEADS if step in STEPS.values() else [max(D_HEADS)]:
        _, opcodes = read_machine_code(bytes(compile_step(step, d, "sm_90a").code))
        assert opcodes["STL"] + opcodes["LDL"] == 0


@pytest.mark.parametrize(("batch", "n", "d"), [(1, 64, 32), (3, 5, 7), (2, 128, 64)])
def test_sequential_program_matches_sdpa(batch: int, n: int, d: int) -> None:
    q, k, v = torch.randn(3, batch, n, d).unbind()
    expected = scaled_dot_product_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(attend_reference(q, k, v).double(), expected, rtol=1e-5, atol=1e-5)


def test_sequential_program_keeps_subnormals_enabled() -> None:
    attend_reference(*torch.randn(3, 1, 4, 4).unbind())
    assert sys.float_info.min / 2 > 0


def test_unknown_step_and_cpu_tensors_are_rejected() -> None:
    q = torch.zeros(1, 64, 64)
    with pytest.raises(ConfigError, match="did you mean padded"):
        attend("paded", q, q, q)
    with pytest.raises(ConfigError, match="q, k and v are on cpu, cpu, cpu; move all three to one GPU"):
        attend("padded", q, q, q)


@pytest.mark.parametrize(
    ("name", "n", "d", "text"),
    [
        ("naive", 64, 64, "the second dimension of q, k and v is 64; make it a multiple of 128 for this step"),
        ("padded", 192, 32, "the second dimension of q, k and v is 192; make it a multiple of 128 for this step"),
        ("padded", 64, 48, "the last dimension of q, k and v is 48; make it 32, 64 or 128"),
    ],
)
def test_sizes_without_whole_blocks_are_rejected(name: str, n: int, d: int, text: str) -> None:
    with FakeTensorMode():
        q = torch.empty(1, n, d, device="cuda")
    with pytest.raises(ConfigError, match=f"^{text}$"):
        attend(name, q, q, q)
    with pytest.raises(ConfigError, match=r"^q, k and v are on cuda:0, cpu, cpu; move all three to one GPU"):
        attend(name, q, *torch.empty(2, 1, n, d).unbind())


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*STEPS, *LEFT_OUT])
def test_step_matches_sdpa(name: str) -> None:
    step = (STEPS | LEFT_OUT)[name]
    for d in D_HEADS:
        q, k, v = torch.randn(3, 2, 512, d, device="cuda").to(step.dtype).unbind()
        expected = scaled_dot_product_attention(q.double(), k.double(), v.double())
        bound = 2e-3 if step.dtype == torch.float16 else 1e-5
        torch.testing.assert_close(attend(name, q, k, v).double(), expected, rtol=0, atol=bound)
        with pytest.raises(ConfigError, match=r"make it a multiple of \d+ for this step$"):
            attend(name, *(tensor[:, :100].contiguous() for tensor in (q, k, v)))


@pytest.mark.gpu
@pytest.mark.parametrize("streams", [1, 4])
def test_overlapped_copies_return_every_batch(streams: int) -> None:
    q, k, v = (torch.randn(6, 256, 64, dtype=torch.float16).pin_memory() for _ in range(3))
    out = torch.empty(6, 256, 64).pin_memory()
    attend_from_host("tensor_cores", q, k, v, out, streams)
    expected = scaled_dot_product_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-3)
