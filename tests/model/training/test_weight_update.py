"""Tests of the update fused into the weights' gradients: the part on a CPU, the kernel on a Hopper GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cs_systems.config import Precision, RunConfig, preset
from cs_systems.machine.device import resolve
from cs_systems.measure.workloads import Cell
from cs_systems.measure.workloads.train_step import TrainStep
from cs_systems.model.training.master_adamw import MasterAdamW, master_weight
from cs_systems.model.training.parts import fused_weight_update
from cs_systems.model.training.parts.fused_weight_update import Product, blocks_together, unavailable

MASTER: dict[str, Any] = {"precision": Precision.BF16_PURE, "optimizer": "adamw_master"}
CELL = RunConfig(model=preset("tiny"), batch_size=2, seq_len=16, device="cpu", **MASTER)


def trained(config: RunConfig, steps: int = 3) -> tuple[list[float], TrainStep]:
    train, losses = TrainStep(Cell(config), resolve(config.device)), []
    for _ in range(steps):
        train.prepare()
        for _, run in train.step():
            run()
        assert train.loss is not None
        losses.append(float(train.loss.detach()))
    return losses, train


@pytest.fixture(autouse=True)
def forgotten_compilations() -> Iterator[None]:
    """Reset compilations of the blocks, because torch compiles one function only a few times."""
    yield
    torch._dynamo.reset()


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a cell on a CPU have the part, which torch then computes."""
    monkeypatch.setattr("cs_systems.model.training.parts.unavailable", lambda config, parts: None)


COMPILED = {"compile": "default", "compile_scope": "block"}
OTHERS: list[tuple[str, ...]] = [(), ("joined_projections",), ("joined_projections", "fused_feed_forward")]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, in dynamo
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("others", "options"),
    [
        *((others, options) for others in OTHERS for options in ({}, {"checkpoint": "every:1"})),
        pytest.param(OTHERS[-1], COMPILED | {"compile": "aot_eager"}, marks=pytest.mark.slow),
        *(pytest.param(others, COMPILED, marks=pytest.mark.slow) for others in (OTHERS[0], OTHERS[-1])),
    ],
    ids=str,
)
def test_training_is_bit_identical_to_an_update_after_backward(
    others: tuple[str, ...], options: dict[str, Any]
) -> None:
    cell = replace(CELL, parts=others, **options)
    losses, plain = trained(cell)
    same_losses, fused = trained(replace(cell, parts=(*others, "fused_weight_update")))
    assert losses == same_losses
    for a, b in zip(plain.model.parameters(), fused.model.parameters(), strict=True):
        assert torch.equal(a, b)
        assert b.grad is None
    assert isinstance(plain.optimizer, MasterAdamW)
    assert isinstance(fused.optimizer, MasterAdamW)
    for a, b in zip(plain.model.parameters(), fused.model.parameters(), strict=True):
        assert all(
            torch.equal(plain.optimizer.state[a][k], fused.optimizer.state[b][k]) for k in ("exp_avg", "remainder")
        )


@pytest.mark.usefixtures("on_cpu")
def test_learning_rate_of_each_step_and_group_is_used() -> None:
    def run(parts: tuple[str, ...]) -> list[Tensor]:
        _, train = trained(replace(CELL, parts=parts), 1)
        assert train.optimizer is not None
        train.optimizer.param_groups[0]["lr"] = 0.1
        train.prepare()
        for _, phase in train.step():
            phase()
        return [*train.model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(()), run(("fused_weight_update",)), strict=True))


@pytest.mark.usefixtures("on_cpu")
def test_update_does_not_keep_the_model_alive() -> None:
    import gc
    import weakref

    _, train = trained(replace(CELL, parts=("fused_weight_update",)), 1)
    weight = weakref.ref(train.model.get_parameter("layers.0.attn.q_proj.weight"))
    del train
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, "a Hopper GPU is required; use update_in_backward"),
        ({"mode": "forward-backward"}, "mode forward-backward does not update the parameters; use mode train-step"),
        (
            {"optimizer": "default"},
            "the default optimizer updates all parameters at once; use optimizer adamw_master",
        ),
        (
            {"parts": ("fp8_linear", "fused_weight_update")},
            "fp8_linear replaces the same layers; leave one of them out",
        ),
        (
            {"compile": "reduce-overhead"},
            "replays backward in a CUDA graph, where the update cannot run; use compile default and graph step",
        ),
        ({"model": replace(preset("tiny"), d_ff=96)}, "d_ff 96 must be multiples of 64; use update_in_backward"),
    ],
    ids=str,
)
def test_part_that_cannot_run_has_a_reason_and_a_remedy(changed: dict[str, Any], reason: str) -> None:
    assert reason in (unavailable(replace(CELL, **changed)) or "")


@pytest.mark.parametrize(
    ("tiles", "blocks"),
    [
        (66, 1),  # a whole wave of clusters of two
        (33, 2),  # one wave for one block or two
        (35, 3),  # 1, 2 and 2 waves for 1, 2 and 3 blocks
        (67, 4),  # 2, 3, 4 and 5 waves
        (1600, 1),  # 25 waves, 73 for three blocks: 2.7% better, which is not enough
    ],
)
def test_blocks_share_a_launch_if_that_saves_a_wave(tiles: int, blocks: int) -> None:
    assert blocks_together([(256 * tiles, 256)], 132) == blocks


def test_blocks_of_many_weights_do_not_share_a_launch() -> None:
    assert blocks_together([(256, 256)] * 9, 132) == 1


