"""Rules about several ranks: on traces of real programs with NCCL and gloo, and on made numbers."""

from __future__ import annotations

import re
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cs_systems.analysis.attribution.collectives import Collective
from cs_systems.analysis.attribution.distribution import DDP, FSDP, Distribution, distribution
from cs_systems.analysis.attribution.overlap import NOTHING, Intervals, union
from cs_systems.analysis.attribution.profile import Profile, profile
from cs_systems.analysis.comparison.expert_work import imbalance
from cs_systems.analysis.comparison.rank_work import INPUT, KERNELS, OPERATORS, PYTHON, Work, longer
from cs_systems.analysis.comparison.ranks import Merged, Rank, merged, straggler, summary
from cs_systems.analysis.diagnosis import Answer, Diagnosis, apply_rules, diagnose
from cs_systems.analysis.diagnosis._evidence import Evidence, of_job, of_profile
from cs_systems.cli import main
from cs_systems.config import RunConfig
from cs_systems.readers import read
from cs_systems.readers.forms.jobs import Job
from cs_systems.record import read_records
from tests.analysis.comparison.test_limits import call, rank
from tests.model.parallel.launch import launch
from tests.programs import Program

# Rules with faults that are planted, and left out, in this file.
TRIED = ("gradient-accumulation", "imbalanced-experts", "pipeline-bubbles", "small-buckets", "unused-parameters")
PROFILES = Path(__file__).parents[3] / "profiles"
TRACES = Path(__file__).parents[2] / "data" / "ranks_h200"


def traced(name: str, number: int = 0) -> Profile:
    return profile(read(TRACES / f"{name}_rank{number}.json.gz"))


def of_ranks(profiles: list[Profile]) -> tuple[Merged, Answer]:
    """Return the job of these ranks and its answer, in detail about the straggler."""
    job = merged([summary(one, number) for number, one in enumerate(profiles)])
    late = straggler(job)
    number = late.rank if late else 0
    return job, apply_rules(of_job(job, number, profiles[number]))


def answered(name: str) -> Answer:
    return of_ranks([traced(name, number) for number in (0, 1)])[1]


def by_code(answer: Answer) -> dict[str, Diagnosis]:
    return {one.code: one for one in answer.diagnoses}


