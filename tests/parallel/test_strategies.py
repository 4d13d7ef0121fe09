"""Every strategy, by being a file, against one process: parameters, optimizer state; and the bytes that it sends."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from cs_systems.formulas.communication import Payload
from cs_systems.parallel import compose
from tests.parallel.misuses import STRATEGIES
from tests.parallel.ranks import cases, composed, scaled, strategies
from tests.parallel.scenarios import without_dimensions
from tests.parallel.training import (
    CONFIG,
    OPTIMIZER,
    OPTIONS,
    ROWS,
    Case,
    Model,
    groups,
    tensors,
    train_in_parts,
    train_rank,
    train_whole,
)


def runs(*world_sizes: int) -> Any:
    """Every strategy and case of these worlds."""
    found = [(name, case, n) for n in world_sizes for name in strategies(n) for case in cases(name, n)]
    return pytest.mark.parametrize(("name", "case", "world_size"), found, ids=str)


every_world = pytest.mark.parametrize("world_size", [2, 3])

whole, in_parts = cache(train_whole), cache(train_in_parts)


def same(got: Any, expected: Any, what: str, **tolerance: float) -> None:
    torch.testing.assert_close(got, expected, msg=lambda text: f"{what}: {text}", **tolerance)


def close(got: dict[str, Any], expected: dict[str, Any], precision: str, what: str, low: float = 1e-2) -> None:
    """The sums of the same numbers in another order. In bf16, where single elements may round to another step, each
    tensor is within `low` of its norm: matrices move by a tenth of theirs."""
    if precision == "fp32":
        same(got, expected, what, rtol=1e-4, atol=1e-6)
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        off = (got[name].double() - x.double()).norm() / x.double().norm().clamp(min=1e-12)
        assert off <= low, f"{what}: {name} is off by {off:.1%}"


def is_exact(name: str, case: Case) -> bool:
    """Return whether sums have one order.

    With sharded parameters, or gradients finished after each micro-batch, each is averaged over the ranks before it is
    added. Tensor parallelism divides the sums of products.
    """
    splits = composed(name).splits
    adds_means = case.micro_batches > 1 and ("parameters" in splits or case.finishes_each)
    return "features" not in splits and not adds_means


@runs(1, 2, 3, 4)
def test_it_trains_to_the_parameters_of_one_process(worlds: Any, name: str, case: Case, world_size: int) -> None:
    first, *others = worlds(world_size).of(f"{name}-{case}")
    for other in others:
        same(other["tensors"], first["tensors"], "ranks differ", rtol=0, atol=0)
    reference, _ = whole(Case(case.precision), world_size)
    close(first["tensors"], dict(tensors(reference)), case.precision, "against the whole batch")
    if world_size <= 2 and is_exact(name, case):  # a + b is b + a: the same arithmetic, to the bit
        same(first["tensors"], dict(tensors(in_parts(case, world_size)[0])), "against its parts", rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", ["scaled", "scaled-fused"])
@pytest.mark.parametrize("name", scaled())
def test_what_overflows_on_one_rank_is_skipped_by_all(worlds: Any, name: str, optimizer: str) -> None:
    """And the next step, by a scale of half as much, is the one that is made without a scaler."""
    for rank in worlds(2).of(f"{name}-{optimizer}"):
        same(rank["skipped"], rank["before"], "not skipped", rtol=0, atol=0)
        assert rank["scales"] == [2.0**15, 2.0**15, 1.0]
        same(rank["scaled"], rank["plain"], "scaled", rtol=1e-5, atol=1e-7)
        assert any(not torch.equal(x, rank["before"][name]) for name, x in rank["scaled"].items())


def test_single_is_one_process() -> None:
    case = Case(micro_batches=2)
    alone = train_rank(compose("single"), case, 0, 1)
    same(alone["tensors"], dict(tensors(in_parts(case, 1)[0])), "alone", rtol=0, atol=0)
    assert alone["calls"] == []


@pytest.mark.gpu
@runs(2, 4)
def test_on_gpus_it_trains_to_the_parameters_of_one_process(
    gpu_worlds: Any, name: str, case: Case, world_size: int
) -> None:
    """Against one process on a CPU, whose sums have another order too."""
    reference, _ = whole(Case(case.precision), world_size)
    ranks = gpu_worlds(world_size).of(f"{name}-{case}")
    for rank in ranks:
        same(rank["tensors"], ranks[0]["tensors"], "ranks differ", rtol=0, atol=0)
        close(rank["tensors"], dict(tensors(reference)), case.precision, "against the whole batch")


@runs(2, 4)
def test_its_optimizer_is_saved_as_that_of_one_process(worlds: Any, name: str, case: Case, world_size: int) -> None:
    """Loaded into one process it is the state that one process reached, and steps go on from it."""
    first, *_ = worlds(world_size).of(f"{name}-{case}")
    model = Model(case.precision)
    model.load_state_dict(first["tensors"])
    loaded = OPTIMIZER(groups(model), **OPTIONS)
    loaded.load_state_dict(first["state"])
    _, reference = in_parts(case, world_size)
    mine, expected = loaded.state_dict(), reference.state_dict()
    assert mine["state"].keys() == expected["state"].keys()
    if is_exact(name, case):
        same(mine["state"], expected["state"], "state", rtol=0, atol=0)
    for number, state in mine["state"].items():
        close(state, expected["state"][number], case.precision, f"state of {number}", low=0.1)
    for group, expected_group in zip(mine["param_groups"], expected["param_groups"], strict=True):
        assert {key: group[key] for key in expected_group} == expected_group


def test_training_covers_frozen_rare_unused_and_tied_parameters() -> None:
    """The proof is empty unless parameters move, one is frozen, one is rare, one is never used and two are one."""
    before, after = Model(), whole(Case(), 2)[0]
    moved = {name for name, x in after.named_parameters() if not torch.equal(x, before.get_parameter(name))}
    still = {name for name, _ in after.named_parameters()} - moved
    assert still == {"never.weight", "never.bias", "lm.layers.0.ln1.weight"}
    assert "lm.lm_head.weight" not in moved
    assert after.lm.lm_head.weight is after.lm.token_embeddings.weight


def payload(case: Case, rows: int) -> Payload:
    """Return the payload of a rank that takes so many rows."""
    trained = {name: p for name, p in Model(case.precision).named_parameters() if p.requires_grad}
    divided = [p.nbytes for name, p in trained.items() if ".attn." in name or ".ffn." in name]
    stream = rows * CONFIG.context_length * CONFIG.d_model * trained["lm.layers.0.ffn.w1.weight"].element_size()
    return Payload(sum(p.nbytes for p in trained.values()), sum(divided), CONFIG.num_layers, stream)


@pytest.mark.parametrize(
    ("name", "world_size"), [(name, n) for n in (2, 3, 4) for name in strategies(n) if "torch_" not in name]
)
def test_it_sends_the_bytes_of_its_formula(worlds: Any, name: str, world_size: int) -> None:
    """Counted as ours are sent. Beside the formula a byte a parameter, for who had a gradient, and padding."""
    strategy = composed(name)
    assert strategy.sent_bytes is not None
    _, parts = strategy.part_of_batch(0, world_size)
    case = cases(name, world_size)[-1]
    each = "parameters" in strategy.splits  # sends gradients of each micro-batch, but for norms, which are not sharded
    times, least = (case.micro_batches, 0.98) if each else (1, 1.0)
    for rank in worlds(world_size).of(f"{name}-{case}"):
        sent = sum(call.sent_bytes for call in rank["calls"])
        formula = times * strategy.sent_bytes(payload(case, ROWS * world_size // parts // times), world_size)
        assert least * formula <= sent <= 1.05 * formula


@pytest.mark.parametrize(
    ("name", "some"),
    [("ddp_naive", False), ("ddp_flat", False), ("ddp_overlap", True), ("ddp_bucketed", True), ("fsdp", True)],
)
def test_overlapping_strategies_send_during_backward(worlds: Any, name: str, some: bool) -> None:
    """In the last step, with `never` unused: what waits for it, waits until backward is finished."""
    for rank in worlds(2).of(f"{name}-{cases(name, 2)[0]}"):
        assert (rank["during_backward"] > 0) == some


@every_world
@pytest.mark.parametrize(
    ("what", "answer"),
    [
        ("shape", "parameter 1.weight (5, 3) float32 (4 tensors) where rank 0 has parameter 1.weight (4, 3) float32"),
        ("count", "nothing (2 tensors) where rank 0 has parameter 1.weight (2, 2) float32 (4 tensors)"),
        ("order", "parameter b.weight (2, 2) float32 (4 tensors) where rank 0 has parameter a.weight (2, 2) float32"),
        ("dtype", "parameter weight (2, 2) bfloat16 (2 tensors) where rank 0 has parameter weight (2, 2) float32"),
        (
            "frozen",
            "parameter weight (2, 2) float32 frozen (2 tensors) where rank 0 has parameter weight (2, 2) float32",
        ),
    ],
)
def test_different_models_on_ranks_are_refused(worlds: Any, world_size: int, what: str, answer: str) -> None:
    for answers in worlds(world_size).of("mismatches"):
        assert answers[what].startswith(f"rank {world_size - 1} has a different model from rank 0: {answer}")
        assert answers[what].endswith("build the same model, in the same order, on every rank")


@pytest.mark.parametrize(
    ("what", "answer"),
    [
        (
            "single",
            "strategy single trains on one process, but 2 were started; use --world-size 1, or",
        ),
        ("backward twice", "backward ran again before finish_gradient_synchronization(); run all but the last"),
        ("unfrozen", "a parameter was unfrozen after the model was wrapped; wrap the model again"),
        (
            "another state",
            "the state has groups of [2] parameters, but this optimizer has [3]; create equal",
        ),
        ("not wrapped", "a parameter of the optimizer does not belong to a wrapped model; wrap the model first"),
        ("no bucket", "bucket_size_mb is 0; it must be a number above 0"),
        ("no last bucket", "last_bucket_mb is 0; it must be a number above 0"),
        ("no such dtype", "unknown comm_dtype 'fp8': did you mean fp16? known: bf16, fp16"),
        ("complex", "comm_dtype does not support complex gradients, got torch.complex64; drop comm_dtype"),
        ("not NCCL", "max_ctas and high_priority require NCCL; drop them on a CPU"),
    ],
)
def test_misuse_raises_a_named_error(worlds: Any, what: str, answer: str) -> None:
    for answers in worlds(2).of("misuses"):
        assert answers[what].startswith(answer)


def test_parameters_that_would_be_put_in_the_place_of_wrapped_ones_are_refused(worlds: Any) -> None:
    """They would train unaveraged, on each rank to something else."""
    for answers in worlds(2).of("assigned"):
        assert len(answers) == 2 * len(STRATEGIES)
        for answer in answers.values():
            assert answer.startswith("load_state_dict(assign=True) would replace the wrapped parameters")


def test_after_a_backward_that_failed_the_next_one_says_how_to_go_on(worlds: Any) -> None:
    for found in worlds(2).of("after_a_failed_backward"):
        for name, ((failed, following), trained, expected) in found.items():
            assert failed == "out of luck"
            assert following.endswith("call finish_gradient_synchronization() and zero_grad() first")
            same(trained, expected, name, rtol=0, atol=0)


def test_buckets_are_sent_in_the_order_in_which_backward_fills_them(worlds: Any) -> None:
    """Layers that run in the reverse of their registration: the first step waits for the last, the second for none."""
    for first, second in worlds(2).of("learned_order"):
        assert first == [0, 0, 3]
        assert second == [1, 2, 3]


@every_world
def test_one_gradient_for_two_parameters_is_averaged_once(worlds: Any, world_size: int) -> None:
    """Each rank's is its number, their mean (N + 1) / 2."""
    for found in worlds(world_size).of("one_gradient_for_two"):
        assert found == {name: [1 - (world_size + 1) / 2] for name in found}