def products(tokens: int, shapes: Sequence[tuple[int, int]], moments: torch.dtype) -> tuple[MasterAdamW, list[Product]]:
    torch.manual_seed(0)
    weights = [nn.Parameter((torch.randn(shape) + 1e-30).bfloat16().cuda()) for shape in shapes]
    optimizer = MasterAdamW(weights, lr=0.01, weight_decay=0.1, moments=moments)
    made = []
    for weight in weights:
        _, remainder, first, second = optimizer.tensors_of(weight)
        remainder.copy_(torch.randint(-(2**15), 2**15, remainder.shape))
        first.normal_(std=0.01)
        second.uniform_(1e-5, 1e-4)
        wide = torch.randn(tokens, weight.shape[0] + 64, device="cuda").bfloat16() * 0.02
        made.append(Product(weight, wide[:, 64:], torch.randn(tokens, weight.shape[1], device="cuda").bfloat16()))
    return optimizer, made


def expected(optimizer: MasterAdamW, product: Product) -> tuple[Tensor, Tensor, Tensor]:
    """Return the master weight and the moments after the step, in float64, from the gradient in bfloat16."""
    group = optimizer.param_groups[0]
    (beta1, beta2), progress = group["betas"], group["progress"]
    _, remainder, first, second = optimizer.tensors_of(product.weight)
    g = (product.d_out.double().T @ product.x.double()).bfloat16().double()
    m = first.double() + (1 - beta1) * (g - first.double())
    v = second.double() + (1 - beta2) * (g * g - second.double())
    w = master_weight(product.weight.detach(), remainder).double() * (1 - group["lr"] * group["weight_decay"])
    return w - group["lr"] / progress[1] * m / ((v / progress[2]).sqrt() + group["eps"]), m, v


@pytest.mark.gpu
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 65, 1000])
def test_kernel_updates_weights_like_float64(moments: torch.dtype, tokens: int) -> None:
    shapes = [(64, 64), (320, 192), (128, 832), (2304, 768)]
    optimizer, made = products(tokens, shapes, moments)
    group = optimizer.param_groups[0]
    tolerances = (1e-4, 1e-3, 1e-3) if moments is torch.float32 else (1e-4, 5e-3, 5e-3)
    for _ in range(2):
        optimizer.advance(group)
        wanted = [expected(optimizer, product) for product in made]
        tensors = [t for p in made for t in (p.d_out, p.x, *optimizer.tensors_of(p.weight))]
        settings = torch.tensor([group["lr"], 1 - 0.9, 1 - 0.999, group["eps"], group["weight_decay"]], device="cuda")
        before = [master_weight(p.weight.detach(), optimizer.tensors_of(p.weight)[1]).double() for p in made]
        fused_weight_update.update_pass(len(made)).run([*tensors, settings, group["progress"]], ())
        for product, start, (w, m, v) in zip(made, before, wanted, strict=True):
            weight, remainder, first, second = optimizer.tensors_of(product.weight)
            found = master_weight(weight.detach(), remainder)
            change = (w - start).norm()
            assert (found.double() - w).norm() <= tolerances[0] * change + 1e-7 * w.norm()
            assert (first.double() - m).norm() <= tolerances[1] * m.norm()
            assert (second.double() - v).norm() <= tolerances[2] * v.norm()
            assert ((weight.double() - found.double()).abs() <= found.double().abs() * 2**-8).all()


def test_weight_that_needs_a_copy_is_refused() -> None:
    optimizer = MasterAdamW([nn.Parameter(torch.zeros(64, 64).bfloat16())])
    (weight,) = optimizer.param_groups[0]["params"]
    state = optimizer.tensors_of(weight)[1:]
    rows, settings, progress = torch.zeros(8, 64).bfloat16(), torch.zeros(5), torch.zeros(3)
    turned = torch.zeros(64, 64).bfloat16().T
    with pytest.raises(ValueError, match=r"of shape \(64, 64\) is not contiguous"):
        fused_weight_update.update_pass(1).run([rows, rows, turned, *state, settings, progress], ())


@pytest.mark.gpu
def test_stochastic_rounding_has_no_bias() -> None:
    optimizer, made = products(64, [(512, 512)], torch.bfloat16)
    group, (product,) = optimizer.param_groups[0], made
    optimizer.advance(group)
    _, m, _ = expected(optimizer, product)
    settings = torch.tensor([group["lr"], 1 - 0.9, 1 - 0.999, group["eps"], group["weight_decay"]], device="cuda")
    tensors = (product.d_out, product.x, *optimizer.tensors_of(product.weight))
    fused_weight_update.update_pass(1).run([*tensors, settings, group["progress"]], ())
    error = optimizer.tensors_of(product.weight)[2].double() - m
    assert error.abs().max() <= m.abs().max() * 2**-7
    assert abs(float(error.mean())) <= 4 * float(error.std()) / 512  # number of tiles of 512² elements


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("compiled", [{}, COMPILED], ids=str)
def test_training_on_a_gpu_follows_an_update_after_backward(compiled: dict[str, Any]) -> None:
    cell = replace(CELL, device="cuda", attention="sdpa_flash", seq_len=64, batch_size=8, **compiled)
    cell = replace(cell, model=replace(preset("tiny"), d_model=256, d_ff=512))
    plain_losses, plain = trained(cell, 6)
    losses, fused = trained(replace(cell, parts=("fused_weight_update",)), 6)
    assert losses == pytest.approx(plain_losses, rel=0.02)
    assert losses[-1] < 0.95 * losses[0]
    for (name, a), b in zip(plain.model.named_parameters(), fused.model.parameters(), strict=True):
        # Adam's first steps move an element by the sign of its gradient, so that rounding shows in small gradients.
        assert (a - b).double().norm() <= 0.1 * (a.double().norm()), name
