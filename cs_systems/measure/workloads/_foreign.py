"""Workloads from outside the package: how a named object becomes a workload, and which options apply to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import nn
from torch.optim import Optimizer

from cs_systems.analysis.comparison.own_code import OWN_CODE, OwnCodeRow
from cs_systems.config import FIELDS, ConfigError, Mode, RunConfig
from cs_systems.core import plugins
from cs_systems.core.fields import Subject
from cs_systems.core.shapes import PRESETS
from cs_systems.core.validation import option, settings, shown
from cs_systems.machine.device import Device
from cs_systems.measure.workloads import CallableWorkload, Cell, Unavailable, Workload
from cs_systems.measure.workloads._language_model import FORM, is_language_model, language_model, of_sizes
from cs_systems.measure.workloads._module import APPLIED, ModuleStep
from cs_systems.measure.workloads._observed import observed
from cs_systems.measure.workloads._own_code import model_row
from cs_systems.measure.workloads._setup import TrainingSetup

FORMS = "(model, batch), (model, batch, loss), a dict or TrainingSetup of such parts, a step to call, or a Workload"
# Fields that a workload from outside the package must use if they are set.
_READ = tuple(
    name for name, each in FIELDS.items() if Subject.OWN in each.subjects and not each.always and name != "model"
)


_METHODS = {  # methods of a Workload besides step, each with its shortest form
    "prepare": "def prepare(self): pass",
    "cost": "def cost(self): return None",
    "describe": "def describe(self): return {}",
}


class ForeignWorkload:
    """Workload around a foreign object; it knows which fields of the configuration have an effect.

    inner: the workload that runs. applied: fields that apply to it in any case.
    """

    def __init__(self, cell: Cell, inner: Workload, read: set[str], applied: Collection[str] = ()) -> None:
        self.cell, self.inner, self._read, self._applied = cell, inner, read, frozenset(applied)
        self._is_checked = False
        # returns rows of `own_code` in addition to the inner workload's
        self.compared: Callable[[], list[OwnCodeRow]] = list
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
            raise Unavailable(self._without_effect(ignored))

    def _without_effect(self, fields: Sequence[str]) -> str:
        """Return a message that the fields have no effect, and what to do.

        It uses words shared by the command line and RunConfig; for a live object the arguments of `run`, which gets a
        ModelConfig in the RunConfig.
        """
        name = self.cell.config.workload
        read = f"read {', '.join(f'config.{field}' for field in fields)} in a factory (config, device)"
        if self.cell.config.inputs is not None:  # a model with inputs gets no config
            read += " named as inputs, or named alone as one that returns (model, batch)"
        if not name.startswith(plugins.LIVE):
            options = ", ".join(dict.fromkeys(_word(field) for field in fields))
            return f"{name} does not use {options}; {read}, or leave out {options}"
        of_preset = any(field.startswith("model.") for field in fields)
        arguments = [f"{field}=" for field in fields if not field.startswith("model.")]
        unused = ", ".join([*arguments, *["the preset of the RunConfig"] * of_preset])
        without = ", ".join([*arguments, *["model= of the RunConfig"] * of_preset])
        if callable(self.cell.workload):
            return f"{name} does not use {unused}; {read}, or leave out {without}"
        return f"the model {name.removeprefix(plugins.LIVE)} does not use {unused}; leave out {without}"

    def _ignored(self) -> Iterable[str]:
        """Yield the fields that differ from their defaults and have no effect."""
        config, default, used = self.cell.config, RunConfig(), self.used
        checked = self.cell.profiler.checks
        if config.shape is not None and config.mode is Mode.FORWARD_BACKWARD:
            checked |= {"mode"}  # an attention call has no training step, so this mode is the whole call
        for name in _READ:
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
        """Fields of the configuration that have had an effect so far."""
        return frozenset(self._read) | self._applied

    @property
    def uses(self) -> str:
        """Names in `used`, as the record lists them."""
        return " ".join(sorted({name.rpartition(".")[2] for name in self.used}))

    def cost(self) -> Any:
        return self.inner.cost()

    def describe(self) -> Any:
        return self.inner.describe()

    def tables(self) -> Any:
        tables: Any = getattr(self.inner, "tables", dict)()
        rows = self.compared()
        return {**tables, **OWN_CODE.filled([*rows, *OWN_CODE.of(tables)])} if rows else tables


class FactoryFound(Exception):
    """Exception: a function without arguments, taken for a step, returned the parts of a step at its first call."""

    def __init__(self, result: Any) -> None:
        super().__init__("the function is a factory")
        self.result = result


def build(cell: Cell, device: Device) -> ForeignWorkload:
    """Convert the object that a foreign name refers to into a workload.

    It is a factory `(config, device)` or `()` of one of FORMS, which also takes the arguments of `--set`; a step, which
    takes no argument; the class of a language model, which sizes make; or with `inputs` a module, or a class or
    function that makes one.

    Raises:
        ConfigError: it is none of these.
    """
    made, config = cell.workload, cell.config
    name, own = config.workload, settings(config, "workload_args")
    if config.inputs is not None:
        return _module_with_inputs(cell, device)
    if reason := problem(name, made, own):
        raise ConfigError(reason)
    if not callable(made):
        return from_result(made, cell, device, set(), verb="is")
    if is_language_model(made, own):
        watched, read = observed(config)
        found = from_result(language_model(made, watched, device, own), cell, device, read)
        found.compared = lambda: [model_row(name, lambda sizes: of_sizes(made, sizes, own), device.torch)]
        return found
    if _takes_config(made, own):
        watched, read = observed(config)
        is_live = name.startswith(plugins.LIVE)
        result = _called(name.removeprefix(plugins.LIVE), made, watched, device, None if is_live else own)
        return from_result(result, cell, device, read)
    if own or isinstance(made, type):
        return from_result(made(**own), cell, device, set())
    return ForeignWorkload(cell, _FirstCall(made), set())


def _called(name: str, made: Any, config: Any, device: Device, own: Mapping[str, Any] | None) -> Any:
    """Return the result of a function (config, device). Raises ConfigError if it uses one of these as another type.

    own: its arguments from --set; None if it cannot have any.
    """
    try:
        return made(config, device, **(own or {}))
    except (AttributeError, TypeError) as error:
        if any(kind.__name__ in str(error) for kind in (Device, type(config))) and (
            reason := _misused(name, made, Device.__name__ in str(error), may_set=own is not None)
        ):
            raise ConfigError(reason) from error
        raise


def problem(name: str, made: Any, own: Mapping[str, Any] | None = None) -> str | None:
    """Return why an object cannot be a workload, and what to do; None if it may be one.

    own: the arguments from `--set`.
    """
    own, is_live = own or {}, name.startswith(plugins.LIVE)
    if isinstance(made, nn.Module) or (isinstance(made, type) and issubclass(made, nn.Module)):
        if is_live:
            model = f"{made.__name__}(…)" if isinstance(made, type) else "…"
            return f"workload is {shown(made)}, and a module requires inputs; use run(model={model}, inputs=…)"
        if is_language_model(made, own):
            return None
        return (
            f"{name} is a module without inputs; name its batch as inputs path.py:name, or name a function (config, "
            f"device) that returns (model, batch), or {FORM}"
        )
    if not callable(made):
        if _is_workload(made) or isinstance(made, (TrainingSetup, Mapping, tuple)):
            return None
        if not isinstance(made, Optimizer) and (reason := _incomplete(made)):
            return f"{name}: {reason}"
        if is_live:
            return f"workload is {shown(made)}; give a factory (config, device), {FORMS}"
        return (
            f"{name} is an object of type {type(made).__name__}; name a factory (config, device), "
            "or a step without arguments"
        )
    if isinstance(made, type) and not any("step" in vars(base) or "__call__" in vars(base) for base in made.__mro__):
        return (
            f"{name} is a class without a method step or __call__; give it one, or use a function (config, device) "
            "that returns (model, batch) or (model, batch, loss)"
        )
    is_factory = _takes_config(made, own)
    if is_factory and (reason := _default_for_device(name, made)):
        return reason
    if not is_factory and not plugins.takes(made, **own):
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


def _default_for_device(name: str, made: Any) -> str | None:
    """Return the reason that a factory (config, width=8) would get the device as its width, with the remedy."""
    written = plugins.signature(made)
    second = [*inspect.signature(made).parameters.values()][1:2] if written else []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not second or second[0].kind not in positional or second[0].default is second[0].empty:
        return None
    if second[0].name == "device":
        return None
    return (
        f"{name}{written} would get the device as {second[0].name}, its second argument; make device the second "
        f"argument: (config, device, {second[0]})"
    )


def _misused(name: str, made: Any, is_device: bool, may_set: bool) -> str | None:
    """Return how a factory's code misused the Device or RunConfig that it got, and what to do; None if it did not."""
    names = [*inspect.signature(made).parameters][:2] if plugins.signature(made) else ["config", "device"]
    if is_device and (device := next((each for each in names[1:] if each.startswith("dev")), None)):
        return (
            f"{name} uses its argument {device} as a torch.device, but it is a Device, whose torch.device is "
            f"{device}.torch; use that, or leave out .to({device}): model and batch are moved for you"
        )
    if names == ["config", "device"]:
        return None
    own = [argument for argument in names if argument not in ("config", "device")]
    remedy = "write (config, device) as its first two arguments"
    if own and may_set:
        remedy += f", {'or' if own[1:] else 'and'} give {' and '.join(own)} {_by_set(own)}"
    return f"{name}{plugins.signature(made)} gets a RunConfig and a Device as its first two arguments; {remedy}"