@every_world
def test_what_was_wrapped_is_freed_with_its_memory(worlds: Any, world_size: int) -> None:
    """Hooks that knew the wrapper kept parameters and gradients for ever: the garbage collector does not see through
    a tensor's hooks."""
    assert worlds(world_size).of("kept_alive") == [[]] * world_size


@every_world
def test_a_parameter_without_dimensions_is_trained_and_loaded_as_any(worlds: Any, world_size: int) -> None:
    alone = without_dimensions(0, 1)["single"]
    for rank in worlds(world_size).of("without_dimensions"):
        for name, got in rank.items():
            same(got, alone, name, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [2, 3])
def test_other_collectives_keep_their_order(worlds: Any, world_size: int) -> None:
    """A second model's gradients in the same backward, and what the caller sends after it: else the ranks take each
    other's numbers, or wait for ever."""
    ranks = worlds(world_size).of("others_collectives")
    exact = [torch.stack(own).mean(0) for own in zip(*(rank["own"] for rank in ranks), strict=True)]
    for rank in ranks:
        same(rank["mean"], exact, "mean")


def test_beside_a_model_that_sends_in_backward_too_it_sends_from_backwards_thread(worlds: Any) -> None:
    for trained in worlds(2).of("a_model_that_sends"):
        for name, parameters in trained.items():
            same(parameters, trained["ddp_naive"], name)


