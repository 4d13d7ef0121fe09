"""Workloads from outside the package: what a name refers to, as a workload, and which options apply to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import nn

from cs_systems.config import ConfigError, Mode, RunConfig
from cs_systems.core import plugins
from cs_systems.core.shapes import PRESETS
from cs_systems.core.validation import option, settings
from cs_systems.machine.device import Device
from cs_systems.workloads import CallableWorkload, Unavailable, Workload
from cs_systems.workloads._module import APPLIED, ModuleStep
from cs_systems.workloads._observed import observed
from cs_systems.workloads._setup import TrainingSetup

FORMS = "a Workload, a step to call, (model, batch), (model, batch, loss), or a TrainingSetup"
# Options of the command line, by field, where the field's name is not that of the option.
_OPTIONS = {
    "model.name": "size", "seq_len": "context-length", "model.context_length": "context-length",
    "strategy_args": "strategy",
}  # fmt: skip
_STEP_FIELDS = (
    "batch_size", "seq_len", "mode", "attention", "precision", "compile", "optimizer", "checkpoint", "keep_graph", "l2",
    "strategy", "strategy_args", "bucket_size_mb", "tp_degree",
)  # fmt: skip


class ForeignWorkload:
    """Workload around what a foreign name gave; it knows which fields of the configuration have an effect.

    inner: the workload that runs. applied: fields that apply to it whatever its code reads.
    """

    def __init__(self, config: RunConfig, inner: Workload, read: set[str], applied: Collection[str] = ()) -> None:
        self.config, self.inner, self._read, self._applied = config, inner, read, frozenset(applied)
        self._is_checked = False
        self.compiled_model = inner.run_model if isinstance(inner, ModuleStep) else None
        for name in ("model", "judged_phase", "hides_launches"):  # optional attributes of a workload
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))

    def prepare(self) -> None:
        self.inner.prepare()

    def step(self) -> Iterable[tuple[str, Callable[[], Any]]]:
        yield from self.inner.step()
        if not self._is_checked:  # a step may read the configuration too
            self.check()
            self._is_checked = True

    def check(self) -> None:
        """Raise Unavailable if an option differs from its default and has no effect."""
        if ignored := sorted(self._ignored()):
            options = self._as_written(ignored)
            fields = ", ".join(f"config.{name}" for name in ignored)
            raise Unavailable(
                f"{self.config.workload} does not use {options}; leave out {options}, or read {fields} in the factory"
            )

    def _as_written(self, fields: Iterable[str]) -> str:
        """Return the fields as they were given: options of the command line, or arguments of `run`."""
        if self.config.workload.startswith(plugins.LIVE):
            return ", ".join(f"{name}=" for name in fields)
        return " ".join(dict.fromkeys(option(_OPTIONS.get(n, n.rpartition(".")[2])) for n in fields))

    def _ignored(self) -> Iterable[str]:
        """Yield the fields that differ from their defaults and have no effect."""
        config, default, used = self.config, RunConfig(), self.used
        checked = {"precision"} if config.profiler == "dtypes" else set()  # held against the dtypes that ran
        if config.shape is not None and config.mode is Mode.FORWARD_BACKWARD:
            checked |= {"mode"}  # a call of attention has no training step: this is its whole
        for name in _STEP_FIELDS:
            if getattr(config, name) != getattr(default, name) and name not in used | checked:
                yield name
        for name in config.model.changed():
            if f"model.{name}" not in used:
                yield f"model.{name}"
        preset = PRESETS.get(config.model.name, default.model)
        if config.model.context_length != preset.context_length and not used & {"seq_len", "model.context_length"}:
            yield "model.context_length"
        sizes = {name for name in used if name.startswith("model.")} - {"model.vocab_size", "model.context_length"}
        if config.model.name != default.model.name and not sizes:
            yield "model.name"

    @property
    def used(self) -> frozenset[str]:
        """Fields of the configuration that have an effect, as far as the code has run."""
        return frozenset(self._read) | self._applied

    @property
    def uses(self) -> str:
        """Names of `used` as the record lists them."""
        return " ".join(sorted({name.rpartition(".")[2] for name in self.used}))

    def cost(self) -> Any:
        return self.inner.cost()

    def describe(self) -> Any:
        return self.inner.describe()

    def tables(self) -> Any:
        return getattr(self.inner, "tables", dict)()


class FactoryFound(Exception):
    """A function without arguments, taken for a step, returned the parts of one when it was first called."""

    def __init__(self, result: Any) -> None:
        super().__init__("the function is a factory")
        self.result = result


def build(made: Any, config: RunConfig, device: Device) -> ForeignWorkload:
    """Turn what a foreign name refers to into a workload.

    It is a factory `(config, device)` or `()` of one of FORMS, which also takes the arguments of `--set`; a step, which
    takes no argument; or with `inputs` a module, or a class or function that makes one.

    Raises:
        ConfigError: it is none of these.
    """
    name, own = config.workload, settings(config.workload_args)
    if config.inputs is not None:
        return _module_with_inputs(made, config, device)
    if reason := problem(name, made, own):
        raise ConfigError(reason)
    if not callable(made):
        return from_result(made, config, device, set())
    if _takes_config(made, own):
        watched, read = observed(config)
        try:
            result = made(watched, device, **own)
        except TypeError as error:
            if Device.__name__ not in str(error):
                raise
            remedy = "use that, or drop .to(device): model and batch are moved for you"
            raise ConfigError(f"{name} takes its device for a torch.device, which is device.torch; {remedy}") from error
        return from_result(result, config, device, read)
    if own:
        return from_result(made(**own), config, device, set())
    return ForeignWorkload(config, _FirstCall(made), set())


def problem(name: str, made: Any, own: Mapping[str, Any] | None = None) -> str | None:
    """Return why an object cannot be a workload, and what to do; None if it may be one.

    own: the arguments of `--set`.
    """
    own = own or {}
    if isinstance(made, nn.Module):
        is_live = name.startswith(plugins.LIVE)
        remedy = "use run(model=…, inputs=…)" if is_live else "give its batch with --inputs path.py:name"
        return f"{name} is a module without inputs; {remedy}"
    if not callable(made):
        if _is_workload(made) or isinstance(made, (TrainingSetup, Mapping, tuple)):
            return None
        return f"{name} is of type {type(made).__name__}; name a factory (config, device) or a step"
    is_factory = _takes_config(made, own)
    if not is_factory and (isinstance(made, type) or not plugins.takes(made, **own)):
        return _cannot_call(name, made, own)
    return None


def _takes_config(made: Any, own: Mapping[str, Any]) -> bool:
    """Return True for a factory (config, device): arguments with defaults, `make(layers=2, lr=1e-3)`, are its own."""
    if not plugins.takes(made, None, None, **own):
        return False
    if not plugins.signature(made):
        return True
    first = next(iter(inspect.signature(made).parameters.values()))
    return first.default is first.empty or first.name == "config"


def _cannot_call(name: str, made: Any, own: Mapping[str, Any]) -> str:
    """Return why a factory or step cannot be called with the arguments of --set, and what to do."""
    written = f"{name}{plugins.signature(made)}"
    parameters = inspect.signature(made).parameters
    if unknown := [argument for argument in own if argument not in parameters]:
        return f"{written} has no argument {unknown[0]!r}; correct its name, or leave it out of --set"
    missing = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if missing := [argument for argument in missing if argument not in own]:
        return f"{written} requires {missing[0]}; give it with --set {missing[0]}=VALUE"
    return f"{written} is no factory or step; write a factory that takes (config, device), or a step without arguments"


class _FirstCall(CallableWorkload):
    """Step without arguments, whose first result shows if it is a factory instead."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(self._call, takes_config=False)
        self.made, self._is_step = function, False

    def _call(self) -> None:
        result = self.made()
        if not self._is_step and _is_parts(result):
            raise FactoryFound(result)
        self._is_step = True


