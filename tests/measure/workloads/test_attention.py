"""Attention workload: phases and graphs of each mode, its description, costs and errors; real runs on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch

import cs_systems
from cs_systems.config import AttentionShape, Mode, Precision, RunConfig
from cs_systems.core import plugins
from cs_systems.formulas.cost import COMPUTE_BYTES
from cs_systems.machine.device import failed_allocation_bytes, resolve
from cs_systems.measure.workloads import Cell
from cs_systems.measure.workloads.attention import WORKLOAD, Attention, Problem, attention_call, random_leaves
from cs_systems.model.attention.naive import attention as naive
from cs_systems.record import RunRecord

SHAPE = AttentionShape(2, 4, 24, 16, causal=True)
TINY = RunConfig(
    workload="attention", shape=SHAPE, mode=Mode.FORWARD_BACKWARD, attention="naive", device="cpu", warmup=1, steps=3
)
CPU = resolve("cpu")
PHASES = {
    Mode.FORWARD: ("forward",),
    Mode.BACKWARD: ("backward",),
    Mode.FORWARD_BACKWARD: ("forward", "backward"),
}


def run(config: RunConfig) -> RunRecord:
    return cs_systems.run(config, in_process=True)


def step(workload: Attention) -> None:
    workload.prepare()
    for _, part in workload.step():
        part()


def supports(name: str, config: RunConfig) -> bool:
    call = attention_call(config, CPU)
    return plugins.get("attention", name).unavailable(call) is None


@pytest.mark.parametrize("mode", PHASES)
def test_mode_selects_phases_and_their_costs(mode: Mode) -> None:
    record = run(replace(TINY, mode=mode))
    assert record.status == "ok", record.reason
    assert record.measurement is not None
    assert record.measurement.phase_names() == PHASES[mode]
    costs = {row["phase"]: row for row in record.results["cost"] if row["phase"] != "step"}
    assert tuple(costs) == PHASES[mode]
    forward_flops = 4 * 2 * 4 * 24 * 24 * 16 // 2
    expected = {"forward": forward_flops, "backward": 2 * forward_flops}
    assert {phase: row["model_flops"] for phase, row in costs.items()} == {p: expected[p] for p in PHASES[mode]}
    assert record.results["memory"][0]["predicted_peak_bytes"] > 0


# Backends that compile take seconds per cell, so they are left out.
@pytest.mark.parametrize("name", [n for n in plugins.names("attention") if n not in ("flex", "compiled")])
def test_every_backend_runs_or_is_unavailable_with_reason(name: str) -> None:
    record = run(replace(TINY, attention=name))
    if supports(name, TINY):
        assert record.status == "ok", record.reason
        assert record.results["ran"][0]["attention"] == name
    else:
        assert record.status == "unavailable"
        assert (record.reason or "").startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (Precision.FP32, torch.float32),
        (Precision.BF16, torch.bfloat16),
        (Precision.BF16_PURE, torch.bfloat16),
        (Precision.FP16, torch.float16),
    ],
)
def test_tensors_have_the_dtype_of_the_precision(precision: Precision, dtype: torch.dtype) -> None:
    workload = WORKLOAD(Cell(replace(TINY, precision=precision)), CPU)
    step(workload)
    assert {leaf.dtype for leaf in workload.problem.leaves} == {dtype}
    assert workload._out is not None
    assert workload._out.dtype == dtype
    assert COMPUTE_BYTES[precision] == dtype.itemsize


def test_grouped_heads_and_longer_keys_match_naive() -> None:
    shape = AttentionShape(1, 4, 8, 16, causal=True, heads_kv=2, seq_k=12, align="lower_right")
    workload = WORKLOAD(Cell(replace(TINY, shape=shape)), CPU)
    step(workload)
    q, k, v = workload.problem.leaves
    assert (q.shape, k.shape) == ((1, 4, 8, 16), (1, 2, 12, 16))
    assert workload._out is not None
    torch.testing.assert_close(workload._out, naive(q, k, v, causal=True, align="lower_right"))


def test_backward_returns_gradients_without_accumulating() -> None:
    workload = WORKLOAD(Cell(TINY), CPU)
    step(workload)
    first = workload._gradients
    step(workload)
    assert first is not None
    assert workload._gradients is not None
    assert [g.shape for g in first] == [leaf.shape for leaf in workload.problem.leaves]
    torch.testing.assert_close(workload._gradients, first)
    assert all(leaf.grad is None for leaf in workload.problem.leaves)
    expected = torch.autograd.grad(
        naive(*workload.problem.leaves, causal=True), workload.problem.leaves, workload._out_gradient
    )
    torch.testing.assert_close(first, expected)


@pytest.mark.parametrize("name", ["naive", "sdpa_flash", "flash_torch"])
def test_backward_alone_runs_over_one_retained_graph(name: str) -> None:
    workload = WORKLOAD(Cell(replace(TINY, mode=Mode.BACKWARD, attention=name)), CPU)
    step(workload)
    out = workload._out
    step(workload)
    assert workload._out is out
    assert workload.describe()["graph"] == "retained"


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by torch while it traces
def test_graph_that_cannot_be_retained_is_rebuilt_untimed() -> None:
    """Compiled code for a backward that frees its graph reuses the graph's buffers."""
    compiled = torch.compile(naive, backend="aot_eager", fullgraph=True, dynamic=False)
    free, retaining = (
        WORKLOAD(
            Cell(config), CPU, Problem(compiled, random_leaves(config, CPU, *3 * [(2, 4, 24, 16)]), (2, 4, 24, 16))
        )
        for config in (TINY, replace(TINY, mode=Mode.BACKWARD))
    )
    step(free)
    step(retaining)
    assert retaining.describe()["graph"] == "rebuilt, untimed, before each step"
    out = retaining._out
    step(retaining)
    assert retaining._out is not out
    torch.testing.assert_close(retaining._gradients, free._gradients)