# job → (code, words of the sentence)
REAL = {
    "late_data": (
        "straggler",
        "rank 1 delays the others by 56.8 ms of each step, because it waits 31.4 ms longer for its batch (last to "
        "arrive in 15 of 15 collectives): look for what makes its data slow: its files, its workers, its share of the "
        "data; not below 53 ms, now 94 ms",
    ),
    "late_host": ("data-input", "77% of the step waits for the next batch (rank 1): raise the data loader's"),
    "experts": (
        "imbalanced-experts",
        "rank 1 receives 1.5 times the mean of all ranks in all-to-all, and delays the others by 21.7 ms of each step",
    ),
    "pipeline": (
        "pipeline-bubbles",
        "34% of the step this stage of a pipeline waits in sends and receives (rank 0, steps 1–3 of 4): split the "
        "batch into more microbatches",
    ),
    "tensor_parallel": (
        "exposed-communication",
        "8% of the traced step (1.95 ms of 23.8 ms) is transfer between ranks without computation beside it (rank 1): "
        "keep the ranks that divide a layer in one host, send bf16, or use a larger batch for each rank",
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_cause_of_a_real_job_is_named(name: str) -> None:
    code, words = REAL[name]
    assert words in by_code(answered(name))[code].sentence


def test_experts_are_not_named_twice() -> None:
    assert "straggler" not in by_code(answered("experts"))


def test_rank_behind_others_that_are_as_slow_gains_little() -> None:
    """All ranks wait for their batches as long as a step: without rank 1's delay they would still."""
    late = by_code(answered("late_host"))["straggler"]
    assert late.at_best is not None
    assert (late.now - late.at_best) / late.now == pytest.approx(0.17, abs=0.01)
    assert "because" not in late.cause
    assert late.takes == late.now - late.at_best


def test_trace_of_one_rank_suggests_analyzing_all_ranks_and_no_option_already_used() -> None:
    found = by_code(apply_rules(of_profile(traced("late_host"))))["exposed-communication"]
    assert found.sentence == (
        "66% of the traced step (58.7 ms of 89.6 ms) is communication without computation beside it, waiting for other "
        "ranks included (steps 1–3 of 4): analyze the traces of all ranks together: one rank's trace does not tell "
        "waiting from transfer; not below 31 ms, now 90 ms; try it: cs-systems analyze RANK0 RANK1 … --ranks"
    )


@pytest.mark.parametrize("name", ["tensor_parallel", "experts"])
def test_inference_gets_no_advice_about_backward(name: str) -> None:
    for number in (0, 1):
        for one in apply_rules(of_profile(traced(name, number))).diagnoses:
            assert not re.search("backward|DistributedDataParallel", one.sentence)
    assert not any("backward" in one.sentence for one in answered(name).diagnoses)


def test_waits_of_a_pipeline_are_not_also_exposed_communication() -> None:
    codes = by_code(apply_rules(of_profile(traced("pipeline"))))
    assert "pipeline-bubbles" in codes
    assert "exposed-communication" not in codes


def test_only_the_all_reduces_of_the_last_pass_are_needed() -> None:
    found = by_code(apply_rules(of_profile(traced("accumulation"))))["gradient-accumulation"]
    assert found.cause == ("gradients are averaged in each of 4 passes per update: 60 of 80 all-reduces are not needed")
    assert "DistributedDataParallel.no_sync()" in found.remedy
    assert found.at_best == pytest.approx(0.257, abs=0.001)


def test_command_begins_with_the_answer_and_says_how_each_rank_waits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", *(str(TRACES / f"experts_rank{number}.json.gz") for number in (0, 1))]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1. rank 1 receives 1.5 times the mean of all ranks in all-to-all")
    words = " ".join(out.split())
    assert (
        "rank 0: 23.0 ms of each step are communication without computation beside it: 21.7 ms waiting for other "
        "ranks, 1.34 ms transfer"
    ) in words


def test_waiting_is_unknown_if_no_collective_matches_across_ranks() -> None:
    job = merged([rank(0, call(0.1, 0.2, name="send")), rank(1, call(0.1, 0.2, name="recv"))])
    answer = apply_rules(Evidence(job=job))
    assert answer.unknowns == (
        "who waits for whom, because no collective of these traces could be matched across the ranks",
    )


def works(**kinds: Work) -> dict[tuple[str, str], Work]:
    return {(kind, "matmul" if kind == KERNELS else ""): work for kind, work in kinds.items()}


# what rank 0 does beside the others' work, in s → words of the cause
CAUSES: dict[str, tuple[dict[str, Work], str]] = {
    "input": (works(input=Work(0.05)), "it waits 30.0 ms longer for its batch"),
    "python": (works(python=Work(0.05)), "its host is 30.0 ms longer in Python between operators"),
    "operators": (works(operators=Work(0.05, 10)), "its operators take 30.0 ms longer"),
    "more operators": (works(operators=Work(0.05, 11)), "it runs more operators, 30.0 ms longer"),
    "slow clock": (works(kernels=Work(0.05, 10, 100)), "the same kernels take 30.0 ms longer (most in matmul)"),
    "more tokens": (
        works(kernels=Work(0.05, 10, 250)),
        "its kernels have 2.5 times as many blocks (most in matmul) and take 30.0 ms longer",
    ),
    "more kernels": (works(kernels=Work(0.05, 30, 300)), "it runs 3 times as many kernels (most in matmul)"),
}
USUAL = {INPUT: Work(0.02), PYTHON: Work(0.02), OPERATORS: Work(0.02, 10), KERNELS: Work(0.02, 10, 100)}


@pytest.mark.parametrize("case", CAUSES)
def test_cause_is_the_work_that_takes_the_last_rank_longer(case: str) -> None:
    own, words = CAUSES[case]
    others = [works(**{kind: USUAL[kind] for kind, _ in own}) for _ in range(3)]
    found = longer(own, others, 0.03)
    assert found is not None
    assert found.cause.startswith(words)
    assert longer(own, others, 0.061) is None, "less than half of the lost time explains nothing"
    assert longer(own, [own, own], 0.03) is None


def test_host_of_a_user_range_is_named() -> None:
    found = longer({(PYTHON, "augment"): Work(0.03)}, [{}, {}], 0.03)
    assert found is not None
    assert found.cause == "its host is 30.0 ms longer in 'augment'"
    assert longer({(KERNELS, "softmax"): Work(0.03, 5.0)}, [{}], 0.03) == (
        KERNELS,
        "it runs kernels of softmax that the others do not, 30.0 ms longer",
        "give each rank the same work",
    )


def sends(*sizes: int | None, wrapper: str = DDP, **known: Any) -> Evidence:
    """Return the evidence of a trace with a step of 100 ms that has all-reduces of 2 ms, one after the other."""
    calls = tuple(
        Collective(0, "all_reduce", "", 2, n, size, 0.01 * n, 0.01 * n + 2e-3, 0.0, {}) for n, size in enumerate(sizes)
    )
    fields = {"searches": 0, "search_s": 0.0, "passes": 1, "updates": 1, "early": (), **known}
    found = Distribution(2, wrapper, True, 1, calls, NOTHING, **fields)
    steps = [{"step": 0, "device": 0, "wall_s": 0.1, "busy_share": 0.98}]
    return Evidence({"steps": steps}, distribution=found)  # type: ignore[dict-item, list-item, typeddict-item]


def codes(evidence: Evidence) -> set[str]:
    return {one.code for one in apply_rules(evidence).diagnoses}


def test_many_small_all_reduces_are_small_buckets() -> None:
    (found,) = (one for one in apply_rules(sends(*[64 << 10] * 6)).diagnoses if one.code == "small-buckets")
    assert found.cause == "each backward sends 6 all-reduces of 64.0 KiB (median), too small to use the bandwidth"
    assert (found.now, found.at_best) == pytest.approx((0.1, 0.088))
    for others in ([64 << 10] * 3, [1 << 20] * 6, [None] * 6, [64 << 10] * 5 + [25 << 20] * 6):
        assert "small-buckets" not in codes(sends(*others))
    assert "small-buckets" not in codes(sends(*[64 << 10] * 6, wrapper=FSDP))


def test_small_all_reduces_without_a_wrapper_are_of_gradients_if_nothing_is_computed_between() -> None:
    alone = sends(*[64 << 10] * 6, wrapper="")
    assert "small-buckets" in codes(alone)
    times = 0.01 * np.arange(6)
    between = Intervals(times + 3e-3, times + 5e-3)
    assert alone.distribution is not None
    divided = replace(alone, distribution=replace(alone.distribution, computing=between))
    assert "small-buckets" not in codes(divided)


def test_search_for_unused_parameters_costs_itself_and_the_smallest_all_reduce() -> None:
    evidence = sends(25 << 20, 72, searches=1, search_s=0.006)
    (found,) = (one for one in apply_rules(evidence).diagnoses if one.code == "unused-parameters")
    assert found.cause == (
        "DistributedDataParallel searches for unused parameters in each pass (6.00 ms per step) and averages the "
        "result (2.00 ms)"
    )
    assert found.at_best == pytest.approx(0.092)
    assert "unused-parameters" not in codes(sends(25 << 20, 72))
    assert "unused-parameters" not in codes(sends(25 << 20, 72, searches=1, search_s=0.001)), "not worth a sentence"


def test_exposed_time_of_calls_at_once_counts_once_and_without_computation() -> None:
    evidence = sends(1 << 20, 1 << 20)
    assert evidence.distribution is not None
    twice = replace(evidence.distribution, calls=evidence.distribution.calls[:1] * 2)
    assert twice.exposed_s(twice.calls) == pytest.approx(2e-3)
    computes = replace(twice, computing=Intervals(np.array([-1.0]), np.array([0.4e-3])))
    assert computes.exposed_s(computes.calls) == pytest.approx(1.6e-3)


@pytest.mark.parametrize("code", TRIED)
def test_step_of_one_rank_has_no_causes_of_several_ranks(code: str) -> None:
    assert code not in codes(Evidence(config=RunConfig()))
    assert code not in codes(sends(25 << 20, 25 << 20))
    even = [call(0.1, 0.2, name="all_to_all", received=8) for _ in range(2)]
    job = merged([rank(number, one) for number, one in enumerate(even)])
    assert code not in codes(Evidence(job=job))


def test_overlap_that_the_run_measured_is_expected_or_refuted() -> None:
    """Read a run with a strategy that overlaps; the host limits each of its steps, so that nothing is gained."""
    refuted = diagnose(read_records(PROFILES / "data_parallel_variants")[0]).refuted
    assert any(
        re.fullmatch(r".*torch_ddp.* was measured: 98.0 ms instead of 98.8 ms, no gain.*", one) for one in refuted
    )


def train(rank: int, world_size: int, folder: Path) -> None:
    """Train on a rank that is late, with and without gradients that only the last micro-batch sends."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import ProfilerActivity, schedule

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), 1e-3)
    for fault in ("no_sync", "all"):
        write = partial(torch.profiler.profile.export_chrome_trace, path=f"{folder}/{fault}_rank{rank}.json")
        steps = schedule(wait=1, warmup=1, active=3)
        with torch.profiler.profile(activities=[ProfilerActivity.CPU], schedule=steps, on_trace_ready=write) as made:
            for _ in range(5):
                for micro in range(3):
                    if rank and micro == 0:
                        time.sleep(0.05)
                    quiet = fault == "no_sync" and micro < 2
                    with ddp.no_sync() if quiet else nullcontext():
                        ddp(torch.randn(8, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                made.step()
    dist.destroy_process_group()


def test_program_with_gloo_shows_its_late_rank_its_passes_and_its_search(tmp_path: Path) -> None:
    launch(train, 2, tmp_path, limit_s=50)
    found = [[profile(read(tmp_path / f"{fault}_rank{n}.json")) for n in (0, 1)] for fault in ("no_sync", "all")]
    quiet, loud = (distribution(one) for one, _ in found)
    assert quiet is not None
    assert loud is not None
    assert (quiet.wrapper, quiet.has_backward, quiet.passes, quiet.updates) == (DDP, True, 9, 3)
    assert (len(quiet.early), quiet.searches) == (0, 3)
    assert (loud.passes, loud.updates, loud.searches) == (9, 3, 9)
    assert len(loud.early) == 2 * len(loud.calls) / 3 > 0
    _, answer = of_ranks(found[0])
    late = by_code(answer)["straggler"]
    assert re.match(r"rank 1 delays the others by .* of each step, because its host is .* longer in Python", late.cause)


@pytest.mark.parametrize("searches", [True, False])
def test_search_is_found_by_its_functions_in_python(tmp_path: Path, searches: bool) -> None:
    program = Program()
    for number in range(4):
        start = program.now
        if searches:
            program.now += 4e3
            program.during("torch/nn/parallel/distributed.py(1601): _find_tensors", start, "python_function")
        begun = program.now
        program.now += 2e3
        name = "<built-in method prepare_for_backward of torch._C._distributed_c10d.Reducer>"
        program.during(name, begun, "python_function")
        program.launch(5e3)
        program.launch(1e3, "ncclDevKernel_AllReduce_Sum_f32_RING_LL")
        program.wait()
        program.during(f"ProfilerStep#{number}", start)
    found = distribution(profile(read(program.write(tmp_path / "trace.json"))))
    assert found is not None
    assert (found.searches, found.search_s) == ((4, pytest.approx(6e-3)) if searches else (0, 0))


def without_sizes(job: Merged) -> Merged:
    """Return a job with recordings that lack the sizes of the collectives."""
    ranks = tuple(
        replace(one, collectives=tuple(call._replace(received=None, size_bytes=None) for call in one.collectives))
        for one in job.ranks
    )
    unknown = [
        replace(match, calls={rank: call._replace(received=None) for rank, call in match.calls.items()})
        for match in job.matches
    ]
    return replace(job, ranks=ranks, matches=tuple(unknown))


def test_uneven_experts_are_found_by_computation_between_all_to_alls() -> None:
    job, _ = of_ranks([traced("experts", number) for number in (0, 1)])
    assert imbalance(job, 1) == "receives 1.5 times the mean of all ranks in all-to-all"
    assert imbalance(without_sizes(job), 1) == (
        "computes 1.5 times the mean of all ranks between two all-to-alls, and as long as they elsewhere"
    )
    assert imbalance(without_sizes(job), 0) is None


def computing(rank: int, experts_s: float, rest_s: float) -> Rank:
    """Return a rank with four all-to-alls, each second one after its experts."""
    calls, intervals, now = list[Collective](), list[tuple[float, float]](), 0.0
    for number in range(4):
        lasts = rest_s if number % 2 == 0 else experts_s
        intervals.append((now, now + lasts))
        now += lasts
        calls.append(Collective(0, "all_to_all", "", 4, number, 1000, now, now + 1e-3, 0.0, {}))
        now += 1e-3
    starts, ends = np.array(intervals).T
    return Rank(rank, "", "kineto", Job(), now, 1, now, now, 0.0, 0.0, 0.0, tuple(calls), computing=union(starts, ends))


@pytest.mark.parametrize(
    ("experts_s", "rest_s", "words"),
    [
        (0.0131, 0.01, "computes 1.2 times the mean"),
        (0.0128, 0.01, None),
        (0.02, 0.02, None),
    ],
    ids=["uneven", "about even", "a slow GPU"],
)
def test_experts_are_uneven_only_if_the_rest_is_even(experts_s: float, rest_s: float, words: str | None) -> None:
    job = Merged((*(computing(rank, 0.01, 0.01) for rank in range(3)), computing(3, experts_s, rest_s)), (), ())
    found = imbalance(job, 3)
    assert (found or "").startswith(words or "")
    assert (found is None) == (words is None)


def test_rank_that_waits_for_data_is_named_before_the_wait() -> None:
    found = answered("late_data")
    assert [one.code for one in found.diagnoses][:2] == ["straggler", "data-input"]
