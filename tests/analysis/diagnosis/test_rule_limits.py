"""Limits and shares of rules about a step of 1 s: silent below the limit, and exact numbers from it on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cs_systems.analysis.attribution.usual_steps import Apart
from cs_systems.analysis.diagnosis import Diagnosis, Rule, Unknown
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._memory_use import MemoryUse
from cs_systems.analysis.diagnosis.periodic_steps import steps_of
from cs_systems.analysis.memory.graphs import UnusedGraphs
from cs_systems.analysis.memory.leaks import Leak
from cs_systems.analysis.memory.model_copies import ModelCopies
from cs_systems.analysis.memory.out_of_memory import Returned
from cs_systems.config import RunConfig
from cs_systems.core import plugins
from cs_systems.readers.forms.trace import Copies, Copy, Step
from cs_systems.record import Measurement, Sample
from tests.analysis.diagnosis.test_findings import recorded
from tests.analysis.diagnosis.test_loop_rank_rules import EXCHANGE, LATE, RANKS
from tests.analysis.diagnosis.test_loop_rules import (
    LOOP,
    PADDED,
    collected,
    hooked,
    in_double,
    outcome,
    own,
    repeated,
    repeated_modules,
    slow,
    under,
    updates,
)

GIB = 1 << 30


def found(rule: str, evidence: Evidence) -> Diagnosis | Unknown | None:
    named: Rule = plugins.get("diagnosis", rule)
    return named.find(evidence)


def at_limit(limit: str, silent: Evidence, speaking: Evidence) -> tuple[Any, bool]:
    """Return what the rule before the colon finds below its limit, and whether it gives a diagnosis from there on."""
    rule = limit.partition(":")[0]
    return found(rule, silent), isinstance(found(rule, speaking), Diagnosis)


def step(tables: Any = None, config: RunConfig = LOOP, walls: Sequence[float] = (1.0,), **phases: float) -> Evidence:
    samples = tuple(Sample(0, False, wall_s, phases, phases) for wall_s in walls)
    return Evidence(tables or {}, Measurement("monotonic", samples, 0.0), config)


def idle(rows: Any = (), usual: Any = None, **causes: float) -> Evidence:
    gaps = [{"device": 0, "cause": cause.replace("_", "-"), "time_s": time_s} for cause, time_s in causes.items()]
    tables: Any = {"gaps": gaps, "steps": [{"device": 0, "wall_s": 1.0}], **dict(rows)}
    return Evidence(tables, usual=usual)


def kernels(**named: float) -> Evidence:
    of: Any = [
        {"kernel": name, "family": name.partition("_")[0], "time_s": time_s, "mean_s": time_s, "grid": "2×4×1"}
        for name, time_s in named.items()
    ]
    return Evidence({"kernels": of, "steps": [{"device": 0, "wall_s": 1.0}]})  # type: ignore[dict-item, list-item, typeddict-item]


def memory(peak: int, of: str = "", size: int = 0, **known: Any) -> Evidence:
    return Evidence(memory=MemoryUse(peak, known.pop("reserved_bytes", None), "backward", {of: size}, **known))


def fed(time_s: float, calls: str = "encode", **known: Any) -> dict[str, Any]:
    return own("batches", 8, time_s, calls) | {"feeds_model": True} | known


def host(name: str, time_s: float, longest_s: float | None = None) -> dict[str, Any]:
    return {"host": name, "time_s": time_s, "longest_s": time_s if longest_s is None else longest_s}


def exchange(**known: Any) -> Evidence:
    return step({"loop_exchange": [EXCHANGE | known], "loop_ranks": RANKS}, replace(LOOP, world_size=2))


def late(**known: Any) -> Evidence:
    return step({"late_rank": [LATE | known], "loop_ranks": RANKS}, replace(LOOP, world_size=2))


def blocking(count: int) -> Any:
    """Return a usual step of 20 kernels, of which so many end with their launch."""
    ends = [2.125 + n / 4 for n in range(20)]
    return recorded([(end_s - 0.125, end_s, end_s - 0.0625 * (n >= count)) for n, end_s in enumerate(ends)])


def copied(**lasts: float) -> Any:
    usual = recorded()
    copies = Copies.of(Copy("memcpy", 1.0, 1.0 + lasts_s, 0, 0, None, name=name) for name, lasts_s in lasts.items())
    return replace(usual, profile=replace(usual.profile, trace=replace(usual.profile.trace, copies=copies)))


GRID: Any = {"kernel": "few", "family": "other", "time_s": 0.5, "mean_s": 0.5, "grid": "2×4×1"}
WINDOW = (Step("step", 0.0, 10.0),)
NOISY = [0.75] * 5 + [1.25] * 5  # half of the range of the middle 80% is 0.25 s

# rule: limit → (evidence without the fault by a hair, evidence with it by a hair)
LIMITS: dict[str, tuple[Evidence, Evidence]] = {
    "batch_preparation: 3 samples": (
        step({"own_python": [fed(0.5, samples=2)]}, other=0.5), step({"own_python": [fed(0.5, samples=3)]}, other=0.5),
    ),
    "batch_preparation: a tenth of the step": (
        step({"own_python": [fed(0.0999)]}, other=0.5), step({"own_python": [fed(0.1)]}, other=0.5),
    ),
    "batch_preparation: a quarter of the step for random numbers": (
        step({"own_python": [fed(0.2499, "randn")]}, other=0.5), step({"own_python": [fed(0.25, "randn")]}, other=0.5),
    ),
    "blocking_launches: 9 of 10 launches": (
        idle(usual=blocking(17), launch_bound=0.5), idle(usual=blocking(18), launch_bound=0.5),
    ),
    "cached_memory: 1 GiB": (
        memory(GIB, reserved_bytes=2 * GIB - 1, unusable_bytes=0),
        memory(GIB, reserved_bytes=2 * GIB, unusable_bytes=0),
    ),
    "cached_memory: 3 tenths of the reserved memory": (
        memory(7 * GIB + 1, reserved_bytes=10 * GIB, unusable_bytes=0),
        memory(6 * GIB, reserved_bytes=10 * GIB, unusable_bytes=GIB),
    ),
    "fragmentation: a tenth of the reserved memory": (
        memory(GIB, reserved_bytes=20 * GIB, unusable_bytes=2 * GIB - 1),
        memory(GIB, reserved_bytes=20 * GIB, unusable_bytes=2 * GIB),
    ),
    "data_input: the noise of the rest of the step": (
        step(walls=[wall_s + 0.2499 for wall_s in NOISY], input=0.2499),
        step(walls=[wall_s + 0.25 for wall_s in NOISY], input=0.25),
    ),
    "double_precision: a tenth of the step": (kernels(matmul_dgemm=0.0999), kernels(matmul_dgemm=0.1)),
    "double_precision: a tenth of the step, by weights": (
        step({"double_precision": [in_double(flops=0.99e9)]}, forward=0.75),
        step({"double_precision": [in_double(flops=1e9)]}, forward=0.75),
    ),
    "double_precision: 0.8 times the rate of fp32": (
        step({"double_precision": [in_double(flops_per_s=1.61e10, flops=1e10)]}, forward=0.75),
        step({"double_precision": [in_double(flops_per_s=1.6e10, flops=1e10)]}, forward=0.75),
    ),
    "exposed_communication: a tenth of the step": (exchange(transfer_share=0.0999), exchange(transfer_share=0.1)),
    "growing_hooks: 10 hooks": (step({"hooks": [hooked(last=13)]}), step({"hooks": [hooked(last=14)]})),
    "garbage_collection: 2 steps": (
        step({"garbage_collection": [collected(1.0, in_steps=1)]}),
        step({"garbage_collection": [collected(1.0, in_steps=2)]}),
    ),
    "imbalanced_experts: 1.2 times the mean": (late(received_times=1.19), late(received_times=1.2)),
    "index_gradients: a fifth of the step": (kernels(indexing_backward=0.1999), kernels(indexing_backward=0.2)),
    "kept_activations: 2 fifths of the peak": (memory(10, "activations", 3), memory(10, "activations", 4)),
    "optimizer_state: 3 tenths of the peak": (memory(10, "optimizer state", 2), memory(10, "optimizer state", 3)),
    "weight_copies: 15% of the peak": (memory(100, "weight copies", 14), memory(100, "weight copies", 15)),
    "no_training: half of the steps": (
        step({"outcome": [outcome(skipped_steps=4, optimizer_steps=10)]}),
        step({"outcome": [outcome(skipped_steps=5, optimizer_steps=10)]}),
    ),
    "own_python: a tenth of the step": (
        step({"own_python": [own("f", 8, 0.05)]}, other=0.0999), step({"own_python": [own("f", 8, 0.05)]}, other=0.1),
    ),
    "padding: 15% of the positions": (
        step({"padding": [PADDED | {"share": 0.1499}]}), step({"padding": [PADDED | {"share": 0.15}]}),
    ),
    "recomputation: a twentieth of the step": (
        step({"repeated_forward": [{"backward_share": 0.0999}]}, backward=0.5),
        step({"repeated_forward": [{"backward_share": 0.1}]}, backward=0.5),
    ),
    "repeated_calls: half of the steps": (
        step({"repeated_calls": [repeated(steps=5)]}, forward=0.5),
        step({"repeated_calls": [repeated(steps=6)]}, forward=0.5),
    ),
    "repeated_calls: of modules in each step": (
        step({"repeated_modules": [repeated_modules(of_steps=3)]}, forward=0.5),
        step({"repeated_modules": [repeated_modules(of_steps=2)]}, forward=0.5),
    ),
    "repeated_calls: of modules in 2 steps": (
        step({"repeated_modules": [repeated_modules(steps=1, of_steps=1)]}, forward=0.5),
        step({"repeated_modules": [repeated_modules()]}, forward=0.5),
    ),
    "rollouts: a tenth of the step": (
        step({"own_python": [own("act", 8, 0.0999, phase="forward without gradients")]}),
        step({"own_python": [own("act", 8, 0.1, phase="forward without gradients")]}),
    ),
    "rollouts: 3 samples": (
        step({"own_python": [own("act", 8, 0.5, phase="forward without gradients") | {"samples": 2}]}),
        step({"own_python": [own("act", 8, 0.5, phase="forward without gradients") | {"samples": 3}]}),
    ),
    "small_buckets: 4 all-reduces": (exchange(small=3, small_share=0.5), exchange(small=4, small_share=0.5)),
    "small_grids: 3 tenths of the step": (kernels(other=0.2999), kernels(other=0.3)),
    "small_grids: 50 µs each": (
        Evidence({"kernels": [GRID | {"mean_s": 50e-6}], "steps": [{"device": 0, "wall_s": 1.0}]}),
        Evidence({"kernels": [GRID | {"mean_s": 51e-6}], "steps": [{"device": 0, "wall_s": 1.0}]}),
    ),
    "small_grids: 8 blocks": (
        Evidence({"kernels": [GRID | {"grid": "3×3×1"}], "steps": [{"device": 0, "wall_s": 1.0}]}),
        Evidence({"kernels": [GRID | {"grid": "2×2×2"}], "steps": [{"device": 0, "wall_s": 1.0}]}),
    ),
    "returned_segments: 20 of them": (
        memory(10, returned=Returned(19, 20, True)), memory(10, returned=Returned(20, 20, True)),
    ),
    "returned_segments: twice the peak": (
        memory(10, returned=Returned(20, 19, True)), memory(10, returned=Returned(20, 20, False)),
    ),
    "small_operators: a tenth of the step": (
        step({"forward_operators": [{"operators": 300, "arithmetic_s": 0.0}]}, forward=0.0999),
        step({"forward_operators": [{"operators": 300, "arithmetic_s": 0.0}]}, forward=0.1),
    ),
    "small_operators: a quarter of the fastest step is arithmetic": (
        step({"forward_operators": [{"operators": 300, "arithmetic_s": 0.0625}]}, forward=0.5, backward=0.2499),
        step({"forward_operators": [{"operators": 300, "arithmetic_s": 0.0625}]}, forward=0.5, backward=0.25),
    ),
    "straggler: a tenth of the step with a cause": (
        late(work="batch", batch_times=2.0, share=0.0999), late(work="batch", batch_times=2.0, share=0.1),
    ),
    "straggler: a quarter of the step without a cause": (late(share=0.2499), late(share=0.25)),
    "straggler: a quarter of the step for a phase": (
        late(work="compute", share=0.2499), late(work="compute", share=0.25),
    ),
    "straggler: experts have their own rule": (
        late(received_times=1.2, work="batch", batch_times=2.0),
        late(received_times=1.19, work="batch", batch_times=2.0),
    ),
    "start_up: a tenth of the recording": (
        Evidence(usual=recorded(total_s=10.0, start_up_s=0.999)),
        Evidence(usual=recorded(total_s=10.0, start_up_s=1.0)),
    ),
    "periodic_steps: garbage collection takes half": (
        step({"slow_steps": [slow()], "garbage_collection": [collected(2.01, in_steps=2)]}),
        step({"slow_steps": [slow()], "garbage_collection": [collected(2.0, in_steps=2)]}),
    ),
    "periodic_steps: garbage collection in 2 steps": (
        step({"slow_steps": [slow()], "garbage_collection": [collected(3.0, in_steps=2)]}),
        step({"slow_steps": [slow()], "garbage_collection": [collected(3.0, in_steps=1)]}),
    ),
    "model_copies: 15% of the peak": (
        memory(100, "model copies", 14, models=ModelCopies((), 1, ())),
        memory(100, "model copies", 15, models=ModelCopies((), 1, ())),
    ),
    "no_update: cleared in 3 steps": (
        step({"updates": [updates(steps=2, cleared=2, compared_steps=2)]}),
        step({"updates": [updates(steps=3, cleared=3, compared_steps=2)]}),
    ),
    "own_python: half of it is a straggler's": (
        step({"loop_ranks": [RANKS[1] | {"step_s": 1.0, "other_s": 0.5}], "own_python": [own("f", 8, 0.25)],
              "late_rank": [LATE | {"work": "python", "share": 0.2501}]}, other=0.5),
        step({"loop_ranks": [RANKS[1] | {"step_s": 1.0, "other_s": 0.5}], "own_python": [own("f", 8, 0.25)],
              "late_rank": [LATE | {"work": "python", "share": 0.25}]}, other=0.5),
    ),
    "unused_graph: none": (
        memory(10), memory(10, graphs=UnusedGraphs(1, 5, "a.py:3", (), 5)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("limit", LIMITS)
def test_rule_gives_a_diagnosis_from_its_limit_on(limit: str) -> None:
    assert at_limit(limit, *LIMITS[limit]) == (None, True)


# rule: case → (evidence, share, least that is left, words of the cause)
NUMBERS: dict[str, tuple[Evidence, float, float | None, str]] = {
    "anomaly_detection": (
        step({"anomaly_detection": [{"passes": 4, "with_detection": 3}]}, forward=0.25, backward=0.25), 0.5, None,
        "3 of 4 timed",
    ),
    "anomaly_detection: no more than the step": (
        step({"anomaly_detection": [{"passes": 4, "with_detection": 4}]}, forward=0.75, backward=0.75), 1.0, None,
        "all 4 timed",
    ),
    "batch_preparation: no more than the phase": (
        step({"own_python": [fed(0.5)]}, other=0.25), 0.25, 0.75, "25% of the step waits",
    ),
    "blocking_launches": (
        idle(usual=blocking(19), launch_bound=0.25, host=0.25, copy=0.25), 0.5, 0.5,
        "95% of the launches return only when their kernel has ended (CUDA_LAUNCH_BLOCKING), so that the GPU waits for "
        "the host 50%",
    ),
    "cached_memory": (
        memory(4, reserved_bytes=8 * GIB, unusable_bytes=4 * GIB - 4), 0.5, 4 * GIB, "4.00 GiB of 8.00 GiB reserved",
    ),
    "data_input: of a trace": (
        idle({"ranges": [{"range": "input", "total_s": 0.5}]}, launch_bound=0.75), 0.5, 0.5, "50% of the step waits",
    ),
    "data_input: of batches that take different times": (
        Evidence({}, Measurement("monotonic", tuple(
            Sample(0, False, 0.5 + s, {"input": s}, {"input": s}) for s in (0.25, 0.5, 0.5, 0.75)
        ), 0.0), LOOP), 0.5, 0.5, "50% of the step waits",
    ),
    "data_input: of a loop without times": (
        Evidence({"ranges": [{"range": "input", "total_s": 0.5}], "steps": [{"device": 0, "wall_s": 1.0}]},
                 Measurement("monotonic", (), 0.0), LOOP),  # type: ignore[dict-item, list-item, typeddict-item]
        0.5, 0.5, "50% of the step",
    ),
    "data_input: iterators made anew": (
        step({"iterators": [{"steps": 4, "with_new": 2}], "own_python": [fed(0.25, "iter"), fed(0.25, "encode")]},
             input=0.25, other=0.5), 0.5, 0.5, "50% of the step waits for the next batch, from a data loader whose",
    ),
    "data_input: iterators of epochs": (
        step({"iterators": [{"steps": 5, "with_new": 2}], "own_python": [fed(0.25, "iter")]}, input=0.25, other=0.5),
        0.25, 0.75, "25% of the step waits for the next batch",
    ),
    "double_precision: no more than forward and backward": (
        step({"double_precision": [in_double(flops=1e10)]}, forward=0.25, other=0.5), 0.25, None,
        "most of forward and backward",
    ),
    "divergence": (
        step({"outcome": [outcome(losses=9, early_loss=2.0, late_loss=20.0)]}), 1.0, None, "at most 2 to at least 20",
    ),
    "exposed_communication: of a loop": (exchange(transfer_share=0.25), 0.25, 0.75, "25% of the step is transfer"),
    "garbage_collection": (step({"garbage_collection": [collected(1.0)]}), 0.25, 3.0, "25% of the loop"),
    "gradient_accumulation: of a loop": (
        exchange(passes=4, early=3, reduces=4, early_share=0.25), 0.25, 0.75, "in each of 4 passes per update: 3 of 4",
    ),
    "gradients_not_cleared": (step({"updates": [updates(stale=11)]}), 1.0, None, "in 11 of 12 steps"),
    "growing_hooks": (
        step({"hooks": [hooked(first=5, last=20)]}, forward=0.25, backward=0.25, other=0.25), 0.375, None,
        "from 5 to 20",
    ),
    "growing_hooks: no more than the step": (
        step({"hooks": [hooked(first=0, last=20)]}, forward=0.75, backward=0.75), 1.0, None, "from 0 to 20",
    ),
    "host_time": (
        idle({"host_gaps": [host("a", 0.25, 0.125), host("b", 0.125, 0.25), host("c", 0.125),
                            host("enumerate(DataLoader)#x", 0.5)],
              "ranges": [{"range": "input", "total_s": 0.125}]}, host=0.625),
        0.5, 0.5,
        "50% of the step the GPU is idle while the host makes no CUDA call, for up to 250 ms (50% in a, 25% in b)",
    ),
    "host_time: half of the work is of a kind": (
        idle({"host_gaps": [host("plot", 0.125), host("draw_figure", 0.125), host("f", 0.25)]}, host=0.5), 0.5, 0.5,
        "while the host draws figures",
    ),
    "host_time: less than half of the work is of a kind": (
        idle({"host_gaps": [host("plot", 0.125), host("draw_figure", 0.124), host("f", 0.25)]}, host=0.5), 0.5, 0.5,
        "while the host makes no CUDA call",
    ),
    "host_synchronisation": (
        idle({"waits": [{"call": "a", "within": "", "time_s": 0.5, "calls_per_step": 9.0},
                        {"call": "a", "within": "item", "time_s": 0.25, "calls_per_step": 1.0},
                        {"call": "a", "within": "cpu", "time_s": 0.25, "calls_per_step": 9.0}]}, synchronisation=0.25),
        0.25, 0.75, "25% of the step the GPU is idle because the host synchronises with it (1 time in item)",
    ),
    "host_synchronisation: of one place": (
        idle({"waits": [{"call": "a", "within": "item", "time_s": 0.25, "calls_per_step": 2.4}]}, synchronisation=0.25),
        0.25, 0.75, "(2 times in item)",
    ),
    "host_synchronisation: less than once per step": (
        idle({"waits": [{"call": "a", "within": "item", "time_s": 0.25, "calls_per_step": 0.9}]}, synchronisation=0.25),
        0.25, 0.75, "synchronises with it: ",
    ),
    "leak": (
        memory(1 << 40, leak=Leak(3, 5, "a.py:3", 3, False, (), 1)), 3000 / (1 << 40), 1,
        "3 B stay alive per step, 2.93 KiB in 1,000 steps (allocated at a.py:3 and 2 more lines; 5 steps recorded)",
    ),
    "leak: of two lines, more than the peak": (
        memory(10, leak=Leak(3, 5, "a.py:3", 2, False, (), 1)), 1.0, 1, "at a.py:3 and another line; 5 steps recorded)",
    ),
    "leak: of one line": (
        memory(10, leak=Leak(3, 5, "a.py:3", 1, False, (), 1)), 1.0, 1, "(allocated at a.py:3; 5 steps recorded)",
    ),
    "launch_bound: without the profiler, no less than the bound": (
        idle({"ranges": [{"range": "input", "total_s": 0.375}]}, recorded(), launch_bound=0.675), 0.3, 0.7,
        "not below 0.70 s, recorded 1.0 s, 0.70 … 0.83 without the profiler",
    ),
    "launch_bound: waits beyond those for a batch": (
        idle({"ranges": [{"range": "input", "total_s": 0.5}]}, launch_bound=0.75, host=0.125), 0.375, 0.625,
        "38% of the step the GPU waits",
    ),
    "model_copies": (
        memory(100, "model copies", 50, models=ModelCopies((), 3, ("a", "b", "c"))), 0.5, 50,
        "3 further copies of the weights take 50% of the peak (a, b): ",
    ),
    "model_copies: one": (
        memory(100, "model copies", 50, models=ModelCopies((), 1, ("a",))), 0.5, 50,
        "1 further copy of the weights takes",
    ),
    "imbalanced_experts: of a loop": (late(received_times=1.5, share=0.25), 0.25, 0.75, "receives 1.5 times"),
    "no_training: NaN": (step({"outcome": [outcome(fault="NaN")]}), 1.0, None, "the loss is NaN"),
    "no_training: skipped": (
        step({"outcome": [outcome(skipped_steps=6, optimizer_steps=8)]}), 1.0, None,
        "the GradScaler skips 6 of 8 optimizer steps",
    ),
    "no_update: the optimizer with most parameters": (
        step({"updates": [updates(changed=0, optimizer="SGD", parameters=5), updates(changed=0)]}), 1.0, None,
        "SGD changes no weight in 24 steps",
    ),
    "no_update": (step({"updates": [updates(changed=0)]}), 1.0, None, "changes no weight in 24 steps"),
    "own_python: without what has rules of its own": (
        step({"own_python": [own("f", 8, 0.25), own("g", 9, 0.02), own("h", 10, 0.0199), fed(0.25)]}, other=0.75),
        0.5, 0.5, "50% of the step is the script's own Python: f() at train.py:8 (25%), g() at train.py:9 (2%)",
    ),
    "own_python: three are named": (
        step({"own_python": [own(name, 8, 0.125) for name in "fghi"]}, other=0.5),
        0.5, 0.5, "f() at train.py:8 (12%), g() at train.py:8 (12%), h() at train.py:8 (12%)",
    ),
    "own_python: of the rank that the others wait for": (
        step({"own_python": [own("f", 8, 0.25)], "loop_ranks": [RANKS[0] | {"other_s": 0.09},
              RANKS[1] | {"step_s": 0.5, "other_s": 0.25}]}, other=0.125),
        0.5, 0.5, "50% of the step is the script's own Python",
    ),
    "own_tools": (
        step({"own_tools": [under(extra_s=1.5), under(extra_s=0.0), under(extra_s=-1.0)]}), 0.25, None,
        "25% of the loop",
    ),
    "own_tools: without a cost": (step({"own_tools": [under(extra_s=-1.0)]}), 0.0, None, "0% of the loop"),
    "own_tools: always": (
        step({"own_tools": [under(steps=40, extra_s=None, without_s=None)]}, forward=0.25, optimizer=0.25, other=0.5),
        0.5, None, "all 40 steps",
    ),
    "padding: of the model's time": (
        step({"padding": [PADDED | {"share": 0.5}]}, forward=0.25, backward=0.25, other=0.5), 0.25, None, "50% of each",
    ),
    "padding: without times of the model": (step({"padding": [PADDED | {"share": 0.5}]}), 0.5, None, "50% of each"),
    "pipeline_bubbles: of a loop": (exchange(pairwise_share=0.25), 0.25, 0.75, "25% of the step the stages"),
    "periodic_steps": (step({"slow_steps": [slow(extra_s=2.0), slow(extra_s=1.0)]}), 0.25, 6.0, "25% of the loop"),
    "periodic_steps: of a trace": (
        Evidence(usual=recorded(total_s=16.0, apart=(Apart("start-up", (0,), 9.0, 1.0, None, WINDOW),
                                                     Apart("slow", (9,), 3.0, 1.0, None, WINDOW),
                                                     Apart("periodic", (3, 6), 3.0, 1.0, 3, WINDOW)), windows=WINDOW)),
        0.25, 12.0, "25% of the recording is in every third step",
    ),
    "recomputation: of a loop": (
        step({"repeated_forward": [{"backward_share": 0.5}]}, backward=0.5), 0.25, 0.75, "25% of the step is forward",
    ),
    "recomputation: no more than backward": (
        step({"repeated_forward": [{"backward_share": 2.0}]}, backward=0.5), 0.5, 0.5, "50% of the step is forward",
    ),
    "repeated_calls": (
        step({"repeated_calls": [repeated(of_calls=48), repeated(of_calls=24)]}, forward=0.5, backward=0.25), 0.25,
        None, "and backward uses only one of the results",
    ),
    "repeated_calls: with the same result": (
        step({"repeated_calls": [repeated(used=12)]}, forward=0.5, backward=0.25), 0.375, None, "with the same result",
    ),
    "repeated_calls: no more than the step": (
        step({"repeated_calls": [repeated(calls=24)]}, forward=1.5), 1.0, None, "called twice",
    ),
    "repeated_calls: of modules": (
        step({"repeated_modules": [repeated_modules(time_s=0.5, recorded_share=0.25)]}, forward=0.25, loss=0.125,
             backward=0.25), 0.25, None, "25% of the step is 24 repeated calls of modules such as Conv2d",
    ),
    "repeated_calls: of modules, by their time": (
        step({"repeated_modules": [repeated_modules(place=None)]}, forward=1.0), 0.25, None, "input and result: run",
    ),
    "rollouts: from a fiftieth of the step on": (
        step({"own_python": [own(name, 8, time_s, phase="forward without gradients")
                             for name, time_s in (("a", 0.25), ("b", 0.02), ("c", 0.0199))]}),
        0.2899, None, "a() at train.py:8 (25%), b() at train.py:8 (2%): ",
    ),
    "rollouts: no more than the step": (
        step({"own_python": [own(name, 8, 0.75, phase="forward without gradients") for name in "abcd"]}), 1.0, None,
        "100% of the step is forward passes without gradients: a() at train.py:8 (75%), b() at train.py:8 (75%), c() "
        "at train.py:8 (75%)",
    ),
    "small_buckets: of a loop": (exchange(small=8, small_share=0.25), 0.25, 0.75, "sends 8 all-reduces of 4.00 KiB"),
    "small_grids": (
        kernels(other_a=0.25, **{f"other_{60 * 'b'}": 0.5}, collective=0.9), 0.75, None,
        f"75% of the step is kernels of few blocks, which leave most of the GPU idle (grid of 8 blocks, 500 ms each: "
        f"other_{54 * 'b'}): ",
    ),
    "small_operators: in the fastest step": (
        Evidence({"forward_operators": [{"operators": 300, "arithmetic_s": 0.0625}]},  # type: ignore[dict-item, list-item, typeddict-item]
                 Measurement("monotonic", tuple(Sample(0, False, 1.0, {"forward": s}, {"forward": s})
                                                for s in (1.0, 0.75, 0.75, 1.0)), 0.0)), 0.875, 0.3125, "88% of",
    ),
    "small_operators": (
        step({"forward_operators": [{"operators": 1000, "arithmetic_s": 1 / 24}]}, forward=0.25, backward=0.5), 0.75,
        0.375, "75% of the step is 1,000 small operators, 750 µs each",
    ),
    "straggler: of a loop": (late(share=0.25), 0.25, 0.75, "by 250 ms of each step (25%)"),
    "start_up": (
        Evidence(usual=recorded(total_s=10.0, start_up_s=2.5, start_up=("1 s in a", "1 s in b", "9 ms in c"))), 0.25,
        None, "25% of the recording is start-up, before the usual work begins (1 s in a, 1 s in b): ",
    ),
    "unused_graph": (
        memory(10, graphs=UnusedGraphs(2, 5, "a.py:3", (), 5)), 0.5, 5, "50% of the peak, because the graphs of 2",
    ),
    "unused_parameters: of a loop": (
        exchange(marked=9, search_share=0.25, marks_share=0.125, unused=3), 0.375, 0.625,
        "(about 250 ms per step) and averages the result (about 125 ms), and finds at most 3",
    ),
    "unused_passes": (
        step({"unused_passes": [{"passes": 8, "unused": 6}]}), 0.75, None, "6 of 8 backward passes that were looked at",
    ),
}  # fmt: skip


def check_numbers(case: str, evidence: Evidence, share: float, at_best: float | None, words: str) -> None:
    """Check the diagnosis of the rule that the case's name begins with."""
    one = found(case.partition(":")[0], evidence)
    assert isinstance(one, Diagnosis)
    assert words in one.sentence
    assert (one.share, one.at_best) == (pytest.approx(share), None if at_best is None else pytest.approx(at_best))


