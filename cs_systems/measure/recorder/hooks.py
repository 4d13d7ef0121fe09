"""Removable hooks that find the phases of a loop.

- input: `__iter__` of a DataLoader, which starts its workers, and `__next__` of its iterator
- copy: `Tensor.to`, `Tensor.cuda` and `copy_` from one device to another
- forward: the call of the models
- backward: autograd's engine, also below `Tensor.backward` and `autograd.grad`
- clip, optimizer, zero_grad: the functions of torch of that name; `optimizer` also covers a GradScaler
- host_sync: `item`, `tolist`, `cpu`, `float()`, `int()`, `bool()` of a tensor on an accelerator, and
  `torch.cuda.synchronize`
- cuda_graph: the replay of the loop's own CUDA graph, inside which phases cannot be told apart

At most one recorder is active in a process, and the hooks are functions of this module that look it up. A model can be
copied and pickled while it has the hooks: see `ModuleHook`.
"""

from __future__ import annotations

import functools
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import checkpoint
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, TensorDataset, dataloader
from torch.utils.hooks import RemovableHandle

from cs_systems.analysis.comparison.loop_findings import COPY, HOST_SYNC
from cs_systems.instrument.compiler import Observation, Undo, passed_through, replaced, untraced
from cs_systems.instrument.hooks import ModuleHook
from cs_systems.measure.recorder import guard
from cs_systems.measure.recorder.guard import as_guest
from cs_systems.measure.recorder.phases import (
    BACKWARD,
    CLIP,
    FORWARD,
    INPUT,
    OPTIMIZER,
    REPLAY,
    ZERO_GRAD,
)
from cs_systems.measure.recorder.tracker import Tracker

_tracker: Tracker | None = None
Tells = Callable[[tuple[Any, ...], dict[str, Any]], str | None]


def observe(observation: Observation, tracker: Tracker, models: Sequence[nn.Module], *, trains: bool = True) -> None:
    """Report the phases of this process's loop to `tracker`, until the observation is closed.

    trains: whether the loop may have the phases of a training.
    """
    for model in models:
        for install in _on_model(model):
            observation.add(install)
    for register, hook in (
        (
            (register_optimizer_step_pre_hook, _optimizer_begins),
            (register_optimizer_step_post_hook, _optimizer_ends),
        )
        if trains
        else ()
    ):
        observation.add(functools.partial(_registered, register, hook), is_guarded=True)
    of_training = _OF_TRAINING if trains else ()
    for owner, name, tells in (*_PATCHES, *of_training, *(_OF_ACCELERATORS if _runs_on_accelerator(tracker) else ())):
        observation.add(functools.partial(patch, owner, name, tells), is_guarded=(owner, name) in _GUARDED)
    for install in (_begins_recomputation, _ends_recomputation, _times_reentrant_recomputation) if trains else ():
        observation.add(install)
    observation.add(functools.partial(_reports_to, tracker))


def _runs_on_accelerator(tracker: Tracker) -> bool:
    return tracker.is_cuda


def is_active() -> bool:
    return _tracker is not None


def _reports_to(tracker: Tracker) -> Undo:
    global _tracker
    _tracker = tracker
    guard.begin(tracker)

    def forget() -> None:
        global _tracker
        _tracker = None
        guard.end()

    return forget


def _registered(register: Callable[[Any], RemovableHandle], hook: Callable[..., object]) -> Undo:
    return register(hook).remove


