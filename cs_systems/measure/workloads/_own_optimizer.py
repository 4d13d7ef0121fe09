"""Optimizer of the user's own, compared with torch's class of the same name on two small tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cs_systems.analysis.comparison.own_code import OPTIMIZER_ERROR, OptimizerErrorRow
from cs_systems.core import plugins
from cs_systems.core.tables import Tables
from cs_systems.model.training.optimizers import optimizer_class

STEPS = 20
SHAPES = ((64, 32), (64,))  # a weight and a bias


def optimizer_error(name: str | None, device: torch.device) -> Tables:
    """Return the table `optimizer_error`: both take STEPS steps from the same float32 parameters and gradients.

    Empty for a built-in optimizer, and where torch has no class of the same name.
    """
    if name is None or not plugins.is_foreign(name):
        return {}
    known = {each.lower(): each for each in torch.optim.__all__}
    reference = known.get(name.rpartition(":")[2].lower())
    if reference is None:
        return {}
    cls, options = optimizer_class(name)
    torchs = getattr(torch.optim, reference)
    accepted = inspect.signature(torchs).parameters
    expected = _stepped(torchs, {each: value for each, value in options.items() if each in accepted}, device)
    row: OptimizerErrorRow = {
        "optimizer": name, "reference": f"torch.optim.{reference}", "steps": STEPS, "error": None, "note": "",
    }  # fmt: skip
    try:
        got = _stepped(cls, options, device)
        row["error"] = _distance(got, expected) / _distance(expected, _parameters(device))
    except Exception as error:  # of the user's code, which has stepped the model without one
        row["note"] = f"{type(error).__name__}: {error}"
    return OPTIMIZER_ERROR.filled([row])


def _stepped(cls: Callable[..., Any], options: dict[str, Any], device: torch.device) -> list[Tensor]:
    """Return the parameters after STEPS steps."""
    params = [nn.Parameter(x) for x in _parameters(device)]
    optimizer, random = cls(params, **options), torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for p in params:
            p.grad = torch.randn(p.shape, generator=random).to(device)
        optimizer.step()
    return [p.detach() for p in params]


def _parameters(device: torch.device) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random).to(device) for shape in SHAPES]


def _distance(some: list[Tensor], others: list[Tensor]) -> float:
    differences = [(x - y).flatten() for x, y in zip(some, others, strict=True)]
    return float(torch.cat(differences).double().norm())
