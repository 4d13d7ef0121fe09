"""Tests of our kernels' prepared calls on a GPU: layouts, streams, threads, graphs and hooks.

tests/model/kernels/test_prepared.py tests their preparation without one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cs_systems.core import plugins
from cs_systems.model.attention import AttentionBackend, AttentionCall
from tests.model.attention.conftest import Case, available, relative_error, results

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
CASES = [
    Case(300, batch=2, heads_q=4, d_head=64, causal=True),
    Case(300, batch=2, heads_q=4, d_head=64),
    Case(300, batch=2, heads_q=4, d_head=64, causal=True, layout="packed", grad="expanded"),
    Case(130, batch=2, heads_q=4, heads_kv=2, d_head=128, causal=True),
]


@pytest.fixture(params=["flash_cuda", "flash_triton"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    found: AttentionBackend = plugins.get("attention", request.param)
    available(found, AttentionCall("cuda", "bfloat16", 64, 8, 8, 1, 1))
    return found


def inputs_of(case: Case, seed: int = 0) -> tuple[Tensor, ...]:
    """Return newly allocated inputs, different for each seed."""
    made = case.inputs("cuda", "bfloat16")
    return tuple(x.roll(seed, 2) for x in made) if seed else made


def check(case: Case, inputs: tuple[Tensor, ...], got: list[Tensor]) -> None:
    exact = tuple(x.double() for x in inputs)
    ref = results(plugins.get("attention", "naive"), exact, case, backward=True)
    errors = [relative_error(g, r) for g, r in zip(got, ref, strict=True)]
    assert max(errors) < 2e-2, errors


def test_alternating_layouts_and_addresses_give_right_results(backend: AttentionBackend) -> None:
    for seed in range(2):
        for case in CASES:
            inputs = inputs_of(case, seed)
            check(case, inputs, results(backend, inputs, case, backward=True))


def test_tensors_that_are_not_aligned_are_supported(backend: AttentionBackend) -> None:
    case = CASES[0]
    aligned = inputs_of(case)
    shifted = []
    for x in aligned:
        room = torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)
        shifted.append(room[1:].view(x.shape).copy_(x))
        assert shifted[-1].data_ptr() % 16
    check(case, aligned, results(backend, tuple(shifted), case, backward=True))


def in_thread(run: Callable[[], None]) -> None:
    raised: list[BaseException] = []

    def caught() -> None:
        try:
            run()
        except BaseException as error:  # otherwise a thread's exception would be lost
            raised.append(error)

    thread = threading.Thread(target=caught)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def test_first_cuda_call_of_a_thread_can_be_attention(backend: AttentionBackend) -> None:
    case = CASES[0]
    inputs = inputs_of(case)
    results(backend, inputs, case, backward=True)  # prepared, and memory for the outputs is cached
    got: list[Tensor] = []
    in_thread(lambda: got.extend(results(backend, inputs, case, backward=True)))
    check(case, inputs, got)


def test_threads_with_own_streams_get_their_own_results(backend: AttentionBackend) -> None:
    case = CASES[0]
    given = [inputs_of(case, seed) for seed in range(3)]
    torch.cuda.synchronize()
    got: list[list[Tensor]] = [[] for _ in given]

    def work(at: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                got[at] = results(backend, given[at], case, backward=True)
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(at,)) for at in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for inputs, found in zip(given, got, strict=True):
        check(case, inputs, found)


def test_graph_replays_on_new_data_beside_another_graph(backend: AttentionBackend) -> None:
    case = CASES[0]
    graphs, kept = [], []
    for seed in range(2):
        inputs = inputs_of(case, seed)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            results(backend, inputs, case, backward=True)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = results(backend, inputs, case, backward=True)
        graphs.append(graph)
        kept.append((inputs, out))
    for inputs, _ in kept:
        for x in inputs:
            x.copy_(torch.randn_like(x))
    torch.cuda.synchronize()
    for _ in range(10):  # both were captured on one stream, and now run at the same time on two streams
        for graph in graphs:
            with torch.cuda.stream(torch.cuda.Stream()):
                graph.replay()
    torch.cuda.synchronize()
    for inputs, out in kept:
        check(case, inputs, out)


def test_saved_tensors_may_come_back_at_other_addresses(backend: AttentionBackend) -> None:
    case = CASES[0]
    inputs = inputs_of(case)
    with torch.autograd.graph.save_on_cpu():
        got = results(backend, inputs, case, backward=True)
    check(case, inputs, got)


def test_checkpointed_attention_has_right_gradients(backend: AttentionBackend) -> None:
    case = CASES[0]
    inputs = inputs_of(case)
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out = checkpoint(lambda *qkv: backend(*qkv, **case.options), q, k, v, use_reentrant=False)
    check(case, inputs, [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])])


def test_tensors_of_different_devices_are_rejected(backend: AttentionBackend) -> None:
    q, k, v, _ = inputs_of(CASES[0])
    with pytest.raises(ValueError, match="q, k, v are on cuda:0, cpu, cuda:0; move them to one device"):
        backend(q, k.cpu(), v)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_device_is_taken_from_the_tensors(backend: AttentionBackend) -> None:
    case = CASES[0]
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        inputs = tuple(x.to(device) for x in inputs_of(case))
        check(case, inputs, results(backend, inputs, case, backward=True))
