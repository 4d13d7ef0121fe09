"""Every strategy compared with one process: parameters, optimizer state, sent bytes and errors."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from cs_systems.formulas.communication import Payload
from cs_systems.model.parallel import compose
from tests.model.parallel.misuses import STRATEGIES
from tests.model.parallel.ranks import cases, composed, scaled, strategies
from tests.model.parallel.scenarios import master_weights, without_dimensions
from tests.model.parallel.training import (
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


def _slow(ranks: int, *values: Any) -> Any:
    """Return a parameter that is slow on three ranks: these take 20 s."""
    return pytest.param(*values, marks=pytest.mark.slow if ranks == 3 else ())


def runs(*world_sizes: int) -> Any:
    """Parametrize a test by every strategy and case of these world sizes."""
    found = [_slow(n, name, case, n) for n in world_sizes for name in strategies(n) for case in cases(name, n)]
    return pytest.mark.parametrize(("name", "case", "world_size"), found, ids=str)


every_world_size = pytest.mark.parametrize("world_size", [2, _slow(3, 3)])

whole, in_parts = cache(train_whole), cache(train_in_parts)


def same(got: Any, expected: Any, name: str, **tolerance: float) -> None:
    torch.testing.assert_close(got, expected, msg=lambda text: f"{name}: {text}", **tolerance)


def close(got: dict[str, Any], expected: dict[str, Any], precision: str, title: str, low: float = 1e-2) -> None:
    """Assert that tensors differ only by the order of summation.

    In bf16 single elements may round differently, so each tensor must be within `low` of the norm; matrices move by a
    tenth of theirs.
    """
    if precision == "fp32":
        same(got, expected, title, rtol=1e-4, atol=1e-6)
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        off = (got[name].double() - x.double()).norm() / x.double().norm().clamp(min=1e-12)
        assert off <= low, f"{title}: {name} is off by {off:.1%}"


def is_exact(name: str, case: Case) -> bool:
    """Return whether sums have one order.

    With sharded parameters, or gradients finished after each micro-batch, each is averaged over the ranks before it is
    added. Tensor parallelism divides the sums of products.
    """
    splits = composed(name).splits
    adds_means = case.micro_batches > 1 and ("parameters" in splits or case.finishes_each)
    return "features" not in splits and not adds_means


@runs(1, 2, 3, 4)
def test_strategy_trains_to_the_parameters_of_one_process(
    ranks_by_size: Any, name: str, case: Case, world_size: int
) -> None:
    first, *others = ranks_by_size(world_size).of(f"{name}-{case}")
    for other in others:
        same(other["tensors"], first["tensors"], "ranks differ", rtol=0, atol=0)
    reference, _ = whole(Case(case.precision), world_size)
    close(first["tensors"], dict(tensors(reference)), case.precision, "against the whole batch")
    if world_size <= 2 and is_exact(name, case):  # a + b is b + a: the same arithmetic, to the bit
        same(first["tensors"], dict(tensors(in_parts(case, world_size)[0])), "against its parts", rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", ["scaled", "scaled-fused"])
@pytest.mark.parametrize("name", scaled())
def test_overflow_on_one_rank_skips_the_step_on_all(ranks_by_size: Any, name: str, optimizer: str) -> None:
    """Also check that the next step, with half the scale, equals a step without a scaler."""
    for rank in ranks_by_size(2).of(f"{name}-{optimizer}"):
        same(rank["skipped"], rank["before"], "not skipped", rtol=0, atol=0)
        assert rank["scales"] == [2.0**15, 2.0**15, 1.0]
        same(rank["scaled"], rank["plain"], "scaled", rtol=1e-5, atol=1e-7)
        assert any(not torch.equal(x, rank["before"][name]) for name, x in rank["scaled"].items())


def test_strategy_single_equals_one_process() -> None:
    case = Case(micro_batches=2)
    alone = train_rank(compose("single"), case, 0, 1)
    same(alone["tensors"], dict(tensors(in_parts(case, 1)[0])), "alone", rtol=0, atol=0)
    assert alone["calls"] == []


@pytest.mark.gpu
@runs(2, 4)
def test_strategy_trains_to_the_parameters_of_one_process_on_gpus(
    gpu_ranks_by_size: Any, name: str, case: Case, world_size: int
) -> None:
    """Compare with one process on a CPU, with sums in another order."""
    reference, _ = whole(Case(case.precision), world_size)
    ranks = gpu_ranks_by_size(world_size).of(f"{name}-{case}")
    for rank in ranks:
        same(rank["tensors"], ranks[0]["tensors"], "ranks differ", rtol=0, atol=0)
        close(rank["tensors"], dict(tensors(reference)), case.precision, "against the whole batch")


@runs(2, 4)
def test_optimizer_state_equals_that_of_one_process(ranks_by_size: Any, name: str, case: Case, world_size: int) -> None:
    """Load the state into one process and compare it with the state that one process reached."""
    first, *_ = ranks_by_size(world_size).of(f"{name}-{case}")
    model = Model(case.precision)
    model.load_state_dict(first["tensors"])
    loaded = OPTIMIZER(groups(model), **OPTIONS)
    loaded.load_state_dict(first["state"])
    _, reference = in_parts(case, world_size)
    restored, expected = loaded.state_dict(), reference.state_dict()
    assert restored["state"].keys() == expected["state"].keys()
    if is_exact(name, case):
        same(restored["state"], expected["state"], "state", rtol=0, atol=0)
    for number, state in restored["state"].items():
        close(state, expected["state"][number], case.precision, f"state of {number}", low=0.1)
    for group, expected_group in zip(restored["param_groups"], expected["param_groups"], strict=True):
        assert {key: group[key] for key in expected_group} == expected_group


def test_training_covers_frozen_rare_unused_and_tied_parameters() -> None:
    """Check the premises of these tests: parameters move; one is frozen, one rare, one unused, and two are tied."""
    before, after = Model(), whole(Case(), 2)[0]
    moved = {name for name, x in after.named_parameters() if not torch.equal(x, before.get_parameter(name))}
    still = {name for name, _ in after.named_parameters()} - moved
    assert still == {"never.weight", "never.bias", "lm.layers.0.ln1.weight"}
    assert "lm.lm_head.weight" not in moved
    assert after.lm.lm_head.weight is after.lm.token_embeddings.weight


def payload(case: Case, rows: int) -> Payload:
    """Return the payload of a rank with this number of rows."""
    trained = {name: p for name, p in Model(case.precision).named_parameters() if p.requires_grad}
    divided = [p.nbytes for name, p in trained.items() if ".attn." in name or ".ffn." in name]
    stream = rows * CONFIG.context_length * CONFIG.d_model * trained["lm.layers.0.ffn.w1.weight"].element_size()
    return Payload(sum(p.nbytes for p in trained.values()), sum(divided), CONFIG.num_layers, stream)


@pytest.mark.parametrize(
    ("name", "world_size"), [_slow(n, name, n) for n in (2, 3, 4) for name in strategies(n) if composed(name).counted]
)
def test_sent_bytes_match_the_formula(ranks_by_size: Any, name: str, world_size: int) -> None:
    """Allow for one byte per parameter, which flags its gradient, and for padding."""
    strategy = composed(name)
    assert strategy.sent_bytes is not None
    _, parts = strategy.part_of_batch(0, world_size)
    case = cases(name, world_size)[-1]
    each = (
        "parameters" in strategy.splits
    )  # sends the gradients of each micro-batch, except of norms, which are not sharded
    times, least = (case.micro_batches, 0.98) if each else (1, 1.0)
    for rank in ranks_by_size(world_size).of(f"{name}-{case}"):
        sent = sum(call.sent_bytes for call in rank["calls"])
        formula = times * strategy.sent_bytes(payload(case, ROWS * world_size // parts // times), world_size)
        assert least * formula <= sent <= 1.05 * formula


@pytest.mark.parametrize("name", [name for name in strategies(2) if composed(name).counted and "tp" not in name])
def test_overlapping_strategies_send_during_backward(ranks_by_size: Any, name: str) -> None:
    """Check the last step; a bucket with the unused `never` waits for the end of backward."""
    for rank in ranks_by_size(2).of(f"{name}-{cases(name, 2)[0]}"):
        assert (rank["during_backward"] > 0) == composed(name).overlaps


@every_world_size
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "shape",
            "parameter 1.weight (5, 3) float32 instead of parameter 1.weight (4, 3) float32 (4 and 4 tensors in all)",
        ),
        ("count", "nothing instead of parameter 1.weight (2, 2) float32 (2 and 4 tensors in all)"),
        ("order", "parameter b.weight (2, 2) float32 instead of parameter a.weight (2, 2) float32"),
        ("dtype", "parameter weight (2, 2) bfloat16 instead of parameter weight (2, 2) float32"),
        (
            "frozen",
            "parameter weight (2, 2) float32 frozen instead of parameter weight (2, 2) float32",
        ),
    ],
)
def test_different_models_on_ranks_are_refused(ranks_by_size: Any, world_size: int, kind: str, message: str) -> None:
    for messages in ranks_by_size(world_size).of("mismatches"):
        assert messages[kind].startswith(f"rank {world_size - 1} has a different model from rank 0: {message}")
        assert messages[kind].endswith("build the same model, in the same order, on every rank")


@pytest.mark.slow
def test_different_models_in_a_group_are_named_by_ranks_of_the_job(ranks_by_size: Any) -> None:
    for messages in ranks_by_size(3).of("mismatches")[1:]:
        assert messages["group"].startswith("rank 2 has a different model from rank 1: parameter weight (3, 2)")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "single",
            "strategy single trains on one process, but 2 were started; start one process, or use a strategy",
        ),
        (
            "backward twice",
            "a parameter got a second gradient before finish_gradient_synchronization(); call finish_",
        ),
        ("unfrozen", "parameter weight requires a gradient, but was frozen when the model was wrapped; unfreeze it"),
        (
            "another state",
            "the state_dict has parameter groups of the sizes [2], but this optimizer has [3]; make this",
        ),
        (
            "not wrapped",
            "the optimizer has a parameter of shape (2, 2) that is in no wrapped model, or was frozen when",
        ),
        ("no bucket", "bucket_size_mb is 0; it must be a number above 0"),
        ("no last bucket", "last_bucket_mb is 0; it must be a number above 0"),
        ("no such dtype", "unknown comm_dtype 'fp8'; did you mean fp16? The names are bf16, fp16"),
        ("complex", "comm_dtype does not support complex gradients, got torch.complex64; leave out comm_dtype"),
        ("not NCCL", "max_ctas and high_priority require NCCL, but the process group uses cpu:gloo"),
    ],
)
def test_misuse_raises_a_named_error(ranks_by_size: Any, kind: str, message: str) -> None:
    for messages in ranks_by_size(2).of("misuses"):
        assert messages[kind].startswith(message)


def test_load_with_assign_into_wrapped_model_is_refused(ranks_by_size: Any) -> None:
    """Replaced parameters would train without averaging, differently on each rank."""
    for messages in ranks_by_size(2).of("assigned"):
        assert len(messages) == 2 * len(STRATEGIES)
        for message in messages.values():
            assert message.startswith("load_state_dict(assign=True) would replace the wrapped parameters")


def test_backward_after_a_failed_one_names_the_remedy(ranks_by_size: Any) -> None:
    for found in ranks_by_size(2).of("after_a_failed_backward"):
        for name, ((failed, following), trained, expected) in found.items():
            assert failed == "planted failure"
            assert "failed on all ranks, call finish_gradient_synchronization() and zero_grad() first" in following
            same(trained, expected, name, rtol=0, atol=0)


def test_buckets_are_sent_in_the_order_of_backward(ranks_by_size: Any) -> None:
    """Run layers in the reverse of their registration: only the first step waits for the last gradient."""
    for first, second in ranks_by_size(2).of("learned_order"):
        assert first == [0, 0, 3]
        assert second == [1, 2, 3]


@every_world_size
def test_shared_gradient_memory_is_averaged_once(ranks_by_size: Any, world_size: int) -> None:
    """Use rank + 1 as each rank's gradient; their mean is (N + 1) / 2."""
    for found in ranks_by_size(world_size).of("one_gradient_for_two"):
        assert found == {name: [1 - (world_size + 1) / 2] for name in found}


