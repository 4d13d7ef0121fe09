"""Checks that every workload with attention makes before it runs: the dtype, and the backend's support for the call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cs_systems.config import ConfigError, Precision, RunConfig
from cs_systems.core import plugins
from cs_systems.core.validation import shown
from cs_systems.machine.device import Device
from cs_systems.measure.workloads import Cell, Unavailable
from cs_systems.model.attention import AttentionBackend, AttentionCall
from cs_systems.model.training import fp8

COMPUTE_DTYPES = {
    Precision.FP32: "float32",
    Precision.TF32: "float32",
    Precision.BF16: "bfloat16",
    Precision.FP16: "float16",
    Precision.BF16_PURE: "bfloat16",
    Precision.FP8: "bfloat16",  # only linear layers run in fp8
}


def check_precision(config: RunConfig, device: Device) -> None:
    """Raise Unavailable if the device does not support the config's precision."""
    if config.precision is Precision.TF32 and (not device.is_cuda or (device.capability() or (0, 0)) < (8, 0)):
        raise Unavailable("tf32 needs an NVIDIA GPU of compute capability 8.0 or newer; use fp32")
    if config.precision is Precision.FP8 and (reason := fp8.unavailable(device)):
        raise Unavailable(reason)


def check_backend(cell: Cell, device: Device, call: AttentionCall) -> AttentionBackend | None:
    """Return the cell's backend after checking that it supports `call`; None for a user's own function.

    Of a user's function only the signature is checked.

    Raises:
        Unavailable: the backend cannot run the call; with the reason and the remedy.
        ConfigError: a user's function cannot be called as backends are.
    """
    config, backend = cell.config, cell.attention
    check_precision(config, device)
    if not isinstance(backend, AttentionBackend):
        if problem := _unfit(backend):
            raise ConfigError(f"{config.attention}{problem}")
        if call.window is not None and not plugins.takes(
            backend, *"qkv", **dict.fromkeys(_OPTIONS), window=call.window
        ):
            raise Unavailable(
                f"{config.attention} has no argument window; add window=None to its arguments, or leave out window"
            )
        return None
    if reason := backend.refusal(call):
        raise Unavailable(f"{config.attention}: {reason}")
    return backend


_OPTIONS = ("causal", "scale", "align")
_ARGUMENTS = '(q, k, v, *, causal=False, scale=None, align="upper_left")'


def _unfit(function: Any) -> str | None:
    """Return why an object cannot be called like a backend, and what to do; None if it can."""
    if not callable(function):
        return f" is of type {type(function).__name__}; give a function {_ARGUMENTS}"
    if plugins.takes(function, *"qkv", **dict.fromkeys(_OPTIONS)):
        return None
    parameters = [*inspect.signature(function).parameters.values()]
    kinds, names = {p.kind for p in parameters}, {p.name for p in parameters}
    tensors = [
        p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in _OPTIONS
    ]
    lacking = [] if inspect.Parameter.VAR_POSITIONAL in kinds else [*"qkv"[len(tensors) :]]
    lacking += [] if inspect.Parameter.VAR_KEYWORD in kinds else [*_OPTIONS]
    lacking = [name for name in lacking if name not in names]
    others = [p for p in parameters if p not in tensors[:3] and p.name not in (*"qkv", *_OPTIONS)]
    needed = [p.name for p in others if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    problem = "cannot be called as f(q, k, v, causal=…, scale=…, align=…)"
    if lacking:
        problem = f"lacks {', '.join(lacking)}"
    elif needed:
        problem = f"requires {', '.join(needed)}, which it is called without"
    return f"{plugins.signature(function)} {problem}; define it with the arguments {_ARGUMENTS}"


def check_output(name: str, function: Callable[..., Any], leaves: Sequence[Tensor], shape: tuple[int, ...]) -> None:
    """Call a user's attention function once, before any timed step. Raises ConfigError for an output of another shape.

    It records a graph if the leaves require gradients, so that a compiled function is compiled for the steps here.
    """
    with torch.set_grad_enabled(leaves[0].requires_grad):
        out = function(*leaves)
    if not isinstance(out, Tensor):
        raise ConfigError(f"{name} returned {shown(out)}; return a tensor of the shape of q, {shape}")
    if tuple(out.shape) != shape:
        raise ConfigError(
            f"{name} returned a tensor of the shape {tuple(out.shape)}; return one of the shape of q, {shape}"
        )