def _own_time(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of the observation, as `as_guest` does, and count its time in the step."""
    guest, clock = as_guest(function), time.perf_counter

    @untraced
    @functools.wraps(function)
    def counted(*args: Any) -> Any:
        began_s = clock()
        result = guest(*args)
        if _tracker is not None and _tracker.is_here():
            _tracker.timeline.own_s += clock() - began_s
        return result

    return counted


@_own_time
def _begins(name: str, arguments: Any = ()) -> None:
    if _tracker is not None and _tracker.observes():
        _tracker.enter(name, arguments)


@_own_time
def _ends(name: str, result: Any = None) -> None:
    if _tracker is not None and _tracker.observes():
        _tracker.exit(name, result=result)


@untraced
def _forward_begins(model: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
    _begins(FORWARD, ((model, *positional), named))


@untraced
def _forward_ends(_: nn.Module, __: Any, result: Any) -> None:
    _ends(FORWARD, result)


@as_guest
def _optimizer_begins(optimizer: Optimizer, *_: Any) -> None:
    if _tracker is not None and _tracker.observes():
        _tracker.optimizer_begins(optimizer)


@as_guest
def _optimizer_ends(optimizer: Optimizer, *_: Any) -> None:
    if _tracker is not None and _tracker.observes():
        _tracker.optimizer_ends(optimizer)


def _on_model(model: nn.Module) -> Iterator[Callable[[], Undo]]:
    """Yield functions that install the hooks on the call of a model.

    Hooks on a module that compiled itself (`model.compile()`) would be compiled with it, so its compiled call is
    wrapped instead.
    """
    if "_compiled_call_impl" in model.__dict__ and model._compiled_call_impl is not None:
        yield functools.partial(patch, model, "_compiled_call_impl", lambda *_: FORWARD)
        return
    yield lambda: model.register_forward_pre_hook(ModuleHook(_forward_begins), with_kwargs=True).remove
    yield lambda: model.register_forward_hook(ModuleHook(_forward_ends), always_call=True).remove


def _wrapped(function: Callable[..., Any], tells: Tells) -> Callable[..., Any]:
    """Wrap the function in the phase that `tells` returns for the call's arguments; no phase if it returns None."""

    @passed_through
    @functools.wraps(function)
    def observed(*args: Any, **kwargs: Any) -> Any:
        begun = _begun(tells, args, kwargs)
        if begun is None:
            return function(*args, **kwargs)
        result = None
        try:
            result = function(*args, **kwargs)
            return result
        finally:
            _exit(*begun, args, result)

    return observed


@_own_time
def _begun(tells: Tells, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tracker, str] | None:
    """Begin the phase of a call, if it has one; return the state that `_exit` needs to end it."""
    tracker = _tracker
    if tracker is None or not tracker.observes():
        return None
    with torch._C.DisableTorchFunction():  # so that a mode of the script sees only the script's own calls
        if (name := tells(args, kwargs)) is None:
            return None
        tracker.enter(name, (args, kwargs))
    return tracker, name


@_own_time
def _exit(tracker: Tracker, name: str, args: tuple[Any, ...], result: Any) -> None:
    """End the phase of a call with these arguments; argument 4 of autograd's engine requests a graph of gradients."""
    is_differentiable = name == BACKWARD and len(args) > 3 and bool(args[3])
    tracker.exit(name, is_differentiable=is_differentiable, result=result, arguments=args)


def patch(owner: Any, name: str, tells: Tells) -> Undo:
    """Replace an attribute of a class or module by the observed one; return a function that restores it."""
    return replaced(owner, name, _wrapped(getattr(owner, name), tells))


def patch_call(tells: Tells) -> Undo:
    """Replace the call of every module by the observed one; return a function that restores it."""
    call = nn.Module.__call__
    return replaced(nn.Module, "__call__", ModuleCall(call, _wrapped(call, tells)))


def report_calls(begins: Callable[[nn.Module, Any], object], ends: Callable[[nn.Module, Any], object]) -> Undo:
    """Call `begins` with each called module and its arguments, and `ends` with its result, until this is undone."""
    call = nn.Module.__call__

    @passed_through
    @functools.wraps(call)
    def reported(*args: Any, **kwargs: Any) -> Any:
        begins(args[0], (args[1:], kwargs))
        result = call(*args, **kwargs)
        ends(args[0], result)
        return result

    return replaced(nn.Module, "__call__", ModuleCall(call, reported))


class ModuleCall:
    """Observed call of modules, with the code object of the call that it replaces.

    torch.profiler with stacks keeps the code of `nn.Module.__call__` for good, and reads `self` of each frame with it.
    """

    def __init__(self, function: Callable[..., Any], observed: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._observed = observed
        if hasattr(function, "__code__"):
            self.__code__ = function.__code__

    @untraced
    def __get__(self, module: nn.Module | None, _: type | None = None) -> Callable[..., Any]:
        return self if module is None else types.MethodType(self._observed, module)

    @passed_through
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._observed(*args, **kwargs)


def after(owner: Any, name: str, then: Callable[..., object]) -> Undo:
    """Call `then` with the arguments after each call of a function; return a function that restores the original."""
    function = getattr(owner, name)

    @passed_through
    @functools.wraps(function)
    def followed(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        _call(then, args, kwargs)
        return result

    return replaced(owner, name, followed)


@as_guest
def _call(then: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    then(*args, **kwargs)


class _OfThread(threading.local):
    recomputes = False


_of_thread = _OfThread()


class _Recomputation:
    """Context for the time in which backward recomputes forward; does nothing inside another such context."""

    @untraced
    def __enter__(self) -> None:
        is_counted = _tracker is not None and _tracker.is_open(BACKWARD) and not _of_thread.recomputes
        self._timeline = _tracker.timeline if is_counted and _tracker is not None else None
        if self._timeline is not None:
            _of_thread.recomputes = True
            self._begin = self._timeline.now()

    @untraced
    def __exit__(self, *_: object) -> None:
        if self._timeline is not None:
            _of_thread.recomputes = False
            self._timeline.recomputed(self._begin, self._timeline.now())


def _begins_recomputation() -> Undo:
    """Begin to time recomputation by a checkpoint with `use_reentrant=False`; return a function that undoes it."""
    begin = checkpoint._recomputation_hook.__enter__

    @passed_through
    @functools.wraps(begin)
    def begins(self: Any) -> Any:
        self._cs_systems_recomputation = _Recomputation()
        self._cs_systems_recomputation.__enter__()
        return begin(self)

    return replaced(checkpoint._recomputation_hook, "__enter__", begins)


def _ends_recomputation() -> Undo:
    """End the timing that `_begins_recomputation` began; return a function that undoes it."""
    end = checkpoint._recomputation_hook.__exit__

    @passed_through
    @functools.wraps(end)
    def ends(self: Any, *error: Any) -> Any:
        result = end(self, *error)
        begun = vars(self).pop("_cs_systems_recomputation", None)  # none if hooks were removed, as in a compilation
        if begun is not None:
            begun.__exit__()
        return result

    return replaced(checkpoint._recomputation_hook, "__exit__", ends)


def _times_reentrant_recomputation() -> Undo:
    """Time recomputation by a checkpoint with `use_reentrant=True`; return a function that ends the timing."""
    function = checkpoint.CheckpointFunction
    backward = function.backward

    @passed_through
    @functools.wraps(backward)
    def observed(ctx: Any, *gradients: Any) -> Any:
        run = ctx.run_function

        @passed_through
        def timed(*args: Any) -> Any:
            with _Recomputation():
                return run(*args)

        ctx.run_function = timed
        try:
            return backward(ctx, *gradients)
        finally:
            ctx.run_function = run

    return replaced(function, "backward", staticmethod(observed))


def _always(name: str) -> Tells:
    return lambda *_: name


def _moves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the phase of `tensor.to(…)`: a copy to a device, or a copy to the host, which waits for the device."""
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
    """Return the phase of reading a value: the host waits for an accelerator, but not for a CPU."""
    return None if args[0].device.type == "cpu" else HOST_SYNC


def _iterates(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Count an iterator that a loader makes in this step, and note whether it starts workers."""
    if _tracker is not None:
        _tracker.iterators += 1
        _tracker.starts_workers |= _starts_workers(args[0])
    return INPUT


def _starts_workers(loader: dataloader.DataLoader[Any]) -> bool:
    """Return whether an iterator of a loader starts processes, and does not keep those of the one before it."""
    keeps = getattr(loader, "persistent_workers", False) and loader._iterator is not None
    return getattr(loader, "num_workers", 0) > 0 and not keeps


def _takes_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Note what kind of iterator gives a batch."""
    if _tracker is not None:
        _tracker.has_workers |= getattr(args[0], "_num_workers", 0) > 0
        known = _tracker.collates_rows
        _tracker.collates_rows = _collates_rows(args[0]) and known is not False
    return INPUT


def _collates_rows(iterator: dataloader._BaseDataLoaderIter) -> bool:
    """Return whether it puts single rows of tensors in memory together, which could be indexed at once.

    They are all rows, in order or shuffled, and not those of an own sampler.
    """
    sampler, is_default = iterator._index_sampler, iterator._collate_fn is dataloader.default_collate
    is_whole = type(sampler) is BatchSampler and type(sampler.sampler) in (RandomSampler, SequentialSampler)
    return type(iterator._dataset) is TensorDataset and is_whole and is_default


_GradScaler = torch.amp.grad_scaler.GradScaler
# all attributes that are replaced while a loop is recorded: (owner, attribute, phase by its arguments). Functions that
# callers may have imported by name are replaced one level lower, where torch itself looks them up at each call.
_PATCHES: tuple[tuple[Any, str, Tells], ...] = (
    (dataloader.DataLoader, "__iter__", _iterates),
    (dataloader._BaseDataLoaderIter, "__next__", _takes_batch),
)
_OF_TRAINING: tuple[tuple[Any, str, Tells], ...] = (
    (torch.autograd, "_engine_run_backward", _always(BACKWARD)),
    *((clip_grad, name, _always(CLIP)) for name in ("_get_total_norm", "_clip_grads_with_norm_")),
    *((owner, "clip_grad_value_", _always(CLIP)) for owner in (clip_grad, nn.utils)),
    *((owner, "zero_grad", _always(ZERO_GRAD)) for owner in (Optimizer, nn.Module)),
    *((_GradScaler, name, _always(OPTIMIZER)) for name in ("unscale_", "step", "update")),
)
# Copies between devices and reads of a value make the host wait only for an accelerator.
_OF_ACCELERATORS: tuple[tuple[Any, str, Tells], ...] = (
    (Tensor, "to", _moves),
    (Tensor, "cuda", _to_cuda),
    (Tensor, "copy_", _copies),
    *((Tensor, name, _reads) for name in ("item", "tolist", "cpu", "__float__", "__int__", "__bool__")),
    (torch.cuda, "synchronize", _always(HOST_SYNC)),
    (torch.cuda.CUDAGraph, "replay", _always(REPLAY)),
)
# Attributes that guards of torch.compile check if a function that calls them is compiled.
_GUARDED = {
    (nn.Module, "zero_grad"),
    *((clip_grad, name) for name in ("_get_total_norm", "_clip_grads_with_norm_", "clip_grad_value_")),
    (nn.utils, "clip_grad_value_"),
}