@every_world_size
def test_wrapped_model_is_freed_with_its_memory(ranks_by_size: Any, world_size: int) -> None:
    """A hook with a reference to the wrapper would leak: the garbage collector does not follow a tensor's hooks."""
    assert ranks_by_size(world_size).of("kept_alive") == [[]] * world_size


@every_world_size
def test_parameter_without_dimensions_is_trained_and_loaded(ranks_by_size: Any, world_size: int) -> None:
    alone = without_dimensions(0, 1)["single"]
    for rank in ranks_by_size(world_size).of("without_dimensions"):
        for name, got in rank.items():
            same(got, alone, name, rtol=1e-5, atol=1e-6)


@every_world_size
def test_master_weights_are_trained_saved_and_loaded_as_in_one_process(ranks_by_size: Any, world_size: int) -> None:
    alone = master_weights(0, 1)["single"]
    for rank in ranks_by_size(world_size).of("master_weights"):
        assert "is a DTensor, as strategy torch_fsdp2 makes them; use strategy fsdp, or" in rank.pop("refused")
        for name, got in rank.items():
            exactly = world_size == 2 and name != "tp"  # a third, and a sum of parts, are rounded to bfloat16
            close(got, alone, "fp32" if exactly else "bf16", name)


@every_world_size
def test_other_collectives_keep_their_order(ranks_by_size: Any, world_size: int) -> None:
    """Send a second model's gradients and the caller's tensor; in another order the ranks would mix them up or hang."""
    ranks = ranks_by_size(world_size).of("collectives_of_two_models")
    exact = [torch.stack(own).mean(0) for own in zip(*(rank["own"] for rank in ranks), strict=True)]
    for rank in ranks:
        same(rank["mean"], exact, "mean")


