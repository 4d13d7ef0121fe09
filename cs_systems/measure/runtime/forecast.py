"""Prediction of a training step's memory: the step of a user's own model runs on fake tensors, which have no memory.

The model is built on fake tensors too, or on real CPU tensors if its code reads values while it is built.
"""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from cs_systems.config import ConfigError, Phase, Precision, RunConfig
from cs_systems.core.fields import Subject
from cs_systems.formulas.memory.tables import ForecastRow
from cs_systems.instrument import recurrent, structure
from cs_systems.instrument.known_values import RANDOM_CAVEAT, ValuedFakeMode, masks_are_read
from cs_systems.instrument.like_cuda import like_cuda
from cs_systems.instrument.storages import StorageTracker
from cs_systems.machine.device import Device
from cs_systems.measure.runtime.process_state import seed_all
from cs_systems.measure.workloads import Cell, Unavailable, _foreign
from cs_systems.measure.workloads._foreign import ForeignWorkload
from cs_systems.measure.workloads._module import ModuleStep

STEPS = 2  # the first step allocates the optimizer's state
_CPU = Device(torch.device("cpu"))
_OF_DATA = (DataDependentOutputException, DynamicOutputShapeException)
# precision that only CUDA has → precision with equal tensors
_SAME_TENSORS = {Precision.TF32: Precision.FP32, Precision.FP8: Precision.BF16}


def forecast(config: RunConfig, *, fake: bool = True) -> ForecastRow:
    """Return the memory that two training steps of a user's own model need, by phase.

    The prediction is for a CPU if `config.device` is cpu, otherwise for CUDA.

    Args:
        config: A cell with a workload that is a model with its batch.
        fake: False runs on real tensors on the CPU, which takes their memory, to check the result of fake tensors.
    """
    try:
        return _forecast(config, fake)
    except (Unavailable, ConfigError) as error:
        return _unknown(str(error))
    except _OF_DATA as error:
        where = _where(error) or "the code of the step"
        return _unknown(
            f"{where} reads values of tensors ({error.func}), but the prediction runs on tensors without values; "
            "measure the memory with cs-systems memory at several batch sizes instead"
        )
    except Exception as error:  # whatever the user's code raises under fake tensors
        first, *_ = str(error).splitlines() or [""]
        where = f" in {place}" if (place := _where(error)) else ""
        return _unknown(
            f"the step fails{where} on tensors without values, on which the prediction runs "
            f"({type(error).__name__}: {first}); correct the model if it also fails when trained, or measure the "
            "memory with cs-systems memory at several batch sizes"
        )


def _where(error: BaseException) -> str | None:
    """Return the innermost module's method in the traceback, with its file and line; None outside of modules."""
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        module, code = frame.f_locals.get("self"), frame.f_code
        if isinstance(module, nn.Module) and code.co_filename != nn.modules.module.__file__:
            place = f"{type(module).__name__}.{code.co_name} ({Path(code.co_filename).name}, line {line})"
    return place


def _unknown(reason: str) -> ForecastRow:
    return {
        "reason": reason,
        "peak_bytes": None,
        "reserved_bytes": None,
        "flops": None,
        "phases": [],
        "reads": [],
        "stacks": {},
        "caveats": [],
    }


def _forecast(config: RunConfig, fake: bool) -> ForecastRow:
    _check(config)
    on_cuda, tf32 = config.device != "cpu", config.precision == Precision.TF32
    config = replace(config, device="cpu", precision=_SAME_TENSORS.get(config.precision, config.precision))
    tracker = StorageTracker("cpu", like_cuda=on_cuda, tf32=tf32)
    mode = ValuedFakeMode() if fake else nullcontext()
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        if on_cuda:
            stack.enter_context(like_cuda())
        workload, step = _built(Cell(config), mode)
        stack.enter_context(masks_are_read())
        stack.enter_context(mode)
        stack.enter_context(tracker)
        # the scale of the loss is a scalar, but checking it reads a value
        step.scaler = torch.amp.GradScaler("cpu", enabled=False)
        tracker.built(step.model, _inputs(step, mode))
        for number in range(1, STEPS + 1):
            tracker.flops = 0
            step.prepare()
            for phase, run in step.step():
                with tracker.phase(number, phase, step.optimizer):
                    if phase == Phase.INPUT:
                        _fetch(run, step, mode)
                    else:
                        run()
        workload.check()
    last = [row for row in tracker.rows if row["step"] == STEPS]
    return {
        "reason": None,
        "peak_bytes": max(sum(row["peak_components"].values()) for row in last),
        "reserved_bytes": tracker.reserved_bytes,
        "flops": tracker.flops,
        "phases": tracker.rows,
        "reads": sorted(workload.used),
        "stacks": _stacks(step.model),
        "caveats": sorted(tracker.caveats)
        + [recurrent.CAVEAT] * (on_cuda and _is_recurrent(step.model))
        + [RANDOM_CAVEAT] * (isinstance(mode, ValuedFakeMode) and mode.draws),
    }