def test_error_in_backward_does_not_rebuild_the_graph() -> None:
    workload = WORKLOAD(Cell(replace(TINY, mode=Mode.BACKWARD)), CPU)
    workload.prepare()
    workload._out_gradient = torch.zeros(1)
    with pytest.raises(RuntimeError, match="shape"):
        workload._backward()
    assert workload.retain_graph


@pytest.mark.parametrize("keep_graph", [False, True])
def test_forward_records_a_graph_only_with_keep_graph(keep_graph: bool) -> None:
    config = replace(TINY, mode=Mode.FORWARD, keep_graph=keep_graph)
    workload = WORKLOAD(Cell(config), CPU)
    step(workload)
    assert workload._out is not None
    assert workload._out.requires_grad is keep_graph
    without, with_graph = (WORKLOAD.preflight(Cell(replace(config, keep_graph=k)), CPU) for k in (False, True))
    assert without is not None
    assert with_graph is not None
    assert without < with_graph


def test_same_seed_gives_the_same_inputs() -> None:
    leaves = [WORKLOAD(Cell(replace(TINY, seed=seed)), CPU).problem.leaves for seed in (0, 0, 1)]
    torch.testing.assert_close(leaves[0], leaves[1])
    assert not torch.equal(leaves[0][0], leaves[2][0])
    assert not torch.equal(leaves[0][0], leaves[0][1])


def test_description_names_the_backend() -> None:
    (ran,) = run(replace(TINY, attention="sdpa_flash")).results["ran"]
    assert ran["attention_version"] == f"torch {torch.__version__} scaled_dot_product_attention, FLASH_ATTENTION only"
    assert (ran["block_q"], ran["block_k"], ran["executed_d_head"]) == (24, 24, 16)  # no larger than the call
    assert ran["tokens"] == 2 * 24
    assert (ran["l2"], ran["graph"], ran["launches_hidden"]) == ("warm", None, False)
    (ran,) = run(TINY).results["ran"]
    assert (ran["block_q"], ran["block_k"], ran["executed_d_head"]) == (None, None, 16)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"precision": Precision.TF32}, "tf32 needs an NVIDIA GPU of compute capability 8.0 or newer; use fp32"),
        ({"l2": "clear"}, "l2 clear requires a GPU; use l2 warm"),
        ({"attention": "flex"}, "flex: FlexAttention has no backward on the CPU; use mode forward, or attention"),
    ],
)
def test_unavailable_cell_names_the_remedy(change: dict[str, object], reason: str) -> None:
    if change.get("attention") == "flex" and not supports("flex", replace(TINY, mode=Mode.FORWARD)):
        pytest.skip("torch.compile has no C++ compiler here")
    record = run(replace(TINY, **change))  # type: ignore[arg-type]
    assert (record.status, record.measurement) == ("unavailable", None)
    assert (record.reason or "").startswith(reason)


