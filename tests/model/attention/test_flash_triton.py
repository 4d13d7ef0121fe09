"""Tests special to flash_triton; test_semantics.py holds those shared by all backends.

Without a GPU the kernels run in Triton's interpreter, which must be chosen before triton is imported. One test
therefore runs this file, the shared suite and the fuzzer in a new process.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cs_systems.model.attention import AttentionBackend, AttentionCall, flash_triton, naive
from cs_systems.model.attention.flash_triton import BACKEND, FlashAttentionTriton, attention
from cs_systems.model.kernels.triton.configs import Tile, Tiles, padded_d_head, tiles_for
from tests import forks
from tests.model.attention.conftest import Case, relative_error, results

HERE = Path(__file__).parent
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INTERPRETED = pytest.mark.skipif(not IS_INTERPRETED, reason="needs Triton's interpreter: TRITON_INTERPRET=1")
COMPILED = pytest.mark.skipif(IS_INTERPRETED, reason="TRITON_INTERPRET is set")
DEVICES = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=[pytest.mark.gpu, COMPILED])]
)


@pytest.mark.slow
@pytest.mark.timeout(300)  # a quarter of a minute, or several on a busy machine
@COMPILED
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: pip install triton")
def test_attention_suite_passes_in_triton_interpreter() -> None:
    """Run in a new process, since Triton reads TRITON_INTERPRET when it is imported."""
    # Cases of the shared suite that repeat others are left to the GPU, since the interpreter is slow.
    repeated = "130-cpu or d-head-128 or d-head-64-tiles or above_10_000 and False"
    shared = f"flash_triton and (cpu-float32 or grouped-cpu-float16) and not ({repeated})"
    own = "test_flash_triton and (cpu or interpreter_refuses) or test_flash_triton_passes_in_interpreter"
    chosen = f"test_semantics and {shared} or {own}"
    fuzzer = HERE.parents[1] / "scripts" / "test_fuzz_attention.py"
    suites = (HERE / "test_semantics.py", HERE / "test_flash_triton.py", fuzzer)
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "-k", chosen, *suites]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    if "fails with numpy" in done.stdout:
        pytest.skip("the interpreter of this triton does not work with this numpy: pip install 'triton>=3.7'")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) > 30, "most tests were skipped"


def log_sum_exp(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores = q.double() @ k.double().mT / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return torch.logsumexp(scores, -1)


@DEVICES
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("leading", [(), (3,), (2, 2), (2, 1, 2)])
def test_apply_saves_only_log_sum_exp_of_its_shape(leading, causal: bool, device: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(*leading, 24, 16, device=device).requires_grad_() for _ in range(3))
    out = FlashAttentionTriton.apply(q, k, v, causal)
    (lse,) = [t for t in out.grad_fn.saved_tensors if t.shape == q.shape[:-1]]
    torch.testing.assert_close(lse.double(), log_sum_exp(q, k, causal), rtol=1e-5, atol=1e-5)
    out.sum().backward()
    assert [x.grad.shape for x in (q, k, v)] == [q.shape, k.shape, v.shape]


@DEVICES
def test_log_sum_exp_is_minus_infinity_for_query_without_keys(device: str) -> None:
    q, k = torch.randn(1, 20, 16, device=device, requires_grad=True), torch.randn(1, 7, 16, device=device)
    out = FlashAttentionTriton.apply(q, k, k, True, None, "lower_right")
    lse = next(t for t in out.grad_fn.saved_tensors if t.shape == (1, 20))
    assert (lse[:, :13] == -torch.inf).all()
    assert lse[:, 13:].isfinite().all()


@pytest.mark.timeout(240)  # on a GPU each tile is compiled for three kernels
@DEVICES
@settings(
    max_examples=12,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    case=st.builds(
        Case,
        seq_q=st.integers(1, 80), seq_k=st.integers(1, 80), batch=st.just(1), heads_q=st.just(2),
        heads_kv=st.sampled_from([1, 2]), d_head=st.sampled_from([5, 16, 24, 40]), causal=st.booleans(),
        align=st.sampled_from(["upper_left", "lower_right"]), scale=st.sampled_from([None, -0.3, 0.0]),
        layout=st.sampled_from(["contiguous", "transposed"]),
    ),
    tile=st.builds(
        Tile, st.sampled_from([16, 32, 64]), st.sampled_from([16, 32, 64]), st.just(4), st.just(1), st.booleans()
    ),
    window=st.sampled_from([None, 1, 7, 16, 33, 100]),
)  # fmt: skip
@example(case=Case(64, 64, 1, 1, causal=True), tile=Tile(64, 16, 4, 1), window=None)
@example(case=Case(64, 64, 1, 1, causal=True), tile=Tile(16, 64, 4, 1, descriptors=True), window=None)
@example(case=Case(80, 77, 1, 1, causal=True), tile=Tile(16, 16, 4, 1), window=33)
@example(case=Case(77, 80, 1, 2, 1, causal=True, align="lower_right"), tile=Tile(16, 32, 4, 1), window=40)
@example(case=Case(75, 10, 1, 1, causal=True), tile=Tile(32, 16, 4, 1), window=7)
def test_attention_is_correct_with_any_tile_and_window(case: Case, tile: Tile, window: int | None, device: str) -> None:
    """Cover tiles that do and do not divide the lengths, pointers, and descriptors if the layout allows them."""
    window = window if case.causal else None
    inputs = case.inputs(device, "float32")
    got, ref = (
        results(AttentionBackend(partial(function, window=window, **options)), given, case, backward=True)
        for function, options, given in (
            (attention, {"tiles": Tiles(tile, tile, tile)}, inputs),
            (naive.attention, {}, tuple(x.double() for x in inputs)),
        )
    )
    # Twice the suite's tolerance: with so few elements, the last bit of CUDA's exp2 matters.
    assert max(relative_error(g, r) for g, r in zip(got, ref, strict=True)) < 2e-5


def starts_of(lengths: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


@DEVICES
@pytest.mark.parametrize(
    ("lengths_q", "lengths_k", "heads_kv", "options"),
    [
        ((33, 1, 0, 70), (50, 7, 4, 33), 1, {"causal": True, "align": "lower_right", "window": 20}),
        ((40, 17), (40, 17), 2, {"causal": True, "scale": -0.3}),
        ((5, 64, 16), (0, 20, 3), 2, {}),
    ],
)
def test_packed_sequences_match_each_sequence_alone(
    lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], heads_kv: int, options: dict[str, object], device: str
) -> None:
    torch.manual_seed(0)
    shapes = [(sum(lengths_q), 2), (sum(lengths_k), heads_kv), (sum(lengths_k), heads_kv), (sum(lengths_q), 2)]
    *inputs, grad = (torch.randn(*shape, 16, device=device) for shape in shapes)
    inputs = [x.requires_grad_() for x in inputs]
    starts = starts_of(lengths_q, device), starts_of(lengths_k, device)
    out = flash_triton.packed_attention(*inputs, *starts, max(lengths_q), max(lengths_k), **options)
    got = [out, *torch.autograd.grad(out, inputs, grad)]

    exact = [x.detach().double().requires_grad_() for x in inputs]
    each = zip(
        *(x.split(lengths) for x, lengths in zip(exact, (lengths_q, lengths_k, lengths_k), strict=True)), strict=True
    )
    alone = torch.cat(
        [
            naive.attention(*(x.transpose(0, 1)[None] for x in qkv), **options)[0].transpose(0, 1)
            if len(qkv[1])
            else qkv[0] * 0
            for qkv in each
        ]
    )
    ref = [alone, *torch.autograd.grad(alone, exact, grad.double())]
    assert max(relative_error(g.detach(), r.detach()) for g, r in zip(got, ref, strict=True)) < 2e-5


def test_packed_sequences_of_wrong_form_are_rejected() -> None:
    q, starts = torch.zeros(8, 2, 16), torch.tensor([0, 8], dtype=torch.int32)
    for arguments, words in (
        ((q[None], q, q, starts, starts), r"pass q as \(tokens, heads, d_head\), and k and v both"),
        (
            (q, q, q, starts.long(), starts),
            "starts_q is torch.int64 .*; pass an int32 tensor of one dimension on cpu, with one",
        ),
        ((q, q, q, starts, starts[:1]), "starts_q has 2 numbers, but starts_k has 1; both need one number more"),
        ((q, q.half(), q, starts, starts), "cast them to one dtype"),
    ):
        with pytest.raises(ValueError, match=words):
            flash_triton.packed_attention(*arguments, 8, 8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": 4}, "window=4 requires causal attention; pass causal=True, or leave out the window"),
        ({"window": 0, "causal": True}, "window is 0; give a Python int of at least 1"),
    ],
)
@pytest.mark.parametrize("function", [attention, naive.attention])
def test_impossible_window_is_rejected(function, options: dict[str, object], words: str) -> None:
    q = torch.zeros(1, 1, 8, 16)
    with pytest.raises(ValueError, match=words):
        function(q, q, q, **options)


@DEVICES
def test_no_keys_give_zeros_and_no_queries_give_empty_output(device: str) -> None:
    q, k = torch.randn(1, 2, 5, 16, device=device), torch.randn(1, 2, 0, 16, device=device)
    q.requires_grad_()
    out = attention(q, k, k)
    out.sum().backward()
    assert torch.count_nonzero(out) == 0
    assert torch.count_nonzero(q.grad) == 0
    k.requires_grad_()
    empty = attention(k, q, q)
    empty.sum().backward()
    assert empty.shape == k.grad.shape == k.shape


@DEVICES
@pytest.mark.parametrize(
    ("leading_q", "leading_k"),
    [((4,), (2,)), ((1,), (2,)), ((), (2,)), ((2,), ()), ((2, 4), (2,)), ((2, 3, 1), (3, 2, 1))],
)
def test_different_batches_of_q_and_k_are_rejected(leading_q, leading_k, device: str) -> None:
    q, k = torch.randn(*leading_q, 5, 16, device=device), torch.randn(*leading_k, 5, 16, device=device)
    with pytest.raises(ValueError, match="give k and v the same shape, with q's number of dimensions"):
        FlashAttentionTriton.apply(q, k, k)


def test_strides_that_overflow_32_bit_offsets_are_rejected() -> None:
    near, far = (torch.empty_strided((1, 1, 20, 16), (1, 1, apart, 1), device="meta") for apart in (2**26, 2**27))
    assert flash_triton._tiles_are_near(near)
    with pytest.raises(
        ValueError, match=r"rows of v are 134217728 elements apart and its columns 1, .*; pass v\.contiguous\(\)"
    ):
        FlashAttentionTriton.apply(near, near, far)


@DEVICES
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch warns while it traces
def test_torch_compile_keeps_attention_in_one_graph(device: str) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 20, 16, device=device).transpose(1, 2).requires_grad_() for _ in range(3)]

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (attention(2 * q, k, v, causal=True) ** 2).sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for got, ref in zip(
        torch.autograd.grad(compiled(*inputs), inputs), torch.autograd.grad(loss(*inputs), inputs), strict=True
    ):
        torch.testing.assert_close(got, ref)


@DEVICES
def test_mixed_dtypes_are_rejected_except_under_autocast(device: str) -> None:
    q = torch.randn(1, 1, 8, 16, device=device)
    with torch.autocast(device, torch.float16):
        assert attention(q, q.half(), q).dtype == torch.float16
    with pytest.raises(ValueError, match="cast them to one dtype, or call under autocast"):
        attention(q, q.half(), q)
    with pytest.raises(ValueError, match="with q's number of dimensions, q's batch and q's d_head"):
        attention(q, q, q[..., :8])


@INTERPRETED
def test_interpreter_refuses_bfloat16_and_cuda() -> None:
    q = torch.randn(1, 1, 8, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="computes wrong bfloat16 products; use float32 or float16"):
        attention(q, q, q)
    on_gpu = BACKEND.unavailable(AttentionCall("cuda", "float32", 16, 8, 8, 1, 1))
    assert "unset it" in (on_gpu or "")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (AttentionCall("cpu", "float64", 16, 8, 8, 1, 1), "use float32, float16, bfloat16, or the backend flash_torch"),
        (AttentionCall("cpu", "float32", 257, 8, 8, 1, 1), "d_head 257 is not from 1 to 256; use naive"),
        (AttentionCall("cpu", "float32", 16, 8, 8, 3, 2), "q has 3 heads and k has 2; give q a multiple of"),
    ],
)
def test_unsupported_call_has_reason(call: AttentionCall, text: str) -> None:
    assert text in (BACKEND.unavailable(call) or "")


@COMPILED
def test_call_without_gpu_or_interpreter_names_both_remedies() -> None:
    reason = BACKEND.unavailable(AttentionCall("cpu", "float32", 16, 8, 8, 1, 1))
    assert reason is not None
    assert "TRITON_INTERPRET=1" in reason


def test_module_without_triton_imports_and_names_package_to_install() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "from cs_systems.model.attention import AttentionCall\n"
        "from cs_systems.model.attention.flash_triton import BACKEND\n"
        "print(BACKEND.unavailable(AttentionCall('cuda', 'float32', 16, 8, 8, 1, 1)), BACKEND.describe())"
    )
    done = forks.python("-c", program)
    assert "pip install triton" in done.stdout, done.stderr
    assert done.stdout.strip().endswith("None")


def test_algorithm_counts_padded_d_head_and_seven_backward_products() -> None:
    algorithm = BACKEND.algorithm(AttentionCall("cpu", "bfloat16", 80, 8, 8, 1, 1))
    assert (algorithm.d_head, algorithm.backward_matmuls, algorithm.score_matrices) == (128, 7, (0, 0, 0))


@pytest.mark.parametrize("capability", [None, (8, 0), (8, 6), (9, 0), (10, 0), (12, 0), (99, 0)])
def test_every_head_size_and_dtype_has_tiles(capability: tuple[int, int] | None) -> None:
    for element_bytes in (2, 4):
        for d_head in range(1, 257):
            assert padded_d_head(d_head) >= d_head
            tiles = tiles_for(capability, element_bytes, d_head)
            assert all(max(t.block_m, t.block_n) <= flash_triton.MOST_ROWS for t in vars(tiles).values())


@pytest.mark.gpu
@COMPILED
def test_attention_is_correct_with_more_heads_than_a_grid_dimension() -> None:
    q = torch.randn(70_000, 1, 16, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out = attention(q, q, q, causal=True)
    out.sum().backward()
    last = q.detach()[-1:].double()
    assert relative_error(out[-1:].detach(), naive.attention(last, last, last, causal=True)) < 2e-2


@pytest.mark.gpu
@COMPILED
def test_attention_is_correct_with_offsets_beyond_32_bits() -> None:
    packed = torch.zeros(1, 33_000, 1024, 64, device="cuda", dtype=torch.bfloat16)  # 4.3 GB, 2.16e9 elements
    q = packed[:, :, 1000:1001].transpose(1, 2)
    q.copy_(torch.randn_like(q))
    far, near = q.detach().requires_grad_(), q.detach().contiguous().requires_grad_()
    gradients = [torch.autograd.grad(attention(x, x, x, causal=True).sum(), x)[0] for x in (far, near)]
    torch.testing.assert_close(*gradients)


@pytest.mark.gpu
@COMPILED
def test_gradients_are_bit_identical_between_runs() -> None:
    q = torch.randn(2, 4, 1000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    first, second = (torch.autograd.grad((attention(q, q, q, causal=True) ** 2).sum(), q)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.gpu
@COMPILED
@pytest.mark.parametrize("d_head", [64, 80, 128, 256])
@pytest.mark.parametrize("descriptors", [False, True])
def test_attention_is_correct_with_pointers_and_with_descriptors(descriptors: bool, d_head: int) -> None:
    table = tiles_for(torch.cuda.get_device_capability(), 2, d_head)
    tiles = Tiles(*(Tile(t.block_m, t.block_n, t.num_warps, t.num_stages, descriptors) for t in vars(table).values()))
    case = Case(1000, causal=True, d_head=d_head, layout="packed")
    inputs = case.inputs("cuda", "bfloat16")
    qkv = [x.detach().requires_grad_() for x in inputs[:3]]
    out = attention(*qkv, causal=True, tiles=tiles)
    got = [out.detach(), *torch.autograd.grad(out, qkv, inputs[3])]
    ref = results(naive.BACKEND, tuple(x.double() for x in inputs), case, backward=True)
    assert max(relative_error(g, r) for g, r in zip(got, ref, strict=True)) < 2e-2


@pytest.mark.gpu
@COMPILED
def test_backward_allocates_only_gradients_and_two_statistics() -> None:
    q, k, v = (torch.randn(1, 4, 16_384, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    grad = torch.randn_like(q)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attention(q, k, v, causal=True)
    statistic_bytes = 4 * q.shape[1] * q.shape[2]
    slack_bytes = 1 << 20
    assert torch.cuda.max_memory_allocated() - before <= q.nbytes + statistic_bytes + slack_bytes
    torch.autograd.grad(out, (q, k, v), grad)
    assert torch.cuda.max_memory_allocated() - before <= 4 * q.nbytes + 3 * statistic_bytes + slack_bytes
