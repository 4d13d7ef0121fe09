"""Tests of every attention backend: output and gradients against float64, or a reason for being unavailable.

A new file in cs_systems/model/attention/ is tested here without changes. Backends that compile run most cases under
torch's eager stance, so that many shapes stay cheap; `test_compiled_output_and_gradients_match_float64` does not use
it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cs_systems.core import plugins
from tests.model.attention.conftest import Case, available, relative_error, results

ROOT = Path(__file__).parents[3]
VECTORS = "TORCHINDUCTOR_VEC_ISA_OK"  # "0": Inductor compiles scalar code for CPUs; "1": vectors, without trying them

NAMES = plugins.names("attention")
CASES = {
    **{f"{'causal' if c else 'full'}-{s}": Case(s, causal=c) for c in (False, True) for s in (1, 7, 127, 130)},
    "more-keys": Case(7, 130),
    "more-queries": Case(130, 7),
    "more-keys-upper-left": Case(70, 130, causal=True),
    "more-queries-upper-left": Case(130, 70, causal=True),
    "more-keys-lower-right": Case(70, 130, causal=True, align="lower_right"),
    "blind-queries-lower-right": Case(130, 70, causal=True, align="lower_right"),
    "one-query-lower-right": Case(1, 130, causal=True, align="lower_right"),
    "aligned-either-way": Case(33, 33, causal=True, align="lower_right"),
    "window": Case(130, causal=True, window=33),
    "window-lower-right": Case(70, 130, causal=True, align="lower_right", window=40),
    "grouped": Case(40, batch=2, heads_q=4, heads_kv=2, causal=True),
    "one-key-head": Case(40, 20, heads_q=4, heads_kv=1),
    "scale": Case(40, scale=0.3, causal=True),
    "transposed": Case(40, batch=2, causal=True, layout="transposed", grad="transposed"),
    "packed": Case(40, batch=2, causal=True, layout="packed"),
    "expanded-gradient": Case(40, batch=2, causal=True, grad="expanded"),
    "d-head-64": Case(40, d_head=64, causal=True),
    "d-head-64-tiles": Case(300, d_head=64, causal=True),
    "d-head-80": Case(40, d_head=80, causal=True),
    "d-head-128": Case(40, d_head=128),
    "d-head-20": Case(40, d_head=20, causal=True),
}
FEW = ("causal-130", "full-127", "grouped")  # skipped for dtypes that add time and little coverage
GPU = pytest.mark.gpu
SETTINGS = [
    *[pytest.param(n, "cpu", "float32", id=f"{n}-cpu-float32") for n in CASES],
    *[pytest.param(n, "cpu", t, id=f"{n}-cpu-{t}") for n in FEW for t in ("float64", "float16", "bfloat16")],
    *[
        pytest.param(n, "cuda", t, id=f"{n}-cuda-{t}", marks=GPU)
        for n in CASES
        for t in ("float32", "float16", "bfloat16")
    ],
]


@pytest.fixture
def eager():
    """Run functions under torch.compile uncompiled; torch warns that this makes flex_attention slow."""
    with torch.compiler.set_stance("force_eager"):
        yield


def check(name: str, case: Case, device: str, dtype: str) -> None:
    backend = plugins.get("attention", name)
    call = available(backend, case.call(device, dtype))
    inputs = case.inputs(device, dtype)
    got = results(backend, inputs, case, backward=call.needs_backward)
    exact = tuple(x.double() for x in inputs)
    ref = results(plugins.get("attention", "naive"), exact, case, backward=call.needs_backward)
    assert got[0].dtype == inputs[0].dtype
    errors = {what: relative_error(g, r) for what, g, r in zip(("out", "dq", "dk", "dv"), got, ref, strict=False)}
    assert max(errors.values()) <= backend.tolerance[dtype], errors


@pytest.mark.usefixtures("eager")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("case", "device", "dtype"), SETTINGS)
@pytest.mark.parametrize("name", NAMES)
def test_output_and_gradients_match_float64(name: str, case: str, device: str, dtype: str) -> None:
    check(name, CASES[case], device, dtype)


@pytest.mark.slow
@pytest.mark.timeout(300)  # torch.compile takes 20 s with an empty cache
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch calls it
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("name", NAMES)
def test_compiled_output_and_gradients_match_float64(name: str, device: str) -> None:
    if (name, device) == ("flex", "cpu") and os.environ.get(VECTORS) == "0":
        # Inductor has no scalar version of flex, and a process cannot change between scalars and vectors.
        test = f"{__file__}::test_compiled_output_and_gradients_match_float64[flex-cpu]"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
        done = subprocess.run(command, env=os.environ | {VECTORS: "1"}, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stdout[-4000:]
        return
    check(name, Case(130, 70, causal=True, heads_kv=1), device, "float32" if device == "cpu" else "bfloat16")


@GPU
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("case", [Case(130, 70, causal=True, align="lower_right"), Case(300, d_head=80)])
@pytest.mark.parametrize("name", NAMES)
def test_gpu_output_and_gradients_match_float64_without_eager_stance(name: str, case: Case) -> None:
    check(name, case, "cuda", "bfloat16")


@pytest.mark.usefixtures("eager")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), pytest.param("cuda", "bfloat16", marks=GPU)])
@pytest.mark.parametrize("name", NAMES)
def test_queries_without_keys_give_zeros(name: str, device: str, dtype: str) -> None:
    case = Case(20, 7, batch=2, causal=True, align="lower_right")
    backend = plugins.get("attention", name)
    call = available(backend, case.call(device, dtype))
    out, *gradients = results(backend, case.inputs(device, dtype), case, backward=call.needs_backward)
    assert torch.count_nonzero(out[:, :, :13]) == 0
    assert torch.count_nonzero(out[:, :, 13:]) == out[:, :, 13:].numel()
    for gradient in gradients:
        assert gradient.isfinite().all()
    if gradients:
        assert torch.count_nonzero(gradients[0][:, :, :13]) == 0


@pytest.mark.usefixtures("eager")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        *[("cpu", dtype) for dtype in ("float32", "float16", "bfloat16")],
        *[pytest.param("cuda", dtype, marks=GPU) for dtype in ("float32", "float16", "bfloat16")],
    ],
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_results_match_float64_with_scores_above_10_000(name: str, causal: bool, device: str, dtype: str) -> None:
    """Use scores of −2¹⁴, 0 and 2¹⁴, exact in every dtype, so that keys with equal scores get equal weights.

    Elements of k differ where q is 0, so that the gradient of q does not cancel. The output's gradient is small, so
    that fp16 can hold the others.
    """
    case = Case(130, causal=causal, scale=2.0**14)
    backend = plugins.get("attention", name)
    call = available(backend, case.call(device, dtype))
    q, k, v, grad = case.inputs(device, dtype)
    axis = torch.nn.functional.one_hot(torch.arange(130, device=device) % 3, 3)
    q[..., 3:], grad = 0, grad / 16
    q[..., :3], k[..., :3] = axis * q[..., :1].sign(), axis * k[..., :1].sign()
    got = results(backend, (q, k, v, grad), case, backward=call.needs_backward)
    exact = tuple(x.double() for x in (q, k, v, grad))
    ref = results(plugins.get("attention", "naive"), exact, case, backward=call.needs_backward)
    assert (exact[0] @ exact[1].mT).abs().max() * 2**14 > 10_000
    # A tiled backward computes the weights from the log-sum-exp, and float32 numbers above 2¹⁴ are 2⁻⁹ apart.
    tolerance = backend.tolerance[dtype] + 2**-9
    for g, r in zip(got, ref, strict=True):
        assert g.isfinite().all()
        assert relative_error(g, r) <= tolerance


HARD = {
    "float64": Case(40).call("cpu", "float64"),
    "int8": Case(40).call("cpu", "int8"),
    "wide-head": Case(40, d_head=1024).call("cuda", "bfloat16"),
    "odd-head": Case(40, d_head=13).call("cuda", "float32"),
    "causal-unequal": Case(40, 20, causal=True).call("cuda", "bfloat16"),
    "no-gpu-here": Case(40).call("cuda", "bfloat16"),
}


@pytest.mark.parametrize("call", HARD.values(), ids=HARD)
@pytest.mark.parametrize("name", NAMES)
def test_unavailable_reason_names_remedy(name: str, call) -> None:
    reason = plugins.get("attention", name).unavailable(call)
    if reason is not None:
        assert len(reason.split()) > 5
        assert any(remedy in reason for remedy in ("use ", "pip install", "apt install", "run with", "unset ")), reason