def test_to_send_a_gradient_takes_backward_one_call_of_python(worlds: Any) -> None:
    """Beside the hook: it is handed to another thread. A step has one for each parameter, and lasts as long as the host
    takes for them where that binds: three of them took 48, and 3 on the same thread."""
    assert worlds(2).of("python_calls") == [1] * 2


def off_the_mean(ranks: list[dict[str, Any]], roundoff: float) -> bool:
    """Return whether gradients differ from the exact mean; assert that they do by at most two roundings."""
    exact = [torch.stack(own).mean(0) for own in zip(*(rank["own"] for rank in ranks), strict=True)]
    largest = max(float(x.abs().max()) for rank in ranks for x in rank["own"])
    for rank in ranks:
        assert [x.dtype for x in rank["mean"]] == [torch.float32] * 3
        same(rank["mean"], ranks[0]["mean"], "ranks differ", rtol=0, atol=0)
        same(rank["mean"], exact, "mean", rtol=0, atol=2 * roundoff * largest)
    return any(not torch.equal(mean, x) for rank in ranks for mean, x in zip(rank["mean"], exact, strict=True))


@every_world
def test_gradients_that_travel_narrowed_are_rounded_means(worlds: Any, world_size: int) -> None:
    """In their own dtype at the end, off the exact mean by bf16's rounding, not to the bit, and half as many bytes."""
    ranks = worlds(world_size).of("narrowed")
    assert off_the_mean(ranks, 2**-8)
    for rank in ranks:
        assert rank["sent"] == 2 * 3 * 16 + 3  # and a byte a parameter, for who had a gradient