def test_model_that_communicates_in_backward_trains_as_ddp_naive(ranks_by_size: Any) -> None:
    for trained in ranks_by_size(2).of("model_that_communicates"):
        for name, parameters in trained.items():
            same(parameters, trained["ddp_naive"], name)


def test_sending_a_gradient_takes_one_python_call_in_backward(ranks_by_size: Any) -> None:
    """Allow one Python call besides the hook, because another thread sends the gradient.

    These calls bound the step when the host is the bottleneck. Three layers once took 48, and 3 on the same thread.
    """
    assert ranks_by_size(2).of("python_calls") == [1] * 2


def differs_from_the_mean(ranks: list[dict[str, Any]], roundoff: float) -> bool:
    """Return whether gradients differ from the exact mean; assert that they do by at most two roundings."""
    exact = [torch.stack(own).mean(0) for own in zip(*(rank["own"] for rank in ranks), strict=True)]
    largest = max(float(x.abs().max()) for rank in ranks for x in rank["own"])
    for rank in ranks:
        assert [x.dtype for x in rank["mean"]] == [torch.float32] * 3
        same(rank["mean"], ranks[0]["mean"], "ranks differ", rtol=0, atol=0)
        same(rank["mean"], exact, "mean", rtol=0, atol=2 * roundoff * largest)
    return any(not torch.equal(mean, x) for rank in ranks for mean, x in zip(rank["mean"], exact, strict=True))


