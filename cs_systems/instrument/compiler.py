"""Observation that torch.compile does not notice.

torch.compile traces the Python code that it finds: a function that replaces one of torch's would be traced with it, or
break the graph, and a guard that sees another function than at tracing compiles again. So that a program is compiled as
it is alone,

- everything of an `Observation` is removed while something is compiled, by torch.jit too, and put back afterwards;
- what guards look at is removed, too, while compiled functions run;
- functions marked `untraced` or `passed_through` stay plain Python where compiled code calls them.

The times of phases in a function that is compiled as a whole are therefore unknown, and belong to what surrounds it.
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
_SKIPS_IT = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT)


def untraced(function: Function) -> Function:
    """Keep torch.compile from compiling a Python function, and what it calls."""
    dynamo.set_code_exec_strategy(function.__code__, _SKIPS_IT_AND_ITS_CALLS)
    return function


def passed_through(function: Function) -> Function:
    """Keep torch.compile from compiling a Python function, but not from compiling what it calls."""
    dynamo.set_code_exec_strategy(function.__code__, _SKIPS_IT)
    return function


@untraced
def is_tracing() -> bool:
    """Return whether this thread traces code, in place of running it alone."""
    keys, mode = torch._C._TorchDispatchModeKey, torch._C._get_dispatch_mode
    traces = any(mode(key) is not None for key in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL))
    return traces or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


class _Installed(NamedTuple):
    install: Callable[[], Undo]
    is_guarded: bool


class Observation:
    """Hooks and replaced functions, which are removed while torch.compile works.

    Several may be active at once, and each part is put back in the order in which it was added.
    """

    def __init__(self) -> None:
        self._parts: list[_Installed] = []
        self._undo: list[Undo | None] = []  # None: removed at the moment

    def add(self, install: Callable[[], Undo], *, is_guarded: bool = False) -> None:
        """Install a part of the observation.

        Args:
            install: installs it and returns what removes it, or returns False if it cannot now; called again after
                each removal.
            is_guarded: guards of compiled code look at what it changes.
        """
        if not _active:
            _watch_compiler()
        if self not in _active:
            _active.append(self)
        self._parts.append(_Installed(install, is_guarded))
        self._undo.append(None)
        self._update()

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

    def _update(self) -> None:
        """Install and remove what the state of the compiler asks for."""
        for i, part in enumerate(self._parts):
            is_wanted = not (_compiles or (part.is_guarded and _runs_compiled))
            undo = self._undo[i]
            if is_wanted and undo is None:
                self._undo[i] = part.install()
            elif not is_wanted and undo is not None and undo() is not False:
                self._undo[i] = None


_active: list[Observation] = []
_covered: list[Undo] = []  # what could not be removed yet, because something else was installed over it
_compiles = False  # something is being compiled
_runs_compiled = False  # a compiled function runs, so that new code below it would be compiled
_stop_watching: list[Undo] = []


def is_observed() -> bool:
    """Return whether a program of the user's is observed, which torch.compile has to compile as if it were alone."""
    return bool(_active)


def _set_state(*, compiles: bool | None = None, runs_compiled: bool | None = None) -> None:
    global _compiles, _runs_compiled
    before = _compiles, _runs_compiled
    _compiles = _compiles if compiles is None else compiles
    _runs_compiled = _runs_compiled if runs_compiled is None else runs_compiled
    if before != (_compiles, _runs_compiled):
        for observation in _active:
            observation._update()


def _watch_compiler() -> None:
    """Follow when torch.compile compiles, and when a function that it compiled runs.

    `torch._dynamo.reset()` forgets callbacks, so that the functions which call them are replaced instead.
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
        """Compile a module by torch.jit, which takes the hooks on it for code of the program."""
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
    """Replace an attribute of a class or module; return what restores it.

    That returns False, and does nothing, while something else stands in the function's place.
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
