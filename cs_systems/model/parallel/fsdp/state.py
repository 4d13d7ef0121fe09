"""Saving and loading of a sharded model's and its optimizer's state as whole tensors, as in one process.

All ranks take part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cs_systems.model.parallel.fsdp.flat import FlatShard, parts


def whole_parameters(module: nn.Module) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each sharded parameter of `module`, with the gathered whole parameter."""
    for flat in _flats(module.parameters()):
        yield from zip(flat.params, flat.whole_of([p.detach() for p in flat.params]), strict=True)


def gather_into(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Save sharded parameters whole, in host memory; a hook for `register_state_dict_post_hook`."""
    names = _names(module)
    for p, whole in whole_parameters(module):
        saved = whole.cpu()
        for name in names[p]:
            state_dict[prefix + name] = saved


def take_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Load this rank's parts of whole parameters; a hook for `register_load_state_dict_pre_hook`.

    One process, or any number of ranks, may have saved them.
    """
    for p, names in _names(module).items():
        for key in (prefix + name for name in names):
            if p in parts and key in state_dict:
                state_dict[key] = _part_of(p, state_dict[key])


def make_optimizer(
    params: Iterable[Any], cls: Callable[..., torch.optim.Optimizer], **options: Any
) -> torch.optim.Optimizer:
    """Return `cls(params, **options)` that saves and loads a state_dict as in one process.

    All ranks must call these methods. For element-wise optimizers (SGD, Adam, AdamW; not LBFGS, Muon, Adafactor).
    """
    optimizer = cls(params, **options)
    optimizer.register_state_dict_post_hook(_gather_state)
    optimizer.register_load_state_dict_pre_hook(_take_parts_of_state)
    return optimizer


def _gather_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state = {i: dict(values) for i, values in state_dict["state"].items()}
    number = {p: i for i, p in enumerate(_params(optimizer))}
    for flat in _flats(number):
        mine = [state.get(number[p], {}) if p in number else {} for p in flat.params]
        dtypes = {
            name: value.dtype
            for p, values in zip(flat.params, mine, strict=True)
            for name, value in values.items()
            if isinstance(value, Tensor) and value.ndim and value.shape == p.shape
        }
        for name, dtype in dtypes.items():
            tensors = [
                values.get(name, torch.zeros_like(p, dtype=dtype)) for p, values in zip(flat.params, mine, strict=True)
            ]
            for values, whole in zip(mine, flat.whole_of(tensors), strict=True):
                if name in values:
                    values[name] = whole.cpu()
    return {**state_dict, "state": state}


def _take_parts_of_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state = dict(state_dict["state"])
    for i, p in enumerate(_params(optimizer)):
        if p in parts and i in state:
            state[i] = {name: _part_of(p, value) for name, value in state[i].items()}
    return {**state_dict, "state": state}


def _part_of(p: nn.Parameter, whole: Any) -> Any:
    """Return this rank's part of a value with one number per element of `p`; other values unchanged."""
    part = parts[p]
    if not isinstance(whole, Tensor) or not whole.ndim or whole.shape != part.whole_shape:
        return whole
    return whole.detach().reshape(-1)[part.start : part.stop].view(part.shape)


def _params(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _flats(params: Iterable[nn.Parameter]) -> list[FlatShard]:
    return list(dict.fromkeys(parts[p].flat for p in params if p in parts))


def _names(module: nn.Module) -> Mapping[nn.Parameter, list[str]]:
    """Return a map from parameter to its names; a tied parameter has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    return names
