"""Difference between ranks that train by a parallel strategy and one process, after a few steps; not a timing.

All train a BasicTransformerLM, or the user's class of a language model that `workload_args` names as `model`, from the
same fp32 parameters by SGD with momentum; unlike Adam's, its update shows if gradients were summed instead of averaged.
One process trains on the whole batch, each rank on its rows of it.

Table `strategy_error`: distance of the parameters from one process, over their change; the largest distance of a rank
from rank 0, in the same measure; the relative error of the last loss; whether ranks with different initial parameters
get those of rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs_systems.analysis.comparison.own_code import STRATEGY_ERROR, StrategyErrorRow
from cs_systems.analysis.comparison.strategies import name
from cs_systems.config import Precision
from cs_systems.core import plugins
from cs_systems.core.tables import Tables
from cs_systems.core.validation import settings
from cs_systems.machine import process_group
from cs_systems.machine.device import Device
from cs_systems.measure.workloads import Cell, Unavailable, Workload
from cs_systems.measure.workloads._language_model import is_language_model, logits_of, of_sizes
from cs_systems.model.training.losses import cross_entropy
from cs_systems.model.transformer import BasicTransformerLM
from cs_systems.record import Ran

STEPS = 3
SGD: Any = torch.optim.SGD
OPTIONS = {"lr": 0.1, "momentum": 0.9}


class StrategyError(Workload):
    """Workload that trains once in each process on the whole batch, and once on all ranks."""

    def __init__(self, cell: Cell, device: Device) -> None:
        if cell.config.precision is not Precision.FP32:
            raise Unavailable("strategy_error compares fp32 training; use precision fp32")
        self.config, self.device, self.cell = cell.config, device, cell
        self.rank, self.ranks = process_group.rank(), process_group.size()
        own = settings(cell.config, "workload_args")
        made = plugins.get("workloads", own.pop("model")) if "model" in own else None
        self.own_model, self.own_arguments = (made, own) if is_language_model(made, own) else (None, {})
        self.part, self.parts = cell.strategy.part_of_batch(self.rank, self.ranks)
        self.alone: dict[str, Tensor] = {}
        self.losses: dict[str, float] = {}
        self.rows: list[StrategyErrorRow] = []

    def prepare(self) -> None:
        self.rows = []

    def step(self) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "one process", self._train_alone
        yield "ranks", self._train_on_ranks

    def _train_alone(self) -> None:
        model = self._model(self.config.seed)
        optimizer = SGD(model.parameters(), **OPTIONS)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = self._loss(model, self._batch(step))
            loss.backward()
            optimizer.step()
        self.alone, self.losses["one process"] = _parameters(model), float(loss.detach())

    def _train_on_ranks(self) -> None:
        strategy = self.cell.strategy
        start = _parameters(self._model(self.config.seed))
        begins_equal = self._begins_equal(start)
        wrapped = strategy.wrap(self._model(self.config.seed))
        optimizer = strategy.make_optimizer(wrapped.parameters(), SGD, **OPTIONS)
        kept = 0
        for step in range(STEPS):
            optimizer.zero_grad()
            kept += any(p.grad is not None and bool(p.grad.any()) for p in wrapped.parameters())
            strategy.before_forward(wrapped)
            loss = self._loss(wrapped, self._batch(step).chunk(self.parts)[self.part])
            loss.backward()
            strategy.finish_gradients(wrapped)
            optimizer.step()
        whole = _matched(strategy.whole_parameters(wrapped), start)
        mean_loss = self._mean(float(loss.detach()))
        expected = self.losses["one process"]
        self.rows = [
            {
                "strategy": name(self.config),
                "ranks": self.ranks,
                "steps": STEPS,
                "error": None if whole is None else _distance(whole, self.alone) / _distance(self.alone, start),
                "between_ranks": None if whole is None else self._between_ranks(whole) / _distance(self.alone, start),
                "loss_error": abs(mean_loss - expected) / expected,
                "begins_equal": begins_equal,
                "note": WITHOUT_PARAMETERS if whole is None else self._note(wrapped, has_kept_gradients=kept > 0),
            }
        ]

    def _note(self, wrapped: nn.Module, *, has_kept_gradients: bool) -> str:
        if not plugins.is_foreign(self.config.strategy):
            return ""
        return LEFT_WHOLE if self._leaves_whole(wrapped) else KEPT_GRADIENTS if has_kept_gradients else ""

    def _leaves_whole(self, wrapped: nn.Module) -> bool:
        """Return whether the user's own code, which should shard parameters, has left this model's parameters whole."""
        divides = "parameters" in self.cell.strategy.splits
        return divides and _elements(wrapped) == _elements(self._model(self.config.seed))

    def _begins_equal(self, start: Mapping[str, Tensor]) -> bool | None:
        """Return whether the strategy gives all ranks the parameters of rank 0; None if they cannot be read."""
        # a new one, because a user's strategy may keep the model that it wrapped
        strategy = replace(self.cell).strategy
        wrapped = strategy.wrap(self._model(self.config.seed + self.rank))
        found = _matched(strategy.whole_parameters(wrapped), start)
        off = torch.tensor(float("nan") if found is None else _distance(found, start))
        if self.ranks > 1:
            dist.all_reduce(off, dist.ReduceOp.MAX)
        return None if found is None else bool(off == 0)

    def _model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        with self.device.torch:
            if self.own_model is not None:
                return of_sizes(self.own_model, self.config.model, self.own_arguments)
            return BasicTransformerLM(self.config.model, plugins.get("attention", "naive"))

    def _batch(self, step: int) -> Tensor:
        """Return the whole batch of a step, (rows, tokens + 1), the same on all ranks."""
        random = torch.Generator().manual_seed(self.config.seed + step)
        shape = (self.config.batch_size * self.parts, self.config.tokens_per_sequence + 1)
        return torch.randint(self.config.model.vocab_size, shape, generator=random).to(self.device.torch)

    def _loss(self, model: nn.Module, rows: Tensor) -> Tensor:
        return cross_entropy(logits_of(model(rows[:, :-1])), rows[:, 1:])

    def _mean(self, value: float) -> float:
        """Return the mean over the ranks."""
        total = torch.tensor(value, dtype=torch.float64, device=self.device.torch)
        if self.ranks > 1:
            dist.all_reduce(total)
        return float(total) / self.ranks

    def _between_ranks(self, whole: Mapping[str, Tensor]) -> float:
        """Return the largest distance of a rank from rank 0."""
        if self.ranks == 1:
            return 0.0
        mine = torch.cat([x.flatten() for x in whole.values()])
        first = mine.clone()
        dist.broadcast(first, 0)
        off = (mine - first).norm()
        dist.all_reduce(off, dist.ReduceOp.MAX)
        return float(off)

    def tables(self) -> Tables:
        return STRATEGY_ERROR.filled(self.rows)

    def describe(self) -> Ran:
        return {"tokens": None, "precision": self.config.precision.value}


WITHOUT_PARAMETERS = "whole parameters not found: add gather_full_params() that returns them by name"
LEFT_WHOLE = "divides no parameter: it looks for layers of other classes; name their model (--workload)"
KEPT_GRADIENTS = "zero_grad() leaves gradients: clear those of all parameters, not only of a rank's own"


def _elements(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return _state(dict(model.named_parameters()))


def _state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.detach().double().clone() for key, value in state.items() if value.is_floating_point()}


def _matched(found: Mapping[str, Tensor], names: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return the tensors under the names of the unwrapped model; None if one is missing or not whole."""
    known = {key.removeprefix("module."): value for key, value in found.items()}
    if any(key not in known or known[key].shape != value.shape for key, value in names.items()):
        return None
    return _state({key: known[key] for key in names})


def _distance(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    return float(torch.stack([(some[key] - value).norm() for key, value in others.items()]).norm())


WORKLOAD = StrategyError
