"""Launches of the FlashAttention-2 kernels on tensors: grids, strides, tiles. Importing it needs triton.

A `Launch` is a kernel call as data: `run()` performs it through Triton; `load()` prepares it for the driver, at a tenth
of the cost per call; and `cs_systems.model.kernels.compile` compiles it without a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from cs_systems.model.kernels.driver import L2_128, TENSOR_MAP_TYPES, Address, KernelCall, Parameter, TensorMap
from cs_systems.model.kernels.triton.backward import flash_dkdv_kernel, flash_dq_kernel
from cs_systems.model.kernels.triton.configs import Tile, Tiles, padded_d_head, tiles_for
from cs_systems.model.kernels.triton.forward import flash_forward_kernel

INTERPRETED = not isinstance(flash_forward_kernel, JITFunction)  # TRITON_INTERPRET was set when triton was imported


@dataclass(frozen=True)
class Launch:
    """Kernel call as data: `kernel[grid](**arguments, **options)`.

    The first dimension of the grid, batch · heads, may be up to 2³¹ − 1.
    """

    kernel: Any
    grid: tuple[int, int]
    arguments: dict[str, Any]
    options: dict[str, int]

    def run(self) -> None:
        if all(self.grid):  # the driver rejects an empty grid, and there is nothing to do
            self.kernel[self.grid](**self.arguments, **self.options)

    def load(self, device: int) -> KernelCall:
        """Compile the kernel for the current device and load it. Only the layouts of tensors matter."""
        compiled = self.kernel.warmup(grid=self.grid, **self.arguments, **self.options)
        compiled.run  # noqa: B018 - the first access loads it
        threads = 32 * compiled.metadata.num_warps
        parameters = tuple(parameters_of(compiled, self.arguments))
        return KernelCall(compiled.function, self.grid, threads, compiled.metadata.shared, parameters)


SCALARS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


def parameters_of(compiled: Any, arguments: Mapping[str, Any]) -> Iterator[Parameter]:
    """Yield the parameters of a compiled kernel; operands have the names of its arguments.

    The order is the same as in Triton's launcher: a descriptor becomes its map, sizes and strides; constants are left
    out; two pointers to scratch memory come last.
    """
    metadata = compiled.metadata
    unusual = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    used = [name for name in unusual if getattr(metadata, name)] + ["num_ctas"] * (metadata.num_ctas != 1)
    if used:
        raise RuntimeError(
            f"the kernel {metadata.name} requires {', '.join(used)} of Triton, which cs-systems does not support; "
            "use another attention backend or part, or in Python call Launch.run()"
        )
    maps = iter(metadata.tensordesc_meta or ())
    for name, kind in compiled.src.signature.items():
        yield from _parameters(name, kind, arguments[name], maps)
    yield from (ctypes.c_void_p(), ctypes.c_void_p())


def _parameters(name: str, kind: Any, value: Any, maps: Iterator[Mapping[str, Any]]) -> Iterator[Parameter]:
    if isinstance(kind, tuple):
        for one_kind, one_value in zip(kind, value, strict=True):
            yield from _parameters(name, one_kind, one_value, maps)
    elif kind.startswith("tensordesc"):
        described = next(maps, None)
        if described is None:
            raise RuntimeError(
                f"argument {name} is a tensor descriptor, which requires compute capability 9.0 or higher; "
                "call without_descriptors() on the tiles"
            )
        yield _tensor_map(name, value, described)
        yield from map(ctypes.c_int32, value.shape)
        yield from map(ctypes.c_int64, value.strides)
    elif kind.startswith("*"):
        yield Address(name)
    elif kind != "constexpr":
        yield SCALARS[kind](value)


def _tensor_map(operand: str, descriptor: TensorDescriptor, compiled: Mapping[str, Any]) -> TensorMap:
    """Return the map of a descriptor, with the block and the swizzle that the compiler chose."""
    return TensorMap(
        operand,
        TENSOR_MAP_TYPES[descriptor.base.dtype],
        sizes=tuple(descriptor.shape[::-1]),
        strides_bytes=tuple(step * compiled["elem_size"] for step in descriptor.strides[-2::-1]),
        box=tuple(compiled["block_size"][::-1]),
        swizzle=compiled["swizzle"],
        l2_promotion=L2_128,
    )


@dataclass(frozen=True)
class Packing:
    """Sequences of different lengths, packed one after the other in the rows of one tensor.

    Attributes:
        starts_q, starts_k: int32; sequence i has the rows starts[i] to before starts[i + 1].
        total_q: rows of q.
        lower_right: the last query of a sequence sees its last key.
    """

    starts_q: Tensor
    starts_k: Tensor
    total_q: int
    lower_right: bool


@dataclass(frozen=True)
class Problem:
    """Attention call on q (batch, heads, seq_q, d_head) and k, v (batch, heads_kv, seq_k, d_head), any strides.

    Query i sees key j when not causal or j <= i + offset, and if window > 0 (causal) only the last `window` of these.
    `tiles` replaces the table's tiles. The statistics lse, lse_log2 and delta are (batch, heads, seq_q), float32,
    contiguous; the other tensors may have any layout.

    packing: q, k and v are views (sequences, heads, rows of the longest, d_head) of packed tensors, with stride 0 in
    the first dimension; the statistics are (heads, total_q).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    offset: int
    scale: float
    tiles: Tiles | None = None
    window: int = 0
    packing: Packing | None = None

    def forward(self, o: Tensor, lse: Tensor) -> Launch:
        """Return the launch that writes o and lse."""
        tile = self._tiles().forward
        arguments = self._common(tile) | self._by_query(tile) | _with_strides(o=o) | {"lse": lse}
        sign = {"scale_log2": abs(arguments["scale_log2"]), "NEGATE": self.scale < 0}
        return self._launch(flash_forward_kernel, self.q, tile.block_m, arguments | sign, tile)

    def dq(self, o: Tensor, lse: Tensor, do: Tensor, lse_log2: Tensor, delta: Tensor, dq: Tensor) -> Launch:
        """Return the launch that writes dq, lse_log2 and delta. Run it before `dkdv`, which reads the latter two."""
        tile = self._tiles().dq
        arguments = self._common(tile) | self._by_query(tile) | _with_strides(o=o, do=do, dq=dq)
        arguments |= {"lse": lse, "lse_log2": lse_log2, "delta": delta, "scale": self.scale}
        return self._launch(flash_dq_kernel, self.q, tile.block_m, arguments, tile)

    def dkdv(self, do: Tensor, lse_log2: Tensor, delta: Tensor, dk: Tensor, dv: Tensor) -> Launch:
        """Return the launch that writes dk and dv."""
        tile = self._tiles().dkdv
        rows, row = [1, 1, tile.block_m, padded_d_head(self.q.shape[-1])], [1, tile.block_m]
        arguments = self._common(tile) | _with_strides(do=do, dk=dk, dv=dv)
        arguments |= {"heads_kv": self.k.shape[1], "GROUP": self.q.shape[1] // self.k.shape[1], "scale": self.scale}
        arguments |= {"q": _streamed(self.q, rows, tile), "do": _streamed(do, rows, tile)}
        arguments |= {"lse_log2": _streamed(lse_log2.flatten(0, -2), row, tile)}
        arguments |= {"delta": _streamed(delta.flatten(0, -2), row, tile)}
        return self._launch(flash_dkdv_kernel, self.k, tile.block_n, arguments, tile)

    def _launch(self, kernel: Any, owned: Tensor, block: int, arguments: dict[str, Any], tile: Tile) -> Launch:
        if self.k.shape[2] == 1 and not INTERPRETED:
            kernel = _of_unknown_lengths(kernel)
        batch, heads, seq, _ = owned.shape
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        return Launch(kernel, (batch * heads, -(-seq // block)), arguments, options)

    def _tiles(self) -> Tiles:
        capability = torch.cuda.get_device_capability(self.q.device) if self.q.is_cuda else None
        return self.tiles or tiles_for(capability, self.q.element_size(), self.q.shape[-1])

    def _packed(self) -> dict[str, Any]:
        """Return the arguments that only packed sequences use."""
        if self.packing is None:
            return {"starts_q": None, "starts_k": None, "total_q": 0, "PACKED": False, "LOWER_RIGHT": False}
        packed = self.packing
        starts = {"starts_q": packed.starts_q, "starts_k": packed.starts_k}
        return starts | {"total_q": packed.total_q, "PACKED": True, "LOWER_RIGHT": packed.lower_right}

    def _by_query(self, tile: Tile) -> dict[str, Any]:
        """Return the arguments of the kernels in which a program has queries and loops over the keys."""
        rows = [1, 1, tile.block_n, padded_d_head(self.q.shape[-1])]
        walked = {"k": _streamed(self.k, rows, tile), "v": _streamed(self.v, rows, tile)}
        return walked | {"heads": self.q.shape[1], "group": self.q.shape[1] // self.k.shape[1]}

    def _common(self, tile: Tile) -> dict[str, Any]:
        return _with_strides(q=self.q, k=self.k, v=self.v) | {
            **self._packed(),
            "seq_q": self.q.shape[2],
            "seq_k": self.k.shape[2],
            "offset": self.offset,
            "window": self.window,
            "scale_log2": self.scale * math.log2(math.e),
            "D": self.q.shape[-1],
            "BLOCK_D": padded_d_head(self.q.shape[-1]),
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "CAUSAL": self.causal,
            "WINDOWED": self.window > 0,
        }


@functools.cache
def _of_unknown_lengths(kernel: Any) -> Any:
    """Return `kernel` without Triton's specialization on the lengths.

    It would treat a length of 1 as a constant, and CUDA 12.8's ptxas crashes on the code of Triton 3.6 for one key. Not
    all kernels use this, because the forward at d_head 128 would take 4 to 8% longer.
    """
    return triton.jit(kernel.fn, do_not_specialize=("seq_q", "seq_k"))


def _streamed(tensor: Tensor, block: list[int], tile: Tile) -> Tensor | TensorDescriptor:
    """Return a tensor descriptor if the tile has descriptors and TMA supports the layout, else the tensor.

    Used for the tensors over which a kernel loops.
    """
    if not tile.descriptors:
        return tensor
    *outer, inner = tensor.stride()
    if not tensor.numel():
        return tensor
    aligned = all(stride > 0 and stride * tensor.element_size() % 16 == 0 for stride in outer)
    if not aligned or inner != 1 or tensor.data_ptr() % 16:
        return tensor
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


def _with_strides(**tensors: Tensor) -> dict[str, Any]:
    """Return each tensor under its name, and its four strides (in elements) as `<name>_strides`."""
    return {key: value for name, t in tensors.items() for key, value in ((name, t), (f"{name}_strides", t.stride()))}
