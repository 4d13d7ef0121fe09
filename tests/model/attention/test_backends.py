"""Tests of single attention backends: the kernel that runs, memory, and reasons for being unavailable."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import einx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from cs_systems.config import AttentionShape, Mode, ModelConfig, Precision
from cs_systems.core import plugins
from cs_systems.core.shapes import ALIGNMENTS
from cs_systems.formulas import cost
from cs_systems.instrument import annotate
from cs_systems.model.attention import AttentionBackend, AttentionCall, flash_attn, naive
from cs_systems.model.attention.flash_torch import B_K, B_Q, FlashAttentionTorch
from tests.model.attention.conftest import Case, relative_error, results

FULL_MATRIX = ["naive", "sdpa_math"]
TILED = ["sdpa_flash", "flash_torch"]


class OpenedRanges:
    """Range listener that keeps the names of opened ranges, in order."""

    def __init__(self) -> None:
        self.opened: list[str] = []

    def push(self, name: str) -> None:
        self.opened.append(name)

    def pop(self) -> None: ...


def backend(name: str) -> AttentionBackend:
    return plugins.get("attention", name)


@pytest.mark.parametrize("name", plugins.names("attention"))
def test_backend_module_exports_backend_with_tolerances_and_algorithm(name: str) -> None:
    b = backend(name)
    assert isinstance(b, AttentionBackend)
    assert all(0 < tolerance < 0.1 for tolerance in b.tolerance.values())
    algorithm = b.algorithm(Case(1024, d_head=64).call("cuda", "bfloat16"))
    assert (algorithm.block_q is None) == (algorithm.score_matrices != (0, 0, 0))
    assert algorithm.backward_matmuls == 4 if algorithm.block_q is None else algorithm.backward_matmuls >= 5


def einx_attention(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
    """Return attention computed in einx, where g query heads share each of h key heads."""
    grouped = einx.id("b (h g) i d -> b h g i d", q, h=k.shape[1])
    scores = einx.dot("b h g i [d], b h j [d] -> b h g i j", grouped, k)
    scores = scores * (case.scale or q.shape[-1] ** -0.5)
    offset = case.key_length - case.seq_q if case.align == "lower_right" else 0
    rows, columns = torch.arange(case.seq_q) + offset, torch.arange(case.key_length)
    seen = einx.greater_equal("i, j -> i j", rows, columns) if case.causal else torch.ones(len(rows), len(columns)) > 0
    weights = einx.softmax("b h g i [j]", einx.where("i j, b h g i j, ", seen, scores, -1e300))
    return einx.id("b h g i d -> b (h g) i d", einx.dot("b h g i [j], b h [j] d -> b h g i d", weights, v))


@pytest.mark.parametrize(
    "case",
    [
        Case(7, batch=2, heads_q=6, heads_kv=2),
        Case(7, 9, heads_q=6, heads_kv=3, causal=True, align="lower_right", scale=0.3),
        Case(9, 7, heads_q=4, heads_kv=1, causal=True),
    ],
)
def test_naive_matches_einx_formula(case: Case) -> None:
    *inputs, _ = case.inputs("cpu", "float64")
    assert torch.allclose(backend("naive")(*inputs, **case.options), einx_attention(*inputs, case), atol=1e-12)


@pytest.mark.parametrize("case", [Case(), Case(causal=True), Case(40, 70, heads_q=4, heads_kv=2, scale=0.3)])
def test_naive_matches_sdpa_math_in_float64(case: Case) -> None:
    """Check the reference backend itself against torch's unfused path in float64."""
    inputs = case.inputs("cpu", "float64")
    got = results(backend("naive"), inputs, case, backward=True)
    ref = results(backend("sdpa_math"), inputs, case, backward=True)
    assert max(relative_error(g, r) for g, r in zip(got, ref, strict=True)) < 1e-12


@pytest.mark.parametrize(
    ("align", "weights"),
    [
        ("upper_left", [[1, 0, 0], [1 / 2, 1 / 2, 0]]),
        ("lower_right", [[1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]]),
    ],
)
def test_causal_mask_follows_align(align: str, weights: list[list[float]]) -> None:
    """Use equal scores and v = identity, so that the output equals the weights."""
    q, k, v = torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 3, 3), torch.eye(3)[None, None]
    assert torch.allclose(backend("naive")(q, k, v, causal=True, align=align)[0, 0], torch.tensor(weights))


