"""Experiments after the last step of a recorded loop, by a function of the user that runs one step again."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from cs_systems.core.caveats import not_restored
from cs_systems.core.experiments import EXPERIMENTS, ExperimentRow
from cs_systems.core.tables import first_row
from cs_systems.core.units import human
from cs_systems.machine.device import Device
from cs_systems.measure.runtime.experimenting import Step, concerning, run_all
from cs_systems.measure.runtime.object_state import ObjectState
from cs_systems.measure.runtime.process_state import ProcessState
from cs_systems.record import RunRecord

NO_STEP = "the loop gives no step that can be called again; give Recorder(experiments=FUNCTION), which runs one"
RANKS = "the step of one rank cannot run alone"
COPIED_PER_S = 1e9  # copy rate, in bytes/s, for keeping model and optimizer on the host and restoring them
MOST_FUNCTIONS = 1000  # most functions called by name that are searched for objects


def with_experiments(
    record: RunRecord,
    function: Callable[[], Any] | None,
    limit_s: float,
    device: Device,
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    world_size: int,
) -> RunRecord:
    """Return the record with the experiments that its numbers call for; all objects are restored afterwards.

    Args:
        record: the record of the last stage.
        function: runs one step of the loop; None if none is given.
        limit_s: the time for all experiments in s; 0 for none.
        device: the device of the loop.
        models: the models that the loop trains.
        optimizers: their optimizers.
        world_size: the number of ranks.
    """
    clean = record.clean
    if not limit_s or clean is None:
        return record
    compiles = any(sample.compiles for sample in clean.samples) or any(map(_is_compiled, models))
    reason = RANKS if world_size > 1 else NO_STEP
    phases = None if function is None or world_size > 1 else lambda: [("step", function)]
    precision = first_row(record.results, "ran").get("precision")
    step = Step(device, clean, phases, reason=reason, is_eager=not compiles, precision=precision, waits=False)
    if not concerning(step):
        return record
    objects = {} if function is None or phases is None else _objects(function, models, optimizers)
    copy_s = 2 * _tensor_bytes(objects.values()) / COPIED_PER_S
    if taken := [name for name, each in objects.items() if _is_iterator(each)]:
        reason = f"the step takes from {taken[0]}, an iterator that cannot be put back; keep one batch, and use it"
        step = replace(step, phases=None, reason=reason)
    elif copy_s > limit_s:
        reason = f"keeping and restoring the model and the optimizer takes about {human(copy_s, 's')}"
        step = replace(step, phases=None, reason=reason)
    rows, lost = _made(step, limit_s - copy_s, objects)
    caveats = (*record.warnings, not_restored(lost)) if lost else record.warnings
    return replace(record, results={**record.results, **EXPERIMENTS.filled(rows)}, warnings=caveats)


def _made(step: Step, limit_s: float, objects: Mapping[str, Any]) -> tuple[list[ExperimentRow], list[str]]:
    """Return the rows of the experiments, and the names of what could not be restored after them."""
    if step.phases is None:
        return run_all(step, limit_s).rows, []
    from cs_systems.measure.runtime.live import restored

    try:
        state = ObjectState(**objects)
    except Exception as error:  # such as parameters without values
        return run_all(replace(step, phases=None, reason=f"its objects cannot be kept: {error}"), limit_s).rows, []
    lost: list[str] = []
    with restored(ProcessState(), state, lost):
        rows = run_all(step, limit_s).rows
    return rows, lost


def _objects(
    function: Callable[[], Any], models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> dict[str, Any]:
    """Return the objects that a step may change, by name."""
    named: dict[str, Any] = {f"model {number}": model for number, model in enumerate(models)}
    named |= {f"optimizer {number}": optimizer for number, optimizer in enumerate(optimizers)}
    return named | dict(_reached(function))


def _reached(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield, without duplicates, the objects that a function holds or names, and those that functions in them name."""
    waiting, seen = [("the step", function)], set[int]()
    while waiting and len(seen) < MOST_FUNCTIONS:
        name, value = waiting.pop()
        if id(value) in seen or isinstance(value, (ModuleType, type)):
            continue
        seen.add(id(value))
        if isinstance(value, partial):
            waiting += [("an argument of the step", each) for each in (value.func, *value.args)]
            waiting += value.keywords.items()
        elif isinstance(value, MethodType):
            waiting += [("the object of the step", value.__self__), (name, value.__func__)]
        elif isinstance(value, FunctionType):
            if value.__module__.partition(".")[0] not in ("torch", "cs_systems"):
                found = inspect.getclosurevars(value)
                waiting += [*found.nonlocals.items(), *found.globals.items()]
                waiting += [("a default of the step", each) for each in value.__defaults__ or ()]
        else:
            yield name, value


def _is_iterator(value: Any) -> bool:
    return hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)


def _is_compiled(model: nn.Module) -> bool:
    return hasattr(model, "_orig_mod") or model._compiled_call_impl is not None


def _tensor_bytes(objects: Any) -> int:
    """Return the approximate bytes of the objects' tensors: parameters, buffers, gradients, optimizer states."""
    tensors: dict[int, Tensor] = {}
    for each in objects:
        found: list[Any] = [each]
        if isinstance(each, nn.Module):
            parameters = [*each.parameters()]
            found = [*parameters, *each.buffers(), *(p.grad for p in parameters)]
        elif isinstance(each, Optimizer):
            found = [value for state in each.state.values() for value in state.values()]
        tensors |= {id(tensor): tensor for tensor in found if isinstance(tensor, Tensor)}
    return sum(tensor.nbytes for tensor in tensors.values() if not tensor.is_meta)