@pytest.mark.parametrize("case", NUMBERS)
def test_share_and_bound_of_a_rule_are_exact(case: str) -> None:
    check_numbers(case, *NUMBERS[case])


@pytest.mark.parametrize(
    ("pinned_s", "pageable_s", "is_ahead"), [(0.5, 0.5, False), (0.501, 0.5, True), (0.0, 0.5, False)]
)
def test_remedy_of_copies_follows_from_the_memory_of_most_of_them(
    pinned_s: float, pageable_s: float, is_ahead: bool
) -> None:
    usual = copied(**{"HtoD pinned": pinned_s, "HtoD pageable": pageable_s})
    one = found("blocking_copies", idle(usual=usual, copy=0.5))
    assert isinstance(one, Diagnosis)
    assert one.remedy.startswith("copy less") is is_ahead


ORDINALS = {2: "second", 3: "third", 4: "fourth", 5: "fifth", 6: "sixth", 7: "seventh", 8: "eighth", 9: "ninth",
            10: "tenth", 20: "twentieth", 50: "fiftieth", 100: "hundredth", 11: "11th", 12: "12th", 13: "13th",
            14: "14th", 21: "21st", 22: "22nd", 23: "23rd", 24: "24th", 31: "31st", 101: "101st",
            111: "111th"}  # fmt: skip