@every_world_size
def test_gradients_sent_in_bf16_are_rounded_means(ranks_by_size: Any, world_size: int) -> None:
    """Check that they keep their dtype, differ from the exact mean by bf16's rounding and take half the bytes."""
    ranks = ranks_by_size(world_size).of("narrowed")
    assert differs_from_the_mean(ranks, 2**-8)
    for rank in ranks:
        assert rank["sent"] == 2 * 3 * 16 + 3  # and one byte per parameter, which flags its gradient


@pytest.mark.gpu
@pytest.mark.parametrize(("options", "roundoff"), [("narrowed", 2**-8), ("prioritised", 2**-23)])
def test_nccl_options_keep_the_mean_of_gradients_on_two_gpus(
    gpu_ranks_by_size: Any, options: str, roundoff: float
) -> None:
    """Cast on separate streams, or let NCCL use fewer thread blocks and a high-priority stream."""
    differs_from_the_mean(gpu_ranks_by_size(2).of(options), roundoff)


@every_world_size
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "foreign",
            "tp requires the attention or feed-forward blocks of BasicTransformerLM, and Linear has none",
        ),
        (
            "heads",
            "num_heads 5 is not divisible by world_size {0}, over which tp divides each block; choose world_size "
            "among 1, 5",
        ),
        (
            "d_ff",
            "d_ff 7 is not divisible by world_size {0}, over which tp divides each block; choose world_size among 1",
        ),
        ("twice", "tp cannot divide layers.0.attn.q_proj.weight, because it is divided already; wrap the model once"),
        (
            "tied outside",
            "tp cannot divide the weight that layers.0.ffn.w1.weight and lm_head.weight share, because the two layers",
        ),
        ("degree", "tp_degree 7 does not divide {0} ranks; choose tp_degree among 1, {0}, or a world size"),
    ],
)
def test_indivisible_model_is_refused(ranks_by_size: Any, world_size: int, kind: str, message: str) -> None:
    for messages in ranks_by_size(world_size).of("indivisible"):
        assert messages[kind].startswith(message.format(world_size))


@every_world_size
def test_tensor_parallel_blocks_are_divided_and_gathered(ranks_by_size: Any, world_size: int) -> None:
    """Check a rank's shards, its gradients under autocast and its state, in a model with tied layers."""
    for rank in ranks_by_size(world_size).of("tensor_parallel"):
        assert rank["kept"] == {"q_proj": (24 // world_size, 24), "w2": (24, 24 // world_size), "lm_head": (24, 24)}
        assert rank["tied"]
        assert {call.whole_bytes for call in rank["calls"]} == {2 * 8 * 24 * 2}  # rows, context, d_model, bf16
        assert len(rank["calls"]) == 4 * 2
        for name, gradient in rank["expected"].items():
            off = (rank["gradients"][name] - gradient).norm() / gradient.norm()
            assert off < 3e-2, name
        same(rank["loaded"], rank["saved"], "loaded", rtol=0, atol=0)


@every_world_size
def test_sharded_optimizer_supports_closures_schedules_and_groups(ranks_by_size: Any, world_size: int) -> None:
    ranks = ranks_by_size(world_size).of("sharding")
    for rank in ranks:
        same(rank["mine"], rank["expected"], "parameters", rtol=0, atol=0)
        assert rank["losses"][:3] == rank["losses"][3:]
    # Two ranks hold 30 and 10 + 10 + 10, and either gets 7; three hold 30, 10 + 10 and 10 + 7: momenta in fp32.
    assert sorted(rank["state_bytes"] for rank in ranks) == {2: [120, 148], 3: [68, 80, 120]}[world_size]
