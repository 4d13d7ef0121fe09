"""Limits of the rules of diagnosis: each rule is silent on one side of its limit and speaks on the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cs_systems.analysis.diagnosis import Diagnosis, Rule, Unknown, apply_rules, ranked
from cs_systems.analysis.diagnosis._evidence import Evidence, of_trace
from cs_systems.analysis.diagnosis._memory_use import MemoryUse
from cs_systems.config import RunConfig
from cs_systems.core import plugins
from cs_systems.record import Measurement, Sample
from cs_systems.report import diagnoses
from tests.analysis.diagnosis.test_loop_rules import LOOP, own
from tests.analysis.diagnosis.test_loop_rules import TRIED as OF_LOOPS
from tests.analysis.diagnosis.test_memory_rules import TRIED as OF_MEMORY
from tests.analysis.diagnosis.test_odd_recordings import TRIED as OF_ODD
from tests.analysis.diagnosis.test_rank_rules import TRIED as OF_RANKS
from tests.analysis.diagnosis.test_recordings import TRIED as OF_RECORDINGS
from tests.analysis.diagnosis.test_rules import (
    CHECKPOINTED,
    ELEMENTWISE,
    FOREACH,
    FP32_GEMM,
    H200,
    OPTIMIZER,
    PLANTED,
    RANKS,
    SCORES,
    SLOW,
    cold_recording,
    measured,
    timed,
    traced,
    with_tables,
)
from tests.analysis.diagnosis.test_trace_rules import TRIED as OF_TRACES

GIB = 1 << 30


def found(rule: str, evidence: Evidence) -> Diagnosis | Unknown | None:
    named: Rule = plugins.get("diagnosis", rule)
    return named.find(evidence)


def in_memory(size: int, of: str = "", peak: int = 0, reserved: int | None = None, phase: str = "backward") -> Evidence:
    return Evidence(memory=MemoryUse(peak, reserved, phase, {of: size}))


def phase_of(time_s: float, *, flops: float, peak_flops_per_s: float, **config: Any) -> Evidence:
    """Return the evidence of a step of one phase, forward, with a least time of flops / peak_flops_per_s."""
    sample = Sample(0, False, time_s, {"forward": time_s}, {"forward": time_s})
    tables: Any = {
        "cost": [{"phase": "forward", "hardware_flops": flops}],
        "ceiling": [{"peak_flops_per_s": peak_flops_per_s}],
    }
    measurement = Measurement("cuda_event", (sample,) * 4, 0.0)
    return Evidence(tables, measurement, RunConfig(**config), H200)


def late(longest_s: float | None) -> Evidence:
    gaps: Any = [{"device": 0, "cause": "device latency", "time_s": 10.0, "longest_s": longest_s}]
    return of_trace({"gaps": gaps, "steps": [{"step": 0, "device": 0, "wall_s": 100.0}]}, H200)  # type: ignore[typeddict-item]


# rule and limit → (evidence without the fault by a hair, evidence with it by a hair)
LIMITS: dict[str, tuple[Evidence, Evidence]] = {
    "below_ceiling: 3 times the least time": (
        phase_of(0.75, flops=256, peak_flops_per_s=1024), phase_of(0.7501, flops=256, peak_flops_per_s=1024),
    ),
    "fragmentation: a tenth of the reserved memory": (
        in_memory(0, peak=18 * GIB + 1, reserved=20 * GIB), in_memory(0, peak=18 * GIB, reserved=20 * GIB),
    ),
    "fragmentation: 1 GiB": (
        in_memory(0, peak=4 * GIB + 1, reserved=5 * GIB), in_memory(0, peak=4 * GIB, reserved=5 * GIB),
    ),
    "kept_activations: 40% of the peak": (
        in_memory(4 * GIB - 1, "activations", peak=10 * GIB), in_memory(4 * GIB, "activations", peak=10 * GIB),
    ),
    "loss_spike: 15% of the peak": (
        in_memory(3 * GIB - 1, "logits", peak=20 * GIB), in_memory(3 * GIB, "logits", peak=20 * GIB),
    ),
    "optimizer_state: 30% of the peak": (
        in_memory(3 * GIB - 1, "optimizer state", peak=10 * GIB), in_memory(3 * GIB, "optimizer state", peak=10 * GIB),
    ),
    "late_kernels: one wait of a tenth of all": (late(0.999), late(1.0)),
    "unused_tensor_cores: products fill a quarter of the phase": (
        phase_of(4.0, flops=67e12, peak_flops_per_s=67e12), phase_of(4.0, flops=67.1e12, peak_flops_per_s=67e12),
    ),
    "straggler: 2 ranks": (
        timed(tables={"ranks": [{"rank": 0, "wait_s": 0.04}]}),
        timed(tables={"ranks": [{"rank": 0, "wait_s": 0.04}, {"rank": 1, "wait_s": 0.01}]}),
    ),
    "exposed_communication: 2 ranks": (
        timed(replace(RANKS, world_size=1), tables={"overlap": [{"rank": 0, "exposed_s": 0.05, "step_s": 0.2}]}),
        timed(replace(RANKS, world_size=2), tables={"overlap": [{"rank": 0, "exposed_s": 0.05, "step_s": 0.2}]}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("limit", LIMITS)
def test_rule_gives_a_diagnosis_on_one_side_of_its_limit(limit: str) -> None:
    rule, (silent, speaking) = limit.partition(":")[0], LIMITS[limit]
    assert found(rule, silent) is None
    assert found(rule, speaking) is not None


def test_gain_of_a_twentieth_is_worth_a_change() -> None:
    worth, less = Diagnosis("a", "", 20.0, 19.0), Diagnosis("b", "", 20.0, 19.001)
    assert ranked([less, worth]) == (worth,)


def test_three_sentences_are_shown() -> None:
    gaps = [{"device": 0, "cause": cause, "time_s": 0.02} for cause in ("copy", "launch-bound")]
    four = apply_rules(with_tables(gaps=gaps, phases=[*ELEMENTWISE, *OPTIMIZER], kernels=FOREACH))
    assert len(four.diagnoses) == 4
    assert len(diagnoses.text(four, "markdown").strip().splitlines()) == 3


OF_RECORDING = ("start-up",)  # needs no step
TIMES = {
    fault: evidence
    for fault, (evidence, *_) in PLANTED.items()
    if evidence.memory is None and fault not in OF_RECORDING
}


@pytest.mark.parametrize("fault", TIMES)
def test_rule_needs_the_duration_of_a_step(fault: str) -> None:
    evidence, rule = TIMES[fault], fault.partition(",")[0].replace("-", "_")
    tables: Any = {name: rows for name, rows in evidence.tables.items() if name not in ("steps", "overlap", "overhead")}
    assert found(rule, replace(evidence, measurement=None, tables=tables)) is None


GRID: dict[str, Any] = {"kernel": "few", "family": "other", "time_s": 0.06, "mean_s": 0.06, "grid": "2×4×1"}
# rule → evidence of a step that lacks its fault, or a number that shows it
SILENT: dict[str, tuple[Evidence, ...]] = {
    "blocking_copies": (with_tables(), timed()),
    "data_input": (with_tables(), timed()),
    "device_allocation": (with_tables(), timed()),
    "host_synchronisation": (with_tables(), timed()),
    "exposed_communication": (
        with_tables(), timed(), timed(RANKS, tables={"overlap": [{"rank": 0, "exposed_s": 0.05}]}),
    ),
    "recompilation": (
        timed(), timed(measurement=measured(compiles=1)), timed(measurement=measured(compile_s=0.1)), with_tables(),
    ),
    "recomputation": (
        timed(), with_tables(),
        *(replace(PLANTED["recomputation"][0], **lacking) for lacking in (
            {"device_bytes": None}, {"device_bytes": 1 << 30}, {"tables": {}}, {"config": None},
        )),
    ),
    "straggler": (timed(), timed(tables={"ranks": [{"rank": r, "wait_s": w} for r, w in ((0, 0.04), (1, None))]})),
    "unfused_attention": (with_tables(), timed(), with_tables(attention=SCORES)),
    "unfused_elementwise": (
        with_tables(phases=[]), timed(),
        with_tables(phases=ELEMENTWISE, kernels=[{"kernel": "triton_poi_0", "family": "elementwise", "time_s": 0.04}]),
        with_tables(phases=[{**ELEMENTWISE[0], "phase": "optimizer"}]),
    ),
    "unfused_optimizer": (
        with_tables(), timed(), of_trace(traced(kernels=FOREACH, phases=OPTIMIZER), None),  # type: ignore[arg-type]
        with_tables(kernels=FOREACH, phases=[]),
    ),
    "unused_tensor_cores": (
        with_tables(), timed(), of_trace(traced(kernels=FP32_GEMM, phases=[]), None),  # type: ignore[arg-type]
        of_trace(traced(kernels=FP32_GEMM, phases=[]), "an unknown GPU"),  # type: ignore[arg-type]
    ),
    "slow_products": (with_tables(phases=[]), timed(), timed(RunConfig(), tables={"phases": SLOW})),
    "double_precision": tuple(
        with_tables(kernels=[{"kernel": name, "family": "matmul", "time_s": time_s}], phases=[])
        for name, time_s in (("cutlass_dgemm_64x64", 0.009), ("cutlass::GroupedGemm<bfloat16_t>", 0.09))
    ),
    **{
        rule: (timed(), with_tables(kernels=[{"kernel": name, "family": "matmul", "time_s": time_s}], phases=[]))
        for rule, name, time_s in (
            ("layout_conversions", "cudnn::nchwToNhwcKernel", 0.009),
            ("index_gradients", "indexing_backward_kernel<float>", 0.019),
        )
    },
    "cached_memory": (
        timed(), in_memory(0, peak=10), Evidence(memory=MemoryUse(10, 10 << 40, None, {}, unusable_bytes=9 << 40)),
    ),
    "late_kernels": (with_tables(), timed(), late(None)),
    "host_time": (with_tables(), timed(), with_tables(gaps=[{"device": 0, "cause": "host", "time_s": 0.03}])),
    "small_grids": (with_tables(), timed(), with_tables(kernels=[GRID | {"grid": "3×3×1"}])),
    "own_python": (timed(LOOP, Measurement("monotonic", (Sample(0, False, 1.0, {"other": 0.0}, {"other": 0.0}),), 0.0),
                         tables={"own_python": [own("f", 8, 0.5)]}), timed()),
    "own_products": (
        timed(),
        *(
            with_tables(kernels=[{"kernel": name, "family": "matmul", "time_s": 0.08, "mean_s": 0.04}])
            for name in (
                "volta_sgemm_128x64_nn", "matmul_wmma(float *)", "at::native::conv2d(float *)", "add(float *)",
                "explicit_convolve_sgemm(int, float const*, int)",
            )
        ),
    ),
    "start_up": (with_tables(), timed(), replace(with_tables(), usual=replace(cold_recording(), start_up_s=0.0))),
    "launch_bound": (Evidence({"overlap": [{"step_s": 1.0}]}), timed()),  # type: ignore[dict-item, list-item, typeddict-item]
    "below_ceiling": (
        with_tables(), timed(),
        *(replace(PLANTED["below-ceiling"][0], **lacking) for lacking in (
            {"config": None}, {"device_name": None}, {"tables": {}},
            {"config": RunConfig(workload="attention", mode="forward")},  # type: ignore[arg-type]
        )),
    ),
    "fragmentation": (in_memory(0, peak=1, reserved=None), timed()),
    "kept_activations": (timed(), replace(in_memory(9, "activations", peak=10), config=CHECKPOINTED)),
    "kept_gradients": (
        timed(), in_memory(0, "gradients", peak=10, phase="forward"), in_memory(5, "gradients", peak=10),
    ),
    "loss_spike": (timed(),),
    "optimizer_state": (timed(),),
    "score_matrices": (timed(), in_memory(0, "attention scores", peak=10)),
}  # fmt: skip


@pytest.mark.parametrize("rule", SILENT)
def test_rule_is_silent_without_its_fault(rule: str) -> None:
    for number, evidence in enumerate(SILENT[rule]):
        assert found(rule, evidence) is None, number


def test_every_rule_is_tried_without_its_fault() -> None:
    elsewhere = {
        name.replace("-", "_") for name in (*OF_LOOPS, *OF_MEMORY, *OF_RANKS, *OF_ODD, *OF_RECORDINGS, *OF_TRACES)
    }
    assert SILENT.keys() | elsewhere == {*plugins.names("diagnosis")}


LEFT = {"synchronize": 0.3}
# rule → evidence, what is left at best and words of the cause; in exact numbers
BOUNDS: dict[str, tuple[Evidence, float, str]] = {
    "kept_activations": (in_memory(4 * GIB, "activations", peak=10 * GIB), 6 * GIB, "activations take 40%"),
    "launch_bound": (
        with_tables(gaps=[{"device": 0, "cause": "copy", "time_s": 0.03}]), 0.1, "0% of the step the GPU waits",
    ),
    "exposed_communication": (
        timed(RANKS, Measurement("cuda_event", (Sample(0, False, 0.1, LEFT, LEFT),) * 4, 0.0)),
        0.0,
        "100% of the step is communication",
    ),
    "recompilation": (
        timed(measurement=replace(m := measured(), samples=(
            replace(m.samples[0], compiles=1, compile_s=0.5), *m.samples[1:],
        ))), 0.05, "code was compiled once while timed",
    ),
    "straggler": (
        timed(tables={"ranks": [{"rank": r, "wait_s": w} for r, w in ((0, 0.01), (1, 0.04), (2, 0.02))]}),
        0.07, "rank 1 waits 30% of the step for rank 0",
    ),
    "straggler: ahead in three phases, and again after a join": (
        timed(tables={"ranks": [
            {"rank": rank, "wait_s": wait_s}
            for rank, all_waits in ((0, (0.02, 0.02, 0.03, 0.0, 0.01)), (1, (0.0,) * 5)) for wait_s in all_waits
        ]}), 0.06, "rank 0 waits 40% of the step for rank 1",
    ),
    "unfused_optimizer: no more than the step": (
        with_tables(kernels=FOREACH, phases=[OPTIMIZER[0] | {"time_s": 0.2}]), 0.1 - 0.2 + 0.2 * 7 / 20,
        "the optimizer takes 100% of the step",
    ),
    "slow_products": (with_tables(phases=[SLOW[0] | {"ceiling_share": 0.8}]), 0.1, "take 80% of the step at 80%"),
    "slow_products: unknown": (with_tables(phases=[SLOW[0] | {"ceiling_share": None}]), 0.02, "of the step at 0%"),
}  # fmt: skip


@pytest.mark.parametrize("case", BOUNDS)
def test_bound_of_a_rule_is_exact(case: str) -> None:
    evidence, at_best, words = BOUNDS[case]
    answer = found(case.partition(":")[0], evidence)
    assert answer is not None
    assert answer.at_best == pytest.approx(at_best, rel=1e-12, abs=1e-15)
    assert words in answer.cause


def test_rows_behind_a_diagnosis_have_its_numbers() -> None:
    recompiled = found("recompilation", timed(measurement=measured(compiles=2, compile_s=0.05)))
    assert isinstance(recompiled, Diagnosis)
    assert recompiled.evidence == ({"compiles": 20, "compile_s": pytest.approx(0.5), "steps": 10},)