@pytest.mark.parametrize("every", ORDINALS)
def test_period_of_slow_steps_is_written_out(every: int) -> None:
    assert steps_of(slow(every=every)) == f"every {ORDINALS[every]} step"  # type: ignore[arg-type]


def test_step_that_is_slow_once_comes_last() -> None:
    for count in (1, 2):
        usual = recorded(total_s=16.0, apart=(Apart("slow", (*range(count),), 3.0, 1.0, 7, WINDOW),), windows=WINDOW)
        for evidence in (step({"slow_steps": [slow(steps=count)]}), Evidence(usual=usual)):
            one = found("periodic_steps", evidence)
            assert isinstance(one, Diagnosis)
            assert (one.comes_last, one.is_outside) == ((count == 1,) * 2)


@pytest.mark.parametrize(
    ("share", "known", "comes_last"),
    [
        (0.9, {}, False),  # the step has no kernel
        (0.89, {}, True),
        (0.9, {"is_rest": True}, False),
        (0.89, {"is_rest": True}, True),
        (0.5, {"is_named": False, "profiler": "kineto"}, False),
        (0.49, {"is_named": False, "profiler": "kineto"}, True),
        (0.9, {"is_named": False, "step_s": 1.0}, True),
        (0.9, {"is_named": False, "step_s": 0.99}, False),
        (0.5, {"is_named": False, "step_s": 50.0, "is_once": True}, True),
        (0.5, {"is_named": False, "step_s": 49.9, "is_once": True}, False),  # of hardly a kernel
    ],
)
def test_start_up_comes_last_unless_it_outweighs_the_usual_work(
    share: float, known: dict[str, Any], comes_last: bool
) -> None:
    one = found("start_up", Evidence(usual=recorded(total_s=100.0, start_up_s=100 * share, **known)))
    assert isinstance(one, Diagnosis)
    assert one.comes_last is comes_last