@pytest.mark.gpu
@pytest.mark.parametrize(("told", "roundoff"), [("narrowed", 2**-8), ("prioritised", 2**-23)])
def test_on_two_gpus_gradients_travel_as_told(gpu_worlds: Any, told: str, roundoff: float) -> None:
    """Cast on streams of their own, or by NCCL on fewer thread blocks and a stream that goes first."""
    off_the_mean(gpu_worlds(2).of(told), roundoff)


@every_world
@pytest.mark.parametrize(
    ("what", "answer"),
    [
        (
            "foreign",
            "tp requires the attention or feed-forward blocks of BasicTransformerLM, and Linear has none",
        ),
        (
            "heads",
            "num_heads 5 is not divisible by {0} ranks; choose a tp_degree (for tp alone: ranks) among 1, 5",
        ),
        ("d_ff", "d_ff 7 is not divisible by {0} ranks; choose a tp_degree (for tp alone: ranks) among 1"),
        ("twice", "tp cannot divide layers.0.attn.q_proj.weight: it is already divided; wrap the model once"),
        ("tied outside", "lm_head.weight is tied to a weight that tp divides in another way; untie them, or use fsdp"),
        ("degree", "tp_degree 7 does not divide {0} ranks; choose one of 1, {0}"),
    ],
)
def test_indivisible_model_is_refused(worlds: Any, world_size: int, what: str, answer: str) -> None:
    for answers in worlds(world_size).of("indivisible"):
        assert answers[what].startswith(answer.format(world_size))


@every_world
def test_blocks_are_divided_and_made_whole(worlds: Any, world_size: int) -> None:
    """Check the parts that a rank keeps, its gradients under autocast and its state, in a model with tied layers."""
    for rank in worlds(world_size).of("tensor_parallel"):
        assert rank["kept"] == {"q_proj": (24 // world_size, 24), "w2": (24, 24 // world_size), "lm_head": (24, 24)}
        assert rank["tied"]
        assert {call.whole_bytes for call in rank["calls"]} == {2 * 8 * 24 * 2}  # rows, context, d_model, bf16
        assert len(rank["calls"]) == 4 * 2
        for name, gradient in rank["expected"].items():
            off = (rank["gradients"][name] - gradient).norm() / gradient.norm()
            assert off < 3e-2, name
        same(rank["loaded"], rank["saved"], "loaded", rtol=0, atol=0)


@every_world
def test_a_sharded_optimizer_takes_closures_schedules_and_groups(worlds: Any, world_size: int) -> None:
    ranks = worlds(world_size).of("sharding")
    for rank in ranks:
        same(rank["mine"], rank["expected"], "parameters", rtol=0, atol=0)
        assert rank["losses"][:3] == rank["losses"][3:]
    # 30 | 10 + 10 + 10, then 7 to either; of three ranks 30 | 10 + 10 | 10 + 7: in fp32, a momentum each
    assert sorted(rank["state_bytes"] for rank in ranks) == {2: [120, 148], 3: [68, 80, 120]}[world_size]
