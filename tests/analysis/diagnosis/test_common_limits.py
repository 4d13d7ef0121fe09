"""Limits of rules, first of those that most often give the first sentence: at each limit, and just off it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from cs_systems.analysis.attribution.usual_steps import Apart, Usual
from cs_systems.analysis.comparison.ranks import merged
from cs_systems.analysis.diagnosis import Diagnosis
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.replay import LaunchesFree
from cs_systems.readers.forms.columns import Range
from cs_systems.readers.forms.trace import Step
from cs_systems.record import Measurement, Sample
from tests.analysis.attribution.made import ADD, FLASH, PRODUCT, Made
from tests.analysis.comparison.test_limits import call, rank
from tests.analysis.diagnosis.test_exact_rules import RANK, calls
from tests.analysis.diagnosis.test_findings import recorded
from tests.analysis.diagnosis.test_loop_rank_rules import BUFFERS, GRADIENTS, LATE, MIB, OTHER, RANKS, ranks
from tests.analysis.diagnosis.test_loop_rules import LOOP, STARTED, growing, inner, own, slow, under
from tests.analysis.diagnosis.test_rule_limits import at_limit, fed, found, idle, step

CONCATENATES = "CatArrayBatchedCopy<float>"
TWO_THIRDS = 2 / 3
SLOW_START = tuple(Step("step", 20.0 * n, 20.0 * n + 20, number=n) for n in range(4))


def waiting(tables: Any = None, lags: Any = None, **phases: float) -> Evidence:
    """Return a loop of which the device finishes each phase with its submission, or so much later."""
    sample = Sample(0, False, 1.0, phases, phases, dict.fromkeys(phases, 0.0) | (lags or {}))
    return Evidence(tables or {}, Measurement("cuda_event", (sample,), 0.0), LOOP)


def reading(time_s: float, calls: str = "loss.item") -> dict[str, Any]:
    return own("", 8, time_s, calls, phase="host_sync")


def slower(kernels: Mapping[str, tuple[float, float]], apart: tuple[Apart, ...] = (), waits: float = 0.0) -> Evidence:
    """Return a recording of 20 steps from (time of the kernel in the first step, growth per step), and of waits."""
    made, windows, at = Made(), [], 100.0
    for n in range(20):
        begun = at
        for name, (first_s, more_s) in kernels.items():
            made.kernel(name, at, at + first_s + n * more_s)
            at += first_s + n * more_s
        at += n * waits
        windows.append(Step("step", begun, at, number=n))
    return Evidence(usual=Usual(made.profile(), 1.0, windows=tuple(windows), apart=apart, total_s=at))


def in_mpi(
    *ranges: tuple[str, float, float], steps: int = 4, first: tuple[int, ...] = (), helpers: int = 0
) -> Evidence:
    """Return steps of 10 s with 20 kernels at their start, with these ranges in each, or in the first ones alone."""
    made = Made()
    for n in range(steps):
        at = 10.0 * n
        made.range("step", at, at + 10.0)
        for number in range(20):
            made.kernel("solve(float*)", at + number / 32, at + (number + 1) / 32, at + number / 64)
        for number in range(helpers):
            made.kernel("pack(float*)", at + 9 + number / 64, at + 9 + (number + 1) / 64, thread=2)
        for at_number, (name, start_s, end_s) in enumerate(ranges):
            if not first or n < first[at_number]:
                made.range(name, at + start_s, at + end_s)
        made.ranges.append(Range("MPI_Bcast", at + 2, at + 4, 2))
    of_steps = made.profile(step="step")
    return Evidence({"steps": [{"device": 0, "wall_s": 10.0}]}, usual=Usual(of_steps, 10.0, total_s=10.0 * steps))


def counted(operators: int, forward_s: float) -> Evidence:
    """Return a step of 100 ms with a forward by a function with this number of operators."""
    rows = {"forward_operators": [{"operators": operators, "arithmetic_s": 1.0, "function": "f"}],
            "inner_lines": [inner("f", 1, 0.02, late_s=1.0)]}  # fmt: skip
    return step(rows, walls=(0.1,), forward=forward_s)


def traced(python: dict[str, Any], *lines: dict[str, Any]) -> Evidence:
    """Return a loop that traces all allocations of Python objects."""
    tool = under(tool="tracemalloc", steps=40, extra_s=None, without_s=None)
    return step({"own_tools": [tool], "own_python": [python], "inner_lines": [*lines]})


def loading(with_new: int, **known: Any) -> Evidence:
    """Return a loop of 40 steps of which every tenth waits for its batch, with this number of new iterators."""
    rows = {"slow_steps": [slow(waits_for_batch=True, without_gradients=False) | known],
            "iterators": [{"steps": 40, "with_new": with_new}]}  # fmt: skip
    return step(rows)


def filled(start_up_s: float, step_s: float = 7.0) -> Evidence:
    """Return a recording that makes no call for 7 s after it allocated managed memory."""
    made = Made()
    made.call("cudaMallocManaged", 0.0, 1.0)
    made.kernel(PRODUCT, 8.0, 9.0)
    of_step = replace(made.profile(), steps=(Step("step", 8.0, 9.0),))
    return Evidence(usual=Usual(of_step, step_s, total_s=100.0, start_up_s=start_up_s))


def busy(kernels: int, share: float, **known: Any) -> Evidence:
    """Return a recording of 100 s with a start-up of this share, before a pass of 10 s with so many kernels."""
    runs = [(n / 4, n / 4 + 1 / 8, n / 4) for n in range(kernels)]
    return Evidence(usual=recorded(runs, total_s=100.0, start_up_s=100 * share, step_s=10.0, **known))


# rule: limit → (evidence without the fault by a hair, evidence with it by a hair)
LIMITS: dict[str, tuple[Evidence, Evidence]] = {
    "small_operators: calls of 150 µs": (
        step({"inner_lines": [inner("f", 1, 0.5, late_s=1.5e-4)]}, forward=0.5),
        step({"inner_lines": [inner("f", 1, 0.5, late_s=1.49e-4)]}, forward=0.5),
    ),
    "small_operators: time of 100 calls, twice their rest": (
        step({"inner_lines": [inner("f", 1, 0.0249, late_s=1.25e-4)]}, walls=(0.1,), forward=0.03),
        step({"inner_lines": [inner("f", 1, 0.025, late_s=1.25e-4)]}, walls=(0.1,), forward=0.03),
    ),
    "small_operators: half of forward and loss": (
        step({"inner_lines": [inner("f", 1, 0.2499, late_s=1e-4)]}, forward=0.25, loss=0.25),
        step({"inner_lines": [inner("f", 1, 0.25, late_s=1e-4)]}, forward=0.25, loss=0.25),
    ),
    "small_operators: 20 samples": (
        step({"inner_lines": [inner("f", 1, 0.5, samples=19, late_s=1e-4)]}, forward=0.5),
        step({"inner_lines": [inner("f", 1, 0.5, samples=20, late_s=1e-4)]}, forward=0.5),
    ),
    "small_operators: arithmetic is compared with the fastest step": tuple(  # type: ignore[dict-item]
        Evidence({"forward_operators": [{"operators": 300, "arithmetic_s": arithmetic_s}]},
                 Measurement("monotonic", tuple(Sample(0, False, 1.0, {"forward": s}, {"forward": s})
                                                for s in (1.0, 0.75, 1.0, 1.0)), 0.0))
        for arithmetic_s in (0.0626, 0.0625)
    ),
    "small_operators: lines of one file are one function": tuple(  # type: ignore[dict-item]
        step({"inner_lines": [inner("f", 1, 0.15, late_s=1e-4), inner("f", 2, 0.15, late_s=1e-4, place=place)]},
             forward=0.5)
        for place in ("other.py:2", "train.py:2")
    ),
    "small_operators: the longest rest of a function counts": tuple(  # type: ignore[dict-item]
        step({"inner_lines": [inner("f", 1, 0.01, late_s=1e-5), inner("f", 2, 0.01, late_s=late_s)]}, walls=(0.1,))
        for late_s in (1.01e-4, 1e-4)
    ),
    "small_operators: 300 operators of 40 µs in forward and loss": (
        counted(300, 0.0121), counted(300, 0.012),
    ),
    "small_operators: 300 operators": (counted(299, 0.0119), counted(300, 0.0119)),
    "start_up: a tenth of the loop": (
        step({"slow_start": [STARTED | {"extra_s": 0.99, "total_s": 10.0}]}),
        step({"slow_start": [STARTED | {"extra_s": 1.0, "total_s": 10.0}]}),
    ),
    "start_up: in a tenth of the timed steps": (
        step({"slow_start": [STARTED | {"timed": 0}]}), step({"slow_start": [STARTED | {"timed": 1}]}),
    ),
    "start_up: of a loop of known length": (
        Evidence({"slow_start": [STARTED]}), step({"slow_start": [STARTED]}),
    ),
    "own_python: a tenth of the step with numbers that are read": (
        waiting({"own_python": [own("", 8, 0.05), reading(0.0499)]}, other=0.05, host_sync=0.5),
        waiting({"own_python": [own("", 8, 0.05), reading(0.0501)]}, other=0.05, host_sync=0.5),
    ),
    "own_python: reads of its own lines": (
        waiting({"own_python": [own("", 9, 0.05), reading(0.5)]}, other=0.05, host_sync=0.5),
        waiting({"own_python": [own("", 8, 0.05), reading(0.5)]}, other=0.05, host_sync=0.5),
    ),
    "own_python: reads of an idle GPU": (
        waiting({"own_python": [own("", 8, 0.05), reading(0.5)]}, {"host_sync": 0.05}, other=0.05, host_sync=0.5),
        waiting({"own_python": [own("", 8, 0.05), reading(0.5)]}, {"host_sync": 0.0499}, other=0.05, host_sync=0.5),
    ),
    "own_python: reads by item or tolist": (
        waiting({"own_python": [own("", 8, 0.05), reading(0.5, "torch.cuda.synchronize")]}, other=0.05, host_sync=0.5),
        waiting({"own_python": [own("", 8, 0.05), reading(0.5, "x.tolist")]}, other=0.05, host_sync=0.5),
    ),
    "own_python: lines that empty the cache belong to the allocation": tuple(  # type: ignore[dict-item]
        step({"gaps": [{"device": 0, "cause": cause, "time_s": 0.5}],
              "own_python": [own("", 8, 0.5, "torch.cuda.empty_cache") | {"samples": 3}]}, other=0.5)
        for cause in ("cudaMalloc", "copy")
    ),
    "own_python: other lines do not": tuple(  # type: ignore[dict-item]
        step({"gaps": [{"device": 0, "cause": "cudaMalloc", "time_s": 0.5}],
              "own_python": [own("", 8, 0.5, "torch.cuda.empty_cache"), own("", 9, time_s)]}, other=0.5 + time_s)
        for time_s in (0.0, 0.125)
    ),
    "own_tools: a tenth of the step is own Python": (traced(own("f", 8, 0.0999)), traced(own("f", 8, 0.1))),
    "own_tools: 3 samples": (
        traced(own("f", 8, 0.5) | {"samples": 2}), traced(own("f", 8, 0.5) | {"samples": 3}),
    ),
    "own_tools: with Python inside the model": (
        traced(own("f", 8, 0.05), inner("g", 1, 0.05)), traced(own("f", 8, 0.05), inner("g", 1, 0.05, is_plain=True)),
    ),
    "growth: of kernels, at a lower clock all grow alike": (
        slower({PRODUCT: (1.0, 0.25), ADD: (1.0, 0.25)}), slower({PRODUCT: (1.0, 0.0), ADD: (1.0, 0.5)}),
    ),
    "growth: half of it is attention": (
        slower({FLASH: (1.0, 20 / 64), PRODUCT: (1.0, 0.0)}, waits=12 / 64),
        slower({FLASH: (1.0, 19 / 64), PRODUCT: (1.0, 0.0)}, waits=13 / 64),
    ),
}  # fmt: skip


@pytest.mark.parametrize("limit", LIMITS)
def test_rule_gives_a_diagnosis_from_its_limit_on(limit: str) -> None:
    assert at_limit(limit, *LIMITS[limit]) == (None, True)


SYNC = {"call": "cudaStreamSynchronize", "within": "host_sync", "time_s": 0.1, "calls_per_step": 3.0}
LATE_LAUNCHES = {"device": 0, "cause": "launch-bound", "time_s": 0.5}
# rule: case → (evidence, share, words of the sentence)
WORDS: dict[str, tuple[Evidence, float, str]] = {
    "growth: of the step, in the line with half of the growth": (
        step({"growth": [growing("step time", 0.25, 1.0)], "own_python": [own("f", 8, 0.375)]}), 0.75,
        "after 50 steps (f() at train.py:8): ",
    ),
    "growth: of the step, in the line with two thirds of the samples": (
        step({"growth": [growing("step time", 0.25, 1.0)], "own_python": [own("f", 8, 0.37) | {"share": TWO_THIRDS}]}),
        0.75, "after 50 steps (after the timed steps mostly f() at train.py:8): ",
    ),
    "growth: of the step, in no line": (
        step({"growth": [growing("step time", 0.25, 1.0)], "own_python": [own("f", 8, 0.37) | {"share": 0.666}]}),
        0.75, "after 50 steps: ",
    ),
    "growth: of kernels, in one of another family": (
        slower({PRODUCT: (1.0, 0.0), "solve": (1.0, 0.25)}), 19 / 27,
        "after 19 steps, most of it in solve: find what each step does",
    ),
    "growth: of kernels, that concatenate": (
        slower({PRODUCT: (1.0, 0.0), CONCATENATES: (1.0, 0.25)}), 19 / 27, "CatArrayBatchedCopy: write into a buffer",
    ),
    "growth: of the host": (slower({PRODUCT: (1.0, 0.0)}, waits=0.25), 19 / 23, "after 19 steps: find what each"),
    "growth: of kernels, of which one has exactly half": (
        slower({PRODUCT: (1.0, 0.0), ADD: (1.0, 19 / 64)}, waits=13 / 64), 9.5 / 11.5, "after 19 steps: find",
    ),
    "growth: of kernels, of which one has most": (
        slower({PRODUCT: (1.0, 0.0), ADD: (1.0, 20 / 64)}, waits=12 / 64), 9.5 / 11.5,
        "after 19 steps, most of it in vectorized_elementwise_kernel: find",
    ),
    "growth: of steps after a slow start": (
        slower({PRODUCT: (1.0, 0.0)}, waits=0.25, apart=(
            Apart("start-up", (0,), 50.0, 1.0, None, SLOW_START),
        )), 19 / 23, "after 19 steps: find",
    ),
    "growth: of slow steps, too": (
        slower({PRODUCT: (1.0, 0.0)}, waits=0.25, apart=(
            Apart("slow", (20,), 6.0, 1.0, None, (Step("step", 200.0, 206.0, number=20),)),
        )), 5 / 6, "after 20 steps: find",
    ),
    "own_python: reads are its time, and the line with most comes first": (
        waiting({"own_python": [own("f", 9, 0.0625), own("", 8, 0.03125), reading(0.25)]}, other=0.125, host_sync=0.5),
        0.375, "own Python: train.py:8 (28%), f() at train.py:9 (6%); 25% of the step reads numbers from the GPU "
        "(.item()): read numbers less often",
    ),
    "own_python: reads are a quarter of it": (
        waiting({"own_python": [own("", 8, 0.25), reading(0.125)]}, other=0.375, host_sync=0.5), 0.5,
        "own Python: train.py:8 (38%): do it less often",
    ),
    "own_python: reads are more than a quarter of it": (
        waiting({"own_python": [own("", 8, 0.25), reading(0.126)]}, other=0.375, host_sync=0.5), 0.501,
        "own Python: train.py:8 (38%); 13% of the step reads numbers from the GPU (.item()): read numbers less often, "
        "and many at once",
    ),
    "own_python: work that reads numbers": (
        waiting({"own_python": [own("save_checkpoint", 8, 0.25), reading(0.25)]}, other=0.25, host_sync=0.5), 0.5,
        "which writes a checkpoint: save_checkpoint() at train.py:8 (50%); 25% of the step reads numbers from the GPU "
        "(.item()): save less often, or in another thread; read numbers less often",
    ),
    "own_python: without the batches that another rule reports": (
        step({"own_python": [own("a", 1, 0.0625), fed(0.375) | {"share": 0.25}], "loop_ranks": [
            RANK | {"step_s": 0.5, "other_s": 0.25}]}, other=0.1875), 0.125, "12% of the step is the script's own",
    ),
    "periodic_steps: as many iterators as slow steps": (loading(4), 0.5, "which begins an iterator of the data loader"),
    "periodic_steps: one iterator more": (loading(5), 0.5, "which begins an iterator of the data loader and loads the"),
    "periodic_steps: one iterator less": (loading(3), 0.5, "which begins an iterator of the data loader and loads the"),
    "periodic_steps: two iterators more": (loading(6), 0.5, "which loads the next batch: raise the data loader's"),
    "periodic_steps: two iterators less": (loading(2), 0.5, "which loads the next batch: raise the data loader's"),
    "periodic_steps: without a period": (loading(4, every=None), 0.5, "which loads the next batch: raise the data"),
    "start_up: half of it fills memory": (filled(14.0), 0.14, "14% of the recording is start-up"),
    "start_up: most of it fills memory": (
        filled(13.9), 0.07, "7% of the recording the host makes no CUDA call between allocating managed memory and its "
        "first use (7.00 s)",
    ),
    "start_up: memory is allocated after the usual work begins": (
        Evidence(usual=recorded(calls=[("cudaMallocManaged", 1.0, 2.0)], total_s=100.0, start_up_s=14.0)), 0.14,
        "14% of the recording is start-up",
    ),
    "start_up: of work without ranges": (
        Evidence(usual=recorded(total_s=100.0, start_up_s=14.0, is_named=False,
                                apart=(Apart("start-up", (0,), 15.0, 1.0, None, ()),))), 0.14,
        "14% of the recording is start-up, before the usual work begins",
    ),
    "exposed_communication: of a job": (
        Evidence(job=merged([rank(0, call(0.25, 0.5)), rank(1, call(0.25, 0.5))])), 0.25, "(250 ms of 1.00 s) is tr",
    ),
    "exposed_communication: of a job, without sends and receives": (
        Evidence(job=merged([rank(0, call(0.25, 0.5)), rank(1, call(0.25, 0.5))]),
                 distribution=calls(("send", 0.25, 0.3125))), 0.1875, "(188 ms of 1.00 s) is transfer between ranks",
    ),
    "own_tools: the tool that costs most": (
        step({"own_tools": [under(extra_s=1.5), under(tool="sys.settrace", extra_s=0.5, without_s=0.2)]}), 0.25,
        "25% of the loop is the program's own torch.profiler",
    ),
    "launch_bound: 3 waits in a step of a loop": (
        waiting({"gaps": [LATE_LAUNCHES], "waits": [SYNC]}, forward=0.5), 0.5,
        "the GPU waits for kernel launches: remove its 3 waits for the GPU, which no graph can hold",
    ),
    "launch_bound: 2 waits in a step of a loop, and others of PyTorch": (
        waiting({"gaps": [LATE_LAUNCHES], "waits": [SYNC | {"calls_per_step": 2.4}, SYNC | {"within": None}]},
                forward=0.5), 0.5, "the GPU waits for kernel launches: compile",
    ),
    "launch_bound: of a loop, without its own Python": (
        waiting({"gaps": [LATE_LAUNCHES], "inner_lines": [inner("f", 1, 0.125, is_plain=True)]}, forward=0.5), 0.375,
        "38% of the step the GPU waits for kernel launches",
    ),
    "launch_bound: a twentieth of the recorded step is told": (
        idle(usual=recorded(), launch_bound=0.05), 0.05, "5% of the step the GPU waits for kernel launches",
    ),
    "exposed_communication: buffers from a tenth of the step on": (
        ranks({"transfer_share": 0.4}, loop_collectives=[GRADIENTS, BUFFERS | {"share": 0.1}]), 0.1,
        "beside it, 10% for the buffers (15.0 MiB)",
    ),
    "exposed_communication: the line with most of it": (
        ranks({"transfer_share": 0.4}, loop_collectives=[OTHER, OTHER | {"share": 0.05, "place": "train.py:9"}]), 0.3,
        "beside it, 30% in 1 call of broadcast (15.0 MiB) at train.py:7",
    ),
    "exposed_communication: half of the transfer in one line": (
        ranks({"transfer_share": 0.4}, loop_collectives=[OTHER | {"share": 0.2}]), 0.2, "beside it, 20% in 1 call",
    ),
    "exposed_communication: 8 small calls": (
        ranks({"transfer_share": 0.4}, loop_collectives=[OTHER | {"count": 8, "size_bytes": 8}]), 0.3,
        "30% in 8 calls of broadcast (8 B)",
    ),
    "exposed_communication: 7 small calls": (
        ranks({"transfer_share": 0.4}, loop_collectives=[OTHER | {"count": 7, "size_bytes": 7 * MIB - 1}]), 0.4,
        "beside it: send the gradients",
    ),
    "exposed_communication: 7 calls of 1 MiB": (
        ranks({"transfer_share": 0.4}, loop_collectives=[OTHER | {"count": 7, "size_bytes": 7 * MIB}]), 0.3,
        "30% in 7 calls",
    ),
    "exposed_communication: not one call per step": (
        ranks({"transfer_share": 0.4}, loop_collectives=[OTHER | {"count": 0, "size_bytes": 0}]), 0.4,
        "beside it: send the gradients",
    ),
    "exposed_communication: the two calls of MPI with most time are named": (
        in_mpi(("MPI_Isend", 2.0, 3.0), ("MPI_Irecv", 3.0, 5.0), ("MPI_Waitall", 5.0, 8.0)), 0.6,
        "60% of the step no kernel runs during 3 calls of MPI (MPI_Waitall, MPI_Irecv), waiting",
    ),
    "exposed_communication: a call of MPI in one step of four": (
        in_mpi(("MPI_Allreduce", 2.0, 6.0), first=(1,)), 0.1, "during 1 call of MPI (MPI_Allreduce)",
    ),
    "exposed_communication: calls of MPI that begin with a range around them": (
        in_mpi(("MPI_exchange", 2.0, 6.0), ("MPI_Waitall", 2.0, 5.0)), 0.4, "during 1 call of MPI (MPI_Waitall)",
    ),
    "exposed_communication: calls of MPI outside of the steps": (
        in_mpi(("MPI_Waitall", 2.0, 6.0), ("MPI_Finalize", 40.0, 90.0), first=(4, 1)), 0.4,
        "during 1 call of MPI (MPI_Waitall)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WORDS)
def test_share_and_words_of_a_rule_are_exact(case: str) -> None:
    evidence, share, words = WORDS[case]
    one = found(case.partition(":")[0], evidence)
    assert isinstance(one, Diagnosis)
    assert words in one.sentence
    assert one.share == pytest.approx(share)


@pytest.mark.parametrize(("plain_s", "change"), [(0.05, LaunchesFree()), (0.051, None)])
def test_replay_without_launches_needs_four_fifths_of_their_waits(plain_s: float, change: Any) -> None:
    rows = {"gaps": [{"device": 0, "cause": "launch-bound", "time_s": 0.25}],
            "inner_lines": [inner("f", 1, plain_s, is_plain=True)]}  # fmt: skip
    one = found("launch_bound", waiting(rows, forward=0.25))
    assert isinstance(one, Diagnosis)
    assert one.change == change


@pytest.mark.parametrize(
    ("collective_s", "transfer_share", "waiting_s", "waited_s"),
    [
        (0.5, 0.125, 0.0, 0.5),  # 0.125 s of gaps, and 0.375 s in collectives that do not transfer
        (0.5, 0.125, 0.25, 0.25),  # a rank that is late for another reason is not waited for by a launch
        (0.125, 0.125, 0.0, 0.125),
        (2.0, 0.0, 0.0, 0.625),  # at most the launch-bound phases without their own kernels, and the gaps
    ],
)
def test_collectives_that_wait_for_launches_count_as_waits_of_the_gpu(
    collective_s: float, transfer_share: float, waiting_s: float, waited_s: float
) -> None:
    families = [{"family": "collective", "time_s": collective_s}, {"family": "matmul", "time_s": 0.25}]
    rows = {"gaps": [{"device": 0, "cause": "launch-bound", "time_s": 0.125}], "families": families,
            "loop_exchange": [{"transfer_share": transfer_share}],
            "loop_ranks": [{"step_s": 1.0, "waiting_s": waiting_s}]}  # fmt: skip
    one = found("launch_bound", waiting(rows, forward=0.75))
    assert isinstance(one, Diagnosis)
    assert one.share == pytest.approx(waited_s)
    assert (one.change is None) is (waited_s > 0.125), "the replay keeps the time of collectives"


@pytest.mark.parametrize(("kernel", "refines"), [("solve", ()), (ADD, ("unfused-elementwise",))])
def test_growth_of_elementwise_kernels_comes_before_their_number(kernel: str, refines: tuple[str, ...]) -> None:
    one = found("growth", slower({PRODUCT: (1.0, 0.0), kernel: (1.0, 0.25)}))
    assert isinstance(one, Diagnosis)
    assert one.refines == refines


@pytest.mark.parametrize(("helpers", "share"), [(1, 0.2), (2, 0.4)])
def test_thread_that_launches_a_tenth_as_many_kernels_computes(helpers: int, share: float) -> None:
    one = found("exposed_communication", in_mpi(("MPI_Send", 4.0, 6.0), helpers=helpers))
    assert isinstance(one, Diagnosis)
    assert one.share == pytest.approx(share)


@pytest.mark.parametrize(
    ("evidence", "is_last"),
    [
        (filled(13.0, 7.0), False),
        (filled(13.0, 7.1), True),
        (busy(20, 0.95), True),  # a step that the program marks
        (busy(19, 0.95), False),
        (busy(20, 0.9, is_named=False, is_once=True), True),
        (busy(20, 0.91, is_named=False, is_once=True), False),
        (busy(20, 0.6, is_named=False, is_once=True), True),
        (busy(19, 0.6, is_named=False, is_once=True), False),
    ],
)
def test_start_up_comes_last_from_20_kernels_on(evidence: Evidence, is_last: bool) -> None:
    one = found("start_up", evidence)
    assert isinstance(one, Diagnosis)
    assert one.comes_last is is_last


@pytest.mark.parametrize(("kernel_s", "is_last"), [(0.5, True), (0.499, False)])
def test_start_up_of_a_process_that_hardly_uses_the_gpu_is_told_first(kernel_s: float, is_last: bool) -> None:
    usual = recorded([(0.5, 0.5 + kernel_s, 0.25)], total_s=20.0, start_up_s=10.2, step_s=10.0, is_named=False)
    one = found("start_up", Evidence(usual=replace(usual, is_once=True)))
    assert isinstance(one, Diagnosis)
    assert one.comes_last is is_last


@pytest.mark.parametrize(("extra_share", "is_alone"), [(0.25, False), (0.251, True)])
def test_rank_that_makes_most_of_the_batches_makes_them_alone(extra_share: float, is_alone: bool) -> None:
    rows = {"loop_ranks": RANKS, "own_python": [fed(0.5)],
            "late_rank": [LATE | {"work": "python", "extra_share": extra_share}]}  # fmt: skip
    one = found("straggler", step(rows, replace(LOOP, world_size=2)))
    assert isinstance(one, Diagnosis)
    assert ("batch-preparation" in one.refines) is is_alone
