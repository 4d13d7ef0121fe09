"""Shared checks of attention backends that return the reason why a call is not supported, with its remedy."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from importlib.util import find_spec

import torch
from torch import Tensor

from cs_systems.model.attention import TOLERANCE, AttentionCall


def no_cuda() -> str | None:
    """Return the reason why nothing can run on a GPU here, or None."""
    if torch.cuda.is_available():
        return None
    return "torch finds no CUDA device; use device cpu, or install a CUDA build of torch"


def wrong_dtype(call: AttentionCall, dtypes: Iterable[str]) -> str | None:
    """Return the reason why the call's dtype is not supported, or None."""
    dtypes = tuple(dtypes)
    if call.dtype in dtypes:
        return None
    instead = ", or the backend naive" if call.dtype in TOLERANCE else ""
    return f"{call.dtype} is not supported on {call.device}; use {' or '.join(dtypes)}{instead}"


def check_one_device(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError if the tensors are on different devices, because a kernel would get a wrong address."""
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v are on {q.device}, {k.device}, {v.device}; move them to one device")


def cannot_run(call: AttentionCall) -> str | None:
    """Return the reason why no backend can run the call (a non-floating dtype, or no such device), or None."""
    return wrong_dtype(call, TOLERANCE) or (no_cuda() if call.device == "cuda" else None)


def cannot_compile(device: str) -> str | None:
    """Return the reason why torch.compile cannot generate code for `device` on this machine, or None."""
    if device == "cuda":
        if reason := no_cuda():
            return reason
        if find_spec("triton") is None:
            return "torch.compile needs triton, which is not installed; run pip install triton (Linux), or use naive"
    compilers = [os.environ[name] for name in ("CXX", "CC") if os.environ.get(name)] or ["g++", "gcc", "clang"]
    if not any(shutil.which(compiler) for compiler in compilers):
        return f"torch.compile needs a C++ compiler and finds no {' or '.join(compilers)}; install g++, or use naive"
    return None
