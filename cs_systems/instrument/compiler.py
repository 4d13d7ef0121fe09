"""Observation of a program that does not change what torch.compile compiles.

torch.compile traces the Python code that it finds: a function that replaces one of torch's would be traced too, or
break the graph, and a guard that sees another function than at tracing triggers a recompilation. To compile a program
as without observation,

- everything in an `Observation` is removed while torch.compile or torch.jit compiles, and restored afterwards;
- parts that guards check are also removed while compiled functions run;
- functions marked `untraced` or `passed_through` stay plain Python where compiled code calls them.

The times of phases inside a function that is compiled as a whole are therefore unknown, and count for the phase around
it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch._C._dynamo import eval_frame as dynamo

Function = TypeVar("Function", bound=Callable[..., Any])
Undo = Callable[[], object]
_SKIPS_IT_AND_ITS_CALLS = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.SKIP)
_KEYS = torch._C._TorchDispatchModeKey
_TRACING = (_KEYS.FAKE, _KEYS.PROXY, _KEYS.FUNCTIONAL)
_SKIPS_IT = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT)


def untraced(function: Function) -> Function:
    """Keep torch.compile from compiling a Python function and the functions that it calls."""
    dynamo.set_code_exec_strategy(function.__code__, _SKIPS_IT_AND_ITS_CALLS)
    return function


def passed_through(function: Function) -> Function:
    """Keep torch.compile from compiling a Python function, but not the functions that it calls."""
    dynamo.set_code_exec_strategy(function.__code__, _SKIPS_IT)
    return function


@untraced
def is_tracing() -> bool:
    """Return whether this thread is tracing code rather than just running it."""
    for key in _TRACING:
        if torch._C._get_dispatch_mode(key) is not None:
            return True
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


class _Installed(NamedTuple):
    install: Callable[[], Undo]
    is_guarded: bool


class Observation:
    """Hooks and replaced functions that are removed while torch.compile works.

    Several may be active at once, and each part is restored in the order in which it was added.
    """

    def __init__(self) -> None:
        self._parts: list[_Installed] = []
        self._undo: list[Undo | None] = []  # None: currently removed

    def add(self, install: Callable[[], Undo], *, is_guarded: bool = False) -> None:
        """Install a part of the observation.

        Args:
            install: installs the part and returns a function that removes it, or False if it cannot now; called again
                after each removal.
            is_guarded: whether compiled code has guards that check the changed objects.
        """
        if not _active:
            _watch_compiler()
        if self not in _active:
            _active.append(self)
        self._parts.append(_Installed(install, is_guarded))
        self._undo.append(None)
        self._install()

    def close(self) -> None:
        """Remove everything for good."""
        _covered.extend(undo for undo in self._undo if undo is not None)
        _covered[:] = [undo for undo in reversed(_covered) if undo() is False][::-1]
        self._parts.clear()
        self._undo.clear()
        if self in _active:
            _active.remove(self)
            if not _active:
                _leave_compiler()

    def _install(self) -> None:
        """Install the parts that the compiler's state allows."""
        for i, part in enumerate(self._parts):
            if self._undo[i] is None and _allows(part):
                self._undo[i] = part.install()

    def _remove(self) -> None:
        """Remove the parts that the compiler's state forbids, the last one first, because it may cover another one."""
        for i, part in reversed([*enumerate(self._parts)]):
            undo = self._undo[i]
            if undo is not None and not _allows(part) and undo() is not False:
                self._undo[i] = None


_active: list[Observation] = []
_covered: list[Undo] = []  # parts that could not be removed yet, because something else was installed over them
_compiles = False  # a compilation is in progress
_runs_compiled = False  # a compiled function runs, so new code below it would be compiled
_stop_watching: list[Undo] = []


def _allows(part: _Installed) -> bool:
    """Return whether the compiler's state allows that a part is installed."""
    return not (_compiles or (part.is_guarded and _runs_compiled))


def is_observed() -> bool:
    """Return whether a user's program is observed; torch.compile must then compile it as without observation."""
    return bool(_active)


def _set_state(*, compiles: bool | None = None, runs_compiled: bool | None = None) -> None:
    global _compiles, _runs_compiled
    before = _compiles, _runs_compiled
    _compiles = _compiles if compiles is None else compiles
    _runs_compiled = _runs_compiled if runs_compiled is None else runs_compiled
    if before != (_compiles, _runs_compiled):
        for observation in reversed(_active):
            observation._remove()
        for observation in _active:
            observation._install()


def _watch_compiler() -> None:
    """Track when torch.compile compiles, and when a compiled function runs.

    `torch._dynamo.reset()` drops callbacks, so the functions that call them are replaced instead.
    """
    from torch._dynamo import eval_frame
    from torch._dynamo.callback import CompilationCallbackHandler as Handler

    starts, ends, set_callback = (
        Handler.run_start_callbacks,
        Handler.run_end_callbacks,
        eval_frame._maybe_set_eval_frame,
    )

    @untraced
    @functools.wraps(starts)
    def compilation_starts(*args: Any) -> None:
        _set_state(compiles=True)
        starts(*args)

    @untraced
    @functools.wraps(ends)
    def compilation_ends(*args: Any) -> None:
        ends(*args)
        _set_state(compiles=False)

    @untraced
    @functools.wraps(set_callback)
    def callback_is_set(callback: Any) -> Any:
        _set_state(runs_compiled=callable(callback))
        return set_callback(callback)

    scripts = torch.jit._recursive.create_script_module

    @untraced
    @functools.wraps(scripts)
    def scripted(*args: Any, **kwargs: Any) -> Any:
        """Compile a module with torch.jit, without hooks, which torch.jit would treat as the program's code."""
        before = _compiles
        _set_state(compiles=True)
        try:
            return scripts(*args, **kwargs)
        finally:
            _set_state(compiles=before)

    _stop_watching.append(replaced(torch.jit._recursive, "create_script_module", scripted))
    _stop_watching.append(replaced(Handler, "run_start_callbacks", compilation_starts))
    _stop_watching.append(replaced(Handler, "run_end_callbacks", compilation_ends))
    _stop_watching.append(replaced(eval_frame, "_maybe_set_eval_frame", callback_is_set))


def _leave_compiler() -> None:
    while _stop_watching:
        _stop_watching.pop()()
    _set_state(compiles=False, runs_compiled=False)


def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Undo:
    """Replace an attribute of a class or module; return a function that restores it.

    That function returns False and does nothing while something else has replaced the attribute again.
    """
    own = vars(owner).get(name)
    setattr(owner, name, function)

    @untraced
    def restore() -> bool:
        if vars(owner).get(name) is not function:
            return False
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
        return True

    return restore