def _is_parts(result: Any) -> bool:
    """Return True if the result of a call is a model or a workload, which no step returns."""
    in_tuple = isinstance(result, tuple) and len(result) in (2, 3) and isinstance(result[0], nn.Module)
    in_mapping = isinstance(result, Mapping) and isinstance(result.get("model"), nn.Module)
    return isinstance(result, (nn.Module, TrainingSetup)) or _is_workload(result) or in_tuple or in_mapping


def _is_workload(made: Any) -> bool:
    return not isinstance(made, type) and all(callable(getattr(made, name, None)) for name in ("step", "prepare"))


def from_result(result: Any, config: RunConfig, device: Device, read: set[str]) -> ForeignWorkload:
    """Return the workload of what a factory returned. Raises ConfigError if it is none of FORMS."""
    name = config.workload
    try:
        setup = TrainingSetup.of(result)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    if setup is not None:
        return ForeignWorkload(config, ModuleStep(config, device, setup), read, APPLIED + _OF_STRATEGY)
    if isinstance(result, nn.Module):
        raise ConfigError(f"{name} returned a module without inputs; return (module, batch), or (module, batch, loss)")
    if callable(getattr(result, "step", None)):
        return ForeignWorkload(config, result, read)
    if not callable(result):
        raise ConfigError(f"{name} returned an object of type {type(result).__name__}; return {FORMS}")
    return ForeignWorkload(config, CallableWorkload(result), read)


_OF_STRATEGY = ("strategy_args", "bucket_size_mb", "tp_degree")


def _module_with_inputs(made: Any, config: RunConfig, device: Device) -> ForeignWorkload:
    """Build the model that `workload` names, on the batch that `inputs` names. Raises ConfigError."""
    assert config.inputs is not None
    model = made
    if not isinstance(made, nn.Module):
        own = settings(config.workload_args)
        if not callable(made) or not plugins.takes(made, **own):
            raise ConfigError(f"{config.workload} makes no module; name a module, or a class without further arguments")
        model = made(**own)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{config.workload} gave {type(model).__name__} and not a module; name a model for --inputs")
    batch, read = plugins.get("workloads", config.inputs), set[str]()
    if callable(batch) and not isinstance(batch, Mapping):
        if _takes_config(batch, {}):
            watched, read = observed(config)
            batch = batch(watched, device)
        elif plugins.takes(batch):
            batch = batch()
        else:
            written = f"{config.inputs}{plugins.signature(batch)}"
            raise ConfigError(f"{written} gives no batch; write a function that takes (config, device), or no argument")
    return from_result((model, batch), config, device, read)
