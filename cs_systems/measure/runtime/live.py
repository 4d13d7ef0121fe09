"""Measurement of objects in this process: a model with its batch, a step function, a Workload.

The cell is named `live NAME`. It runs in this process, because such objects cannot be sent to a worker.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cs_systems.config import ConfigError, RunConfig
from cs_systems.core import caveats, plugins
from cs_systems.core.tables import first_row
from cs_systems.core.validation import short_name, shown
from cs_systems.measure.runtime import allowance
from cs_systems.measure.runtime.channel import CellRecord, Message
from cs_systems.measure.runtime.execute import run_cells
from cs_systems.measure.runtime.journal import Journal
from cs_systems.measure.runtime.object_state import ObjectState, Stage
from cs_systems.measure.runtime.process_state import ProcessState
from cs_systems.measure.runtime.profiled import prefix, with_profile
from cs_systems.measure.workloads import Cell, _foreign
from cs_systems.measure.workloads._setup import TrainingSetup, instance_or
from cs_systems.record import RunRecord


def setup_of(model: Any, inputs: Any, parts: Mapping[str, Any]) -> TrainingSetup:
    """Return the training step of a live model. Raises ConfigError for unusable parts."""
    if not isinstance(model, nn.Module):
        remedy = instance_or("give an nn.Module, or a ModelConfig such as preset('small')", model)
        raise ConfigError(f"model is {shown(model)}; {remedy}")
    if inputs is None:
        if parts.get("batches") is None:
            raise ConfigError("model= requires inputs=; give one batch, or a DataLoader of batches")
        return TrainingSetup(model, **parts)
    if parts.get("batches") is not None:
        raise ConfigError("inputs= and batches= exclude each other; give one of them")
    setup = TrainingSetup.of((model, inputs))
    assert setup is not None
    return replace(setup, **parts)


def run_live(
    made: Any,
    config: RunConfig,
    plan: Mapping[str, Any],
    *,
    name: str | None,
    out: str | os.PathLike[str] | None,
    experiments_s: float = 0.0,
) -> RunRecord:
    """Measure an object in this process; afterwards restore the state of the object and of the process.

    Args:
        made: a TrainingSetup or another form that a factory may return, a factory, a step, or a Workload.
        config: configuration of the cell; the object replaces its workload.
        plan: the cell's field `checkpoint`, if given.
        name: name of the object in tables; by default the name of its class or function.
        out: folder to which the record is appended.
        experiments_s: the time for experiments after the last step.
    """
    setup = None if callable(made) else TrainingSetup.of(made)
    subject = made if setup is None else setup.model
    named = plugins.LIVE + short_name("name", _name_of(subject) if name is None else name)
    if setup is None and (reason := _foreign.problem(named, made)):
        raise ConfigError(reason.removeprefix(plugins.LIVE))
    if experiments_s and setup is None:
        raise ConfigError(
            "experiments_s requires an object that can be put back, and the workload is a function or a Workload; give "
            "model= and inputs=, or a TrainingSetup, or leave out experiments_s"
        )
    config = replace(config, workload=named, device=_device(config.device, setup), **plan)
    if torch.is_inference_mode_enabled():
        raise ConfigError("run() was called in inference mode; call it outside of torch.inference_mode()")
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        raise ConfigError("run() was called under autocast; call it outside, and pass precision='bf16' or 'fp16'")
    journal = None if out is None else Journal.prepare(Path(out))
    with ExitStack() as stack:
        folder: Any = stack.enter_context(tempfile.TemporaryDirectory() if journal is None else _locked(journal))
        repeat = 0 if journal is None else journal.times_done(config)
        if journal is not None and setup is not None:
            _check_same_model(journal, config, setup.model)
        stack.enter_context(plugins.holding(named, made if setup is None else setup))
        files = None if not config.is_profiled else prefix(Path(folder), config, repeat)
        if setup is not None:
            stack.enter_context(torch.enable_grad())
        allowance.check(experiments_s, [config])
        record = measured_here(config, repeat=repeat, out=files, setup=setup, experiments_s=experiments_s).stamped()
        if files is not None:
            record = with_profile(record, Cell(config).profiler, files, keep=journal is not None)
        return record if journal is None else journal.append(record)


def measured_here(
    config: RunConfig,
    *,
    repeat: int = 0,
    out: Path | None = None,
    setup: TrainingSetup | None = None,
    experiments_s: float = 0.0,
) -> RunRecord:
    """Measure one cell in this process, and restore the state of the process and of the setup's objects."""
    messages: list[Message] = []
    lost: list[str] = []
    with restored(ProcessState(), ObjectState(setup), lost):
        run_cells([config], repeat=repeat, out=out, emit=messages.append, experiments_s=experiments_s)
    record = next(RunRecord.from_dict(message.record) for message in messages if isinstance(message, CellRecord))
    return replace(record, warnings=(*record.warnings, caveats.not_restored(lost))) if lost else record


@contextmanager
def restored(process: ProcessState, objects: ObjectState, lost: list[str]) -> Iterator[None]:
    """Restore both states at the end, even after an error; append to `lost` the names of what cannot be restored.

    Weights are restored first, and other state of a user's model last.
    """
    try:
        yield
    finally:
        with _uninterrupted():
            found = objects.restore(stage for stage in Stage if stage is not Stage.OTHERS)
            found += [*process.restore_random(), *objects.restore([Stage.OTHERS]), *process.restore()]
        lost += dict.fromkeys(found)
        if lost:
            caveat = caveats.not_restored(lost)
            warnings.warn(f"{caveat.message}; {caveat.remedy}", stacklevel=2)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block, because half-restored weights would be worse than a delay."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield
        return
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pressed:
            signal.raise_signal(signal.SIGINT)


def _check_same_model(journal: Journal, config: RunConfig, model: nn.Module) -> None:
    """Raise ConfigError if the folder has records of another model under this name, which would count as repeats."""
    parameters = sum(p.numel() for p in model.parameters())
    name = config.workload.removeprefix(plugins.LIVE)
    for record in journal.read()[0]:
        other = first_row(record.results, "ran").get("parameters")
        if record.run_config.key() == config.key() and other is not None and other != parameters:
            raise ConfigError(
                f"{journal.folder} has a record of {name} with {other:,} parameters, and this {name} has "
                f"{parameters:,}; tell them apart with name='…', or give another folder"
            )


@contextmanager
def _locked(journal: Journal) -> Iterator[Path]:
    with journal.locked():
        yield journal.folder


def _name_of(subject: Any) -> str:
    function = getattr(subject, "func", subject)  # functools.partial keeps the function in this attribute
    return str(getattr(function, "__name__", type(subject).__name__))


def _device(name: str, setup: TrainingSetup | None) -> str:
    """Return the device of the cell; for "auto", the device of the model."""
    if name != "auto" or setup is None:
        return name
    first = next(setup.model.parameters(), None)
    return name if first is None or first.device.type not in ("cpu", "cuda") else str(first.device)