def _cannot_call(name: str, made: Any, own: Mapping[str, Any]) -> str:
    """Return why a factory or step cannot be called with the arguments of --set, and what to do."""
    if (taken := [each for each in ("config", "device") if each in own]) and plugins.takes(
        made, None, None, **{each: value for each, value in own.items() if each not in taken}
    ):
        instead = ", and use the option device" if "device" in taken else ""
        return (
            f"{name}{plugins.signature(made)} gets {' and '.join(taken)} from cs-systems; leave {' and '.join(taken)} "
            f"out of --set (in Python workload_args){instead}"
        )
    by_position = () if own or isinstance(made, type) else (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
    if reason := _wrong_settings(name, made, own, by_position):
        return reason
    missing = [] if name.startswith(plugins.LIVE) else _missing(made, own)
    by_name = f"give {', '.join(missing)} {_by_set(missing)}, or " if missing else ""
    return (
        f"{name}{plugins.signature(made)} has other arguments than a factory or a step; {by_name}write a factory that "
        "takes (config, device), or a step without arguments"
    )


def _wrong_settings(name: str, made: Any, own: Mapping[str, Any], but: Collection[Any] = ()) -> str | None:
    """Return which argument of --set is unknown or missing, and what to do; None if none is.

    but: kinds of parameters to ignore.
    """
    if not (written := plugins.signature(made)):
        return None
    parameters = inspect.signature(made).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not takes_any and (unknown := [argument for argument in own if argument not in parameters]):
        return f"{name}{written} has no argument {unknown[0]!r}; correct its name, or leave it out"
    if not (missing := _missing(made, own, but)):
        return None
    given = "them" if missing[1:] else "it"
    if name.startswith(plugins.LIVE):  # run() passes it no arguments
        values = ", ".join(f"{argument}=VALUE" for argument in missing)
        return (
            f"{name}{written} requires {', '.join(missing)}, which run() does not give; pass a function without "
            f"arguments that calls it with {values}"
        )
    return f"{name}{written} requires {', '.join(missing)}; give {given} {_by_set(missing)}"


def _missing(made: Any, own: Mapping[str, Any], but: Collection[Any] = ()) -> list[str]:
    """Return the arguments without a default that neither --set nor cs-systems gives.

    but: as in `_wrong_settings`.
    """
    parameters = inspect.signature(made).parameters.values() if plugins.signature(made) else ()
    silent = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, *but)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in silent]
    return [argument for argument in needed if argument not in (*own, "config", "device")]


