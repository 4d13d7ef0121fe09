"""Named ranges for profilers: an NVTX range, a `record_function`, or nothing. Floor 1.

Free when off: `annotate` then returns one shared null context. Modules are annotated from outside; a `with
annotate(...)` stands only inside attention algorithms whose parts (scores, softmax, value) no module boundary shows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

_OFF: AbstractContextManager[None] = nullcontext()
_open: Callable[[str], AbstractContextManager[object]] | None = None


def annotate(name: str) -> AbstractContextManager[object]:
    """A context manager that marks what runs inside as `name` for the profiler that listens, if any.

    Nothing inside torch.compile: a range cannot be traced, and fusion leaves no part to mark.
    """
    return _OFF if _open is None or torch.compiler.is_compiling() else _open(name)


def listen(opener: Callable[[str], AbstractContextManager[object]] | None) -> None:
    """Turn annotations on with `opener` (`nvtx.annotate`, `torch.profiler.record_function`), or off with None."""
    global _open
    _open = opener
