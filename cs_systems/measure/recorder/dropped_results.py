"""Proof, from the instructions of the function that called a module, that it drops the second part of a pair.

The instructions after the call have to take the first part, or to store both in local variables of which the second is
never read: not in this function, and not in one inside it, whose variables are no plain local ones. Anything else may
read it, such as a return to the caller, an attribute, a list, a hook or a replaced function.
"""

from __future__ import annotations

import dis
import functools
import inspect
import linecache
import sys
from collections.abc import Sequence
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn.modules import module as modules

from cs_systems.instrument.hooks import ModuleHook
from cs_systems.measure.recorder.stacks import MOST_BYTES, Line, holds_locals, names_read

_NAMES = ("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL")  # beginnings
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_SUBSCRIPTS = ("BINARY_SUBSCR", "BINARY_OP")
_OF_CALLS = ("PUSH_NULL", "PRECALL", "KW_NAMES")


def drops_second(module: nn.Module, frame: FrameType) -> Line | None:
    """Return the call that a frame is in, if it calls this module itself, and drops the second part of the result."""
    code, at = frame.f_code, frame.f_lasti
    if not _is_dropped(code, at) or is_hooked(module) or _reads_frames(code.co_filename):
        return None
    if any(isinstance(each, (FunctionType, MethodType)) for each in (sys.gettrace(), sys.getprofile())):
        return None  # it may read variables
    variables = frame.f_locals
    called = _called(_callee(code, at), variables, frame.f_globals)
    if isinstance(variables, dict):
        variables.clear()  # Python keeps this copy with the frame, and it would keep the tensors alive
    # a built-in function that calls the module, such as `map`, has no frame
    is_direct = any(each is module for each in called) and all(isinstance(each, nn.Module) for each in called)
    return (code, at) if is_direct else None


def is_hooked(module: nn.Module) -> bool:
    """Return whether a hook, other than this package's, sees what a module returns, or its gradients."""
    of_all = modules._global_forward_hooks, modules._global_backward_hooks, modules._global_backward_pre_hooks
    own = module._forward_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(not isinstance(hook, ModuleHook) for hooks in (*of_all, *own) for hook in hooks.values())


@functools.lru_cache(maxsize=64)
def _reads_frames(file: str) -> bool:
    """Return whether a file has a function that reads the variables of others."""
    return any("f_locals" in line for line in linecache.getlines(file))


@functools.lru_cache(maxsize=512)
def _is_dropped(code: CodeType, at: int) -> bool:
    """Return whether a function drops the second part of the pair that its call at this place returns."""
    if not code.co_flags & inspect.CO_OPTIMIZED or len(code.co_code) > MOST_BYTES or holds_locals(code):
        return False
    every = [*dis.get_instructions(code)]
    following = [each for each in every if each.offset > at][:3]
    first, second = (*((each.opname, each.argval) for each in following), ("", None), ("", None))[:2]
    if first[0] in ("LOAD_CONST", "LOAD_SMALL_INT") and first[1] == 0 and type(first[1]) is int:
        return second[0] == "BINARY_SUBSCR" or (second[0] == "BINARY_OP" and following[1].argrepr == "[]")
    if first != ("UNPACK_SEQUENCE", 2):
        return False
    stored = list[str]()
    for each in following[1:]:
        if each.opname == "STORE_FAST":
            stored.append(each.argval)
        elif each.opname == "STORE_FAST_STORE_FAST":  # since Python 3.13
            stored += each.argval
        else:
            break
    return len(stored) > 1 and all(stored[1] not in names_read(each.opname, each.argval) for each in every)


@functools.lru_cache(maxsize=512)
def _callee(code: CodeType, at: int) -> Sequence[tuple[str, Any]]:
    """Return the instructions that load what is called at this place: they begin where the call begins."""
    every = [each for each in dis.get_instructions(code) if each.offset <= at]
    begin = every[-1].positions
    if begin is None or begin.lineno is None or begin.col_offset is None:
        return ()
    return [
        (each.opname, each.argval)
        for each in every[:-1]
        if each.positions is not None
        and (each.positions.lineno, each.positions.col_offset) == (begin.lineno, begin.col_offset)
    ]


def _called(instructions: Sequence[tuple[str, Any]], variables: Any, outside: Any) -> list[Any]:
    """Return what instructions load: one object, or all from which an index takes one; none if this is not known."""
    found = list[Any]()
    for operation, name in instructions:
        if operation.startswith(_NAMES) and isinstance(name, str):
            found = [variables.get(name, outside.get(name))]
        elif operation in _ATTRIBUTES:
            found = [_attribute(each, name) for each in found]
        elif operation in _SUBSCRIPTS and isinstance(found[0], (nn.ModuleList, nn.ModuleDict)):
            found = [*found[0].children()]
        elif operation not in _OF_CALLS:
            return []
    return found


def _attribute(value: Any, name: str) -> Any:
    """Return a module's part or an object's own attribute, without a call of the object; None without it."""
    try:
        of = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return of["_modules"].get(name) if isinstance(value, nn.Module) and name in of["_modules"] else of.get(name)