@pytest.mark.parametrize(("seq_q", "seq_k"), [(6, 6), (4, 7), (7, 3)])
@pytest.mark.parametrize("align", ["upper_left", "lower_right"])
@pytest.mark.parametrize("window", [1, 3, 9])
def test_window_shows_last_keys_up_to_the_query(seq_q: int, seq_k: int, align: str, window: int) -> None:
    """Use equal scores and v = identity, so that the output equals the weights."""
    offset = seq_k - seq_q if align == "lower_right" else 0
    seen = torch.tensor([[float(i + offset - window < j <= i + offset) for j in range(seq_k)] for i in range(seq_q)])
    q, k, v = torch.zeros(1, 1, seq_q, 3), torch.zeros(1, 1, seq_k, 3), torch.eye(seq_k)[None, None]
    out = naive.attention(q, k, v, causal=True, align=align, window=window)[0, 0]
    assert torch.allclose(out, seen / seen.sum(1, keepdim=True).clamp(min=1))


@pytest.mark.parametrize("name", ["naive", "flash_torch", "sdpa_math", "sdpa_flash", "flex"])
def test_unknown_alignment_is_rejected(name: str) -> None:
    q, k, v, _ = Case(2, 3).inputs("cpu", "float32")
    with torch.compiler.set_stance("force_eager"), pytest.raises(ValueError, match="did you mean lower_right"):
        backend(name)(q, k, v, causal=True, align="lower-right")


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(1, 2), (3, 2)])
@pytest.mark.parametrize("name", ["naive", "flash_torch"])
def test_query_heads_not_divisible_by_key_heads_are_rejected(name: str, heads_q: int, heads_kv: int) -> None:
    q, k, v, _ = Case(5, heads_q=heads_q, heads_kv=heads_kv).inputs("cpu", "float32")
    with pytest.raises(ValueError, match=f"q has {heads_q} heads and k has {heads_kv}; give q a multiple"):
        backend(name)(q, k, v)


@pytest.mark.parametrize("name", ["naive", "flash_torch"])
def test_attention_ranges_are_annotated(name: str) -> None:
    ranges = OpenedRanges()
    with annotate.listening(ranges):
        backend(name)(*Case(40).inputs("cpu", "float32")[:3])
    assert ranges.opened == ["scores", "softmax", "value"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch warns while it traces
@pytest.mark.parametrize("name", ["naive", "compiled", "sdpa_math", "sdpa_flash", "flex", "flash_torch"])
def test_compiled_model_traces_backend_into_one_graph(name: str) -> None:
    ranges = OpenedRanges()
    q, k, v, _ = Case(40).inputs("cpu", "float32")
    attention = backend(name)
    model = torch.compile(lambda *qkv: 2 * attention(*qkv, causal=True), backend="eager", fullgraph=True)
    with annotate.listening(ranges):
        out = model(q, k, v)
    assert ranges.opened == []
    assert torch.allclose(out, 2 * backend("naive")(q, k, v, causal=True), atol=1e-5)


KERNELS = {
    ("sdpa_math", "cpu"): "aten::_scaled_dot_product_attention_math",
    ("sdpa_flash", "cpu"): "aten::_scaled_dot_product_flash_attention_for_cpu",
    ("sdpa_math", "cuda"): "aten::_scaled_dot_product_attention_math",
    ("sdpa_flash", "cuda"): "aten::_scaled_dot_product_flash_attention",
    ("sdpa_efficient", "cuda"): "aten::_scaled_dot_product_efficient_attention",
    ("sdpa_cudnn", "cuda"): "aten::_scaled_dot_product_cudnn_attention",
}


@pytest.mark.parametrize(
    ("name", "device"),
    [pytest.param(*key, marks=[pytest.mark.gpu] if key[1] == "cuda" else []) for key in KERNELS],
)
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_backend_runs_only_its_own_kernel(name: str, device: str, causal: bool) -> None:
    q, k, v, _ = Case(128, d_head=64).inputs(device, "bfloat16")
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        backend(name)(q, k, v, causal=causal)
    ran = {e.key for e in profiled.key_averages() if e.key.startswith("aten::_scaled_dot_product")}
    assert ran == {KERNELS[name, device]}


def unavailable_reason(name: str, device: str, dtype: str, **case: object) -> str:
    reason = backend(name).unavailable(Case(40, **case).call(device, dtype))  # type: ignore[arg-type]
    assert reason is not None
    return reason


@pytest.mark.parametrize(
    ("name", "device", "dtype", "words"),
    [
        (
            "sdpa_flash",
            "cuda",
            "float32",
            "float32 is not supported on cuda; use float16 or bfloat16, or the backend naive",
        ),
        ("sdpa_cudnn", "cpu", "float32", "no CUDNN_ATTENTION kernel on the CPU; use sdpa_flash or sdpa_math"),
        ("sdpa_cudnn", "cpu", "bfloat16", "no CUDNN_ATTENTION kernel on the CPU; use sdpa_flash or sdpa_math"),
        ("sdpa_efficient", "cpu", "float32", "no EFFICIENT_ATTENTION kernel on the CPU; use sdpa_flash or sdpa_math"),
        ("sdpa_efficient", "cuda", "float64", "float64 is not supported on cuda; use float32 or float16 or bfloat16"),
        (
            "flex",
            "cpu",
            "float64",
            "float64 is not supported on cpu; use float32 or float16 or bfloat16, or the backend naive",
        ),
        ("flex", "cpu", "float32", "no backward on the CPU; use mode forward"),
        ("flash_attn", "cpu", "bfloat16", "a CUDA device is required; use sdpa_flash or flash_torch"),
    ],
)
def test_unavailable_reason_names_alternative(name: str, device: str, dtype: str, words: str) -> None:
    assert words in unavailable_reason(name, device, dtype)


@pytest.mark.parametrize("name", plugins.names("attention"))
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "float8_e4m3fn"])
def test_unavailable_reason_does_not_repeat_the_name(name: str, device: str, dtype: str) -> None:
    for call in (Case(40).call(device, dtype), Case(40, d_head=258, heads_q=3, heads_kv=2).call(device, dtype)):
        assert name not in (backend(name).unavailable(call) or "").rpartition("; ")[0]


