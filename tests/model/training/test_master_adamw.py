"""Tests of AdamW with master weights: against torch's in float32, and the Triton kernel against torch's operators."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from cs_systems.config import ConfigError
from cs_systems.model.training.master_adamw import MasterAdamW, _random_bits, _rounded, master_weight

SIZES = (3, 8192, 9001)
OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def trained(
    moments: torch.dtype, device: str = "cpu", run: Callable[[MasterAdamW], object] = MasterAdamW.step, steps: int = 4
) -> tuple[MasterAdamW, list[nn.Parameter]]:
    random = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(n, generator=random).bfloat16().to(device)) for n in SIZES]
    optimizer = MasterAdamW(parameters, moments=moments, **OPTIONS)  # type: ignore[arg-type]
    for _ in range(steps):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=random).bfloat16().to(device)
        run(optimizer)
    return optimizer, parameters


def weights(optimizer: MasterAdamW, parameters: list[nn.Parameter]) -> list[Tensor]:
    return [master_weight(p.detach(), optimizer.state[p]["remainder"]).cpu() for p in parameters]


def test_master_weights_follow_torch_adamw_in_float32() -> None:
    random = torch.Generator().manual_seed(0)
    reference = [nn.Parameter(torch.randn(n, generator=random).bfloat16().float()) for n in SIZES]
    twin = torch.optim.AdamW(reference, foreach=False, **OPTIONS)  # type: ignore[arg-type]
    for _ in range(4):
        for p in reference:
            p.grad = torch.randn(p.shape, generator=random).bfloat16().float()
        twin.step()
    ours = trained(torch.float32)
    for mine, theirs, p in zip(weights(*ours), reference, ours[1], strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-6, atol=1e-6)
        assert (p.detach() - mine).abs().max() <= mine.abs().max() * 2**-8  # the parameter is the rounded weight


def test_bias_correction_follows_betas_that_a_scheduler_changes() -> None:
    def last(cls: type[torch.optim.Optimizer], dtype: torch.dtype) -> tuple[torch.optim.Optimizer, nn.Parameter]:
        p = nn.Parameter(torch.linspace(-1, 1, 64).to(dtype))
        optimizer = cls([p], lr=1e-2, betas=(0.9, 0.999))  # type: ignore[call-arg]
        for momentum in (0.9, 0.85, 0.8):
            optimizer.param_groups[0]["betas"] = (momentum, 0.99)
            p.grad = torch.linspace(1, 2, 64).bfloat16().to(dtype)
            optimizer.step()
        return optimizer, p

    ours, p = last(MasterAdamW, torch.bfloat16)
    _, reference = last(torch.optim.AdamW, torch.float32)
    start = torch.linspace(-1, 1, 64).bfloat16().float() - torch.linspace(-1, 1, 64)  # what bfloat16 rounded away
    mine = master_weight(p.detach(), ours.state[p]["remainder"])
    torch.testing.assert_close(mine - start, reference.detach(), rtol=0, atol=1e-5)


def test_bfloat16_moments_stay_near_those_in_float32() -> None:
    for narrow, wide in zip(weights(*trained(torch.bfloat16)), weights(*trained(torch.float32)), strict=True):
        assert (narrow - wide).norm() <= 1e-3 * wide.norm()


def test_training_continues_from_a_saved_state() -> None:
    def gradients(p: nn.Parameter, step: int) -> Tensor:
        return torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).bfloat16()

    def train(optimizer: MasterAdamW, steps: range) -> Tensor:
        (p,) = optimizer.param_groups[0]["params"]
        for step in steps:
            p.grad = gradients(p, step)
            optimizer.step()
        return master_weight(p.detach(), optimizer.state[p]["remainder"])

    def begin() -> tuple[nn.Parameter, MasterAdamW]:
        p = nn.Parameter(torch.linspace(-1, 1, 100).bfloat16())
        return p, MasterAdamW([p], **OPTIONS)  # type: ignore[arg-type]

    first, saving = begin()
    train(saving, range(3))
    again, loading = begin()
    again.data.copy_(first.data)
    loading.load_state_dict(saving.state_dict())
    assert {value.dtype for value in loading.state[again].values()} == {torch.int16, torch.float32}
    assert torch.equal(train(loading, range(3, 6)), train(begin()[1], range(6)))


def test_stochastic_rounding_is_unbiased() -> None:
    count = 1 << 16
    x = torch.full((count,), 1 + 2**-9)  # a quarter of the way from 1 to the next bfloat16
    rounded = _rounded(x, _random_bits(count, step=1, tensor=0) & 0xFFFF)
    assert {*rounded.unique().tolist()} == {1.0, 1 + 2**-7}
    assert float((rounded > 1).double().mean()) == pytest.approx(0.25, abs=0.01)


def test_parameters_that_are_not_bfloat16_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"one of shape \(2,\) is torch.float32; use precision bf16-pure \(model"):
        MasterAdamW([nn.Parameter(torch.ones(2))])


def test_remedy_for_a_parameter_that_is_not_contiguous_works() -> None:
    p = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16).t())
    with pytest.raises(ConfigError, match=r"one of shape \(2, 3\) is not; store its contiguous\(\) copy in the model"):
        MasterAdamW([p])
    p.data = p.data.contiguous()
    MasterAdamW([p])


def run_kernel(optimizer: MasterAdamW) -> None:
    """Take a step with the Triton kernel, on any device."""
    from cs_systems.model.kernels.triton.adamw import Hyperparameters, Tables

    (group,) = optimizer.param_groups
    parameters = group["params"]
    optimizer.advance(group)
    tables = Tables([(p.data, *optimizer.tensors_of(p)[1:]) for p in parameters])
    settings = Hyperparameters(group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    tables.launch([p.grad for p in parameters], group["progress"], settings)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter: TRITON_INTERPRET=1")
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
def test_interpreted_kernel_matches_torch(moments: torch.dtype) -> None:
    """test_parts.py runs this test in its process."""
    kernel, reference = trained(moments, run=run_kernel, steps=2), trained(moments, steps=2)
    for a, b in zip(weights(*kernel), weights(*reference), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    for p, q in zip(kernel[1], reference[1], strict=True):
        assert torch.equal(kernel[0].state[p]["exp_avg_sq"], reference[0].state[q]["exp_avg_sq"])


@pytest.mark.gpu
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
def test_kernel_on_a_gpu_matches_torch_on_a_cpu(moments: torch.dtype) -> None:
    for a, b in zip(weights(*trained(moments, "cuda")), weights(*trained(moments)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)
