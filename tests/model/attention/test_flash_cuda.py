"""Tests special to flash_cuda; test_semantics.py holds those shared by all backends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cs_systems.model.attention import AttentionBackend, AttentionCall, flash_cuda, naive
from cs_systems.model.kernels.cuda import driver as cuda_driver
from tests.model.attention.conftest import Case, available, relative_error, results

HOPPER = AttentionCall("cuda", "bfloat16", 64, 8, 8, 1, 1)
IGNORE_TRACING_WARNING = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
BACKEND = flash_cuda.BACKEND


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `unavailable` find a Hopper GPU and all packages."""
    monkeypatch.setattr(flash_cuda, "no_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(cuda_driver, "find_spec", lambda package: package)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (AttentionCall("cuda", "float32", 64, 8, 8, 1, 1), "float32 is not supported on cuda; use float16 or bfloat16"),
        (AttentionCall("cuda", "bfloat16", 20, 8, 8, 1, 1), "from 8 to 256; use flash_triton"),
        (AttentionCall("cuda", "bfloat16", 264, 8, 8, 1, 1), "from 8 to 256; use sdpa_math or naive"),
        (AttentionCall("cuda", "bfloat16", 64, 8, 8, 3, 2), "q has 3 heads and k has 2; give q a multiple of"),
        (AttentionCall("cpu", "bfloat16", 64, 8, 8, 1, 1), "a Hopper GPU is required; use flash_torch on the CPU"),
        (AttentionCall("cpu", "float32", 64, 8, 8, 1, 1), "a Hopper GPU is required; use flash_torch on the CPU"),
    ],
)
def test_unsupported_call_has_reason(call: AttentionCall, text: str) -> None:
    assert text in (BACKEND.unavailable(call) or "")


@pytest.mark.usefixtures("hopper")
def test_backend_is_available_on_hopper_with_its_packages() -> None:
    assert BACKEND.describe() == "FlashAttention-3 in CUDA C++"
    assert [BACKEND.unavailable(replace(HOPPER, d_head=d_head)) for d_head in (64, 256)] == [None, None]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("capability", "instead"), [((7, 5), "sdpa_efficient"), ((8, 0), "flash_triton"), ((10, 0), "flash_triton")]
)
def test_other_compute_capability_is_unavailable(
    capability: tuple[int, int], instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    reason = BACKEND.unavailable(HOPPER) or ""
    have = ".".join(map(str, capability))
    assert reason == f"compute capability 9.0 (Hopper) is required, and this GPU has {have}; use {instead}"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("found_packages", [(), ("cuda",), ("cuda", "cuda.core")])
def test_missing_cuda_packages_name_what_to_install(
    found_packages: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "find_spec", lambda package: package if package in found_packages else None)
    assert "pip install cuda-core cuda-bindings nvidia-cuda-nvrtc" in (BACKEND.unavailable(HOPPER) or "")
    assert BACKEND.describe() is None


def test_unsupported_call_raises_value_error_with_reason() -> None:
    q = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="a Hopper GPU is required"):
        BACKEND(q, q, q)
    with pytest.raises(ValueError, match="cast them to one dtype, or call under autocast"):
        BACKEND(q, q.half(), q)
    for k, v in ((q, q[..., :8]), (q[0], q[0])):
        with pytest.raises(ValueError, match="k and v alike, with the batch and the d_head of q"):
            BACKEND(q, k, v)


