"""Reasons and remedies that several backends return, worded alike."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from importlib.util import find_spec

import torch

from cs_systems.attention import TOLERANCE, AttentionCall


def no_cuda() -> str | None:
    """Return why nothing can run on a GPU here, or None."""
    if torch.cuda.is_available():
        return None
    return "torch sees no CUDA device: run with --device cpu, or install a CUDA build of torch"


def wrong_dtype(name: str, call: AttentionCall, dtypes: Iterable[str]) -> str | None:
    """Return why `name` does not support the call's dtype, or None."""
    dtypes = tuple(dtypes)
    if call.dtype in dtypes:
        return None
    instead = ", or the backend naive" if call.dtype in TOLERANCE else ""
    return f"{name} does not take {call.dtype}: use {' or '.join(dtypes)}{instead}"


def cannot_run(call: AttentionCall) -> str | None:
    """Return what stops even the most general backend, a non-floating dtype or an absent device, or None."""
    return wrong_dtype("attention", call, TOLERANCE) or (no_cuda() if call.device == "cuda" else None)


def cannot_compile(device: str) -> str | None:
    """Return what torch.compile lacks on this machine to generate code for `device`, or None."""
    if device == "cuda":
        if reason := no_cuda():
            return reason
        if find_spec("triton") is None:
            return "torch.compile needs triton to generate GPU code: pip install triton (Linux), or use naive"
    compilers = [os.environ[name] for name in ("CXX", "CC") if os.environ.get(name)] or ["g++", "gcc", "clang"]
    if not any(shutil.which(compiler) for compiler in compilers):
        return (
            f"torch.compile needs a C++ compiler and found no {' or '.join(compilers)}: apt install g++, or use naive"
        )
    return None
