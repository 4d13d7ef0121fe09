"""Rules of diagnosis: each finds the fault that is planted for it, bounds its gain, and is silent on clean numbers."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cs_systems.analysis.attribution.profile import Profile, profile
from cs_systems.analysis.attribution.timeline import results
from cs_systems.analysis.attribution.usual_steps import Apart, Usual
from cs_systems.analysis.diagnosis import (
    MOST,
    NO_ANSWER,
    WORTH,
    Answer,
    Diagnosis,
    Expected,
    apply_rules,
    diagnose,
    without_options,
)
from cs_systems.analysis.diagnosis._evidence import TABLES, Evidence, of_records, of_snapshot, of_trace
from cs_systems.analysis.diagnosis._findings import ranked
from cs_systems.analysis.diagnosis._measured import with_part
from cs_systems.analysis.diagnosis._memory_use import MemoryUse
from cs_systems.analysis.memory.allocations import replay
from cs_systems.analysis.memory.categories import attribute
from cs_systems.analysis.memory.tensor_names import tensor_names
from cs_systems.cli._output import joined
from cs_systems.config import FIELDS, RunConfig, preset
from cs_systems.core import plugins
from cs_systems.core.caveats import Caveat
from cs_systems.readers import read as read_trace
from cs_systems.readers.forms.columns import NO_RANGES, Categorical
from cs_systems.readers.forms.trace import NO_KERNELS, Trace
from cs_systems.readers.snapshot import read
from cs_systems.record import Measurement, RunRecord, Sample, read_records
from cs_systems.report import diagnoses
from tests.analysis.diagnosis.test_loop_rules import TRIED as OF_LOOPS
from tests.analysis.diagnosis.test_memory_rules import TRIED as OF_MEMORY
from tests.analysis.diagnosis.test_odd_recordings import TRIED as OF_ODD
from tests.analysis.diagnosis.test_rank_rules import TRIED as OF_RANKS
from tests.analysis.diagnosis.test_recordings import TRIED as OF_RECORDINGS
from tests.analysis.diagnosis.test_trace_rules import TRIED as OF_TRACES
from tests.analysis.diagnosis.whole_rows import whole
from tests.recorded import MAIN

PROFILES = Path(__file__).parents[3] / "profiles"
STEP_S, PEAK = 0.1, 100 << 30
H200 = "NVIDIA H200"
PHASES = {"forward": 0.03, "loss": 0.002, "backward": 0.06, "optimizer": 0.008}


def measured(walls: list[float] | None = None, lag: float = 0.9, **known: Any) -> Measurement:
    """Return a measurement with these walls; with a small lag, the device waited for launches in every phase."""
    phases = {name: known.pop(name, time_s) for name, time_s in PHASES.items()} | known.pop("others", {})
    lags = {name: lag * time_s for name, time_s in phases.items()}
    made = [Sample(0, False, wall, phases, phases, lags, **known) for wall in walls or [STEP_S] * 10]
    return Measurement("cuda_event", tuple(made), 0.0)


def traced(**tables: Any) -> dict[str, Any]:
    """Return the tables of a step that keeps the GPU busy with fused kernels, with others in the place of some."""
    busy: dict[str, Any] = {
        "steps": [{"step": 0, "device": 0, "wall_s": STEP_S, "busy_share": 0.98}],
        "gaps": [{"device": 0, "cause": "device latency", "time_s": 0.002}],
        "phases": [
            {"phase": "forward", "family": "all", "time_s": 0.03, "calls_per_step": 90.0},
            {"phase": "forward", "family": "matmul", "time_s": 0.028, "calls_per_step": 60.0, "ceiling": "compute",
             "ceiling_share": 0.75},
            {"phase": "forward", "family": "elementwise", "time_s": 0.001, "calls_per_step": 9.0},
            {"phase": "optimizer", "family": "all", "time_s": 0.008, "calls_per_step": 3.0},
        ],
        "families": [{"family": "matmul", "time_s": 0.08}, {"family": "attention", "time_s": 0.01}],
        "kernels": [
            {"kernel": "nvjet_sm90_tst_128x256_64x4", "family": "matmul", "time_s": 0.08},
            {"kernel": "multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata>", "family": "optimizer",
             "time_s": 0.008},
        ],
    }  # fmt: skip
    return busy | tables


RANKS = RunConfig(  # type: ignore[arg-type]
    precision="bf16", optimizer="adamw_fused", attention="sdpa_flash", world_size=2, strategy="ddp_flat"
)


def timed(config: RunConfig | None = None, measurement: Measurement | None = None, **known: Any) -> Evidence:
    """Return the evidence of a timed training step in bf16 near its ceiling."""
    costs = [{"phase": name, "hardware_flops": time_s * 0.4e15, "bytes": 1e6} for name, time_s in PHASES.items()]
    ceiling = [{"peak_flops_per_s": 0.9895e15, "peak_bytes_per_s": 4.8e12}]
    tables: Any = {"cost": costs, "ceiling": ceiling} | known.pop("tables", {})
    config = config or RunConfig(precision="bf16", optimizer="adamw_fused", attention="sdpa_flash")  # type: ignore[arg-type]
    return Evidence(tables, measurement or measured(), config, H200, PEAK, **known)


def causes(evidence: Evidence) -> list[Diagnosis]:
    return [*apply_rules(evidence).diagnoses]


def gap(cause: str, time_s: float = 0.03) -> Evidence:
    return of_trace(traced(gaps=[{"device": 0, "cause": cause, "time_s": time_s}]), H200)  # type: ignore[arg-type]


def with_tables(**tables: Any) -> Evidence:
    return of_trace(traced(**tables), H200)  # type: ignore[arg-type]


def in_memory(phase: str = "backward", reserved: int = PEAK, **categories: int) -> Evidence:
    named = {name.replace("_", " "): size << 30 for name, size in categories.items()}
    return Evidence(memory=MemoryUse(PEAK, reserved, phase, named))


def cold_recording() -> Usual:
    """Return the usual steps of 15, of which the first took 0.8 s."""
    trace = Trace("made", "other", {}, NO_KERNELS, [], [], NO_RANGES, [], None, ())
    empty = Profile(trace, (), Categorical([], np.empty(0, np.int64)), {}, {}, {}, ())
    apart = (Apart("start-up", (0,), 0.8, STEP_S),)
    causes = ("600 ms in first kernel launches",)
    return Usual(empty, STEP_S, "steps 1–14 of 15", apart, 2.3, start_up=causes, start_up_s=0.7)


OWN = "void conv1d_kernel(float *, int)"
FP32_GEMM = [{"kernel": "cutlass_80_simt_sgemm_128x64_8x5_nt_align1", "family": "matmul", "time_s": 0.08}]
FOREACH = [
    {"kernel": "multi_tensor_apply_kernel<TensorListMetadata<4>>", "family": "optimizer", "time_s": 0.03},
    {"kernel": "nvjet_sm90_tst_128x256_64x4", "family": "matmul", "time_s": 0.05},
]
OPTIMIZER = [{"phase": "optimizer", "family": "all", "time_s": 0.04, "calls_per_step": 300.0}]
ELEMENTWISE = [{"phase": "backward", "family": "elementwise", "time_s": 0.04, "calls_per_step": 900.0}]
SCORES = [
    {"phase": "forward", "part": "attention.scores", "family": "matmul", "time_s": 0.01},
    {"phase": "forward", "part": "attention.softmax", "family": "softmax", "time_s": 0.02},
    {"phase": "forward", "part": "attention.rope", "family": "elementwise", "time_s": 0.01},
]
SLOW = [{"phase": "forward", "family": "matmul", "time_s": 0.08, "calls_per_step": 9.0, "ceiling": "compute",
         "ceiling_share": 0.2}]  # fmt: skip
NO_ATTENTION = [{"family": "matmul", "time_s": 0.08}]
CHECKPOINTED = RunConfig(precision="bf16", attention="sdpa_flash", checkpoint="every:1")  # type: ignore[arg-type]

# fault → (evidence with the fault, at best, words of the sentence); the times are in s, and the sizes in GiB
PLANTED: dict[str, tuple[Evidence, float | None, str]] = {
    "launch-bound": (gap("launch-bound"), 0.07, "30% of the step the GPU waits for kernel launches: compile"),
    "launch-bound, timed": (
        timed(measurement=measured(lag=0.01)),
        0.1 * 0.4 / 0.9895,
        "for 100% of the step (forward, loss, backward, optimizer) the GPU keeps waiting for kernel launches",
    ),
    "exposed-communication": (
        with_tables(overlap=[{"device": 0, "exposed_s": 0.02, "share": 0.2}]),
        0.08,
        "20% of the traced step is communication without computation beside it",
    ),
    "exposed-communication, of a rank": (
        timed(RANKS, tables={"overlap": [{"rank": r, "exposed_s": 0.05 * r, "step_s": 0.2} for r in (0, 1)]}),
        0.075,
        "25% of the traced step (50.0 ms of 200 ms) is communication",
    ),
    "exposed-communication, of a step whose host the profiler slowed": (
        timed(
            RANKS,
            measured(others={"synchronize": 0.03}),
            tables={"overlap": [{"rank": r, "exposed_s": 0.03, "step_s": 0.2} for r in (0, 1)]},
        ),
        0.07,
        "15% of the traced step (30.0 ms of 200 ms) is communication",
    ),
    "data-input": (
        with_tables(
            gaps=[{"device": 0, "cause": "launch-bound", "time_s": 0.04}],
            ranges=[{"range": "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "total_s": 0.04}],
        ),
        0.06,
        "40% of the step waits for the next batch: raise the data loader's num_workers",
    ),
    "data-input, timed": (
        timed(measurement=Measurement("cuda_event", (Sample(0, False, 0.1, {"input": 0.03}, {"input": 0.03}),) * 4, 0)),
        0.07,
        "30% of the step waits for the next batch",
    ),
    "late-kernels": (
        with_tables(gaps=[{"device": 0, "cause": "device latency", "time_s": 0.03, "longest_s": 0.02}]),
        0.07,
        "30% of the step the GPU is idle although the next kernel is launched: find what the kernel after the gap",
    ),
    "late-kernels, between short ones": (
        with_tables(
            gaps=[{"device": 0, "cause": "device latency", "time_s": 0.03, "longest_s": 0.02, "gaps_per_step": 15000}]
        ),
        0.07,
        "30% of the step is the usual time between two kernels, 2.00 µs each: launch fewer and larger kernels",
    ),
    "own-products": (
        with_tables(kernels=[{"kernel": OWN, "family": "other", "time_s": 0.08, "mean_s": 0.04}], phases=[]),
        None,
        "80% of the step is a matrix product or convolution of the program's own in fp32 (conv1d_kernel, 40.0 ms "
        "each): call the product of a library (cuBLAS, cuDNN, CUTLASS)",
    ),
    "host-synchronisation": (
        gap("synchronisation"), 0.07, "30% of the step the GPU is idle because the host synchronises with it"
    ),
    "device-allocation": (gap("cudaMalloc"), 0.07, "while the host allocates device memory"),
    "blocking-copies": (gap("copy"), 0.07, "30% of the step the GPU copies memory and computes nothing: pin"),
    "unfused-attention": (
        with_tables(attention=SCORES, families=NO_ATTENTION),
        0.07,
        "mask, softmax and copies of the score matrix take 20% of the step: use a fused kernel",
    ),
    "unfused-attention, without ranges": (
        with_tables(
            families=NO_ATTENTION,
            phases=[],
            scores=[{"kernel": "softmax_warp_forward<float>", "family": "softmax", "time_s": 0.02}],
        ),
        None,
        "the softmax of unfused attention takes 20% of the step",
    ),
    "host-time": (
        with_tables(
            gaps=[{"device": 0, "cause": "host", "time_s": 0.03}],
            host_gaps=[
                {"host": "augment", "time_s": 0.02, "longest_s": 0.02},
                {"host": "no CUDA call, and nothing recorded", "time_s": 0.01, "longest_s": 0.004},
            ],
        ),
        0.07,
        "30% of the step the GPU is idle while the host makes no CUDA call, for up to 20.0 ms (67% in augment)",
    ),
    "host-time, a checkpoint": (
        with_tables(
            gaps=[{"device": 0, "cause": "host", "time_s": 0.03}],
            host_gaps=[{"host": "save_checkpoint() at train.py:140", "time_s": 0.03, "longest_s": 0.02}],
        ),
        0.07,
        "30% of the step the GPU is idle while the host writes a checkpoint, for up to 20.0 ms (100% in "
        "save_checkpoint() at train.py:140): save less often, or in another thread",
    ),
    "double-precision": (
        with_tables(kernels=[{"kernel": "cutlass_dgemm_64x64", "family": "matmul", "time_s": 0.05}], phases=[]),
        None,
        "50% of the step is matrix products in fp64: compute in fp32 or bf16",
    ),
    "layout-conversions": (
        with_tables(kernels=[{"kernel": "cudnn::nchwToNhwcKernel", "family": "copy", "time_s": 0.04}], phases=[]),
        0.06,
        "40% of the step is conversions between NCHW and NHWC: keep one layout",
    ),
    "index-gradients": (
        with_tables(
            kernels=[{"kernel": "indexing_backward_kernel<float>", "family": "reduction", "time_s": 0.03}], phases=[]
        ),
        None,
        "30% of the step is the gradient of an index or embedding lookup",
    ),
    "small-grids": (
        with_tables(
            phases=[],
            kernels=[
                {"kernel": "hash_all", "family": "other", "time_s": 0.06, "mean_s": 0.06, "grid": "1×1×1"},
                {"kernel": "nccl_ring", "family": "collective", "time_s": 0.03, "mean_s": 0.03, "grid": "4×1×1"},
                {"kernel": "tiny", "family": "other", "time_s": 0.01, "mean_s": 5e-6, "grid": "1×1×1"},
            ],
        ),
        None,
        "60% of the step is kernels of few blocks, which leave most of the GPU idle (grid of 1 block, 60.0 ms each: "
        "hash_all): divide",
    ),
    "start-up": (
        replace(with_tables(), usual=cold_recording()),
        None,
        "step 0 takes 800 ms where the usual ones take 100 ms: 30% of the recording is start-up (600 ms in first "
        "kernel launches): warm up before recording",
    ),
    "unused-tensor-cores": (
        with_tables(kernels=FP32_GEMM, phases=[]),
        None,
        "80% of the step is matrix products in fp32, which leaves the tensor cores idle: compute in bf16",
    ),
    "unused-tensor-cores, timed": (
        timed(RunConfig(optimizer="adamw_fused")),
        0.1 * 0.4 / 0.9895,
        "90% of the step is forward and backward in fp32",
    ),
    "unfused-elementwise": (
        with_tables(phases=ELEMENTWISE), 0.058, "900 elementwise kernels, casts and norms take 40%"
    ),
    "unfused-optimizer": (
        with_tables(kernels=FOREACH, phases=OPTIMIZER),
        0.1 - 0.04 * 13 / 20,
        "the optimizer takes 40% of the step, and its kernels are not fused: use a fused optimizer",
    ),
    "unfused-optimizer, timed": (
        timed(RunConfig(precision="bf16", optimizer="adamw"), measured(optimizer=0.04)),  # type: ignore[arg-type]
        0.1 - 0.04 + 0.008 * 0.4 / 0.9895,
        "the optimizer takes 40% of the step",
    ),
    "slow-products": (
        with_tables(phases=SLOW),
        0.1 - (0.08 - 0.2 * 0.08 / 0.8),
        "matrix products take 80% of the step at 20% of the device's peak",
    ),
    "recomputation": (
        timed(CHECKPOINTED, tables={"cost": [{"phase": "backward", "hardware_flops": 1.5e12, "bytes": 1}]}),
        0.1 - 0.06 * 0.23,
        "--checkpoint every:1 computes",
    ),
    "straggler": (
        timed(tables={"ranks": [{"rank": r, "wait_s": 0.01 * r * n} for r in (0, 2) for n in (1, 2)]}),
        0.06,
        "rank 2 waits 40% of the step for rank 0: compare its batch",
    ),
    "launch-bound, graph breaks": (
        replace(
            timed(
                RunConfig(precision="bf16", compile="default", optimizer="adamw_fused"),  # type: ignore[arg-type]
                measured(lag=0.05),
                tables={"graph_breaks": [{"reason": "print", "place": "a.py:3 in forward", "count": 2}]},
            )
        ),
        0.1 - 0.1 + 0.1 * 0.4 / 0.9895,
        "keep printing, .item(), .cpu() and branches on tensors out of the compiled code, because torch.compile "
        "left the graph, first at a.py:3 in forward: print",
    ),
    "recompilation": (
        timed(measurement=measured(compiles=1, compile_s=0.05)),
        0.05,
        "50% of the timed steps' mean is compiling: code was compiled 10 times while timed",
    ),
    "below-ceiling": (
        timed(RunConfig(precision="bf16", compile="default"), measured([0.4] * 10, forward=0.3)),  # type: ignore[arg-type]
        0.1 + 0.03 * 0.4 / 0.9895,
        "times as long as its FLOPs and bytes need (forward): profile the step",
    ),
    "kept-activations": (in_memory(activations=60), 40, "activations take 60% of the memory at the peak: checkpoint"),
    "score-matrices": (in_memory(attention_scores=30), 70, "attention's score matrices take 30% of the memory"),
    "fragmentation": (in_memory(reserved=2 * PEAK), 100, "50% of the reserved memory is in no allocation"),
    "cached-memory": (
        Evidence(memory=MemoryUse(PEAK, 3 * PEAK, "backward", {}, unusable_bytes=0)),
        100,
        "200 GiB of 300 GiB reserved stay cached without any use, even at the peak: call torch.cuda.empty_cache() once",
    ),
    "loss-spike": (in_memory(logits=20), 80, "logits and loss take 20% of the memory at the peak: compute lm_head"),
    "optimizer-state": (in_memory(optimizer_state=40), 60, "optimizer state takes 40% of the memory at the peak"),
    "kept-gradients": (
        in_memory("forward", gradients=10),
        90,
        "gradients of the last step take 10% of the memory at the peak, in forward: call optimizer.zero_grad",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_found_first_with_its_bound(fault: str) -> None:
    evidence, at_best, words = PLANTED[fault]
    first, *others = causes(evidence)
    assert first.code == fault.partition(",")[0], [first, *others]
    assert words in first.sentence
    if at_best is None:
        assert first.at_best is None
    else:
        assert first.at_best is not None
        assert first.at_best / (1 << 30 if first.unit == "bytes" else 1) == pytest.approx(at_best, rel=0.02)
    assert others == []
    assert first.evidence or first.unit == "bytes"


def test_special_cause_comes_before_the_general_one_that_it_explains() -> None:
    parts = {"general": 0.8, "special": 0.5, "other": 0.9}
    found = [Diagnosis(code, "mend", 1.0, 1.0 - share, code=code) for code, share in parts.items()]
    refined = [replace(one, refines=("general",)) if one.code == "special" else one for one in found]
    assert [one.code for one in ranked(found)] == ["other", "general", "special"]
    assert [one.code for one in ranked(refined)] == ["other", "special", "general"]
    minor = replace(refined[1], at_best=0.7)
    assert [one.code for one in ranked([refined[0], minor])] == ["general", "special"]


def test_small_cause_comes_after_one_outside_of_the_usual_steps() -> None:
    outside = Diagnosis("start-up", "warm up", 1.0, 0.4, code="start-up", comes_last=True, is_outside=True)
    small, large = (Diagnosis("fuse", "compile", 1.0, rest, code="fuse") for rest in (0.92, 0.8))
    assert [one.code for one in ranked([small, outside])] == ["start-up", "fuse"]
    assert [one.code for one in ranked([outside, large])] == ["fuse", "start-up"]


def test_every_rule_has_a_planted_fault() -> None:
    rules = {name.replace("_", "-") for name in plugins.names("diagnosis")}
    tried = {*OF_LOOPS, *OF_MEMORY, *OF_RANKS, *OF_ODD, *OF_RECORDINGS, *OF_TRACES}
    assert rules == {fault.partition(",")[0] for fault in PLANTED} | tried


def late(longest_s: float) -> Evidence:
    return with_tables(gaps=[{"device": 0, "cause": "device latency", "time_s": 0.03, "longest_s": longest_s}])


def small(free_bytes: int) -> Evidence:
    return Evidence(memory=MemoryUse(2 << 30, (2 << 30) + free_bytes, "backward", {}))


def products(flops: float) -> Evidence:
    cost = [{"phase": "forward", "hardware_flops": flops, "bytes": 1e6}]
    return timed(RunConfig(), tables={"cost": cost})


@pytest.mark.parametrize(
    ("rule", "silent", "found"),
    [
        ("below_ceiling", timed(measurement=measured(forward=0.036)), timed(measurement=measured(forward=0.037))),
        ("fragmentation", in_memory(reserved=111 << 30), in_memory(reserved=112 << 30)),
        ("fragmentation", small((1 << 30) - 1), small(1 << 30)),
        ("kept_activations", in_memory(activations=39), in_memory(activations=40)),
        ("late_kernels", late(0.0029), late(0.0031)),
        ("loss_spike", in_memory(logits=14), in_memory(logits=15)),
        ("optimizer_state", in_memory(optimizer_state=29), in_memory(optimizer_state=30)),
        ("unused_tensor_cores", products(5.0e11), products(5.1e11)),
    ],
)
def test_rule_begins_at_its_threshold(rule: str, silent: Evidence, found: Evidence) -> None:
    find = plugins.get("diagnosis", rule).find
    assert (find(silent), find(found) is not None) == (None, True)


def test_gain_below_5_percent_gives_no_sentence() -> None:
    assert causes(gap("launch-bound", 0.0049)) == []
    assert [one.code for one in causes(gap("launch-bound", 0.0051))] == ["launch-bound"]


LOOP = RunConfig(workload="loop mine", world_size=2)


@pytest.mark.parametrize(
    ("strategy", "args", "remedy"),
    [
        (
            "ddp_naive",
            (),
            "overlap it with backward (DistributedDataParallel, FSDP; --strategy ddp_bucketed, or fsdp), send",
        ),
        ("ddp_overlap", (), "send the gradients in buckets (--strategy ddp_bucketed), send bf16, or use a larger"),
        ("ddp_bucketed+zero1", (), "try other bucket sizes (--bucket-size-mb), send bf16, or use a larger batch"),
        ("ddp_bucketed", ("comm_dtype=bf16",), "try other bucket sizes (--bucket-size-mb), or use a larger batch"),
        ("fsdp", (), "send bf16, or use a larger batch for each rank"),
        ("fsdp", ("compute_dtype=bf16",), "use a larger batch for each rank"),
    ],
)
def test_remedy_of_exposed_communication_is_not_an_option_already_used(
    strategy: str, args: tuple[str, ...], remedy: str
) -> None:
    evidence, *_ = PLANTED["exposed-communication, of a rank"]
    assert evidence.config is not None
    config = replace(evidence.config, strategy=strategy, strategy_args=args, world_size=2)
    (found,) = causes(replace(evidence, config=config))
    assert found.remedy.startswith(remedy)
    alone = replace(config, world_size=1)
    assert causes(replace(evidence, config=alone)) == [], "one rank exchanges nothing"


COMPILE = "compile (torch.compile; --compile), or capture the step in a CUDA graph (torch.cuda.graph; --graph step)"


@pytest.mark.parametrize(
    ("changed", "remedy"),
    [
        (
            {"world_size": 2, "strategy": "ddp_flat"},
            "compile (torch.compile; --compile), or use a larger batch for each rank",
        ),
        ({"world_size": 2, "strategy": "fsdp", "compile": "default"}, "use a larger batch for each rank"),
        ({"workload": "mine.py:make"}, COMPILE.replace("; --graph step", "")),
        ({}, COMPILE),
    ],
)
def test_remedy_of_a_launch_bound_cell_is_an_option_that_it_accepts(changed: dict[str, Any], remedy: str) -> None:
    evidence = timed(RunConfig(precision="bf16", **changed), measured(lag=0.01))  # type: ignore[arg-type]
    found = {one.code: one for one in causes(evidence)}
    assert found["launch-bound"].remedy == remedy


def test_remedies_of_a_loop_and_of_a_trace_have_no_options_of_other_commands() -> None:
    """Every planted fault, as if a loop, a trace or a snapshot showed it."""
    for evidence, *_ in PLANTED.values():
        for shown in (replace(evidence, config=LOOP), replace(evidence, config=None, measurement=None)):
            for found in causes(shown):
                assert not re.search("--(?!steps|with)", found.remedy), found
    assert without_options("use it (torch.f; --size tiny), or leave (--it)") == "use it (torch.f), or leave"


def test_sentences_wrap_at_the_width_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = apply_rules(PLANTED["kept-activations"][0])
    monkeypatch.setenv("COLUMNS", "40")
    for width, most in ((None, 40), (60, 60)):
        lines = diagnoses.text(found, width=width).splitlines()
        assert most - 20 < max(map(len, lines)) <= most
    monkeypatch.delenv("COLUMNS")
    assert 60 < max(map(len, diagnoses.text(found).splitlines())) <= 80


@pytest.mark.parametrize(
    "clean",
    [
        timed(),
        with_tables(),
        with_tables(gaps=[{"device": 0, "cause": "launch-bound", "time_s": 0.004}]),
        with_tables(phases=ELEMENTWISE, kernels=[{"kernel": "triton_poi_fused_add_0", "family": "elementwise",
                                                  "time_s": 0.04}]),
        replace(timed(CHECKPOINTED), device_bytes=1 << 30),
        in_memory(activations=30, optimizer_state=25, gradients=12, parameters=12, logits=10),
        in_memory(reserved=PEAK + (1 << 29)),
    ],
)  # fmt: skip
def test_clean_step_has_no_diagnosis(clean: Evidence) -> None:
    assert causes(clean) == []


@pytest.mark.parametrize(("around", "found"), [((20, 20), ["fragmentation"]), ((9, 20), []), ((20, 15), [])])
def test_reserved_memory_of_a_record_counts_only_if_measured_at_the_peak(
    around: tuple[int, int], found: list[str]
) -> None:
    """The highest of a phase in which reserved memory changes may be at another time than the allocated peak."""
    before, after = (size << 30 for size in around)
    forward = {"step": 1, "phase": "forward", "reserved_bytes": before}
    backward = {"step": 1, "phase": "backward", "reserved_bytes": after, "peak_reserved_bytes": 20 << 30}
    phases: Any = [forward, backward | {"peak_allocated_bytes": 8 << 30}]
    config = RunConfig(profiler="memory", workload="own.py:step").to_dict()
    record = RunRecord("key", config, "ok", results=whole({"memory_phases": phases}))
    assert [one.code for one in diagnose(record).diagnoses] == found


def test_answers_distinguish_unknown_from_nothing_to_gain_and_nothing_judged() -> None:
    assert apply_rules(Evidence()) == diagnose([]) == NO_ANSWER
    on_cpu: Any = {"overhead": [{"recorded_s": 0.2, "not_recorded_s": 0.1}], "ranges": []}
    of_cpu = diagnose(RunRecord("key", RunConfig(profiler="kineto").to_dict(), "ok", results=on_cpu))
    assert of_cpu.causes == []
    assert of_cpu.others == ["nothing was judged: on a CPU no GPU is idle and no kernel is slow; measure on a GPU"]
    assert diagnoses.text(NO_ANSWER) == ""
    assert diagnoses.text(Answer(judged="the step")) == "nothing found that would save more than 5% of the step\n\n"
    assert diagnoses.text(Answer(not_judged="no kernel; use a GPU")) == "nothing was judged: no kernel; use a GPU\n\n"
    assert diagnoses.text(Answer(unknowns=("it; record it",), judged="it")) == "cannot be told: it; record it\n\n"


def test_nothing_else_to_gain_is_said_after_a_cause_outside_the_usual_steps() -> None:
    answer = apply_rules(PLANTED["start-up"][0])
    assert [one.code for one in answer.diagnoses] == ["start-up"]
    assert answer.nothing == "nothing found that would save more than 5% of the step"
    assert not apply_rules(PLANTED["host-time"][0]).nothing


def test_wait_for_the_batch_does_not_count_as_launch_bound() -> None:
    evidence, *_ = PLANTED["data-input"]
    assert [found.code for found in causes(evidence)] == ["data-input"]


def test_other_processes_make_kernels_late_and_are_no_cause() -> None:
    find = plugins.get("diagnosis", "late_kernels").find
    assert find(late(0.02)) is not None
    assert find(replace(late(0.02), shares_device=True)) is None
    alone = RunRecord("", RunConfig().to_dict(), "ok")
    shared = replace(alone, warnings=(Caveat("shared-gpu", "2 other processes used the GPU", "stop them"),))
    assert [of_records([each]).shares_device for each in (alone, shared)] == [False, True]


def test_usual_time_between_kernels_is_not_late() -> None:
    short = [{"device": 0, "cause": "device latency", "time_s": 0.03, "longest_s": 5e-6}]
    assert causes(with_tables(gaps=short)) == []


def test_real_h200_trace_is_launch_bound(nsys_profile: Profile, kineto_profile: Profile) -> None:
    for recorded in (nsys_profile, kineto_profile):
        first = (causes(of_trace(results(recorded), H200)))[0]
        assert first.code == "launch-bound"
        (row,) = [row for row in results(recorded)["gaps"] if row["cause"] == "launch-bound"]
        assert first.share == pytest.approx(row["share"])
        assert f"{row['share']:.0%} of the step the GPU waits for kernel launches" in first.sentence


def test_real_h200_snapshot_is_mostly_activations(snapshot_path: Path) -> None:
    found = attribute(replay(read(snapshot_path, None)))
    (first,) = causes(of_snapshot(found, tensor_names(found, None)))
    assert (first.code, first.unit, first.now) == ("kept-activations", "bytes", 213_795_840)


def test_synchronisation_planted_in_an_export_is_found(export: Callable[..., Path]) -> None:
    def made(calls: tuple[Any, ...]) -> list[Diagnosis]:
        path = export(
            launches=((100, 110, MAIN, 1), (700, 710, MAIN, 2)), kernels=(("gemm", 120, 400, 1), ("gemm", 720, 990, 2)),
            calls=calls,
        )  # fmt: skip
        return causes(of_trace(results(profile(read_trace(path))), None))

    assert [found.code for found in made(())] == ["launch-bound"]
    waiting = made((("cudaStreamSynchronize_v3020", 410, 690, MAIN),))
    assert [found.code for found in waiting] == ["host-synchronisation", "launch-bound"]
    assert waiting[0].share == pytest.approx(0.28)


@pytest.mark.parametrize(
    ("run", "codes"),
    [
        ("top_kernels", ["unused-tensor-cores", "launch-bound", "precision-casts"]),
        ("nvidia_smi_memory", ["kept-activations", "score-matrices", "optimizer-state"]),
        ("fully_sharded", ["launch-bound", "exposed-communication"]),
    ],
)
def test_committed_runs_have_their_causes(run: str, codes: list[str]) -> None:
    found = diagnose(read_records(PROFILES / run)[0]).diagnoses
    assert [one.code for one in found or []][:MOST] == codes


def test_bf16_stays_above_the_bound_that_fp32_predicts() -> None:
    """Compare the bound of an fp32 step with the step that follows the remedy, both measured on an H200."""
    by_cell: dict[Any, dict[str, RunRecord]] = {}
    for record in read_records(PROFILES / "step_time")[0]:
        if record.config["profiler"] == "none":
            cell = replace(record.run_config, precision="fp32")  # type: ignore[arg-type]
            by_cell.setdefault(cell, {})[record.config["precision"]] = record
    pairs = [pair for pair in by_cell.values() if {"fp32", "bf16"} <= pair.keys()]
    bounds = []
    for pair in pairs:
        found = causes(of_records([pair["fp32"]]))
        after = of_records([pair["bf16"]]).step_s
        bounds += [(one.at_best, after) for one in found if one.code == "unused-tensor-cores"]
    assert len(bounds) >= 8
    assert all(after is not None and at_best <= after for at_best, after in bounds)


def test_diagnosis_of_several_cells_names_the_worst_and_counts_them() -> None:
    config = RunConfig(model=preset("tiny"), precision="bf16", device="cuda")  # type: ignore[arg-type]
    records = [
        RunRecord(f"key{batch}", replace(config, batch_size=batch).to_dict(), "ok", results=whole(traced(
            gaps=[{"device": 0, "cause": "launch-bound", "time_s": 0.01 * batch}])))  # type: ignore[arg-type]
        for batch in (2, 4, 8)
    ]  # fmt: skip
    records = [replace(r, config=r.config | {"profiler": "kineto"}) for r in records]
    (found,) = [one for one in diagnose(records).diagnoses if one.code == "launch-bound"]
    assert found.sentence.startswith("80% of the step")
    assert "(batch 8; 3 of 3 cells have this cause)" in found.sentence
    assert found.row()["at_best_s"] == pytest.approx(0.02)


def test_waits_of_ranks_are_those_without_a_profiler() -> None:
    def record(profiler: str, wait_s: float) -> RunRecord:
        config = RunConfig(strategy="ddp_flat", world_size=2, profiler=profiler)
        rows = [{"rank": rank, "phase": "backward", "wait_s": rank * wait_s} for rank in (0, 1)]
        made = RunRecord("", config.to_dict(), "ok", measurement=measured())
        made.results.update(whole({"ranks": rows}))
        return made

    of_memory, traced = record("rank_memory", 0.09), record("overlap", 0.08)
    assert "straggler" not in [d.code for d in diagnose([record("none", 0.001), traced, of_memory]).diagnoses]
    (straggler,) = [d for d in diagnose([record("none", 0.04), traced, of_memory]).diagnoses if d.code == "straggler"]
    assert straggler.cause == "rank 1 waits 40% of the step for rank 0"
    assert of_records([of_memory]).is_empty


def test_sentences_are_ranked_by_share_and_cut_to_three() -> None:
    evidence = with_tables(
        gaps=[{"device": 0, "cause": c, "time_s": t} for c, t in (("copy", 0.1e-1), ("launch-bound", 0.02))],
        phases=[*ELEMENTWISE, *OPTIMIZER],
        kernels=FOREACH,
    )
    answer = apply_rules(evidence)
    found = answer.diagnoses
    assert [one.share for one in found] == sorted((one.share for one in found), reverse=True)
    lines = diagnoses.text(answer, "markdown").strip().splitlines()
    assert (len(found), len(lines)) == (4, MOST)
    assert lines[0].startswith("1. 900 elementwise kernels")


@pytest.mark.parametrize(
    ("now_s", "at_best_s", "shown"),
    [
        (0.0440, 0.0120, "; not below 12 ms, now 44 ms"),
        (1.54, 1.46, "; not below 1.46 s, now 1.54 s"),
        (1.0, None, ""),
        (1.0, 0.9999, ""),
    ],
)
def test_sentence_states_a_bound_only_if_its_digits_show_one(now_s: float, at_best_s: float | None, shown: str) -> None:
    assert Diagnosis("cause", "remedy", now_s, at_best_s).sentence == f"cause: remedy{shown}"


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"expected": Expected(0.02, 0.018, 0.024, "replayed")},
         "cause: remedy; expected: 20 ms (18 … 24) instead of 100 ms"),
        ({"expected": Expected(0.02, 0.02, 0.02, "measured")}, "cause: remedy; measured: 20 ms instead of 100 ms"),
        ({"at_best": 0.02, "unprofiled": (0.03, 0.05)},
         "cause: remedy; not below 20 ms, recorded 100 ms, 30 … 50 without the profiler"),
        ({"at_best": 0.02, "try_it": "--compile default"},
         "cause: remedy; not below 20 ms, now 100 ms; try it: --compile default"),
        ({"subject": "steps 1–3 of 4", "where": "f() at a.py:3"}, "cause (f() at a.py:3; steps 1–3 of 4): remedy"),
        ({"then": "then, on top of that"}, "then, on top of that: cause: remedy"),
    ],
)  # fmt: skip
def test_sentence_has_the_basis_of_each_number(fields: dict[str, Any], shown: str) -> None:
    assert Diagnosis("cause", "remedy", 0.1, **fields).sentence == shown


numbers = st.none() | st.floats() | st.integers(-1, 10)
columns = st.sampled_from(
    [
        *("step", "device", "wall_s", "busy_share", "cause", "time_s", "phase", "family", "kernel", "part", "share"),
        *("calls_per_step", "ceiling", "ceiling_share", "exposed_s", "step_s", "range", "total_s", "hardware_flops"),
        *("bytes", "peak_flops_per_s", "peak_bytes_per_s", "not_recorded_s", "component", "peak_bytes"),
        *("peak_allocated_bytes", "peak_reserved_bytes", "rank", "wait_s"),
    ]
)
words = st.sampled_from(["forward", "backward", "optimizer", "all", "matmul", "softmax", "launch-bound", "copy"])
rows = st.dictionaries(columns, numbers | words, max_size=8)
tables = st.dictionaries(
    st.sampled_from([*TABLES, "cost", "ceiling", "ran", "overhead", "ranks", "memory_phases", "memory_forecast"]),
    st.lists(rows, max_size=3),
)


@settings(max_examples=50, deadline=None)
@given(tables, st.sampled_from(["kineto", "memory", "none"]), st.lists(st.floats(0, 1e9), max_size=8))
def test_any_tables_give_bounded_diagnoses(made: Any, profiler: str, walls: list[float]) -> None:
    config = RunConfig(profiler=profiler).to_dict()
    record = RunRecord("key", config, "ok", measurement=measured(walls) if walls else None, results=made)
    for found in diagnose(record).diagnoses:
        assert found.at_best is None or 0 <= found.at_best <= found.now
        assert WORTH <= found.share <= 1
        assert found.sentence


def test_page_of_tables_begins_with_the_sentences() -> None:
    records = read_records(PROFILES / "fully_sharded")[0]
    shown = joined(["<p>tables</p>"], "html", "Strategies", records=records)
    assert shown.index("the GPU keeps waiting for kernel launches") < shown.index("<p>tables</p>")
    assert shown.count("<li>") == len(diagnose(records).causes)
    assert 'class="diagnoses"' not in joined(["<p>tables</p>"], "html", "Runs")


def experiment(name: str, time_s: float, instead: str = "", baseline_s: float = STEP_S) -> dict[str, Any]:
    made = {"low_s": 0.9 * time_s, "high_s": 1.1 * time_s, "baseline_s": baseline_s, "rounds": 5, "spent_s": 1.0}
    return {
        "experiment": name,
        "instead": instead,
        "of": "",
        "time_s": time_s,
        "stands_for": "",
        "skipped": None,
    } | made


def with_experiments(evidence: Evidence, *rows: dict[str, Any]) -> Evidence:
    return replace(evidence, tables={**evidence.tables, "experiments": rows})


@pytest.mark.parametrize("fault", ["launch-bound", "launch-bound, timed"])
def test_expected_time_under_a_graph_is_the_time_on_the_device_alone(fault: str) -> None:
    evidence = with_experiments(PLANTED[fault][0], experiment("device-only", 0.05))
    (found, *_) = causes(evidence)
    assert found.code == "launch-bound"
    assert found.expected == Expected(0.05, 0.9 * 0.05, 1.1 * 0.05, "measured")
    assert found.sentence.endswith("; measured: 50 ms (45 … 55) instead of 100 ms")


def test_wait_for_input_remains_in_the_step_that_a_graph_is_expected_to_give() -> None:
    phases = {"input": 0.02, "forward": 0.08}
    sample = Sample(0, False, STEP_S, phases, phases, {"input": 0.02, "forward": 0.0})
    waiting = Measurement("cuda_event", (sample,) * 4, 0.0)
    cost = [{"phase": "forward", "hardware_flops": 1e9, "bytes": 1e6}]
    evidence = with_experiments(timed(measurement=waiting, tables={"cost": cost}), experiment("device-only", 0.01))
    found = next(each for each in causes(evidence) if each.code == "launch-bound")
    assert found.expected is not None
    assert found.expected.value == pytest.approx(0.03)


def test_remedy_without_gain_in_its_experiment_is_not_named() -> None:
    evidence = with_experiments(PLANTED["launch-bound"][0], experiment("device-only", 0.97 * STEP_S))
    assert "launch-bound" not in {found.code for found in causes(evidence)}


def test_skipped_experiment_gives_no_expectation() -> None:
    row = experiment("device-only", 0.05) | {"time_s": None, "low_s": None, "high_s": None, "skipped": "no step"}
    evidence = with_experiments(PLANTED["launch-bound"][0], row)
    assert evidence.experiment("device-only") is None
    assert causes(evidence)[0].expected is None


def test_products_in_bf16_replace_those_of_the_step() -> None:
    fp32 = with_tables(kernels=FP32_GEMM)
    evidence = with_experiments(
        fp32,
        experiment("products", 0.01, "bf16", baseline_s=0.08),
        experiment("products", 0.02, "tf32", baseline_s=0.08),
    )
    (found,) = [each for each in causes(evidence) if each.code == "unused-tensor-cores"]
    assert found.expected is not None
    assert (found.expected.value, found.expected.how) == (pytest.approx(0.03), "measured")


def test_part_gives_no_expectation_if_the_step_waits_for_the_host() -> None:
    waiting = with_tables(kernels=FP32_GEMM, gaps=[{"device": 0, "cause": "launch-bound", "time_s": 0.04}])
    evidence = with_experiments(waiting, experiment("products", 0.01, "bf16", baseline_s=0.05))
    assert with_part(evidence, "products", "bf16") is None
    of_device = evidence.of_device
    assert of_device is not None
    then = with_part(of_device, "products", "bf16")
    assert then is not None
    assert then.value == pytest.approx(0.06 - 0.05 + 0.01)


@pytest.mark.parametrize(
    ("submit_s", "factor", "is_told"), [(0.02, 1.0, True), (0.02, 1.43, True), (0.025, 1.43, False)]
)
def test_part_gives_no_expectation_if_the_step_would_then_wait_for_the_host(
    submit_s: float, factor: float, is_told: bool
) -> None:
    sample = Sample(0, False, STEP_S, {"forward": STEP_S}, {"forward": submit_s})
    evidence = with_experiments(with_tables(kernels=FP32_GEMM), experiment("products", 0.01, baseline_s=0.08))
    timed = replace(evidence, measurement=Measurement("cuda_event", (sample,), 0.0))
    then = with_part(timed, "products", host_factor=factor)
    assert (then is not None) == is_told
    if then is not None:
        assert then.value == pytest.approx(0.03)


def test_fastest_kernel_replaces_the_attention_of_the_step() -> None:
    evidence = with_experiments(
        PLANTED["unfused-attention"][0],
        experiment("attention", 0.03, "efficient", baseline_s=0.04),
        experiment("attention", 0.01, "flash", baseline_s=0.04),
    )
    (found,) = [each for each in causes(evidence) if each.code == "unfused-attention"]
    assert found.expected is not None
    assert (found.expected.value, found.expected.how) == (pytest.approx(0.07), "measured")


def test_part_that_takes_longer_alone_than_the_whole_step_gives_no_expectation() -> None:
    evidence = with_experiments(PLANTED["unfused-attention"][0], experiment("attention", 0.01, baseline_s=2 * STEP_S))
    assert with_part(evidence, "attention") is None


def test_options_that_rules_offer_exist() -> None:
    modules = [importlib.import_module(f"cs_systems.analysis.diagnosis.{name}") for name in plugins.names("diagnosis")]
    offered = [item for module in modules for item in getattr(module, "OPTIONS", {}).items()]
    assert offered
    for field, value in [(field, value) for field, values in offered for value in values]:
        assert getattr(RunConfig(**{field: value}), field) == value
        if FIELDS[field].field.plugin == "attention":
            assert plugins.check("attention", value)