@pytest.mark.parametrize("name", ["sdpa_flash", "flash_attn", "flex", "compiled"])
def test_cuda_call_without_gpu_is_unavailable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "use device cpu, or install a CUDA build of torch" in unavailable_reason(name, "cuda", "bfloat16")


@pytest.mark.parametrize("name", ["compiled", "flex"])
def test_compiled_backends_without_cpp_compiler_are_unavailable(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    assert "finds no g++ or gcc or clang; install g++" in unavailable_reason(name, "cpu", "float32")


def test_missing_flash_attn_names_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(flash_attn, "_installed", lambda: None)
    reason = unavailable_reason("flash_attn", "cuda", "bfloat16")
    assert (
        "flash-attn is not installed; run pip install --no-build-isolation 'cs-systems[flash-attn]', or use" in reason
    )
    assert "use sdpa_flash" in reason
    assert backend("flash_attn").describe() is None
    with pytest.raises(ImportError, match="pip install --no-build-isolation 'cs-systems"):
        backend("flash_attn")(*Case(40).inputs("cpu", "bfloat16")[:3])


def test_flash_attn_that_cannot_be_imported_is_to_be_installed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attn, "version", lambda package: "3.0.0")
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    reason = flash_attn._missing.__wrapped__()
    assert "the installed flash-attn-4 cannot be imported (import of flash_attn" in reason
    assert (
        "run pip install --force-reinstall --no-deps --no-cache-dir --no-build-isolation flash-attn-4, or use" in reason
    )


def test_empty_flash_attn_package_counts_as_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-4's wheel installs an empty, importable `flash_attn`."""
    for module in ("flash_attn", "flash_attn.cute", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, type(sys)(module))
    assert flash_attn._installed.__wrapped__() is None


@pytest.mark.parametrize(("d_head", "refused"), [(16, True), (80, True), (64, False), (96, False)])
def test_flash_attention_4_backward_is_refused_when_d_head_is_not_a_multiple_of_32(
    monkeypatch: pytest.MonkeyPatch, d_head: int, refused: bool
) -> None:
    """On an H200, dq had a relative error of 1 if d_head was not a multiple of 32; all other results were right."""
    generation = flash_attn._GENERATIONS[0]
    monkeypatch.setattr(flash_attn, "no_cuda", lambda: None)
    monkeypatch.setattr(flash_attn, "_installed", lambda: (generation, None))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    call = Case(130, d_head=d_head).call("cuda", "bfloat16")
    reason = backend("flash_attn").unavailable(call)
    assert (reason is not None) == refused
    if refused:
        assert f"computes a wrong gradient of q on Hopper at d_head {d_head}; use sdpa_flash" in str(reason)
    assert backend("flash_attn").unavailable(replace(call, needs_backward=False)) is None