def test_user_attention_runs_without_declared_cost(tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    source.write_text(
        "def attend(q, k, v, *, causal=False, scale=None, align='upper_left'):\n"
        "    return (q @ k.transpose(-2, -1)).softmax(-1) @ v\n"
    )
    record = run(replace(TINY, attention=f"{source}:attend"))
    assert record.status == "ok", record.reason
    assert "cost" not in record.results
    assert record.results["memory"][0]["predicted_peak_bytes"] is None
    assert record.results["ran"][0]["attention_path"] == str(source)


def test_user_attention_may_require_every_argument_of_a_backend(tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    source.write_text("def attend(q, k, v, *, causal, scale, align, window=None): return q + k + v\n")
    shape = AttentionShape(1, 2, 4, 8, causal=True, window=2)
    for config in (TINY, replace(TINY, shape=shape)):
        record = run(replace(config, attention=f"{source}:attend"))
        assert (record.status, record.reason) == ("ok", None)


def test_oom_record_has_prediction_or_failed_allocation(tmp_path: Path) -> None:
    """Request 2^50 bytes of queries, which no allocator grants; an own function has no prediction."""
    shape = AttentionShape(batch=2**14, heads=2**6, seq=2**22, d_head=2**6)
    predicted = run(replace(TINY, shape=shape, attention="sdpa_flash"))
    source = tmp_path / "mine.py"
    source.write_text("def attend(q, k, v, *, causal, scale, align, window=None): return q + k + v\n")
    tried = run(replace(TINY, shape=shape, attention=f"{source}:attend"))
    assert (predicted.status, tried.status) == ("oom", "oom")
    assert predicted.results["memory"][0]["predicted_peak_bytes"] > 3 * 4 * 2**48
    assert predicted.results["memory"][0]["failed_allocation_bytes"] is None
    assert tried.results["memory"][0]["failed_allocation_bytes"] == 4 * 2**48


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB", 2**31),
        ("CUDA out of memory. Tried to allocate 20.50 MiB. GPU 0", 20 * 2**20 + 2**19),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes.", 2**33),
        ("CUDA out of memory.", None),
    ],
)
def test_failed_allocation_is_parsed_from_torch_message(message: str, expected: int | None) -> None:
    assert failed_allocation_bytes(RuntimeError(message)) == expected


GPU = replace(TINY, device="cuda", precision=Precision.BF16, attention="sdpa_flash", steps=20, warmup=5)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", PHASES)
def test_launches_of_short_kernels_are_hidden_on_gpu(mode: Mode) -> None:
    record = run(replace(GPU, mode=mode))
    assert record.status == "ok", record.reason
    assert record.measurement is not None
    assert record.results["ran"][0]["launches_hidden"] is True
    assert "launch-bound" not in [w.code for w in record.warnings]
    lags = []
    for sample in record.measurement.timed:
        assert sample.held_s is not None
        assert sample.held_s > 0
        assert sample.wall_s == pytest.approx(sum(sample.phases_s.values()), rel=1e-3, abs=1e-6)
        assert sample.lag_s is not None
        lags.append(min(sample.lag_s.values()))
    assert median(lags) > 0  # the host finished each phase before the device


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["naive", "sdpa_flash"])
@pytest.mark.parametrize("l2", ["clear", "warm"])
def test_peak_matches_its_formula_on_gpu(attention: str, l2: str) -> None:
    shape = AttentionShape(4, 16, 2048, 64, causal=True)
    before = torch.cuda.memory_allocated()  # left by other tests of this process, such as cuBLAS workspaces
    record = run(replace(GPU, shape=shape, attention=attention, l2=l2, steps=3))
    assert record.status == "ok", record.reason
    (memory,) = record.results["memory"]
    expected = before + memory["predicted_peak_bytes"]
    # cuBLAS keeps 32 MiB for each of two threads.
    assert memory["peak_allocated_bytes"] == pytest.approx(expected, rel=0.02, abs=70 * 2**20)


@pytest.mark.gpu
def test_memory_limit_causes_oom_on_gpu() -> None:
    shape = AttentionShape(8, 16, 4096, 64)
    record = run(replace(GPU, shape=shape, attention="naive", memory_limit_bytes=2 * 2**30))
    assert record.status == "oom"
    (memory,) = record.results["memory"]
    assert memory["failed_allocation_bytes"] == 8 * 16 * 4096**2 * 2
    assert memory["predicted_peak_bytes"] > memory["memory_limit_bytes"]
    assert run(replace(GPU, steps=3)).status == "ok"  # the next cell finds the memory free and the limit gone