def _fetch(run: Callable[[], Any], step: ModuleStep, mode: Any) -> None:
    """Fetch a batch as the host does, and copy it, because it may be a view of data that stays on the host."""
    with _disable_current_modes():
        run()
    step.batch = tree_map_only(Tensor, lambda tensor: _fake(tensor, mode).clone(), step.batch)


def _check(config: RunConfig) -> None:
    """Raise Unavailable for a cell if fake tensors cannot predict its memory."""
    if config.subject is not Subject.OWN:
        raise Unavailable(
            f"only your own models are predicted on fake tensors, and workload {config.workload} is not one; "
            "use cs_systems.preflight"
        )
    if config.compile != "none":
        raise Unavailable(
            "the memory of a compiled model is not predicted, because the compiler decides which "
            "tensors it keeps; leave out compile"
        )
    if config.is_distributed:
        raise Unavailable(
            "the memory of your own model is predicted for one process only; use strategy single and world_size 1"
        )


def _built(cell: Cell, mode: Any) -> tuple[ForeignWorkload, ModuleStep]:
    """Build the workload on fake tensors, or on real ones if its code needs values."""
    if not isinstance(mode, ValuedFakeMode):
        return _workload(cell)
    try:
        with mode, _without_values():
            return _workload(cell)
    except (Unavailable, ConfigError):
        raise
    except Exception:  # whatever the user's code raises under fake tensors
        workload, step = _workload(cell)
        _make_fake(step, mode)
        return workload, step


@contextmanager
def _without_values() -> Iterator[None]:
    """Allow to initialise and convert modules of fake tensors, in which torch reads values or swaps tensors."""

    def convert(parameter: Tensor, converted: Tensor) -> None:
        parameter.data = converted.data

    with (
        patch("torch.utils.swap_tensors", convert),
        patch("torch.nn.init._no_grad_trunc_normal_", lambda tensor, *_, **__: tensor),
    ):
        yield


def _workload(cell: Cell) -> tuple[ForeignWorkload, ModuleStep]:
    seed_all(cell.config.seed)
    workload = _foreign.built(cell, _CPU)
    step = workload.inner
    if not isinstance(step, ModuleStep):
        raise Unavailable(
            f"{cell.config.workload} runs the step itself, which a prediction cannot follow; name a function (config, "
            "device) that returns (model, batch, loss)"
        )
    return workload, step


def _inputs(step: ModuleStep, mode: Any) -> list[Any]:
    """Return the tensors on the device before the first step: the batch, and tensors that the loss refers to."""
    found = tree_leaves(step.batch)
    for function in (step.setup.loss, step.setup.forward):
        if inspect.isfunction(function):
            names = inspect.getclosurevars(function)
            found += tree_leaves([names.nonlocals, names.globals])
    return [_fake(value, mode) if isinstance(value, Tensor) else value for value in found]


def _fake(tensor: Tensor, mode: Any) -> Tensor:
    """Return the fake tensor of this tensor, always the same one; the tensor itself if it is fake or must stay real."""
    if isinstance(tensor, FakeTensor) or not isinstance(mode, ValuedFakeMode):
        return tensor
    return mode.from_batch(tensor)


def _make_fake(step: ModuleStep, mode: ValuedFakeMode) -> None:
    """Replace the parameters, buffers and batch of a step that was built on real tensors, also in its optimizer."""
    replaced: dict[int, Tensor] = {}
    for module in step.model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = replaced.setdefault(id(tensor), _fake(tensor, mode))  # type: ignore[assignment]
    if step.optimizer is not None:
        for group in step.optimizer.param_groups:
            group["params"] = [replaced[id(p)] for p in group["params"]]
    step.batch = tree_map_only(Tensor, lambda tensor: _fake(tensor, mode), step.batch)


def _is_recurrent(model: nn.Module) -> bool:
    return any(isinstance(module, nn.RNNBase) for module in model.modules())


def _stacks(model: nn.Module) -> dict[str, int]:
    found: dict[str, int] = {}
    for block in structure.blocks(model):
        found[block.stack] = found.get(block.stack, 0) + 1
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's own report of an operation without a fake form, because the error includes it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before