def _by_set(names: Sequence[str]) -> str:
    """Return how the arguments of a factory are given, on the command line and in Python."""
    values = [f"{name}=VALUE" for name in names]
    return f"with --set {' '.join(values)} (in Python workload_args={values})"


def built(cell: Cell, device: Device) -> ForeignWorkload:
    """Return the workload that a cell names; a function without arguments is called to get it.

    Raises ConfigError if it is none of FORMS.
    """
    made = build(cell, device)
    if isinstance(made.inner, _FirstCall) and _is_parts(result := made.inner.made()):
        return from_result(result, cell, device, set())
    return made


class _FirstCall(CallableWorkload):
    """Step without arguments; its first result shows if it is a factory instead."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(self._call, takes_config=False)
        self.made, self._is_step = function, False

    def _call(self) -> None:
        result = self.made()
        if not self._is_step and _is_parts(result):
            raise FactoryFound(result)
        self._is_step = True


def _is_parts(result: Any) -> bool:
    """Return whether the result of a call is or contains a model or a workload, which a step does not return."""
    held = result if isinstance(result, tuple) else [*result.values()] if isinstance(result, Mapping) else []
    holds_model = any(isinstance(part, nn.Module) for part in held)
    return isinstance(result, (nn.Module, TrainingSetup)) or _is_workload(result) or holds_model


def _is_workload(made: Any) -> bool:
    return not isinstance(made, type) and all(callable(getattr(made, name, None)) for name in ("step", "prepare"))


def from_result(result: Any, cell: Cell, device: Device, read: set[str], verb: str = "returned") -> ForeignWorkload:
    """Return the workload for the result of a factory. Raises ConfigError if it has none of FORMS.

    verb: the message's verb; "is" if the object itself was named.
    """
    name = cell.config.workload.removeprefix(plugins.LIVE)
    try:
        setup = TrainingSetup.of(result)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    if setup is not None:
        return ForeignWorkload(cell, ModuleStep(cell, device, setup), read, APPLIED)
    if isinstance(result, nn.Module):
        raise ConfigError(f"{name} returned a module without inputs; return (module, batch), or (module, batch, loss)")
    if callable(getattr(result, "step", None)):
        if reason := _incomplete(result):
            raise ConfigError(f"{name}: {reason}")
        return ForeignWorkload(cell, result, read)
    if not callable(result):
        what = "workload" if verb == "is" and name != cell.config.workload else name
        raise ConfigError(f"{what} {verb} {_no_form(result, 'give' if verb == 'is' else 'return')}")
    return ForeignWorkload(cell, CallableWorkload(result), read)


def _incomplete(made: Any) -> str | None:
    """Return what an object with a method step lacks for a Workload, and what to do; None if nothing."""
    lacking = [method for method in _METHODS if not callable(getattr(made, method, None))]
    if not lacking or not callable(getattr(made, "step", None)):
        return None
    added = ", ".join(_METHODS[method] for method in lacking)
    return f"{shown(made)} has a method step, but lacks {', '.join(lacking)}; add {added}"


def _no_form(result: Any, give: str) -> str:
    """Return a description of a result that has none of FORMS, and what to do.

    give: the verb, "give" or "return".
    """
    if result is None:
        return f"nothing; {give} {FORMS}"
    if isinstance(result, tuple):
        types = ", ".join(shown(part) if isinstance(part, type) else type(part).__name__ for part in result)
        more = ", or a dict with the keys 'model', 'batch', 'loss', 'optimizer', …" if len(result) > 3 else ""
        return f"a tuple of ({types}); {give} (model, batch) or (model, batch, loss), the module first{more}"
    if isinstance(result, Mapping):
        keys = ", ".join(str(key)[:40] for key in [*result][:8])
        what = f"a dict without the key 'model', its keys are {keys}" if result else "an empty dict"
        parts = ", ".join(p.name for p in fields(TrainingSetup) if p.name not in ("model", "batch", "batches"))
        return f"{what}; {give} the key 'model', the key 'batch' or 'batches', and any of {parts}"
    return f"{shown(result)}; {give} {FORMS}"


def _word(field: str) -> str:
    """Return the word for a field that the command line and RunConfig share: its option's name if that differs."""
    name = field.rpartition(".")[2]
    return option(field).removeprefix("--") if field in ("model.name", "strategy_args") else name


