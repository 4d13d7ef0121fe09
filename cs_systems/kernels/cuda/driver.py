"""Compilation of CUDA C++ kernels for Hopper by NVRTC, and their launch by the driver with tensor maps.

NVRTC comes through cuda-core, NVIDIA's own Python interface to it. Maps and launches go through the driver's C
interface: it is on every machine with a GPU, and TMA requires maps at multiples of 64 bytes, which Python objects do
not guarantee.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).parent
ARCHITECTURE = "sm_90a"
INSTALL = "pip install cuda-core cuda-bindings nvidia-cuda-nvrtc"
FOR_RACECHECK = "CS_SYSTEMS_FOR_RACECHECK"
"""Environment variable; if set, kernels are compiled so that compute-sanitizer's racecheck follows their barriers."""
Macros = tuple[tuple[str, int], ...]


def machine_code(source: str, macros: Macros) -> bytes:
    """Compile `source`.cu to a cubin; needs no GPU. Raises RuntimeError without cuda-core."""
    try:
        try:
            from cuda.core import Program, ProgramOptions
        except ImportError:  # cuda-core before 0.5
            from cuda.core.experimental import Program, ProgramOptions
    except ImportError as error:
        raise RuntimeError(f"cuda-core is not installed ({error}); run {INSTALL}") from error
    defined: Any = [(name, str(value)) for name, value in (*macros, ("EVERY_LANE", int(FOR_RACECHECK in os.environ)))]
    options = ProgramOptions(name=f"{source}.cu", arch=ARCHITECTURE, define_macro=defined, include_path=str(FOLDER))
    return bytes(Program((FOLDER / f"{source}.cu").read_text(), "c++", options).compile("cubin").code)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _succeed(status: int) -> None:
    if status:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(name))
        raise RuntimeError(f"the CUDA driver returned error {status} {(name.value or b'').decode()}")


@cache
def _module(source: str, macros: Macros, device: int) -> ctypes.c_void_p:
    module = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # torch makes its context on first use
        _succeed(_driver().cuModuleLoadData(ctypes.byref(module), machine_code(source, macros)))
    return module


@cache
def function(source: str, name: str, macros: Macros, shared_bytes: int, device: int) -> ctypes.c_void_p:
    """Return a kernel, loaded into torch's context on that device and allowed its shared memory."""
    found = ctypes.c_void_p()
    _succeed(_driver().cuModuleGetFunction(ctypes.byref(found), _module(source, macros, device), name.encode()))
    most_dynamic_shared = 8
    _succeed(_driver().cuFuncSetAttribute(found, most_dynamic_shared, shared_bytes))
    return found


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("unused", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        *((f"{of}_{axis}", ctypes.c_uint) for of in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("number", ctypes.c_uint),
    )


PROGRAMMATIC_STREAM_SERIALIZATION = 6


@dataclass(frozen=True)
class Launch:
    """A kernel call as data.

    Attributes:
        arguments: ctypes objects.
        keeps: the tensors that the arguments point into.
        overlaps: the kernel may start before the previous kernel has ended, and waits for it itself.
    """

    function: ctypes.c_void_p
    blocks: int
    threads: int
    shared_bytes: int
    arguments: tuple[Any, ...]
    keeps: tuple[Tensor, ...]
    overlaps: bool = False

    def run(self) -> None:
        """Launch on the current stream of the current device."""
        stream = torch.cuda.current_stream().cuda_stream
        pointers = (ctypes.c_void_p * len(self.arguments))(*map(ctypes.addressof, self.arguments))
        attributes = (_Attribute * 1)()
        attributes[0].id, attributes[0].value[0] = PROGRAMMATIC_STREAM_SERIALIZATION, 1
        sizes = (self.blocks, 1, 1, self.threads, 1, 1, self.shared_bytes)
        config = _Config(*sizes, stream, attributes, int(self.overlaps))
        _succeed(_driver().cuLaunchKernelEx(ctypes.byref(config), self.function, pointers, None))


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def tensor_map(tensor: Tensor, rows: int) -> ctypes.Array[ctypes.c_uint64]:
    """Return a tensor map with boxes of `rows` rows x 64 columns and a 128-byte swizzle.

    tensor: (batch, heads, seq, d_head), accepted by `takes_layout`. Reads past its ends give zeros, and nothing is
    written there.
    """
    raw = (ctypes.c_uint64 * 24)()
    made = (ctypes.c_uint64 * 16).from_buffer(raw, -ctypes.addressof(raw) % 64)
    sizes = tensor.shape[::-1]
    # A dimension of one element may have any stride, but TMA still requires a valid one.
    strides = [step if size > 1 else 64 for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    strides_bytes = [step * tensor.element_size() for step in strides[-2::-1]]
    types = {torch.float16: 6, torch.bfloat16: 9}
    int32s, int64s = ctypes.c_uint32 * 4, ctypes.c_uint64 * 4
    no_interleave, swizzle_128, l2_256, zeros = 0, 3, 3, 0
    _succeed(
        _driver().cuTensorMapEncodeTiled(
            made, types[tensor.dtype], 4, pointer(tensor), int64s(*sizes), int64s(*strides_bytes),
            int32s(64, rows, 1, 1), int32s(1, 1, 1, 1), no_interleave, swizzle_128, l2_256, zeros,
        )
    )  # fmt: skip
    return made
