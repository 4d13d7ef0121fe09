"""Tests of memory prediction: allocator rounding, committed GPU records, largest sizes and suggested changes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_systems.config import AttentionShape, ConfigError, Mode, ModelConfig, Precision, RunConfig, preset
from cs_systems.core import plugins
from cs_systems.formulas.cost import COMPUTE_BYTES, recomputed_flops
from cs_systems.formulas.memory.allocator import CUBLAS_WORKSPACE_BYTES, rounding
from cs_systems.formulas.memory.attention import attention_memory
from cs_systems.formulas.memory.fit import algorithm_of, cheapest_plan, fits, needed_bytes, plans
from cs_systems.formulas.memory.model import phase_memory, step_memory
from cs_systems.formulas.sdpa import KERNELS
from cs_systems.model.attention import AttentionCall
from cs_systems.record import RunRecord, read_records

MIB, GIB = 2**20, 2**30
PROFILES = Path(__file__).parents[3] / "profiles"


@cache
def measured() -> list[RunRecord]:
    """Return all committed records."""
    return [record for file in sorted(PROFILES.glob("*/records.jsonl")) for record in read_records(file)[0]]


@pytest.mark.parametrize(
    ("size", "count", "extra_bytes"),
    [
        (100, 3, 3 * 412),  # rounded up to 512 bytes
        (9 * MIB, 4, 0),  # two tensors in a block of 20 MiB, with 2 MiB split off
        (1600 * 1600 * 4, 4, 2 * (20 * MIB - 2 * 1600 * 1600 * 4)),  # two in a block, with 0.47 MiB unused
        (25 * MIB, 10, 10 * MIB),  # each in a block of 26 MiB
        (1600 * 6400 * 4, 2, 2 * 15 * MIB // 16),
        (24 * MIB + MIB // 2, 1, 0),  # in a block of 26 MiB, with 1.5 MiB split off
    ],
)
def test_rounding_matches_allocator_blocks(size: int, count: int, extra_bytes: int) -> None:
    assert rounding(size, count) == extra_bytes


@given(size=st.integers(1, 200 * MIB))
def test_rounding_of_one_tensor_is_at_most_a_mebibyte(size: int) -> None:
    assert 0 <= rounding(size, 1) <= MIB


def test_predicted_peaks_match_committed_records() -> None:
    """Eager steps of every size, precision and context on an H200 are within 5%, half of them within 0.2%.

    The records were measured when a block held q and k as they were before the rotation through attention's forward.
    """
    checked, off = 0, {}
    for record in measured():
        config = record.run_config
        if config.workload != "train_step" or config.compile != "none" or config.precision not in ("fp32", "bf16"):
            continue
        peak = record.measurement and record.measurement.peak_allocated_bytes
        if peak and not config.is_distributed:
            on_gpu = replace(config, device="cuda")
            predicted = step_memory(on_gpu, algorithm_of(on_gpu)).peak_bytes
            checked, off[config] = checked + 1, abs(predicted / peak - 1)
    assert checked >= 250
    assert median(off.values()) < 0.002
    worst = max(off, key=lambda config: off[config])
    assert off[worst] < 0.05, worst


def test_predicted_naive_attention_peaks_match_committed_records() -> None:
    """The tensors are few and large, so the records of an H200 differ by less than 1 MiB."""
    checked = 0
    for record in measured():
        config = record.run_config
        peak = record.measurement and record.measurement.peak_allocated_bytes
        if config.workload == "attention" and config.attention == "naive" and config.shape and peak:
            algorithm, element = algorithm_of(replace(config, device="cuda")), COMPUTE_BYTES[config.precision]
            predicted = attention_memory(config.shape, config.mode, element, algorithm, cuda=True).peak_bytes
            assert abs(predicted - peak) < MIB, config
            checked += 1
    assert checked >= 60


def test_predicted_sdpa_flash_peaks_match_committed_records() -> None:
    """sdpa_flash pads queries to 128 and d_head to 32.

    Below a d_head of 8 it pads copies of its inputs, so those records are left out. A few small cells on an H200 took
    up to 6 MiB more, in blocks that were not split.
    """
    off = {}
    for record in measured():
        config, shape = record.run_config, record.run_config.shape
        peak = record.measurement and record.measurement.peak_allocated_bytes
        eager = (config.workload, config.attention, config.compile) == ("attention", "sdpa_flash", "none")
        if eager and config.device != "cpu" and shape and shape.d_head >= 8 and peak:
            dtype = {"bf16": "bfloat16", "fp16": "float16"}[config.precision.value]
            call = AttentionCall("cuda", dtype, shape.d_head, shape.seq, shape.key_length, shape.heads, shape.kv_heads)
            algorithm = plugins.get("attention", "sdpa_flash").algorithm(call)
            off[config] = attention_memory(shape, config.mode, 2, algorithm, cuda=True).peak_bytes - peak
    assert len(off) >= 60
    assert max(map(abs, off.values())) < 6 * MIB
    assert sum(abs(size) < MIB for size in off.values()) > 0.9 * len(off)


@pytest.mark.parametrize(("d_head", "seq", "rows"), [(64, 100, 128), (128, 100, 128), (128, 150, 160), (128, 80, 80)])
def test_attention_workspace_pads_query_gradient_to_whole_tiles(d_head: int, seq: int, rows: int) -> None:
    """`d_head` is padded; `rows` are those that flash_cuda sums in fp32."""
    shape = AttentionShape(batch=2, heads=3, seq=seq, d_head=d_head - 8)
    call = AttentionCall("cuda", "bfloat16", shape.d_head, seq, seq, 3, 3)
    algorithm = plugins.get("attention", "flash_cuda").algorithm(call)
    instants = attention_memory(shape, Mode.FORWARD_BACKWARD, 2, algorithm).instants
    assert instants["backward"]["workspace"] == 2 * 3 * rows * (4 + 4 * d_head)


def test_step_workspace_pads_query_gradient_to_whole_tiles() -> None:
    """The backend pads 150 queries of d_head 80 to 160 rows of 128."""
    model = ModelConfig("odd", 160, 256, num_layers=2, num_heads=2, vocab_size=64, context_length=150)
    config = RunConfig(model=model, batch_size=3, precision=Precision.BF16, device="cuda", mode=Mode.FORWARD_BACKWARD)
    algorithm = plugins.get("attention", "flash_cuda").algorithm(AttentionCall("cuda", "bfloat16", 80, 150, 150, 2, 2))
    padded, exact = (
        step_memory(config, declared).instants["backward: attention of block 1"]["workspace"]
        for declared in (algorithm, replace(algorithm, d_head=None, dq_accumulator_d_head=None, padded_queries=1))
    )
    assert padded - exact == 3 * 2 * (160 * 128 - 150 * 80) * 4


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("name", plugins.names("attention"))
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_declared_memory_of_backends_matches_their_modules(name: str, device: str, precision: Precision) -> None:
    from cs_systems.measure.workloads._calls import COMPUTE_DTYPES

    call = AttentionCall(device, COMPUTE_DTYPES[precision], 64, 512, 512, 8, 8, causal=True)
    backend = plugins.get("attention", name)
    if device == "cpu" and (reason := backend.unavailable(call)):
        pytest.skip(reason)
    declared = backend.algorithm(call)
    known = algorithm_of(RunConfig(attention=name, precision=precision, device=device))
    kept = ("score_matrices", "autocast_score_matrices", "dq_accumulator_bytes", "output_by_position", "torch_matmul")
    for field in kept:
        assert getattr(known, field) == getattr(declared, field), f"declare {field} in keeps of {name}"
    assert (known.block_q is None) == (declared.block_q is None)


@pytest.mark.parametrize("name", plugins.names("attention"))
def test_literals_of_a_backend_are_read_without_its_module(name: str) -> None:
    backend, declared = plugins.get("attention", name), plugins.declared("attention", name)
    for field in ("rounds_scores", "full_matrix", "keeps", "torch_kernel", "one_operator"):
        assert declared.get(field) == (getattr(backend, field) or None), field
    assert backend.torch_kernel in (None, *KERNELS)


def test_memory_of_custom_attention_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"the memory that attention json:loads needs is unknown; use a built-in one"):
        algorithm_of(RunConfig(attention="json:loads"))


def test_kernel_that_cannot_run_the_model_is_not_predicted() -> None:
    fields: dict[str, Any] = {"model": preset("small"), "device": "cuda", "attention": "sdpa_flash"}
    with pytest.raises(ConfigError, match="attention sdpa_flash cannot run this model on a GPU: query, key and value"):
        fits(RunConfig(precision=Precision.FP32, **fields), 24 * GIB)
    assert fits(RunConfig(precision=Precision.BF16, **fields), 24 * GIB).fits


def test_fitting_config_has_no_changes_and_exact_largest_sizes() -> None:
    fit = fits(RunConfig(model=preset("small"), device="cuda"), 24 * GIB)
    assert fit.fits
    assert (fit.changes, fit.first) == ((), ())
    for field, value in (("batch_size", fit.largest_batch), ("context", fit.largest_context)):
        small = preset("small")
        for n, expected in ((value, True), (value + 1, False)):
            changed = (
                RunConfig(model=small, batch_size=n, device="cuda")
                if field == "batch_size"
                else RunConfig(model=replace(small, context_length=n), device="cuda")
            )
            assert (needed_bytes(changed) <= 24 * GIB) is expected, (field, n)


def test_config_that_does_not_fit_lists_changes_in_order() -> None:
    config = RunConfig(model=preset("medium"), precision=Precision.BF16, device="cuda")
    fit = fits(config, 8 * GIB)
    assert not fit.fits
    assert [change.what.split()[0] for change in fit.changes] == [
        "--attention", "--checkpoint", "--batch-size", "--context-length",
    ]  # fmt: skip
    assert not fit.changes[0].fits
    assert [change.what.split()[0] for change in fit.first] == ["--attention", "--checkpoint"]
    assert needed_bytes(fit.first[-1].config) <= 8 * GIB


def test_shorter_context_is_the_last_suggested_change() -> None:
    config = RunConfig(model=preset("small", context_length=8192), batch_size=16, device="cuda")
    fit = fits(config, 8 * GIB)
    assert [c.what for c in fit.changes if c.fits] == ["--context-length 297"]
    assert [c.what.split()[0] for c in fit.first] == ["--attention", "--checkpoint", "--precision", "--batch-size"]
    assert fit.first[-1].fits
    assert not any(change.fits for change in fit.first[:-1])


def test_parameters_larger_than_memory_have_no_fitting_change() -> None:
    fit = fits(RunConfig(model=preset("8B"), device="cuda"), 24 * GIB)
    assert (fit.fits, fit.first, fit.largest_batch, fit.largest_context) == (False, (), 0, 0)


def test_cheapest_plan_recomputes_least_of_fitting_plans() -> None:
    config = RunConfig(model=preset("medium", context_length=1024), attention="sdpa_flash", precision=Precision.BF16)
    best = cheapest_plan(config, 10 * GIB)
    assert best is not None
    algorithm = algorithm_of(config)

    def flops(plan: str) -> int:
        return recomputed_flops(config.model, 4, 1024, algorithm, plan)

    cheaper = [plan for plan in plans(config) if flops(plan) < flops(best.config.checkpoint)]
    assert cheaper
    assert all(needed_bytes(replace(config, checkpoint=plan)) > 10 * GIB for plan in cheaper)
    unbounded = cheapest_plan(config, 200 * GIB)
    assert unbounded is not None
    assert unbounded.config.checkpoint == "none"
    assert cheapest_plan(config, GIB) is None


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.FORWARD_BACKWARD, Mode.TRAIN_STEP])
def test_phase_memory_lists_phases_of_first_two_steps(mode: Mode) -> None:
    config = RunConfig(model=preset("small"), mode=mode, device="cuda")
    rows = phase_memory(config, algorithm_of(config))
    phases = [(row.step, row.phase) for row in rows]
    assert phases[0] == (0, "built")
    assert [step for step, _ in phases[1:]] == sorted([1, 2] * ((len(phases) - 1) // 2))
    whole = step_memory(config, algorithm_of(config))
    assert max(row.peak_bytes for row in rows if row.step == 2) == whole.peak_bytes
    assert all(row.peak_bytes >= row.allocated_bytes for row in rows)
    built = rows[0].components
    assert built["cublas_workspaces"] == 0
    assert rows[1].components["cublas_workspaces"] == CUBLAS_WORKSPACE_BYTES
    if mode is Mode.TRAIN_STEP:
        by = {(row.step, row.phase): row for row in rows}
        assert "optimizer_state" not in by[1, "backward"].components, "AdamW makes its state in its first step"
        state = by[2, "forward"].components["optimizer_state"]
        assert by[1, "optimizer"].components["optimizer_state"] == state == 2 * built["parameters"]
