"""Arguments of a recorder: their checks, and the models, optimizers and device that they name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from cs_systems.config import ConfigError, RunConfig, one_of
from cs_systems.core import plugins
from cs_systems.core.validation import is_number, is_whole, shown
from cs_systems.measure.recorder.stages import PROFILES


def check(given: Mapping[str, Any]) -> None:
    """Raise ConfigError unless all options of a recorder, by name, have a value that it can use."""
    clock, profile, out, tokens = given["clock"], given["profile"], given["out"], given["tokens"]
    if not callable(clock):
        raise ConfigError(f"clock is {shown(clock)}; give a function that returns seconds")
    one_of("profile", profile, PROFILES)
    if not isinstance(out, str | os.PathLike) or not os.fspath(out):
        raise ConfigError(f"out is {shown(out)}; give the folder of the records")
    for what in ("snapshot", "stacks", "record_host"):
        if not isinstance(given[what], bool):
            raise ConfigError(f"{what} is {shown(given[what])}; give True or False")
    least_profiled = 0 if profile == RunConfig.profiler and not given["snapshot"] else 1
    for what, least in {"warmup": 0, "steps": 1, "profile_steps": least_profiled}.items():
        if not is_whole(given[what]) or given[what] < least:
            without = ", or pass profile='none' without snapshot" if what == "profile_steps" and least else ""
            raise ConfigError(f"{what} is {shown(given[what])}; give a whole number, at least {least}{without}")
    if tokens is not None and (not is_whole(tokens) or tokens < 1):
        raise ConfigError(f"tokens is {shown(tokens)}; give the tokens or samples of a step, a whole number from 1")
    for what in ("patience_s", "experiments_s"):
        if not is_number(given[what]) or not given[what] >= 0:
            raise ConfigError(f"{what} is {shown(given[what])}; give a number of seconds, at least 0")
    if (experiments := given["experiments"]) is not None:
        if not (callable(experiments) and plugins.takes(experiments)):
            does = "give a function without arguments that runs a step"
            raise ConfigError(f"experiments is {shown(experiments)}; {does}")
        if not given["experiments_s"]:
            raise ConfigError("experiments is given, but experiments_s is 0; leave out one of them")


def models_of(model: Any) -> list[nn.Module]:
    """Return the given models as a list. Raises ConfigError."""
    models = _listed("model", model, nn.Module)
    if not models and model is not None:
        raise ConfigError("model is an empty list; give a torch Module, or leave out model")
    return models


def optimizers_of(optimizer: Any) -> list[Optimizer]:
    """Return the given optimizers as a list. Raises ConfigError."""
    return _listed("optimizer", optimizer, Optimizer)


def device_of(device: Any, models: Sequence[nn.Module]) -> torch.device:
    """Return the given device, or by default the device of the models. Raises ConfigError."""
    return _device_of(models) if device is None else _named_device(device)


def _listed(what: str, given: Any, kind: type) -> list[Any]:
    """Return one object or several as a list. Raises ConfigError for another type."""
    if given is None:
        return []
    several = isinstance(given, Sequence) and not isinstance(given, (str, kind))
    objects = list(given) if several else [given]
    for each in objects:
        if not isinstance(each, kind):
            found = f"{what} {'contains' if several else 'is'} {shown(each)}"
            raise ConfigError(f"{found}; give an instance of a torch {kind.__name__}, or a list of them")
    return objects


def _device_of(models: Sequence[nn.Module]) -> torch.device:
    """Return the device of the models' parameters; without parameters, the default device of torch."""
    parameters = (p for model in models for p in model.parameters())
    found = next((p.device for p in parameters if p.device.type != "meta"), None)
    if found is not None:
        return found
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _named_device(device: Any) -> torch.device:
    """Return the device of that name. Raises ConfigError."""
    try:
        named = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device is {shown(device)}; give cpu, cuda or cuda:N, or a torch.device") from None
    if named.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {named}, but torch finds no CUDA device; leave out device")
    return named
