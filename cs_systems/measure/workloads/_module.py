"""Training step of any model, in any precision: input, forward, loss, backward, clip, optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cs_systems.config import FIELDS, ConfigError, Mode, Phase, Precision, RunConfig
from cs_systems.core.fields import Subject
from cs_systems.core.validation import shown
from cs_systems.machine.device import Device
from cs_systems.measure.workloads import Cell, Unavailable
from cs_systems.measure.workloads._batches import (
    NO_BATCH,
    StepSize,
    call_with,
    loss_in,
    placed,
    samples_in,
    size_of,
    tokens_in,
)
from cs_systems.measure.workloads._calls import check_precision
from cs_systems.measure.workloads._setup import TrainingSetup, check_scheduler
from cs_systems.measure.workloads._training import Training, clip_unavailable, compiled
from cs_systems.model.parallel._collectives import counting
from cs_systems.model.training import fp8
from cs_systems.model.training.checkpointing import checkpoint_blocks, without_effect
from cs_systems.record import Ran

# fields of a RunConfig that apply to any module, by their names in tables
APPLIED = tuple(name for name, each in FIELDS.items() if Subject.MODEL in each.subjects and not each.always)


class ModuleStep(Training):
    """Training step of any model. The options of APPLIED and the device apply to it.

    In fp8, the linear layers are replaced if their sizes allow it.
    """

    def __init__(self, cell: Cell, device: Device, setup: TrainingSetup) -> None:
        config = cell.config
        check_precision(config, device)
        self.setup, model = setup, setup.model
        self.clip_norm = setup.clip_norm if config.clip is None else config.clip
        if config.precision is Precision.FP8 and not fp8.use_fp8(model):
            if type(model) in fp8.REPLACED:
                raise Unavailable(
                    "fp8 replaces the linear layers inside the module, and the module itself is one; wrap it in "
                    "nn.Sequential, or use bf16"
                )
            raise Unavailable(
                f"fp8 replaces each plain nn.Linear (no subclass) whose sizes are multiples of {fp8.MULTIPLE}, and the "
                "module has none; use bf16, or give the module such layers"
            )
        self._check_parts(cell)
        self._signature = inspect.signature(model.forward)
        self._loss_takes_batch = setup.loss is not None and _takes_batch(setup.loss)
        self._dtype = torch.bfloat16 if config.precision is Precision.BF16_PURE else None
        if self._dtype:
            model.bfloat16()
        if reason := without_effect(config) or checkpoint_blocks(model, config.checkpoint):
            raise Unavailable(reason)
        self.parameters = sum(p.numel() for p in model.parameters())  # a strategy may keep only shards of them
        self.computes_in = _precision(config, model)
        # forward alone keeps the mode: a model in eval() is then measured in inference
        if config.mode is not Mode.FORWARD:
            model.train()
        super().__init__(cell, device, model.to(device.torch))
        self.run_model = compiled(self.wrapped, config.compile)
        self.scheduler: Any = self._make_scheduler()
        self._iterator: Iterator[Any] | None = None
        self.batch: Any = None if setup.batch is None else placed(setup.batch, device.torch, self._dtype)
        self.output: Any = None
        self._sizes: list[StepSize] = []  # sizes of the steps since `take_sizes`, if batches differ

    def _check_parts(self, cell: Cell) -> None:
        """Raise Unavailable for parts that the strategy cannot honour."""
        splits, strategy = cell.strategy.splits, cell.config.strategy
        shared = splits - {"batch"}
        why = f"is not supported by strategy {strategy}, which divides the model or the optimizer's state"
        if shared and isinstance(self.setup.optimizer, torch.optim.Optimizer):
            name = type(self.setup.optimizer).__name__
            remedy = f"give a function such as lambda parameters: {name}(parameters, lr=…)"
            raise Unavailable(f"an optimizer object ({name}) {why}; {remedy}")
        name = "clip_norm" if cell.config.clip is None else "clip"
        if self.clip_norm is not None and (reason := clip_unavailable(name, cell)):
            raise Unavailable(reason)
        if self.setup.accumulate > 1 and splits:
            raise Unavailable(
                f"accumulate {self.setup.accumulate} is not supported by strategy {strategy}; "
                "use accumulate 1, or strategy single"
            )

    def _make_optimizer(self) -> None:
        """Make the optimizer: the configuration's if it names one, else the setup's, else the default."""
        given = self.setup.optimizer
        if next(self.model.parameters(), None) is None:
            raise ConfigError("the model has no parameter that an optimizer could change; use mode forward")
        if given is None or self.config.optimizer != "default":
            super()._make_optimizer()
        elif isinstance(given, torch.optim.Optimizer):
            mine = {id(p) for p in self.model.parameters()}
            if not all(id(p) in mine for group in given.param_groups for p in group["params"]):
                raise ConfigError(
                    "the optimizer holds parameters that are not the model's; make it from the same model"
                )
            self.optimizer, self.optimizer_name = given, type(given).__name__
        else:
            self.optimizer = self.strategy.make_optimizer(self.wrapped.parameters(), given)
            self.optimizer_name = type(self.optimizer).__name__

    def _make_scheduler(self) -> Any:
        given = self.setup.scheduler
        if given is None or self.optimizer is None:
            return None
        is_made = callable(getattr(given, "step", None)) and not isinstance(given, type)
        scheduler = given if is_made else given(self.optimizer)
        if not callable(getattr(scheduler, "step", None)):
            raise ConfigError(
                f"scheduler returned {shown(scheduler)}, which is not a scheduler; give a class, "
                "or a function of the optimizer that returns one"
            )
        check_scheduler(scheduler, self.optimizer, self.config.optimizer if is_made else None)
        return scheduler

    def prepare(self) -> None:
        self.output = None
        super().prepare()

    def step(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        if self.setup.batches is not None:
            self._sizes.append(NO_BATCH)
        with counting() as self.calls:
            for _ in range(self.setup.accumulate):
                if self.setup.batches is not None:
                    yield Phase.INPUT, self._fetch
                yield Phase.FORWARD, self._forward
                if self.config.mode is not Mode.FORWARD:
                    yield Phase.LOSS, self._compute_loss
                    yield Phase.BACKWARD, self._backward
            if self.config.mode is not Mode.FORWARD and self.strategy.splits:
                yield Phase.SYNCHRONIZE, self._synchronize
            yield from self._updates()

    def _fetch(self) -> None:
        batches = self.setup.batches
        assert batches is not None
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(batches)
            try:
                self.batch = placed(next(self._iterator), self.device.torch, self._dtype)
            except StopIteration:
                self._iterator = None
            else:
                self._sizes[-1] += size_of(self.batch, self.model)
                return
        raise ConfigError(
            "there is no batch: the list or DataLoader is empty, or a generator has ended; give a list or DataLoader "
            "with at least one batch"
        )

    def _forward(self) -> None:
        with torch.set_grad_enabled(self._keeps_graph), self.device.autocast(self.config.precision):
            self.strategy.before_forward(self.wrapped)
            if self.setup.forward is not None:
                self.output = self.setup.forward(self.run_model, self.batch)  # type: ignore[arg-type]
            else:
                self.output = call_with(self.model, self._signature, self.run_model, self.batch)

    def _compute_loss(self) -> None:
        with self.device.autocast(self.config.precision):
            self.loss = self._loss() / self.setup.accumulate
        if not self.loss.requires_grad:
            raise ConfigError(
                "the loss does not depend on a trainable parameter; set requires_grad of one to True, do not detach "
                "the loss, or use mode forward"
            )

    def _loss(self) -> Tensor:
        if self.setup.loss is not None:
            arguments = (self.output, self.batch) if self._loss_takes_batch else (self.output,)
            if self._loss_takes_batch and _is_torchs(self.setup.loss) and not isinstance(self.batch, Tensor):
                name = getattr(self.setup.loss, "__name__", type(self.setup.loss).__name__)
                target = "batch['labels']" if isinstance(self.batch, Mapping) else "batch[1]"
                raise ConfigError(
                    f"{name} takes (outputs, target), but a loss is called with (outputs, batch); write "
                    f"loss=lambda outputs, batch: criterion(outputs, {target}), where criterion is your {name}"
                )
            loss = self.setup.loss(*arguments)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                raise ConfigError(f"the loss function returned {found}; return a scalar tensor")
            return loss
        if (loss := loss_in(self.output)) is not None:
            return loss
        if isinstance(self.output, tuple | list):
            raise ConfigError(
                f"the model returned {shown(self.output)}, which is not searched for a loss; give a loss function "
                "such as loss=lambda outputs: outputs[1] (in a factory also as (model, batch, loss))"
            )
        if not isinstance(self.output, Tensor):
            raise ConfigError(
                f"the model returned {shown(self.output)} without a tensor loss; put the labels into the batch, or "
                "give a loss function as loss= (in a factory also as (model, batch, loss))"
            )
        return self.output.square().mean()

    def _update(self) -> None:
        super()._update()
        if self.scheduler is not None:
            self.scheduler.step()

    def take_sizes(self) -> list[StepSize]:
        """Return the sizes of the steps since the last call; none if all steps use one batch."""
        taken, self._sizes = self._sizes, []
        return taken

    def _formula_sent_bytes(self) -> float | None:
        """Return the formula's bytes; None if they depend on which parameters stay gathered after forward."""
        return None if "parameters" in self.strategy.splits else super()._formula_sent_bytes()

    def describe(self) -> Ran:
        tokens, samples = tokens_in(self.batch), samples_in(self.batch, self.model)
        loss = None if self.loss is None else float(self.loss.detach()) * self.setup.accumulate
        return {
            "tokens": None if tokens is None else tokens * self.setup.accumulate,
            "samples": None if samples is None else samples * self.setup.accumulate,
            "parameters": self.parameters,
            "precision": (
                self.config.precision.value if self.computes_in == self.config.computes_in else self.computes_in
            ),
            "mode": self.config.mode.value,
            "optimizer": self.optimizer_name,
            "loss": loss,
        }


def _precision(config: RunConfig, model: nn.Module) -> str:
    """Return the precision of the model's products: the config's, or without autocast the dtypes of the parameters."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if config.computes_in not in (Precision.FP32, Precision.TF32) or dtypes <= {torch.float32}:
        return config.computes_in.value
    if dtypes == {torch.bfloat16}:
        return Precision.BF16_PURE.value
    return "+".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _is_torchs(loss: Any) -> bool:
    """Return whether the loss is one of torch's own, which take only the target as second argument."""
    module = type(loss).__module__ if isinstance(loss, nn.Module) else getattr(loss, "__module__", "")
    return str(module).startswith("torch.nn")


def _takes_batch(loss: Callable[..., Any]) -> bool:
    """Return True if the function takes the outputs and the batch, False if the outputs alone."""
    try:
        inspect.signature(loss).bind(None, None)
    except (TypeError, ValueError):
        return False
    needed = [
        p
        for p in inspect.signature(loss).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return len(needed) != 1  # a second argument with a default is an option of the loss
