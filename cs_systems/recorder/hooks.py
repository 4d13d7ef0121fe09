"""Hooks that find the phases of a loop, all of them removable.

- input: `__next__` of a DataLoader's iterator
- copy: `Tensor.to`, `Tensor.cuda` and `copy_` from one device to another
- forward: the call of the models
- backward: autograd's engine, also below `Tensor.backward` and `autograd.grad`
- clip, optimizer, zero_grad: the functions of torch of that name; `optimizer` also covers a GradScaler
- host_sync: `item`, `tolist`, `cpu`, `float()`, `int()`, `bool()` of a tensor on an accelerator, and
  `torch.cuda.synchronize`

One recorder is active in a process, and the hooks are functions of this module that look for it: a model can be copied
and pickled while they are on it, and a copy of a hook is harmless afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from cs_systems.recorder.phases import (
    BACKWARD,
    CLIP,
    COPY,
    FORWARD,
    HOST_SYNC,
    INPUT,
    OPTIMIZER,
    ZERO_GRAD,
    Tracker,
)

_tracker: Tracker | None = None
Tells = Callable[[tuple[Any, ...], dict[str, Any]], str | None]


@contextmanager
def hooked(tracker: Tracker, models: Sequence[nn.Module]) -> Iterator[None]:
    """Report the phases of this process's loop to `tracker`; on leaving, everything is as it was."""
    global _tracker
    with ExitStack() as installed:
        for model in models:
            for handle in _on_model(model):
                installed.callback(handle)
        for register, hook in (
            (register_optimizer_step_pre_hook, _optimizer_begins),
            (register_optimizer_step_post_hook, _optimizer_ends),
        ):
            installed.callback(register(hook).remove)
        for owner, name, tells in _PATCHES:
            installed.callback(patch(owner, name, tells))
        _tracker = tracker
        try:
            yield
        finally:
            _tracker = None


def is_active() -> bool:
    return _tracker is not None


def _begins(name: str, arguments: Any = ()) -> None:
    if _tracker is not None and _tracker.observes():
        _tracker.enter(name, arguments)


def _ends(name: str) -> None:
    if _tracker is not None and _tracker.observes():
        _tracker.exit(name)


def _forward_begins(_: nn.Module, *arguments: Any) -> None:
    if not torch.compiler.is_compiling():  # first, so that compiled code depends on nothing else here
        _begins(FORWARD, arguments)


def _forward_ends(*_: Any) -> None:
    if not torch.compiler.is_compiling():
        _ends(FORWARD)


def _optimizer_begins(*_: Any) -> None:
    _begins(OPTIMIZER)


def _optimizer_ends(*_: Any) -> None:
    _ends(OPTIMIZER)


def _on_model(model: nn.Module) -> Iterator[Callable[[], object]]:
    """Hook the call of a model; yield what removes the hooks.

    Hooks on a module that compiled itself (`model.compile()`) would be compiled with it, so that its compiled call is
    wrapped instead.
    """
    compiled = model.__dict__.get("_compiled_call_impl")
    if compiled is not None:
        model.__dict__["_compiled_call_impl"] = _wrapped(compiled, lambda *_: FORWARD)
        yield lambda: model.__dict__.update(_compiled_call_impl=compiled)
        return
    yield model.register_forward_pre_hook(_forward_begins, with_kwargs=True).remove
    yield model.register_forward_hook(_forward_ends, always_call=True).remove


def _wrapped(function: Callable[..., Any], tells: Tells) -> Callable[..., Any]:
    """Return the function, in a phase if `tells` names one for its arguments."""

    @functools.wraps(function)
    def observed(*args: Any, **kwargs: Any) -> Any:
        if _tracker is None or not _tracker.observes() or (name := tells(args, kwargs)) is None:
            return function(*args, **kwargs)
        tracker = _tracker
        tracker.enter(name, (args, kwargs))
        try:
            return function(*args, **kwargs)
        finally:
            tracker.exit(name)

    return observed


def patch(owner: Any, name: str, tells: Tells) -> Callable[[], object]:
    """Replace an attribute of a class or module by the observed one; return what restores it."""
    return _replace(owner, name, _wrapped(getattr(owner, name), tells))


def after(owner: Any, name: str, then: Callable[..., object]) -> Callable[[], object]:
    """Call `then` with the arguments after each call of a function of a class or module; return what restores it."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def followed(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        then(*args, **kwargs)
        return result

    return _replace(owner, name, followed)


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], object]:
    own = vars(owner).get(name)
    setattr(owner, name, function)
    return functools.partial(delattr, owner, name) if own is None else functools.partial(setattr, owner, name, own)


def _always(name: str) -> Tells:
    return lambda *_: name


def _moves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the phase of `tensor.to(…)`: a copy to a device, or to the host, which waits for the device."""
    target = kwargs.get("device", kwargs.get("other", args[1] if len(args) > 1 else None))
    if isinstance(target, Tensor):
        target = target.device
    elif not isinstance(target, (str, int, torch.device)):
        return None
    kind = target.type if isinstance(target, torch.device) else str(target).partition(":")[0]
    here = args[0].device.type
    if kind == here:
        return None
    return HOST_SYNC if kind == "cpu" else COPY


def _to_cuda(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    return COPY if args[0].device.type == "cpu" else None


def _copies(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    source = args[1] if len(args) > 1 else kwargs.get("src")
    here = args[0].device.type
    if not isinstance(source, Tensor) or source.device.type == here:
        return None
    return HOST_SYNC if here == "cpu" else COPY


def _reads(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the phase of reading a value: the host waits for an accelerator, and for nothing on a CPU."""
    return None if args[0].device.type == "cpu" else HOST_SYNC


_GradScaler = torch.amp.grad_scaler.GradScaler
# Everything that is replaced while a loop is recorded: (owner, attribute, phase by its arguments). Functions that
# callers may have imported by name are replaced one level lower, where torch itself looks them up at each call.
_PATCHES: tuple[tuple[Any, str, Tells], ...] = (
    (dataloader._BaseDataLoaderIter, "__next__", _always(INPUT)),
    (torch.autograd, "_engine_run_backward", _always(BACKWARD)),
    *((clip_grad, name, _always(CLIP)) for name in ("_get_total_norm", "_clip_grads_with_norm_")),
    *((owner, "clip_grad_value_", _always(CLIP)) for owner in (clip_grad, nn.utils)),
    *((owner, "zero_grad", _always(ZERO_GRAD)) for owner in (Optimizer, nn.Module)),
    *((_GradScaler, name, _always(OPTIMIZER)) for name in ("unscale_", "step", "update")),
    (Tensor, "to", _moves),
    (Tensor, "cuda", _to_cuda),
    (Tensor, "copy_", _copies),
    *((Tensor, name, _reads) for name in ("item", "tolist", "cpu", "__float__", "__int__", "__bool__")),
    (torch.cuda, "synchronize", _always(HOST_SYNC)),
)
