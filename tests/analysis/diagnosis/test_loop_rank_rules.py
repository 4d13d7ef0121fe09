"""Rules about the ranks of a recorded loop: each finds the fault that is planted for it, and is silent without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cs_systems.analysis.diagnosis import Answer, apply_rules
from cs_systems.analysis.diagnosis._evidence import Evidence
from tests.analysis.diagnosis.test_loop_rules import DROPPED, LOOP, loop, own

RANKS = [
    {"rank": 0, "steps": 5, "step_s": 0.1, "waiting_s": 0.03, "pairwise_s": 0.0, "other_s": 0.0, "leads": False},
    {"rank": 1, "steps": 5, "step_s": 0.1, "waiting_s": 0.0, "pairwise_s": 0.0, "other_s": 0.002, "leads": True},
]
EXCHANGE = {"ranks": 2, "steps": 5, "wrapper": "DistributedDataParallel", "transfer_share": 0.0, "pairwise_share": 0.0,
            "passes": 1, "reduces": 2, "early": 0, "early_share": 0.0, "small": 1, "small_bytes": 4096.0,
            "small_share": 0.04, "are_gradients": True, "marked": 0, "search_share": 0.0, "marks_share": 0.0,
            "unused": None}  # fmt: skip
LATE = {"rank": 1, "share": 0.3, "last": 5, "steps": 5, "work": "", "phase": "", "extra_share": 0.0,
        "batch_times": None, "received_times": None, "function": None, "place": None, "calls": None}  # fmt: skip


def ranks(exchange: Any = None, late: Any = None, **more: Any) -> Evidence:
    """Return the evidence of a loop on two ranks, by the differences from a healthy one."""
    tables = {"loop_ranks": RANKS, "loop_exchange": [{**EXCHANGE, **(exchange or {})}], **more}
    if late is not None:
        tables |= {"late_rank": [LATE | late]}
    return replace(loop(tables), config=replace(LOOP, world_size=2))


LATE_FOR = {
    "batch": ({"batch_times": 4.0}, ", because its batch is 4 times as large as the others': give each rank as many"),
    "compute": ({"phase": "backward", "extra_share": 0.3}, ", because its backward takes 30.0 ms longer: give each"),
    "input": ({"extra_share": 0.3}, ", because it waits 30.0 ms longer for its batch: look for what makes its data"),
    "python": (
        {"function": "metrics", "place": "train.py:8", "calls": "time.sleep", "extra_share": 0.25},
        ", because it spends 25.0 ms longer in metrics() at train.py:8, time.sleep: remove the pause; not below 63 ms",
    ),
    "": ({}, ": compare its batch, its GPU's clock and other processes"),
}


@pytest.mark.parametrize("work", LATE_FOR)
def test_late_rank_is_named_with_its_own_cause(work: str) -> None:
    known, rest = LATE_FOR[work]
    (first, *_) = apply_rules(ranks(late={"work": work, **known})).diagnoses
    assert first.code == "straggler"
    assert first.sentence.startswith(f"rank 1 delays the others by 30.0 ms of each step (30%){rest}")


@pytest.mark.parametrize(("extra_share", "code"), [(0.3, "straggler"), (0.14, "batch-preparation")])
def test_batches_made_by_one_rank_alone_are_a_straggler(extra_share: float, code: str) -> None:
    made = own("prepare", 8, 0.03, "eval") | {"feeds_model": True}
    late = {"work": "python", "function": "prepare", "place": "train.py:8", "calls": "eval", "share": 0.2}
    tables = ranks(late=late | {"extra_share": extra_share}, own_python=[made]).tables
    (first, *_) = apply_rules(replace(loop(tables, other=0.04), config=replace(LOOP, world_size=2))).diagnoses
    assert first.code == code


@pytest.mark.parametrize(
    ("work", "share", "is_named"), [("batch", 0.1, True), ("batch", 0.099, False), ("", 0.25, True), ("", 0.249, False)]
)
def test_small_delay_without_a_known_cause_is_noise(work: str, share: float, is_named: bool) -> None:
    found = apply_rules(ranks(late={"work": work, "share": share, "batch_times": 2.0})).diagnoses
    assert [one.code for one in found] == (["straggler"] if is_named else [])


PLANTED: dict[str, tuple[Any, str]] = {
    "gradient-accumulation": (
        {"passes": 8, "reduces": 16, "early": 14, "early_share": 0.3, "transfer_share": 0.35},
        "gradients are averaged in each of 8 passes per update: 14 of 16 all-reduces are not needed: average them in "
        "the last pass alone: run the others, forward and backward, under DistributedDataParallel.no_sync(); not below "
        "63 ms, now 100 ms",
    ),
    "small-buckets": (
        {"small": 80, "small_share": 0.3, "transfer_share": 0.3},
        "each backward sends 80 all-reduces of 4.00 KiB (median), too small to use the bandwidth: send larger buckets "
        "(bucket_cap_mb of DistributedDataParallel, 25 by default); not below 63 ms, now 100 ms",
    ),
    "unused-parameters": (
        {"marked": 600, "search_share": 0.1, "marks_share": 0.05, "unused": 0},
        "DistributedDataParallel searches for unused parameters in each pass (about 10.0 ms per step) and averages the "
        "result (about 5.00 ms), and finds none: leave out find_unused_parameters=True if each step uses every "
        "parameter; if the same ones are never used, freeze them; not below 76 ms, now 100 ms",
    ),
    "exposed-communication": (
        {"transfer_share": 0.4},
        "40% of the step is transfer between ranks without computation beside it: send the gradients in bf16 "
        "(bf16_compress_hook), try other bucket sizes (bucket_cap_mb), or use a larger batch for each rank; not below "
        "54 ms, now 100 ms",
    ),
    "pipeline-bubbles": (
        {"pairwise_share": 0.45},
        "45% of the step the stages of a pipeline wait in sends and receives, on average: split the batch into more "
        "microbatches, use an interleaved or zero-bubble schedule, or give all stages the same work; not below 50 ms, "
        "now 100 ms",
    ),
}


def test_gradients_reduced_in_vain_are_named_before_the_transfer_that_they_are_part_of() -> None:
    sent = {"name": "all_reduce", "phase": "backward", "place": None, "callee": None, "count": 2, "size_bytes": 1 << 20,
            "share": 0.2, "are_gradients": True, "is_model_sized": True, "option": None,
            "changed_bytes": None}  # fmt: skip
    dropped = DROPPED | {"share": 0.0, "reduced_share": 0.5}
    evidence = ranks({"transfer_share": 0.2}, dropped_gradients=[dropped], loop_collectives=[sent])
    found = [one.code for one in apply_rules(evidence).diagnoses]
    assert found == ["unused-gradients", "exposed-communication"]


@pytest.mark.parametrize("code", PLANTED)
def test_exchange_with_a_fault_is_named_first(code: str) -> None:
    known, sentence = PLANTED[code]
    (first, *_) = apply_rules(ranks(known)).diagnoses
    assert (first.code, first.sentence) == (code, sentence)


@pytest.mark.parametrize(
    ("known", "remedy"),
    [
        ({"wrapper": "", "early": 3, "early_share": 0.3}, "average them once, after the last pass"),
        ({"wrapper": "", "small": 9, "small_share": 0.3}, "send several gradients in one all-reduce"),
        ({"wrapper": "", "small": 9, "small_share": 0.3, "are_gradients": False}, "send several values in one"),
        ({"wrapper": "", "transfer_share": 0.3}, "overlap it with backward (DistributedDataParallel, FSDP), send bf16"),
        ({"wrapper": "FSDP", "transfer_share": 0.3}, "gather and reduce in bf16 (MixedPrecisionPolicy), prefetch"),
    ],
)
def test_remedy_matches_the_wrapper_of_the_model(known: Any, remedy: str) -> None:
    assert apply_rules(ranks(known)).diagnoses[0].remedy.startswith(remedy)


@pytest.mark.parametrize(
    "known", [{}, {"transfer_share": 0.099}, {"small": 3, "small_share": 0.3}, {"marked": 9, "unused": 0}]
)
def test_healthy_exchange_has_no_cause(known: Any) -> None:
    found = apply_rules(ranks(known))
    assert found.diagnoses == ()
    assert found.nothing == "nothing found that would save more than 5% of the step's time"


MIB = 1 << 20
SENT = {"name": "broadcast", "phase": "forward", "place": "train.py:7", "callee": "model", "count": 1, "share": 0.3,
        "size_bytes": 15 * MIB, "are_gradients": False, "is_model_sized": False, "option": None,
        "changed_bytes": None}  # fmt: skip
BUFFERS = SENT | {"option": "forward_sync_buffers", "changed_bytes": 0}
OTHER = SENT | {"phase": "other", "callee": "dist.broadcast"}
GRADIENTS = SENT | {"name": "all_reduce", "phase": "backward", "are_gradients": True, "place": None, "callee": None}


@pytest.mark.parametrize(
    ("sent", "sentence"),
    [
        (
            [GRADIENTS | {"share": 0.25}, BUFFERS | {"share": 0.15}],
            "40% of the step is transfer between ranks without computation beside it, 15% for the buffers (15.0 MiB) "
            "that DistributedDataParallel sends from rank 0 before each forward at train.py:7: pass "
            "forward_sync_buffers=False, if each rank may keep its own (no change was seen in 5 steps); not below "
            "77 ms, now 100 ms",
        ),
        (
            [BUFFERS | {"share": 0.4, "changed_bytes": MIB}],
            "40% of the step is transfer between ranks without computation beside it, all of it for the buffers "
            "(15.0 MiB) that DistributedDataParallel sends from rank 0 before each forward at train.py:7: pass "
            "forward_sync_buffers=False, if each rank may keep its own; not below 54 ms, now 100 ms",
        ),
        (
            [OTHER | {"count": 170}],
            "40% of the step is transfer between ranks without computation beside it, 30% in 170 calls of broadcast "
            "(15.0 MiB) at train.py:7, dist.broadcast: send it once, or only when it has changed; not below 63 ms, "
            "now 100 ms",
        ),
        (
            [OTHER | {"count": 100, "is_model_sized": True}],
            "40% of the step is transfer between ranks without computation beside it, 30% in 100 calls of broadcast "
            "(15.0 MiB) at train.py:7, dist.broadcast: send it only before the loop if each rank updates all "
            "parameters itself, else overlap it with computation; not below 63 ms, now 100 ms",
        ),
    ],
    ids=["buffers", "changed buffers", "other", "parameters"],
)
def test_transfer_outside_of_backward_is_named_with_its_line(sent: Any, sentence: str) -> None:
    assert apply_rules(ranks({"transfer_share": 0.4}, loop_collectives=sent)).diagnoses[0].sentence == sentence


@pytest.mark.parametrize(
    "sent",
    [
        [GRADIENTS, BUFFERS | {"share": 0.09}],
        [GRADIENTS | {"share": 0.1}, BUFFERS | {"share": 0.3, "size_bytes": MIB - 1}],
        [OTHER | {"share": 0.19}],
        [OTHER | {"place": None}],
        [SENT | {"name": "all_gather"}],
        [OTHER | {"name": "all_gather", "is_model_sized": True}],
        [OTHER | {"name": "reduce_scatter", "is_model_sized": True}],
    ],
    ids=["small share", "small buffers", "small share of the transfer", "no line", "of the model", "parts", "sums"],
)
def test_other_transfer_keeps_its_remedy(sent: Any) -> None:
    found = apply_rules(ranks({"transfer_share": 0.4}, loop_collectives=sent)).diagnoses[0]
    assert found.remedy.startswith("send the gradients in bf16 (bf16_compress_hook), try other bucket sizes")


def test_search_that_finds_nothing_is_named_for_less_than_other_causes() -> None:
    """Its remedy costs nothing; one that finds unused parameters needs a change of the model."""
    found = {share: apply_rules(ranks({"marked": 600, "search_share": share, "unused": 0})) for share in (0.019, 0.021)}
    assert [len(answer.diagnoses) for answer in found.values()] == [0, 1]
    assert not apply_rules(ranks({"marked": 600, "search_share": 0.021, "unused": 3})).diagnoses


def test_experts_are_named_instead_of_the_straggler() -> None:
    found = apply_rules(ranks(late={"work": "batch", "batch_times": 7.0, "received_times": 1.75})).diagnoses
    assert [one.code for one in found] == ["imbalanced-experts"]
    assert found[0].cause == (
        "rank 1 receives 1.8 times the mean of all ranks in all-to-all, and delays the others by 30.0 ms of each step"
    )


def answer(other_s: float, late: Any = None) -> Answer:
    busy = [RANKS[0], {**RANKS[1], "other_s": other_s}]
    return apply_rules(ranks(None, late, loop_ranks=busy, own_python=[own("metrics", 8, 0.03)]))


def test_own_python_is_shown_for_the_rank_that_others_wait_for() -> None:
    assert [one.code for one in answer(0.03).diagnoses] == ["own-python"]
    assert (
        answer(0.03)
        .causes[0]
        .startswith("30% of the step is the script's own Python, which computes metrics: metrics() at")
    )
    assert not answer(0.005).diagnoses
    python = {"work": "python", "function": "metrics", "place": "train.py:8", "extra_share": 0.3}
    assert [one.code for one in answer(0.03, python).diagnoses] == ["straggler"]  # once
    assert [one.code for one in answer(0.09, {**python, "share": 0.2}).diagnoses] == ["own-python", "straggler"]
