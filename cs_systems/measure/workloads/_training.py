"""Base of the training steps of a language model and of any other module: phases, loss scaler, optimizer."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cs_systems.analysis.comparison.own_code import OWN_CODE, OwnCodeRow
from cs_systems.config import CAPTURED_COMPILE_MODES, ConfigError, Mode, Phase, Precision
from cs_systems.core.optimizers import DEFAULT, USUAL
from cs_systems.core.tables import Tables
from cs_systems.core.validation import shown
from cs_systems.formulas.communication import NARROW_BYTES, SENT, Payload, SentRow
from cs_systems.machine.device import Device
from cs_systems.measure.workloads import Cell, Unavailable, Workload
from cs_systems.measure.workloads._graph import StepGraph
from cs_systems.measure.workloads._own_code import own_code
from cs_systems.model.parallel._collectives import Call, counting
from cs_systems.model.training.clipping import clip_function
from cs_systems.model.training.optimizers import optimizer_class


class Training(Workload):
    """Training step of the phases that `config.mode` selects; the subclass defines forward and loss.

    Attributes:
        model: the model without a wrapper.
        wrapped: the model as `config.strategy` wraps it; a step calls this one.
        trained_bytes: Ψ, the bytes of the trained parameters before the strategy divides them.
        trained_elements: their number of elements.
        calls: the collectives that the package started in the last step.
        optimizer: the optimizer; it and `optimizer_name` are None in modes without an update.
        loss: the loss of the last step, a scalar.
        clip_norm: the largest norm of all gradients together, None for any.
        clip_gradients: the function (parameters, max_norm) that clips them.
    """

    clip_norm: float | None = None

    def __init__(self, cell: Cell, device: Device, model: nn.Module) -> None:
        self.config, self.device, self.model = cell.config, device, model
        self.calls: list[Call] = []
        self.clip_gradients = clip_function(cell.config.clip_function)
        trained = [p for p in model.parameters() if p.requires_grad]
        self.trained_bytes, self.trained_elements = sum(p.nbytes for p in trained), sum(p.numel() for p in trained)
        self.strategy = cell.strategy
        try:
            self.wrapped = self.strategy.wrap(model)
        except ConfigError as error:  # the strategy cannot take this model
            raise Unavailable(str(error)) from error
        self.scaler = self.strategy.grad_scaler(device.torch.type, enabled=self.config.precision is Precision.FP16)
        self.optimizer: torch.optim.Optimizer | None = None
        self.optimizer_name: str | None = None
        if self.config.mode is Mode.TRAIN_STEP:
            self._make_optimizer()
            self._check_optimizer()
        self.loss: Tensor | None = None
        self.graph = None if self.config.graph == "none" else StepGraph(self._phases)

    def _make_optimizer(self) -> None:
        self.optimizer_name = USUAL if self.config.optimizer == DEFAULT else self.config.optimizer
        cls, options = optimizer_class(self.optimizer_name)
        if self.config.graph != "none" and options.get("fused"):
            options["capturable"] = True
        try:
            self.optimizer = self.strategy.make_optimizer(self.wrapped.parameters(), cls, **options)
        except ConfigError as error:  # the optimizer cannot take these parameters
            raise Unavailable(str(error)) from error

    def _check_optimizer(self) -> None:
        """Raise ConfigError unless the optimizer's step needs no argument."""
        if not callable(getattr(self.optimizer, "step", None)):
            raise ConfigError(
                f"optimizer returned {shown(self.optimizer)}, which is not an optimizer; give a "
                "class, or a function of the parameters that returns one"
            )
        if _needs_closure(self.optimizer):
            raise Unavailable(
                f"optimizer {self.optimizer_name} requires an argument of step(), such as a closure, and a measured "
                "step gives none; measure your own training loop with cs_systems.Recorder or cs-systems run"
            )

    def prepare(self) -> None:
        if self.graph is not None and self.graph.captured:
            return  # the graph writes to the loss and gradients with which it was captured
        self.loss = None
        self.wrapped.zero_grad(set_to_none=True)
        if self.config.compile in CAPTURED_COMPILE_MODES:
            torch.compiler.cudagraph_mark_step_begin()

    @property
    def _keeps_graph(self) -> bool:
        return self.config.keep_graph or self.config.mode is not Mode.FORWARD

    def step(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        with counting() as self.calls:
            if self.graph is None:
                yield from self._phases()
            else:
                yield Phase.GRAPH, self.graph

    def _phases(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        yield Phase.FORWARD, self._forward
        if self.config.mode is not Mode.FORWARD:
            yield Phase.LOSS, self._compute_loss
            yield Phase.BACKWARD, self._backward
            if self.strategy.splits:
                yield Phase.SYNCHRONIZE, self._synchronize
        yield from self._updates()

    def _updates(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yield the phases that change the parameters."""
        if self.config.mode is Mode.TRAIN_STEP:
            if self.clip_norm is not None:
                yield Phase.CLIP, self._clip
            yield Phase.OPTIMIZER, self._update

    def tables(self) -> Tables:
        """Return the table `sent` for a step on ranks, and `own_code` for the user's own code."""
        rows = self._own_code()
        own = OWN_CODE.filled(rows) if rows else {}
        if not self.config.is_distributed:
            return own
        counted = self.strategy.counted
        row: SentRow = {
            "collectives": len(self.calls) if counted else None,
            "sent_bytes": sum(call.sent_bytes for call in self.calls) if counted else None,
            "formula_sent_bytes": self._formula_sent_bytes(),
        }
        return {**own, **SENT.filled([row])}

    def _own_code(self) -> list[OwnCodeRow]:
        return own_code(self.config, self.optimizer_name, self.device.torch)

    def _formula_sent_bytes(self) -> float | None:
        """Return the bytes that a rank sends in a whole training step, by formula.

        None for a part of a step, and if activation checkpoints repeat the collectives of tensor parallelism.
        """
        formula, config = self.strategy.sent_bytes, self.config
        again = config.checkpoint != "none" and "features" in self.strategy.splits
        if formula is None or config.mode is not Mode.TRAIN_STEP or again:
            return None
        return formula(self.payload(), config.world_size)

    def payload(self) -> Payload:
        """Return the sizes that the strategies' formulas need.

        Tensor parallelism is not included, because a module alone does not show how it is divided.
        """
        narrowed_bytes = NARROW_BYTES * self.trained_elements
        share = narrowed_bytes / self.trained_bytes if self.trained_bytes else 1.0
        return Payload(self.trained_bytes, narrow_share=share)

    @abstractmethod
    def _forward(self) -> None: ...

    @abstractmethod
    def _compute_loss(self) -> None: ...

    def _backward(self) -> None:
        assert self.loss is not None
        self.scaler.scale(self.loss).backward()

    def _synchronize(self) -> None:
        self.strategy.finish_gradients(self.wrapped)

    def _clip(self) -> None:
        assert self.optimizer is not None
        assert self.clip_norm is not None
        self.scaler.unscale_(self.optimizer)
        self.clip_gradients(self.wrapped.parameters(), self.clip_norm)

    def _update(self) -> None:
        assert self.optimizer is not None
        self.scaler.step(self.optimizer)
        self.scaler.update()


def _needs_closure(optimizer: Any) -> bool:
    # step of the class, because a scheduler replaces the instance's method
    step = getattr(type(optimizer), "step", None)
    try:
        if step is not None:
            inspect.signature(step).bind(optimizer)
    except TypeError:
        return True
    return False


def clip_unavailable(name: str, cell: Cell) -> str | None:
    """Return why gradients cannot be clipped in a cell (no update, or a rank holds only a share); None if they can."""
    if cell.config.clip is not None and (mode := cell.config.mode) is not Mode.TRAIN_STEP:
        return f"{name} requires mode train-step, got {mode.value}; leave out {name}"
    if not cell.strategy.splits - {"batch"}:
        return None
    why = f"is not supported by strategy {cell.config.strategy}, which divides the model or the optimizer's state"
    return f"{name} {why}; leave out {name}"


def compiled(function: Callable[..., Any], mode: str, *, keeps_buffers: bool = False) -> Callable[..., Any]:
    """Return a model or function compiled in this mode of `config.COMPILE_MODES`, or itself for "none".

    keeps_buffers: whether the memory of an operator's input is kept until the operator releases it, instead of until
    its last use in the function.
    """
    return function if mode == "none" else torch.compile(function, **_compile_options(mode, keeps_buffers))


def compile_blocks(
    blocks: Iterable[nn.Module], mode: str, *, with_hooks: bool = True, keeps_buffers: bool = False
) -> None:
    """Compile each block in place; blocks of one class and shape share one compilation.

    Args:
        blocks: the blocks to compile.
        mode: as in `compiled`.
        with_hooks: whether the blocks' hooks are compiled too. Hooks that wait for other ranks must not be compiled.
        keeps_buffers: as in `compiled`.
    """
    for block in blocks:
        if with_hooks:
            block.compile(**_compile_options(mode, keeps_buffers))
        else:
            block.forward = compiled(block.forward, mode, keeps_buffers=keeps_buffers)


def _compile_options(mode: str, keeps_buffers: bool) -> dict[str, Any]:
    if mode == "aot_eager":
        return {"backend": "aot_eager"}
    if not keeps_buffers:
        return {"mode": mode}
    from torch._inductor import list_mode_options

    return {"options": {**list_mode_options(mode), "allow_buffer_reuse": False, "inplace_buffers": False}}