@pytest.mark.parametrize(
    ("generation", "capability", "instead"),
    [
        (1, (8, 0), "8.0; use sdpa_flash"),
        (1, (7, 5), "7.5; use sdpa_efficient"),
        (2, (7, 5), "7.5; use sdpa_efficient"),
    ],
)
def test_flash_attn_on_an_older_gpu_names_a_backend_that_supports_it(
    monkeypatch: pytest.MonkeyPatch, generation: int, capability: tuple[int, int], instead: str
) -> None:
    monkeypatch.setattr(flash_attn, "no_cuda", lambda: None)
    monkeypatch.setattr(flash_attn, "_installed", lambda: (flash_attn._GENERATIONS[generation], None))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    reason = backend("flash_attn").unavailable(Case(130).call("cuda", "float16"))
    assert f"does not run on compute capability {instead}" in str(reason)


def test_flash_attn_gets_batch_seq_heads_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also check that the first installed generation that has a function is used."""

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
        out = backend("naive")(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal, scale=softmax_scale)
        return out.transpose(1, 2), None

    for module in ("flash_attn.cute", "flash_attn"):
        monkeypatch.setitem(sys.modules, module, type(sys)(module))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", type(sys)("flash_attn_interface"))
    sys.modules["flash_attn_interface"].flash_attn_func = flash_attn_func
    found = flash_attn._installed.__wrapped__()
    assert found is not None
    assert found[0].name == "FlashAttention-3"
    monkeypatch.setattr(flash_attn, "_installed", lambda: found)
    case = Case(40, 70, causal=True, scale=0.3)
    q, k, v, _ = case.inputs("cpu", "float32")
    assert torch.equal(backend("flash_attn")(q, k, v, **case.options), backend("naive")(q, k, v, **case.options))
    assert backend("flash_attn").describe() == "flash-attn-3, version unknown (FlashAttention-3)"


# Memory


def allocations(step: Callable[[], object]) -> tuple[int, int]:
    """Return the bytes that `step` leaves allocated and its peak bytes, from the CPU allocator's events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = step()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    del kept
    return live, peak


def measured_bytes(name: str, case: Case, dtype: str) -> tuple[int, int, int]:
    """Return the peak of forward, the bytes kept for backward and the peak of backward.

    AttentionAlgorithm.score_matrices declares these three.
    """
    *qkv, grad = case.inputs("cpu", dtype)
    qkv = [x.requires_grad_() for x in qkv]
    outputs = []
    kept, forward_peak = allocations(lambda: outputs.append(backend(name)(*qkv, **case.options)))
    _, backward_peak = allocations(lambda: torch.autograd.grad(outputs, qkv, grad))
    return forward_peak, kept, kept + backward_peak


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", FULL_MATRIX)
def test_measured_score_matrices_match_declaration(name: str, causal: bool, dtype: str) -> None:
    case = Case(512, batch=2, heads_q=8, d_head=8, causal=causal)
    matrix_bytes = case.batch * case.heads_q * case.seq_q**2 * getattr(torch, dtype).itemsize
    declared = backend(name).algorithm(case.call("cpu", dtype)).score_matrices
    for measured, count in zip(measured_bytes(name, case, dtype), declared, strict=True):
        assert count - 0.1 < measured / matrix_bytes < count + 0.8  # others: q, k, v, out, copies, one mask


@pytest.mark.parametrize("name", TILED)
def test_memory_of_tiled_backend_grows_linearly_with_sequence(name: str) -> None:
    short, long = (measured_bytes(name, Case(s, batch=1, heads_q=1), "float32") for s in (512, 2048))
    assert all(b < 4.2 * a for a, b in zip(short, long, strict=True))


# flash_torch


