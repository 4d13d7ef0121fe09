"""Compiler and loader of CUDA C++ kernels for Hopper by NVRTC, and their launches as data.

NVRTC comes through cuda-core, NVIDIA's own Python interface to it.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cs_systems.model.kernels.driver import (
    L2_256,
    SWIZZLE_128,
    TENSOR_MAP_TYPES,
    KernelCall,
    Parameter,
    TensorMap,
    driver,
    succeed,
)

FOLDER = Path(__file__).parent
ARCHITECTURE = "sm_90a"
INSTALL = "pip install cuda-core cuda-bindings nvidia-cuda-nvrtc"
FOR_RACECHECK = "CS_SYSTEMS_FOR_RACECHECK"
"""Environment variable; if set, kernels are compiled so that compute-sanitizer's racecheck follows their barriers."""
Macros = tuple[tuple[str, int], ...]


def missing() -> str | None:
    """Return the reason why no kernel can be compiled, with the remedy, or None."""
    # The parent of a namespace package comes first: find_spec raises for a submodule of an absent parent.
    if any(find_spec(package) is None for package in ("cuda", "cuda.core", "cuda.bindings")):
        return f"cuda-core, which compiles the kernels, is not installed; run {INSTALL}"
    return None


def compiler() -> tuple[Any, Any]:
    """Return cuda-core's Program and ProgramOptions. Raises RuntimeError if they cannot be imported."""
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        try:
            from cuda.core.experimental import Program, ProgramOptions  # cuda-core before 0.5
        except ImportError:
            raise RuntimeError(f"cuda-core cannot be imported ({error}); run {INSTALL}") from error
    return Program, ProgramOptions


def machine_code(source: str, macros: Macros) -> bytes:
    """Compile `source`.cu to a cubin; needs no GPU. Raises RuntimeError without cuda-core."""
    Program, ProgramOptions = compiler()
    defined: Any = [(name, str(value)) for name, value in (*macros, ("EVERY_LANE", int(FOR_RACECHECK in os.environ)))]
    options = ProgramOptions(name=f"{source}.cu", arch=ARCHITECTURE, define_macro=defined, include_path=str(FOLDER))
    return bytes(Program((FOLDER / f"{source}.cu").read_text(), "c++", options).compile("cubin").code)


@cache
def _module(source: str, macros: Macros, device: int) -> ctypes.c_void_p:
    module = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # torch makes its context on first use
        succeed(driver().cuModuleLoadData(ctypes.byref(module), machine_code(source, macros)))
    return module


@cache
def function(source: str, name: str, macros: Macros, shared_bytes: int, device: int) -> int:
    """Load a kernel into torch's context on the device, allow its shared memory, and return it."""
    found = ctypes.c_void_p()
    succeed(driver().cuModuleGetFunction(ctypes.byref(found), _module(source, macros, device), name.encode()))
    most_dynamic_shared = 8
    succeed(driver().cuFuncSetAttribute(found, most_dynamic_shared, shared_bytes))
    return found.value or 0


@dataclass(frozen=True)
class Launch:
    """A kernel call as data, for tensors of one layout.

    Attributes:
        source, kernel, macros: the kernel: its file, its name, and how it is compiled.
        blocks, threads, shared_bytes: as in a launch.
        parameters: of the kernel, in its order.
        overlaps: the kernel may start before the previous kernel has ended, and waits for it in its own code.
    """

    source: str
    kernel: str
    macros: Macros
    blocks: int
    threads: int
    shared_bytes: int
    parameters: tuple[Parameter, ...]
    overlaps: bool = False

    def load(self, device: int) -> KernelCall:
        """Compile the kernel, if that is not done yet, and load it on the device."""
        loaded = function(self.source, self.kernel, self.macros, self.shared_bytes, device)
        return KernelCall(loaded, (self.blocks, 1), self.threads, self.shared_bytes, self.parameters, self.overlaps)


def tensor_map(operand: str, tensor: Tensor, rows: int) -> TensorMap:
    """Return the parameter for a tensor map with boxes of `rows` rows x 64 columns and a 128-byte swizzle.

    tensor: (batch, heads, seq, d_head), accepted by `takes_layout`; only its layout matters.
    """
    # A dimension of one element may have any stride, but TMA still requires a valid one.
    strides = [step if size > 1 else 64 for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return TensorMap(
        operand,
        TENSOR_MAP_TYPES[tensor.dtype],
        sizes=tuple(tensor.shape[::-1]),
        strides_bytes=tuple(step * tensor.element_size() for step in strides[-2::-1]),
        box=(64, rows, 1, 1),
        swizzle=SWIZZLE_128,
        l2_promotion=L2_256,
    )