def _module_with_inputs(cell: Cell, device: Device) -> ForeignWorkload:
    """Build the model that `workload` names, on the batch that `inputs` names. Raises ConfigError."""
    made, config = cell.workload, cell.config
    model = made
    if not isinstance(made, nn.Module):
        own = settings(config, "workload_args")
        if not callable(made):
            raise ConfigError(
                f"{config.workload} is {shown(made)}, but inputs requires a model; name an "
                "nn.Module, its class, or a function that returns one"
            )
        if not plugins.takes(made, **own):
            written = f"{config.workload}{plugins.signature(made)}"
            raise ConfigError(
                _wrong_settings(config.workload, made, own)
                or f"{written} takes config or device, but with inputs a model gets neither; name a function "
                "without these arguments, or leave out inputs and return (model, batch)"
            )
        model = made(**own)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{config.workload} returned an object of type {type(model).__name__}, but inputs "
            "requires a model; return an nn.Module, or leave out inputs"
        )
    batch, read = cell.inputs, set[str]()
    if callable(batch) and not isinstance(batch, Mapping):
        if _takes_config(batch, {}):
            watched, read = observed(config)
            batch = _called(f"inputs {config.inputs}", batch, watched, device, None)
        elif plugins.takes(batch):
            batch = batch()
        else:
            written = f"{config.inputs}{plugins.signature(batch)}"
            raise ConfigError(
                f"inputs {written} has other arguments than (config, device); write a function without arguments, or "
                "of (config, device), that returns the batch; it is moved to the device for you"
            )
    if batch is None or (isinstance(batch, (list, tuple, Mapping)) and not batch):
        found = "None" if batch is None else f"an empty {type(batch).__name__}"
        raise ConfigError(f"inputs {config.inputs} gave {found}; return a batch")
    return from_result((model, batch), cell, device, read)