@pytest.mark.parametrize("shape", [(3, 130, 16), (2, 3, 70, 16)])
def test_flash_torch_saves_inputs_output_and_log_sum_exp(shape: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    saved: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        FlashAttentionTorch.apply(q, k, v, True)
    (lse,) = [x for x in saved if x.shape == shape[:-1]]
    assert len(saved) == 5  # q, k, v, out
    hidden = torch.ones(shape[-2], shape[-2], dtype=torch.bool).triu(1)
    scores = (q @ k.mT / math.sqrt(shape[-1])).masked_fill(hidden, -math.inf)
    assert torch.allclose(lse, scores.logsumexp(-1), atol=1e-5)


def test_flash_torch_log_sum_exp_is_minus_infinity_without_keys() -> None:
    q, k, v = (torch.randn(1, seq, 8, requires_grad=True) for seq in (5, 2, 2))
    saved: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        FlashAttentionTorch.apply(q, k, v, True, None, "lower_right")
    (lse,) = [x for x in saved if x.shape == (1, 5)]
    assert lse.isneginf().tolist() == [[True, True, True, False, False]]


def test_flash_torch_gradients_match_finite_differences() -> None:
    q, k, v = (torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(lambda *x: FlashAttentionTorch.apply(*x, True), (q, k, v))


def test_flash_torch_skips_hidden_tiles() -> None:
    """With three blocks of queries and keys, a causal mask leaves six of nine tiles."""
    ranges = OpenedRanges()
    q, k, v, _ = Case(3 * B_Q, 3 * B_K, causal=True).inputs("cpu", "float32")
    with annotate.listening(ranges):
        FlashAttentionTorch.apply(q, k, v, True)
    assert ranges.opened.count("scores") == 6


def test_flash_torch_is_bit_identical_under_autocast() -> None:
    """Autocast would round every tile of scores; the specification sums them in float32."""
    case = Case(40, causal=True)
    inputs = case.inputs("cpu", "bfloat16")
    plain = results(backend("flash_torch"), inputs, case, backward=True)
    with torch.autocast("cpu", torch.bfloat16):
        cast = results(backend("flash_torch"), inputs, case, backward=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


@settings(max_examples=25)
@given(
    seq_q=st.integers(1, 300),
    seq_k=st.integers(1, 300),
    d_head=st.integers(1, 33),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    causal=st.booleans(),
    align=st.sampled_from(["upper_left", "lower_right"]),
)
def test_flash_torch_matches_naive_at_any_shape(
    seq_q: int, seq_k: int, d_head: int, heads: tuple[int, int], causal: bool, align: str
) -> None:
    case = Case(seq_q, seq_k, 1, *heads, d_head=d_head, causal=causal, align=align)
    inputs = case.inputs("cpu", "float64")
    got = results(backend("flash_torch"), inputs, case, backward=True)
    ref = results(backend("naive"), inputs, case, backward=True)
    assert max(relative_error(g, r) for g, r in zip(got, ref, strict=True)) < 1e-12


def test_equal_attention_calls_hash_equal() -> None:
    """The result of torch's backend selector is cached by call, so calls must be hashable."""
    assert (
        len({AttentionCall("cuda", "bfloat16", 64, 8, 8, 1, 1), AttentionCall("cuda", "bfloat16", 64, 8, 8, 1, 1)}) == 1
    )


CHECKPOINTS = ("none", "every:1", "nested:2:1", "selective:attention", "selective:matmul", "selective:products")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", plugins.names("attention"))
def test_executed_flops_are_at_least_those_of_the_model(name: str, device: str) -> None:
    """Check calls of every form, and a training step in every precision with every kind of checkpoint."""
    for seq, seq_k, d_head, causal, align, window in itertools.product(
        (1, 100, 1024), (1, 300, 1024), (16, 80), (False, True), ALIGNMENTS, (None, 1, 130)
    ):
        if window is not None and not causal:
            continue
        shape = AttentionShape(2, 4, seq, d_head, causal, heads_kv=2, seq_k=seq_k, align=align, window=window)
        call = AttentionCall(device, "bfloat16", d_head, seq, seq_k, 4, 2, causal, align, window=window)
        for phase in cost.attention_cost(shape, Mode.FORWARD_BACKWARD, backend(name).algorithm(call), 2).values():
            assert phase.hardware_flops >= phase.model_flops, (shape, phase)
    model = ModelConfig(d_model=48, d_ff=100, num_layers=4, num_heads=3, vocab_size=77, context_length=200)
    algorithm = backend(name).algorithm(AttentionCall(device, "bfloat16", 16, 200, 200, 3, 3, causal=True))
    for precision, checkpoint, in_loss in itertools.product(Precision, CHECKPOINTS, (False, True)):
        costs = cost.step_cost(model, 2, 200, Mode.TRAIN_STEP, algorithm, precision, checkpoint, head_in_loss=in_loss)
        assert all(phase.hardware_flops >= phase.model_flops for phase in costs.values())
