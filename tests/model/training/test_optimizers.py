"""Tests of the optimizers against torch's AdamW."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from cs_systems.config import OPTIMIZERS
from cs_systems.model.training.master_adamw import MOMENTS
from cs_systems.model.training.optimizers import AdamW, make_optimizer


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in MOMENTS])
def test_optimizer_steps_match_torch_adamw(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    twin = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    twin.load_state_dict(model.state_dict())
    options = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    ours = make_optimizer(name, model.parameters(), **options)
    reference = torch.optim.AdamW(twin.parameters(), foreach=False, fused=False, **options)  # type: ignore[arg-type]
    for _ in range(5):
        x = torch.randn(4, 5, dtype=torch.float64)
        for module, optimizer in ((model, ours), (twin, reference)):
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_adamw_keeps_parameters_without_gradient() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = AdamW([used, unused], lr=0.1)
    used.sum().backward()
    optimizer.step()
    assert torch.equal(unused, torch.ones(2))
    assert not torch.equal(used, torch.ones(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1}, "lr is -1; give a number of at least 0"),
        ({"eps": math.nan}, "eps is nan; give"),
        ({"betas": (0.9, 1)}, r"betas is \(0.9, 1\); give two numbers"),
    ],
)
def test_invalid_setting_is_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdamW([nn.Parameter(torch.ones(1))], **options)
