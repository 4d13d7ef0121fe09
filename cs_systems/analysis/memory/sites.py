"""Line of the user's code that made an allocation, as one line of text for a stack."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from cs_systems.readers.snapshot import Frame, Stack


def sites(stacks: Iterable[Stack]) -> list[str | None]:
    """Return for each stack the innermost frame outside torch, and the torch frame that it ended in.

    The form is `train.py:12 forward > softmax`. Where a line has several callers among the stacks (a user's own module
    for every projection), the caller's line comes first, as in `model.py:114 > 31 forward > linear`. An empty stack
    gives None.
    """
    python = [python_frames(stack) for stack in stacks]
    own = [tuple(f for f in frames if not of_torch(f.file)) for frames in python]
    callers: dict[Frame, set[Frame]] = defaultdict(set)
    for frames in own:
        callers[frames[0] if frames else _NOWHERE].update(frames[1:2])
    return [_site(frames, chain, callers) for frames, chain in zip(python, own, strict=True)]


_NOWHERE = Frame("", 0, "")
UNKNOWN_FILE = "??"  # of a C++ frame without debugging symbols


def _site(frames: Stack, own: Stack, callers: dict[Frame, set[Frame]]) -> str | None:
    if not frames:
        return None
    inner = frames[0] if _is_python(frames[0]) else _native(frames)
    here, *outside = own if own and _is_python(own[0]) else (inner,)
    name = here.function if _is_python(here) else _native_name(here)
    text = name if here.file == UNKNOWN_FILE else f"{short_file(here.file)}:{here.line} {name}"
    if outside and len(callers[here]) > 1:
        same = outside[0].file == here.file
        text = f"{short_file(outside[0].file)}:{outside[0].line} > {text.partition(':')[2] if same else text}"
    called = short_file(inner.file).removesuffix(".py") if inner.function == "forward" else inner.function
    return text if here is inner else f"{text} > {called}"


def outside_forward(stack: Stack) -> str | None:
    """Return the line outside torch that calls the outermost function named forward, as `train.py:31 main`."""
    frames = python_frames(stack)
    last = max((n for n, frame in enumerate(frames) if frame.function == "forward"), default=-1)
    caller = next((f for f in frames[last + 1 :] if not of_torch(f.file)), None)
    return f"{short_file(caller.file)}:{caller.line} {caller.function}" if caller else None


def python_frames(stack: Stack) -> Stack:
    """Return the Python frames of a stack, or its C++ frames if it has none."""
    return tuple(filter(_is_python, stack)) or stack


def _is_python(frame: Frame) -> bool:
    return frame.file.endswith(".py") or frame.file.startswith("<")


def _native(stack: Stack) -> Frame:
    """Return the most specific frame of a C++ stack: autograd's node, the innermost of ATen, else the innermost."""
    for wanted in (r"torch::autograd::.*Backward\d*::apply\b.*", r"at::.*"):
        if found := next((f for f in stack if re.match(wanted, f.function)), None):
            return found
    return stack[0]


def _native_name(frame: Frame) -> str:
    """Return the name of autograd's node (`DivBackward0`), or of another C++ function without its arguments."""
    node = re.match(r"torch::autograd::(?:\w+::)*(\w*Backward\d*)::", frame.function)
    return node[1] if node else frame.function.partition("(")[0]


def short_file(file: str) -> str:
    return _posix(file).rpartition("/")[2]


def of_torch(file: str) -> bool:
    return _posix(file).startswith("torch/") or "/torch/" in _posix(file)


def _posix(file: str) -> str:
    """Return a path of Windows with the slashes of other systems."""
    return file.replace("\\", "/")