@IGNORE_TRACING_WARNING
def test_dynamo_captures_forward_and_backward_in_one_graph() -> None:
    """The kernels need a Hopper GPU, so only the captured graph is checked."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    q = torch.zeros(1, 2, 40, 64, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(lambda x: BACKEND(2 * x, x, 3 * x, causal=True).sum(), backend=keep, fullgraph=True)
    with pytest.raises(ValueError, match="a Hopper GPU is required"):
        compiled(q)
    parts = [part for part in graphs[0].modules() if isinstance(part, torch.fx.GraphModule)]
    passes = {str(node.target) for part in parts for node in part.graph.nodes}
    assert {"cs_systems.flash_cuda_forward.default", "cs_systems.flash_cuda_backward.default"} <= passes


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("hopper", "deterministic")
def test_flash_cuda_is_available_under_deterministic_algorithms() -> None:
    assert BACKEND.unavailable(HOPPER) is None


@pytest.fixture
def available_backend() -> AttentionBackend:
    """Return the backend, or skip the test if it is unavailable."""
    available(BACKEND, HOPPER)
    return BACKEND


@pytest.mark.gpu
@pytest.mark.timeout(240)  # each case compiles
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "case",
    [
        Case(1024, d_head=64, causal=True),
        Case(1024, d_head=128, causal=True),
        Case(777, d_head=128),
        Case(300, 500, d_head=64, heads_q=6, heads_kv=2, causal=True, align="lower_right"),
        Case(500, 300, d_head=128, heads_q=4, heads_kv=1, causal=True, align="lower_right", layout="transposed"),
        Case(130, d_head=96, scale=-0.3, causal=True, layout="packed", grad="expanded"),
        Case(130, d_head=8, scale=0.0),
        Case(1024, d_head=80, causal=True),
        Case(300, 500, d_head=72, heads_q=4, heads_kv=2),
        Case(1024, d_head=256, causal=True),
        Case(777, d_head=256),
        Case(300, 500, d_head=192, heads_q=6, heads_kv=2, causal=True, align="lower_right"),
        Case(500, 300, d_head=256, heads_q=4, heads_kv=1, causal=True, align="lower_right", layout="transposed"),
        Case(130, d_head=136, scale=-0.3, causal=True, layout="packed", grad="expanded"),
        Case(1, 40, d_head=256),
    ],
)
def test_results_match_naive_for_tiles_lengths_and_layouts(
    case: Case, dtype: str, available_backend: AttentionBackend
) -> None:
    available(available_backend, case.call("cuda", dtype))
    inputs = case.inputs("cuda", dtype)
    got = results(available_backend, inputs, case, backward=True)
    ref = results(naive.BACKEND, tuple(x.double() for x in inputs), case, backward=True)
    errors = [relative_error(g, r) for g, r in zip(got, ref, strict=True)]
    assert max(errors) <= available_backend.tolerance[dtype], errors


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("d_head", [64, 80, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_flash_cuda_gradients_are_bit_identical_under_deterministic_algorithms(d_head: int, causal: bool) -> None:
    available(BACKEND, HOPPER)
    case = Case(3000, batch=2, heads_q=8, heads_kv=4, d_head=d_head, causal=causal)
    inputs = case.inputs("cuda", "bfloat16")
    first, *others = (results(BACKEND, inputs, case, backward=True) for _ in range(4))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    ref = results(naive.BACKEND, tuple(x.double() for x in inputs), case, backward=True)
    errors = [relative_error(g, r) for g, r in zip(first, ref, strict=True)]
    assert max(errors) <= BACKEND.tolerance["bfloat16"], errors


@pytest.mark.gpu
def test_forward_saves_log_sum_exp(available_backend: AttentionBackend) -> None:
    q, k = (torch.randn(1, 2, n, 64, device="cuda", dtype=torch.bfloat16) for n in (20, 7))
    out = available_backend(q.requires_grad_(), k, k, causal=True, align="lower_right")
    (lse,) = [t for t in out.grad_fn.saved_tensors if t.shape == q.shape[:-1]]
    scores = q.detach().double() @ k.double().mT / 8
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(7 - 20 + 1)
    torch.testing.assert_close(lse.double(), scores.masked_fill(hidden, -torch.inf).logsumexp(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_results_match_naive_with_more_heads_than_a_grid_dimension(available_backend: AttentionBackend) -> None:
    """The second dimension of a grid is limited to 65,535."""
    case = Case(8, batch=1100, heads_q=64, d_head=64)
    inputs = case.inputs("cuda", "bfloat16")
    got = results(available_backend, inputs, case, backward=True)
    ref = results(naive.BACKEND, tuple(x.float() for x in inputs), case, backward=True)
    assert max(relative_error(g, r) for g, r in zip(got, ref, strict=True)) <= available_backend.tolerance["bfloat16"]


@pytest.mark.gpu
def test_no_keys_give_zeros_and_no_queries_give_empty_output(available_backend: AttentionBackend) -> None:
    q, k = (torch.randn(1, 2, n, 16, device="cuda", dtype=torch.float16, requires_grad=True) for n in (5, 0))
    out = available_backend(q, k, k)
    out.sum().backward()
    assert torch.count_nonzero(out) == 0
    assert q.grad is not None
    assert torch.count_nonzero(q.grad) == 0
    assert available_backend(k, q, q).shape == k.shape


@pytest.mark.gpu
@IGNORE_TRACING_WARNING
def test_torch_compile_keeps_attention_in_one_graph(available_backend: AttentionBackend) -> None:
    torch.manual_seed(0)
    like = {"device": "cuda", "dtype": torch.bfloat16}
    inputs = [torch.randn(1, 200, 2, 64, **like).transpose(1, 2).requires_grad_() for _ in range(3)]

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (available_backend(2 * q, k, v, causal=True) ** 2).sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for got, ref in zip(
        torch.autograd.grad(compiled(*inputs), inputs), torch.autograd.grad(loss(*inputs), inputs), strict=True
    ):
        assert relative_error(got, ref.double()) < 1e-2  # the order of additions to dq varies
