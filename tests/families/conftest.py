"""A model of each family, built once for all tests of this folder."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cs_systems.config import Phase
from cs_systems.instrument.annotate import STEP, annotate
from tests.families.models import FAMILIES, Family


@dataclass(frozen=True)
class Made:
    name: str
    family: Family
    model: nn.Module
    forward: Callable[[], Any]
    loss_of: Callable[[Any], Tensor]

    def phases(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yield the phases of a training step as a workload does."""
        found: dict[str, Any] = {}
        yield Phase.FORWARD, lambda: found.update(output=self.forward())
        yield Phase.LOSS, lambda: found.update(loss=self.loss_of(found["output"]))
        yield Phase.BACKWARD, lambda: found["loss"].backward()

    def step(self) -> None:
        with annotate(STEP):
            for name, run in self.phases():
                with annotate(name):
                    run()


@cache
def _made(name: str) -> Made:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the libraries, while they are imported
        model, forward, loss_of = FAMILIES[name].make()
        model.train()
    return Made(name, FAMILIES[name], model, forward, loss_of)


@pytest.fixture(params=[*FAMILIES])
def made(request: pytest.FixtureRequest) -> Made:
    if FAMILIES[request.param].is_missing:
        pytest.skip(f"needs the package {FAMILIES[request.param].needs}")
    found = _made(request.param)
    found.model.zero_grad(set_to_none=True)
    return found
