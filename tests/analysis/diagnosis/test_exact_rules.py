"""Numbers of single rules where both sides of a limit meet, in a step of 1 s: exact shares, bounds and words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from cs_systems.analysis.attribution.collectives import Collective
from cs_systems.analysis.attribution.distribution import DDP, Distribution
from cs_systems.analysis.attribution.overlap import union
from cs_systems.analysis.attribution.product_rates import Product
from cs_systems.analysis.attribution.tables import scores
from cs_systems.analysis.attribution.usual_steps import Apart, Usual
from cs_systems.analysis.diagnosis import (
    Diagnosis,
    _without_kernels,
    find_all,
    slow_products,
    small_grids,
    unused_tensor_cores,
)
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis.exposed_communication import BUCKETS, OVERLAP, SIZES, _more_overlap
from cs_systems.analysis.memory.out_of_memory import FRAGMENTED, Failure
from cs_systems.analysis.replay import Change, HostScaled, SyncRemoved
from cs_systems.analysis.replay import Expected as Predicted
from cs_systems.readers.forms.trace import Copies, Copy, Step
from cs_systems.record import Measurement, Sample
from tests.analysis.attribution.made import PRODUCT, Made
from tests.analysis.diagnosis.test_findings import recorded
from tests.analysis.diagnosis.test_loop_rules import (
    BROADCAST,
    DROPPED,
    LOOP,
    PADDED,
    UNHELD,
    collected,
    growing,
    in_double,
    inner,
    outcome,
    own,
    slow,
    under,
    updates,
)
from tests.analysis.diagnosis.test_rule_limits import at_limit, check_numbers, fed, found, host, idle, memory, step
from tests.analysis.diagnosis.test_rules import RANKS, timed

MIB, GIB = 1 << 20, 1 << 30


@dataclass
class Answers:
    """Replay of a recorded step of 1 s with known answers."""

    of: dict[Change, Predicted]
    step_s: float = 1.0

    def what_if(self, *changes: Change) -> Predicted:
        (change,) = changes
        return self.of[change]


def replayed(now: float, value: float, change: Change | None = None) -> Any:
    return Answers({change or SyncRemoved(): Predicted(value, value, value, now)})


def with_copies(*spans: tuple[str, float, float], size: int = MIB, **known: Any) -> Usual:
    """Return a recording of a process with one kernel, which ends at 1 s, and these copies."""
    usual = recorded(**known)
    copies = Copies.of(Copy("memcpy", start_s, end_s, 0, 7, size, name=name) for name, start_s, end_s in spans)
    return replace(usual, profile=replace(usual.profile, trace=replace(usual.profile.trace, copies=copies)))


def kernels(rows: Sequence[dict[str, Any]], device: str | None = None, usual: Usual | None = None) -> Evidence:
    of: Any = [{"family": "other", "mean_s": row["time_s"], "calls_per_step": 1.0} | row for row in rows]
    tables: Any = {"kernels": of, "steps": [{"device": 0, "wall_s": 1.0}]}
    return Evidence(tables, usual=usual, device_name=device)


def gaps(**rows: tuple[float, dict[str, Any]]) -> Evidence:
    of = [{"device": 0, "cause": cause.replace("_", " "), "time_s": s} | more for cause, (s, more) in rows.items()]
    return Evidence({"gaps": of, "steps": [{"device": 0, "wall_s": 1.0}]})  # type: ignore[dict-item, list-item, typeddict-item]


def walls(*lasted: float, **phases: float) -> Measurement:
    return Measurement("monotonic", tuple(Sample(0, False, wall_s, phases, phases) for wall_s in lasted), 0.0)


def moved(count: int, name: str, start_s: float = 1.0) -> list[tuple[str, float, float]]:
    """Return so many copies of pages, each of 2⁻¹⁰ s."""
    return [(f"{name} unified", start_s + n * 2.0**-10, start_s + (n + 1) * 2.0**-10) for n in range(count)]


STEP: Any = {"steps": [{"device": 0, "wall_s": 1.0}]}
RANK = {"rank": 1, "steps": 5, "step_s": 1.0, "waiting_s": 0.0, "pairwise_s": 0.0, "other_s": 0.0, "leads": True}


def calls(*spans: tuple[str, float, float], sizes: Sequence[int] = (), busy: Sequence[float] = (), **known: Any) -> Any:
    """Return a program under DistributedDataParallel with these collectives, which computes at most an instant."""
    made = tuple(
        Collective(0, name, "", 2, None, size, start_s, end_s, 0.0, {})
        for (name, start_s, end_s), size in zip(spans, sizes or [4 * MIB] * len(spans), strict=True)
    )
    at = np.array([*busy], float)
    fields = {"searches": 0, "search_s": 0.0, "passes": 0, "updates": 0, "early": (), **known}
    return Distribution(2, DDP, True, fields.pop("steps", 1), made, union(at, at + 2.0**-20), **fields)


def reduces(small: int, large: int, *, size: int = 1024, apart: bool = False, **known: Any) -> Any:
    """Return a program with so many all-reduces of this size, and of 4 MiB; apart: it computes between any two."""
    spans = [("all_reduce", n / 64, n / 64 + 1 / 128) for n in range(small + large)]
    busy = [start_s - 1 / 256 for _, start_s, _ in spans] if apart else []
    return calls(*spans, sizes=[size] * small + [4 * MIB] * large, busy=busy, **known)


def one_of_two(share: float) -> Evidence:
    """Return a step with two elementwise kernels, of which one takes this share of the time."""
    rows = [
        {"kernel": f"at::native::{n}", "family": "elementwise", "time_s": s} for n, s in enumerate((share, 1 - share))
    ]
    of_phase = {"phase": "forward", "family": "elementwise", "time_s": 1.0, "calls_per_step": 2.0}
    evidence = kernels(rows)
    return replace(evidence, tables={**evidence.tables, "phases": [of_phase]})


def with_rows(table: str, *rows: dict[str, Any]) -> Evidence:
    return Evidence({**STEP, table: [*rows]})


def of_training(weights: int, gradients: int) -> Evidence:
    """Return a snapshot with a peak of 100 bytes."""
    evidence = memory(100, "parameters", weights, without=lambda *_: 0)
    assert evidence.memory is not None
    sizes = {"parameters": weights, "gradients": gradients}
    return Evidence(memory=replace(evidence.memory, categories=sizes))


def lagging(**phases: float) -> Evidence:
    """Return a loop of which the device finishes each phase as soon as the host has submitted it."""
    sample = Sample(0, False, 1.0, phases, phases, dict.fromkeys(phases, 0.0))
    return Evidence({}, Measurement("cuda_event", (sample,), 0.0), LOOP)


SOFTMAX = "softmax_warp_forward<float>"
GEFORCE, IN_DOUBLE = "NVIDIA GeForce RTX 3060", "diverge(int, double, "
PAGES = {"profiler": "nsys", "total_s": 16.0, "calls": [("cudaFree", 15.0, 15.5)]}
SLOW = (Apart("slow", (3,), 3.0, 1.0, None, (Step("step", 0.25, 2.0),)),)

# rule: limit → (evidence without the fault by a hair, evidence with it by a hair)
LIMITS: dict[str, tuple[Evidence, Evidence]] = {
    "blocking_copies: after the last kernel": (
        Evidence(usual=with_copies(("DtoH", 0.99, 1.5), profiler="nsys", is_once=True, total_s=4.0)),
        Evidence(usual=with_copies(("DtoH", 1.0, 1.5), profiler="nsys", is_once=True, total_s=4.0)),
    ),
    "device_allocation: half of the time pins memory": (
        idle(usual=recorded(calls=[("cudaHostAlloc", 2.0, 2.5), ("cudaMalloc", 3.0, 3.5)]), cudaMalloc=0.5),
        idle(usual=recorded(calls=[("cudaHostAlloc", 2.0, 2.5), ("cudaMalloc", 3.0, 3.75)]), cudaMalloc=0.5),
    ),
    "pinned_allocation: half of the time pins memory": (
        idle(usual=recorded(calls=[("cudaHostAlloc", 2.0, 2.5), ("cudaMalloc", 3.0, 3.75)]), cudaMalloc=0.5),
        idle(usual=recorded(calls=[("cudaHostAlloc", 2.0, 2.5), ("cudaMalloc", 3.0, 3.5)]), cudaMalloc=0.5),
    ),
    "divergence: from a loss above 0": (
        step({"outcome": [{"losses": 9, "early_loss": 0.0, "late_loss": 5.0}]}),
        step({"outcome": [{"losses": 9, "early_loss": 0.5, "late_loss": 5.0}]}),
    ),
    "double_precision: arguments in 3 tenths of the step": (
        kernels([{"kernel": IN_DOUBLE, "time_s": 0.2999}], GEFORCE, recorded()),
        kernels([{"kernel": IN_DOUBLE, "time_s": 0.3}], GEFORCE, recorded()),
    ),
    "double_precision: arguments on a GPU that is slow at it": (
        kernels([{"kernel": IN_DOUBLE, "time_s": 0.5}], None, recorded()),
        kernels([{"kernel": IN_DOUBLE, "time_s": 0.5}], GEFORCE, recorded()),
    ),
    "double_precision: arguments of a program without PyTorch": (
        kernels([{"kernel": IN_DOUBLE, "time_s": 0.5}], GEFORCE),
        kernels([{"kernel": IN_DOUBLE, "time_s": 0.5}], GEFORCE, recorded()),
    ),
    "growth: a tenth of the step, in no phase": (
        step({"growth": [growing("time in no phase", 0.1001, 0.2)]}),
        step({"growth": [growing("time in no phase", 0.1, 0.2)]}),
    ),
    "growth: in a step": (
        Evidence({"growth": [growing("time in no phase", 0.1, 0.2)]}, config=LOOP),  # type: ignore[dict-item, list-item, typeddict-item]
        step({"growth": [growing("time in no phase", 0.1, 0.2)]}),
    ),
    "host_synchronisation: a replay of a twentieth": (
        idle({"waits": [{"call": "a", "within": "item", "time_s": 0.5, "calls_per_step": 1.0}]}, launch_bound=0.5),
        replace(
            idle({"waits": [{"call": "a", "within": "item", "time_s": 0.5, "calls_per_step": 1.0}]}, launch_bound=0.5),
            known_replay=replayed(20.0, 19.0),
        ),
    ),
    "late_kernels: short waits of a fifth of the step": (
        gaps(device_latency=(0.1999, {"longest_s": 0.001, "gaps_per_step": 0.1999 / 5e-6 + 1})),
        gaps(device_latency=(0.2, {"longest_s": 0.001, "gaps_per_step": 0.2 / 5e-6})),
    ),
    "late_kernels: short waits of 5 µs": (
        gaps(device_latency=(0.5, {"longest_s": 0.001, "gaps_per_step": 99_999})),
        gaps(device_latency=(0.5, {"longest_s": 0.001, "gaps_per_step": 100_000})),
    ),
    "managed_memory: 100 pages come back": (
        Evidence(usual=with_copies(*moved(99, "DtoH"), **PAGES)),
        Evidence(usual=with_copies(*moved(100, "DtoH"), **PAGES)),
    ),
    "managed_memory: 100 pages move in slow steps": (
        Evidence(usual=with_copies(*moved(99, "HtoD", 0.25), apart=SLOW, **PAGES)),
        Evidence(usual=with_copies(*moved(100, "HtoD", 0.25), apart=SLOW, **PAGES)),
    ),
    "managed_memory: 9 of 10 pages move in slow steps": (
        Evidence(usual=with_copies(*moved(107, "HtoD", 0.25), *moved(12, "HtoD", 3.0), apart=SLOW, **PAGES)),
        Evidence(usual=with_copies(*moved(108, "HtoD", 0.25), *moved(12, "HtoD", 3.0), apart=SLOW, **PAGES)),
    ),
    "garbage_collection: its function takes a tenth of the step": (
        step({"garbage_collection": [collected(0.8, function="f")], "own_python": [own("f", 8, 0.1)]}),
        step({"garbage_collection": [collected(0.8, function="f")], "own_python": [own("f", 8, 0.0999)]}),
    ),
    "garbage_collection: its function takes half of its share": (
        step({"garbage_collection": [collected(2.0, function="f")], "own_python": [own("f", 8, 0.25)]}),
        step({"garbage_collection": [collected(2.0, function="f")], "own_python": [own("f", 8, 0.2499)]}),
    ),
    "garbage_collection: a twentieth of the loop belongs to its function": (
        step({"garbage_collection": [collected(0.2, function="f")], "own_python": [own("f", 8, 0.5)]}),
        step({"garbage_collection": [collected(0.199, function="f")], "own_python": [own("f", 8, 0.5)]}),
    ),
    "own_products: half of the step": (
        kernels([{"kernel": "gemm(float *)", "time_s": 0.4999}]), kernels([{"kernel": "gemm(float *)", "time_s": 0.5}]),
    ),
    "periodic_steps: a wait for the batch of a twentieth has its own rule": (
        step({"slow_steps": [slow(waits_for_batch=True)]}, input=0.05),
        step({"slow_steps": [slow(waits_for_batch=True)]}, input=0.0499),
    ),
    "precision_casts: 15% of the step": (
        kernels([{"kernel": "bfloat16_copy_kernel", "family": "copy", "time_s": 0.1499}]),
        kernels([{"kernel": "bfloat16_copy_kernel", "family": "copy", "time_s": 0.15}]),
    ),
    "python_in_forward: 5 samples": (
        step({"inner_lines": [inner("f", 1, 0.5, is_plain=True, samples=4)]}),
        step({"inner_lines": [inner("f", 1, 0.5, is_plain=True, samples=5)]}),
    ),
    "python_in_forward: a tenth of the step": (
        step({"inner_lines": [inner("f", 1, 0.0999, is_plain=True)]}),
        step({"inner_lines": [inner("f", 1, 0.1, is_plain=True)]}),
    ),
    "small_buckets: half of all that have a size": (
        Evidence(STEP, distribution=reduces(4, 5)), Evidence(STEP, distribution=reduces(4, 4)),
    ),
    "small_buckets: 4 per pass": (
        Evidence(STEP, distribution=reduces(7, 0, passes=2)), Evidence(STEP, distribution=reduces(8, 0, passes=2)),
    ),
    "small_buckets: 4 per step": (
        Evidence(STEP, distribution=reduces(7, 0, steps=2)), Evidence(STEP, distribution=reduces(8, 0, steps=2)),
    ),
    "small_buckets: below 1 MiB": (
        Evidence(STEP, distribution=reduces(4, 0, size=MIB)), Evidence(STEP, distribution=reduces(4, 0, size=MIB - 1)),
    ),
    "small_buckets: most without computation in between, unless a wrapper sends them": (
        Evidence(STEP, distribution=replace(reduces(4, 0, apart=True), wrapper="")),
        Evidence(STEP, distribution=reduces(4, 0, apart=True)),
    ),
    "too_many_threads: 1.3 times the time": (
        step({"threads": [{"threads": 8, "cores": 4, "time_s": 1.29, "of_cores_s": 1.0}]}, forward=0.5),
        step({"threads": [{"threads": 8, "cores": 4, "time_s": 1.3, "of_cores_s": 1.0}]}, forward=0.5),
    ),
    "unfused_elementwise: one kernel is 95% of all": (
        one_of_two(0.95), one_of_two(0.949),
    ),
    "unfused_optimizer: a tenth of the step in own Python": (
        step({"own_python": [own("step", 8, 0.0999, phase="optimizer")]}, optimizer=0.5),
        step({"own_python": [own("step", 8, 0.1, phase="optimizer")]}, optimizer=0.5),
    ),
    "unfused_optimizer: 3 samples in own Python": (
        step({"own_python": [own("step", 8, 0.5, phase="optimizer") | {"samples": 2}]}, optimizer=0.5),
        step({"own_python": [own("step", 8, 0.5, phase="optimizer") | {"samples": 3}]}, optimizer=0.5),
    ),
    "unfused_optimizer: in a function that calls no other optimizer": (
        step({"own_python": [own("train", 8, 0.5, "optimizer.step", phase="optimizer"),
                             own("", 9, 0.5, phase="optimizer")]}, optimizer=0.5),
        step({"own_python": [own("train", 8, 0.5, "torch.sqrt", phase="optimizer")]}, optimizer=0.5),
    ),
    "value_checks: a third of a function": (
        step({"inner_lines": [inner("f", 1, 0.0999, source="x.isnan()"), inner("f", 2, 0.5)]}),
        step({"inner_lines": [inner("f", 1, 0.25, source="x.isnan()"), inner("f", 2, 0.5)]}),
    ),
    "weights_and_gradients: 7 tenths of the peak": (
        of_training(39, 30), of_training(40, 30),
    ),
    "weights_and_gradients: 3 tenths of gradients": (
        of_training(60, 29), of_training(60, 30),
    ),
}  # fmt: skip


@pytest.mark.parametrize("limit", LIMITS)
def test_rule_gives_a_diagnosis_from_its_limit_on(limit: str) -> None:
    assert at_limit(limit, *LIMITS[limit]) == (None, True)


def waiting(sync: float, launches: float, value: float) -> Evidence:
    rows = {"waits": [{"call": "a", "within": "item", "time_s": 0.5, "calls_per_step": 1.0}]}
    return replace(idle(rows, synchronisation=sync, launch_bound=launches), known_replay=replayed(1.0, value))


# rule: case → (evidence, share, least that is left, words of the sentence)
NUMBERS: dict[str, tuple[Evidence, float, float | None, str]] = {
    "batch_preparation: lines from a fiftieth of the step on": (
        step({"own_python": [fed(0.25), fed(0.02, samples=3), fed(0.0199)]}, other=0.5), 0.2899, 0.7101,
        "batches() at train.py:8, encode (25%), batches() at train.py:8, encode (2%): ",
    ),
    "blocking_copies: mostly after the last kernel": (
        idle(usual=with_copies(("DtoH", 0.5, 0.75), ("DtoH", 1.0, 1.5), ("HtoD", 2.0, 3.0),
                               profiler="nsys", is_once=True, total_s=4.0), copy=0.0625),
        0.125, None, "12% of the recording is copies to the host after the last kernel (1.00 MiB in 500 ms)",
    ),
    "blocking_copies: at the same time": (
        Evidence(usual=with_copies(*[("HtoD", 0.0, 0.25)] * 4, ("HtoD", 0.5, 0.75), *[("DtoH", 1.0, 1.5)] * 4,
                                   profiler="nsys", is_once=True, total_s=2.0)),
        0.375, None, "before the first kernel and to the host after the last kernel (8.00 MiB in 750 ms)",
    ),
    "blocking_copies: without those that a kernel hides": (
        Evidence(usual=with_copies(("HtoD", 0.625, 0.875), ("HtoD", 1.0, 1.5), runs=[(0.5, 1.0, 0.25), (1.5, 2.0, 0.5)],
                                   profiler="nsys", is_once=True, total_s=2.0)),
        0.25, None, "25% of the recording is copies between kernels (1.00 MiB in 500 ms)",
    ),
    "blocking_copies: mostly between kernels": (
        idle(usual=with_copies(("DtoH", 1.0, 1.5), profiler="nsys", is_once=True, total_s=4.0), copy=0.25),
        0.25, 0.75, "25% of the step the GPU copies memory and computes nothing: copy from pinned",
    ),
    "blocking_copies: two short ones from pinned memory": (
        idle(usual=with_copies(("HtoD pinned", 2.0, 2.125), ("HtoD pinned", 3.0, 3.125), ("HtoD pageable", 4.0, 4.5)),
             copy=0.25), 0.25, 0.75, "computes nothing: copy from pinned memory",
    ),
    "data_input: noise of the rest of the step alone": (
        Evidence({}, Measurement("monotonic", tuple(
            Sample(0, False, 0.5 + s, {"input": s}, {"input": s}) for s in (0.1, 0.1, 0.5, 0.9, 0.9)
        ), 0.0), LOOP), 0.5, 0.5, "50% of the step waits",
    ),
    "data_input: the function that is named has 3 samples and waits": (
        step({"own_python": [own("f", 1, 0.4) | {"samples": 9}, own("g", 2, 0.3, phase="input") | {"samples": 2},
                             own("h", 3, 0.2, phase="input") | {"samples": 3}]}, input=0.5),
        0.5, 0.5, "50% of the step waits for the next batch (h() at train.py:3): ",
    ),
    "double_precision: by the fastest step": (
        step({"double_precision": [in_double(flops=1e9)]}, walls=(1.0, 1.0, 0.5), forward=0.75), 0.2, None,
        "at least 20% of the step",
    ),
    "double_precision: in a step of unknown samples": (
        step({"double_precision": [in_double(flops=2e9)]}, walls=(1.0, 1.0, 0.0), forward=0.75), 0.2, None,
        "at least 20% of the step",
    ),
    "double_precision: the worst kernel is named": (
        kernels([{"kernel": IN_DOUBLE, "time_s": 0.25}, {"kernel": IN_DOUBLE.ljust(61, "x"), "time_s": 0.5}], GEFORCE,
                recorded()), 0.75, None, f"at 1/32 of the rate of fp32 or less ({IN_DOUBLE.ljust(60, 'x')}): ",
    ),
    "exposed_communication: of the fastest steps": (
        timed(RANKS, walls(0.05, 0.06, *[0.1] * 9, synchronize=0.03)), 0.3, 0.03, "30% of the step is communication",
    ),
    "exposed_communication: no more than the transfer": (
        timed(RANKS, tables={"overlap": [{"rank": 0, "exposed_s": 0.05, "transfer_s": 0.03, "step_s": 0.2}]}),
        0.15, 0.085, "15% of the traced step (30.0 ms of 200 ms)",
    ),
    "exposed_communication: of the worst rank": (
        timed(RANKS, tables={"overlap": [{"rank": 0, "exposed_s": 0.05, "transfer_s": None, "step_s": 0.2},
                                         {"rank": 1, "exposed_s": 0.03, "transfer_s": 0.03, "step_s": 0.2}]}),
        0.25, 0.075, "25% of the traced step (50.0 ms of 200 ms)",
    ),
    "gradients_not_cleared: the optimizer with most such steps": (
        step({"updates": [updates(stale=9, optimizer="SGD"), updates(stale=11)]}), 1.0, None, "in 11 of 12 steps of Ad",
    ),
    "growth: memory by the largest growth": (
        step({"growth": [growing("host memory", 1e9, 3e9), growing("device memory", 5e9, 6e9)]}), 2 / 3, None,
        "host memory grows by 38.1 MiB a step: 1.86 GiB in 50 steps: find",
    ),
    "growth: of the step": (
        step({"growth": [growing("step time", 0.25, 1.0)]}), 0.75, None,
        "a step takes 15.0 ms longer with each step: 250 ms at first, 1.00 s after 50 steps: ",
    ),
    "growth: of the host while cuDNN prepares attention": (
        step({"growth": [growing("host memory", 1e9, 3e9)],
              "host_gaps": [host("f, aten::_cudnn_attention_forward", 0.25)]}), 2 / 3, None,
        "1.86 GiB in 50 steps: it is probably what cuDNN keeps of each size that it prepared: use another kernel of",
    ),
    "growth: of the host while a step hardly waits for cuDNN": (
        step({"growth": [growing("host memory", 1e9, 3e9)],
              "host_gaps": [host("f, aten::_cudnn_attention_forward", 0.05)]}), 2 / 3, None,
        "1.86 GiB in 50 steps: find what is kept",
    ),
    "growth: of the device while cuDNN prepares attention": (
        step({"growth": [growing("device memory", 1e9, 3e9)],
              "host_gaps": [host("f, aten::_cudnn_attention_forward", 0.25)]}), 2 / 3, None,
        "1.86 GiB in 50 steps: find what is kept",
    ),
    "growth: in no phase, in the own function with most of it": (
        step({"growth": [growing("time in no phase", 0.125, 0.25)],
              "own_python": [own("a", 1, 0.2), own("b", 2, 0.5, phase="forward"), own("c", 3, 0.1),
                             own("calls of phases", 4, 0.9)]}), 0.25, None, "steps, most of it in a() at train.py:1",
    ),
    "growth: in no phase, by no more than the step": (
        step({"growth": [growing("time in no phase", 0.125, 2.5)]}), 1.0, None, "125 ms to 2.50 s in 50 steps: ",
    ),
    "host_synchronisation: with the launches after it": (
        waiting(0.125, 0.25, 0.75), 0.25, 0.875, "25% of the step the GPU is idle because the host synchronises",
    ),
    "host_synchronisation: no more than the waits and the launches": (
        waiting(0.125, 0.25, 0.5), 0.375, 0.875, "38% of the step the GPU is idle because the host synchronises",
    ),
    "host_synchronisation: no more than the waits": (
        waiting(0.25, 0.0, 0.5), 0.25, 0.75, "25% of the step the GPU is idle because the host synchronises",
    ),
    "host_synchronisation: a replay below a twentieth does not count": (
        waiting(0.25, 0.0, 0.97), 0.25, 0.75, "25% of the step the GPU is idle because the host synchronises",
    ),
    "host_synchronisation: waits of a twentieth count": (
        waiting(0.0, 0.05, 0.5), 0.05, None, "5% of the step the GPU is idle because the host synchronises",
    ),
    "host_time: the kind with most of the work": (
        idle({"host_gaps": [host("plot", 0.125), host("save_checkpoint", 0.25)]}, host=0.375), 0.375, 0.625,
        "while the host writes a checkpoint",
    ),
    "host_time: cuDNN prepares attention": (
        idle({"host_gaps": [host("f, aten::_cudnn_attention_forward", 0.25), host("f", 0.125)]}, host=0.375),
        0.375, None, "while the host lets cuDNN prepare attention for sizes that are new to it",
    ),
    "late_kernels: short waits": (
        gaps(device_latency=(0.5, {"longest_s": 0.001, "gaps_per_step": 200_000})), 0.5, 0.5,
        "50% of the step is the usual time between two kernels, 2.50 µs each: ",
    ),
    "late_kernels: long waits": (
        gaps(device_latency=(0.25, {"longest_s": 0.2, "gaps_per_step": 2})), 0.25, 0.75,
        "25% of the step the GPU is idle although the next kernel is launched: ",
    ),
    "managed_memory: pages come back in silence": (
        Evidence(usual=with_copies(*moved(1024, "DtoH"), *moved(90, "HtoD", 2.0), **PAGES)), 0.0625, None,
        "6% of the recording the host reads managed memory back page by page, after the last kernel (1,024 moves, 1.00 "
        "GiB in 1.00 s)",
    ),
    "managed_memory: slow steps take longer than the way back": (
        Evidence(usual=with_copies(*moved(128, "HtoD", 0.25), *moved(12, "DtoH", 1.9), apart=SLOW, **PAGES)),
        0.125, None, "is extra time of 1 step in which pages of managed memory move (140 MiB): 3.00 s each",
    ),
    "launch_bound: phases of a loop from a fiftieth of the step on": (
        lagging(forward=0.5, loss=0.0199, backward=0.02), 0.52, None, "for 52% of the step (forward, backward) the GPU",
    ),
    "own_products: with the arguments as Kineto writes them": (
        kernels([{"kernel": "matmul_k(float*, float*, int)", "time_s": 0.75, "mean_s": 0.125}]), 0.75, None,
        "of the program's own in fp32 (matmul_k, 125 ms each): ",
    ),
    "own_products: the worst is named by 60 letters": (
        kernels([{"kernel": "void gemm(float *)", "time_s": 0.25}, {"kernel": f"void conv2d_{60 * 'a'}(float *)",
                                                                  "time_s": 0.5, "mean_s": 0.125}]),
        0.75, None, f"of the program's own in fp32 (conv2d_{53 * 'a'}, 125 ms each): ",
    ),
    "own_python: copies of a batch are no preparation": (
        step({"own_python": [fed(0.25, "asdict"), own("f", 8, 0.125)]}, other=0.375), 0.375, 0.625,
        "own Python, which copies a dataclass with all that it holds: batches() at train.py:8, asdict (25%), ",
    ),
    "own_python: of three, in steps that wait for a rank": (
        step({"own_python": [*(own(name, 1, 0.25) for name in "abcd"), fed(0.125) | {"share": 0.25}], "loop_ranks": [
            RANK | {"step_s": 0.5, "other_s": 0.25}, RANK | {"leads": False, "other_s": 0.9}]}, other=0.125),
        0.375, 0.625, "own Python: a() at train.py:1 (25%), b() at train.py:1 (25%), c() at train.py:1 (25%): ",
    ),
    "own_python: its share of slower steps that all ranks observe": (
        step({"own_python": [own("a", 1, 0.0625), fed(0.125) | {"share": 0.75}], "loop_ranks": [
            RANK | {"step_s": 0.5, "other_s": 0.25}]}, other=0.1875), 0.125, 0.875, "own Python: a() at train.py:1",
    ),
    "own_python: from 3 samples on": (
        step({"own_python": [own("f", 8, 0.25) | {"samples": 3}, own("g", 9, 0.25) | {"samples": 2}]}, other=0.5),
        0.5, 0.5, "is the script's own Python: f() at train.py:8 (25%): ",
    ),
    "own_python: half of it is of a kind": (
        step({"own_python": [own("save_checkpoint", 8, 0.25)]}, other=0.5), 0.5, 0.5,
        "is the script's own Python, which writes a checkpoint: ",
    ),
    "periodic_steps: of a trace, without a name": (
        Evidence(usual=recorded(total_s=16.0, apart=(Apart("periodic", (3, 6), 3.0, 1.0, 3, SLOW[0].windows),),
                                windows=SLOW[0].windows)), 0.25, 12.0, "in every third step: see what the loop does",
    ),
    "own_tools: by the mean of its steps": (
        step({"own_tools": [under(extra_s=1.5)]}), 0.25, None,
        "active in 20 of 40 steps (175 ms each on average, without it 100 ms)",
    ),
    "own_tools: without any cost": (step({"own_tools": [under(extra_s=0.0)]}), 0.0, None, "0% of the loop"),
    "padding: of no more than the step": (
        step({"padding": [PADDED | {"share": 0.5}]}, forward=1.5), 0.5, None, "50% of each",
    ),
    "pipeline_bubbles": (
        Evidence(STEP, distribution=calls(("send", 0.0, 0.25), ("recv", 0.25, 0.5), ("all_reduce", 0.5, 1.0))),
        0.5, 0.5, "50% of the step this stage of a pipeline waits",
    ),
    "exposed_communication: of one rank, without sends and receives": (
        Evidence(STEP, distribution=calls(("send", 0.0, 0.25), ("all_reduce", 0.25, 1.0))), 0.75, 0.25,
        "75% of the traced step (750 ms of 1.00 s) is communication",
    ),
    "gradient_accumulation": (
        Evidence(STEP, distribution=replace(
            calls(("all_reduce", 0.0, 0.25), ("broadcast", 0.5, 0.75), ("all_reduce", 0.75, 1.0)),
            early=calls(("all_reduce", 0.0, 0.25)).calls, passes=4, updates=2,
        )), 0.25, 0.75, "in each of 2 passes per update: 1 of 2 all-reduces",
    ),
    "unused_parameters": (
        Evidence(STEP, distribution=replace(
            calls(("all_reduce", 0.0, 0.5), ("broadcast", 0.5, 0.5625), ("all_reduce", 0.625, 0.75), sizes=(9, 1, 2)),
            searches=1, search_s=0.25,
        )), 0.375, 0.625, "(250 ms per step) and averages the result (125 ms)",
    ),
    "precision_casts": (
        kernels([{"kernel": "bfloat16_copy_kernel", "family": "copy", "time_s": time_s, "calls_per_step": calls}
                 for time_s, calls in ((0.25, 2.4), (0.125, 1.0))]), 0.375, 0.625, "between precisions (3 kernels): ",
    ),
    "python_in_forward: two functions": (
        step({"inner_lines": [inner("f", 1, 0.125, is_plain=True), inner("g", 2, 0.25, is_plain=True),
                              inner("g", 3, 0.125, is_plain=True), inner("h", 4, 0.0625, is_plain=True)]}),
        0.5625, 0.4375, "is Python inside the model, which computes without tensors: g() at train.py:2 (38%), f() at t",
    ),
    "python_in_forward: from a fiftieth of the step on": (
        step({"inner_lines": [inner("f", 1, 0.25, is_plain=True), inner("g", 2, 0.0199, is_plain=True)]}),
        0.2699, 0.7301, "without tensors: f() at train.py:1 (25%): ",
    ),
    "python_in_forward: half of it in the loss": (
        step({"inner_lines": [inner("f", 1, 0.25, is_plain=True), inner("g", 2, 0.25, is_plain=True, phase="loss")]}),
        0.5, 0.5, "is Python inside the model",
    ),
    "python_in_forward: more than half of it in the loss": (
        step({"inner_lines": [inner("f", 1, 0.25, is_plain=True), inner("g", 2, 0.26, is_plain=True, phase="loss")]}),
        0.51, 0.49, "is Python between the model and backward",
    ),
    "small_buckets: of the median size": (
        Evidence(STEP, distribution=calls(*(("all_reduce", n / 8, n / 8 + 1 / 16) for n in range(6)),
                                          sizes=(1024, 1024, 2048, 2048, 4096, 2 * MIB))),
        5 / 16, 11 / 16, "each backward sends 5 all-reduces of 2.00 KiB (median)",
    ),
    "too_many_threads": (
        step({"threads": [{"threads": 8, "cores": 4, "time_s": 2.0, "of_cores_s": 1.0}]}, forward=0.5, other=0.5), 0.25,
        None, "takes 2 times as long as with 4, and operators are in 50% of the step",
    ),
    "unfused_optimizer: in own Python, no more than its phase": (
        step({"own_python": [own(name, 8, 0.25, phase="optimizer") for name in "abcd"]}, optimizer=0.5), 0.5, 0.5,
        "50% of the step is an optimizer in the script's own Python: a() at train.py:8 (25%), b() at train.py:8 (25%), "
        "c() at train.py:8 (25%): ",
    ),
    "unfused_attention": (
        with_rows("attention", {"part": "attention.scores", "family": "matmul", "time_s": 0.25},
                  {"part": "attention.softmax", "family": "softmax", "time_s": 0.125},
                  {"part": "attention.rotation", "family": "elementwise", "time_s": 0.25}),
        0.125, 0.625, "mask, softmax and copies of the score matrix take 12% of the step",
    ),
    "unfused_elementwise: one kernel": (
        with_rows("phases", {"phase": "forward", "family": "norm", "time_s": 0.25, "calls_per_step": 1.2},
                  {"phase": "optimizer", "family": "copy", "time_s": 0.5, "calls_per_step": 9.0}),
        0.25, 0.75, "1 elementwise kernel, casts and norms take 25% of the step",
    ),
    "unused_gradients": (
        step({"unused_gradients": [UNHELD]}, backward=0.5), 0.25, None, "50.0% of all elements with gradients: ",
    ),
    "unused_gradients: no more than the step": (
        step({"unused_gradients": [UNHELD | {"share": 1.0}]}, backward=1.5), 1.0, None, "of 16 parameters that no",
    ),
    "unused_gradients: of the optimizer with most of them": (
        step({"dropped_gradients": [DROPPED | {"share": 0.25}, DROPPED | {"optimizer": "SGD", "share": 0.5}]},
             backward=0.5), 0.25, None, "another optimizer (SGD), such as",
    ),
    "unused_passes": (step({"unused_passes": [{"passes": 8, "unused": 6}]}), 0.75, None, "6 of 8 backward passes"),
}  # fmt: skip


@pytest.mark.parametrize("case", NUMBERS)
def test_share_and_bound_of_a_rule_are_exact(case: str) -> None:
    check_numbers(case, *NUMBERS[case])


@pytest.mark.parametrize(("elements", "times"), [(0, 8), (1, 8), (2, 4), (4, 2)])
def test_broadcast_tensor_has_a_multiple_of_the_elements_that_it_is_made_from(elements: int, times: int) -> None:
    rows = {"inner_lines": [inner("f", 3, 0.5, source="(a - b).sum()")]}
    one = found("broadcast_sums", step(rows | {"broadcasts": [BROADCAST | {"elements": 8, "from_elements": elements}]}))
    assert isinstance(one, Diagnosis)
    assert f"with {times} times the elements" in one.cause


@pytest.mark.parametrize(
    ("strategy", "way"),
    [
        ("ddp_flat", OVERLAP), ("mine", OVERLAP), ("ddp_flat+mine", OVERLAP), ("ddp_overlap", BUCKETS),
        ("ddp_bucketed", SIZES), ("fsdp", ""),
    ],
)  # fmt: skip
def test_more_overlap_is_advised_where_a_strategy_lacks_it(strategy: str, way: str) -> None:
    assert _more_overlap(strategy) == way


@pytest.mark.parametrize(("time_s", "change"), [(0.25, HostScaled(0.0, "f")), (0.2499, None)])
def test_replay_of_host_time_is_of_the_range_with_half_of_it(time_s: float, change: Change | None) -> None:
    rows = {"host_gaps": [host("f", time_s), host("g", 0.5 - time_s)]}
    one = found("host_time", idle(rows, host=0.5))
    assert isinstance(one, Diagnosis)
    assert one.change == change


@pytest.mark.parametrize(
    ("sizes", "remedy"),
    [
        ((64, 64, 64), "use a larger batch"), ((63, 64, 64), "compute several"), ((64, 72, 100), "pad these sizes"),
        ((64, 72, 104), "use a larger batch"), ((64, 8, 64), "compute several"),
    ],
)  # fmt: skip
def test_remedy_of_a_slow_product_follows_from_its_sizes(sizes: tuple[int, int, int], remedy: str) -> None:
    one = Product("mm", sizes, 1.0, 1.0, 0.5)
    assert slow_products._remedy(one).startswith(remedy)
    assert slow_products._why(one) == (
        "; 100 is no multiple of 8" if 100 in sizes else "; 63 is no multiple of 8" * (63 in sizes)
    )


@pytest.mark.parametrize(
    ("grid", "block", "multiprocessors", "used"),
    [
        ("8×1×1", "32×1×1", None, 0.0), ("9×1×1", "32×1×1", None, 1.0), (None, None, None, 1.0),
        ("66×1×1", "128×1×1", 132, 0.5), ("66×2×2", "128×1×1", 132, 1.0), ("132×1×1", "64×1×1", 132, 0.5),
        ("132×1×1", "16×4×1", 132, 0.5), ("528×1×1", "16×1×1", 132, 0.5),
        ("528×1×1", "33×1×1", 132, 33 / 64),
        ("66×1×1", None, 132, 0.5),
    ],
)  # fmt: skip
def test_share_of_a_gpu_that_a_launch_can_use(grid: Any, block: Any, multiprocessors: int | None, used: float) -> None:
    assert small_grids._used({"grid": grid, "block": block}, multiprocessors) == used  # type: ignore[typeddict-item]


@pytest.mark.parametrize(("launches", "is_known"), [(0.25, True), (0.2, False)])
def test_waits_that_the_profiler_explains_are_unknown(launches: float, is_known: bool) -> None:
    assert isinstance(found("launch_bound", idle(usual=recorded(), launch_bound=launches)), Diagnosis) is is_known


@pytest.mark.parametrize(("phases", "is_told"), [((), False), (("forward",), True), (("forward", "backward"), False)])
def test_forward_alone_may_run_without_a_graph(phases: Sequence[str], is_told: bool) -> None:
    one = found("kept_activations", memory(10, "activations", 5, phases=frozenset(phases)))
    assert isinstance(one, Diagnosis)
    assert one.remedy.endswith("run forward under torch.no_grad()") is is_told


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({}, "a request for 10 B failed, with 3 B free on the device, 8 B reserved but free (the largest piece 5 B), "),
        (
            {"cached_bytes": 0},
            "a request for 10 B failed, with 3 B free on the device, 90 B allocated (at a.py:3): set",
        ),
        ({"largest_free_bytes": 0}, "a request for 10 B failed, with 3 B free on the device, 90 B allocated (at a"),
        ({}, "usable, or free 7 B more: 16 B are activations, most of them allocated at c.py:5; checkpoint blocks"),
        ({"device_free_bytes": 0}, "usable, or free 10 B more: 16 B are"),
        ({"count": 2}, "a request for 10 B failed, the last of 2 that failed, with"),
    ],
)
def test_failed_request_names_what_was_free_and_what_holds_most(known: dict[str, Any], words: str) -> None:
    row: Any = {"requested_bytes": 10, "device_free_bytes": 3, "allocated_bytes": 90, "cached_bytes": 8,
                "largest_free_bytes": 5, "phase": None, "where": "a.py:3"}  # fmt: skip
    count = known.get("count", 1)
    held = {
        ("activations", "b.py:4"): 4,
        ("activations", "c.py:5"): 5,
        ("activations", ""): 7,
        ("gradients", "d.py:6"): 9,
    }
    one = found("out_of_memory", Evidence(failure=Failure(row | known, count, FRAGMENTED, 0, held, False)))
    assert isinstance(one, Diagnosis)
    assert words in one.sentence
    assert (one.now, one.share) == (100, 1.0)


@pytest.mark.parametrize(
    ("known", "words"),
    [
        (
            {"learning_rate": 1e-3, "dtype": "bfloat16"},
            "24 steps: updates by a learning rate of 0.001 are lost in bfloat16",
        ),
        ({"learning_rate": 1e-3, "dtype": "float32"}, "24 steps, at a learning rate of 0.001: find"),
        ({"learning_rate": None, "dtype": "bfloat16"}, "24 steps: find what restores"),
    ],
)
def test_reason_of_no_update_follows_from_rate_and_dtype(known: dict[str, Any], words: str) -> None:
    one = found("no_update", step({"updates": [updates(changed=0, **known)]}))
    assert isinstance(one, Diagnosis)
    assert words in one.sentence
    assert "now_s" not in one.row()


@pytest.mark.parametrize(("first", "last", "words"), [(8.0, 2.0, " (scale 8 at first, 2 at last)"), (8.0, None, ""),
                                                     (None, 2.0, "")])  # fmt: skip
def test_scales_of_skipped_steps_are_told_if_both_are_known(first: Any, last: Any, words: str) -> None:
    row = outcome(skipped_steps=6, optimizer_steps=8, first_scale=first, last_scale=last)
    one = found("no_training", step({"outcome": [row]}))
    assert isinstance(one, Diagnosis)
    assert one.cause == f"the GradScaler skips 6 of 8 optimizer steps{words}"


@pytest.mark.parametrize(
    ("costs", "rate", "least_s"),
    [
        ([(8.0, 4), (8.0, 0)], 2.0, 1.5), ([(8.0, 4), (8.0, 0)], None, 1.0), ([(8.0, 4), (None, 0)], 2.0, None),
        ([(8.0, None)], 2.0, 0.5), ([], 2.0, None),
    ],
)  # fmt: skip
def test_step_in_16_bits_takes_at_least_its_flops_or_half_of_its_bytes(
    costs: Any, rate: float | None, least_s: float | None
) -> None:
    rows = [{"phase": "forward", "hardware_flops": flops, "bytes": size} for flops, size in costs]
    tables: Any = {"cost": rows, "ceiling": [{"peak_flops_per_s": 1.0, "peak_bytes_per_s": rate}]}
    assert unused_tensor_cores._least_s(Evidence(tables), 16.0) == least_s


@pytest.mark.parametrize(
    ("kernel", "block", "is_known"),
    [("nvjet_a", "16×1×1", False), ("nvjet_a", "32×1×1", True), ("mine", "16×1×1", True), ("nvjet_a", None, True)],
)
def test_block_smaller_than_a_warp_is_unknown_in_a_library(kernel: str, block: str | None, is_known: bool) -> None:
    assert small_grids._is_known({"kernel": kernel, "block": block}) is is_known  # type: ignore[typeddict-item]


def test_kernels_over_the_scores_are_counted_per_step() -> None:
    made = Made()
    for name, start_s, end_s in ((PRODUCT, 0.0, 1.0), (SOFTMAX, 1.0, 1.25), (PRODUCT, 2.0, 3.0), (SOFTMAX, 3.0, 3.5),
                                 (PRODUCT, 4.0, 5.0), (SOFTMAX, 5.0, 5.75), (PRODUCT, 6.0, 7.0)):  # fmt: skip
        made.kernel(name, start_s, end_s)
    steps = (Step("step", -1.0, 3.5), Step("step", 3.5, 8.0))
    (row,) = scores(replace(made.profile(), steps=steps))
    assert row == {"kernel": SOFTMAX, "family": "softmax", "calls_per_step": 1.5, "time_s": 0.75}


@pytest.mark.parametrize(("pages", "is_told"), [(0, False), (100, False), (101, True)])
def test_pages_that_move_while_kernels_run_are_to_be_prefetched(pages: int, is_told: bool) -> None:
    rows = [{"kernel": "few", "time_s": 0.5, "grid": "2×4×1"}]
    one = found("small_grids", kernels(rows, usual=with_copies(*moved(pages, "HtoD", 0.5))))
    assert isinstance(one, Diagnosis)
    assert ("prefetch" in one.remedy) is is_told


def test_allocation_without_a_trace_is_on_the_device() -> None:
    assert isinstance(found("device_allocation", idle(cudaMalloc=0.5)), Diagnosis)
    assert found("pinned_allocation", idle(cudaMalloc=0.5)) is None


def test_cause_of_a_whole_loop_keeps_its_weight() -> None:
    evidence = step({"slow_steps": [slow()], "outcome": [outcome(fault="NaN")], "padding": [PADDED]}, forward=0.5)
    weights = {one.code: one.weight for one in find_all(evidence)[0]}
    assert weights == {"no-training": 1.0, "padding": 0.5, "periodic-steps": 1.0}


def test_first_two_calls_of_a_start_up_are_named() -> None:
    made = Made()
    for name, start_s, end_s in (("cudaFree", 0.0, 1.0), ("cudaMalloc", 1.0, 3.0), ("cuInit", 3.0, 3.5)):
        made.call(name, start_s, end_s)
    words = _without_kernels._start_up(made.trace(), 7.0)
    assert words.startswith("50% of the recording is start-up (")
    assert words.count(" in ") == 2
    assert _without_kernels._start_up(made.trace(), 7.1) == ""


def test_rate_of_copies_is_that_of_copies_with_known_bytes() -> None:
    copies = [Copy("memcpy", 0.0, 0.5, 0, 7, 10**9, name="HtoD"), Copy("memcpy", 1.0, 1.5, 0, 7, 0, name="HtoD")]
    words = _without_kernels._copies(replace(Made().trace(), copies=Copies.of(copies)), 4.0)
    assert words == "954 MiB HtoD at 2 GB/s; they take 25% of the time"
