"""Kernel calls through the CUDA driver's C interface, prepared once, so that a run only sets addresses and launches.

The driver is on every machine with a GPU. Tensor maps and parameters are in separately allocated memory, because TMA
requires maps at multiples of 64 bytes, which Python objects do not guarantee.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from threading import Lock
from typing import Any

import torch

NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
TENSOR_MAP_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
SWIZZLE_128 = 3
L2_128, L2_256 = 2, 3
PROGRAMMATIC_STREAM_SERIALIZATION = 6
MOST_MAPS = 256
"""Limit of addresses of one operand with stored tensor maps, 128 bytes each."""


@cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def multiprocessors(device: int) -> int:
    """Return the number of multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def succeed(status: int) -> None:
    """Raise RuntimeError with the driver's name of the error for a status other than 0."""
    if status:
        name = ctypes.c_char_p()
        driver().cuGetErrorName(status, ctypes.byref(name))
        raise RuntimeError(
            f"the CUDA driver returned error {status} {(name.value or b'(unknown)').decode()}; look it up under "
            "CUresult in NVIDIA's documentation of the driver API"
        )


@dataclass(frozen=True)
class Address:
    """Kernel parameter for the address of an operand."""

    operand: str


@dataclass(frozen=True)
class TensorMap:
    """Kernel parameter for a tensor map (TMA) of an operand. Reads past its ends give zeros; writes there are dropped.

    Attributes:
        operand: the name of the tensor.
        dtype: the driver's number of the element type, from TENSOR_MAP_TYPES.
        sizes: elements per dimension, innermost first, like all that follow.
        strides_bytes: strides of all dimensions except the innermost.
        box: elements of a copied block per dimension.
        swizzle: the driver's constant for the order in shared memory.
        l2_promotion: the driver's constant for the bytes that a copy fetches into the L2 cache.
    """

    operand: str
    dtype: int
    sizes: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    l2_promotion: int

    def encode(self, made: Any, address: int) -> None:
        """Write the tensor map of the operand at `address` to the address `made`: 128 bytes, aligned to 64."""
        rank = len(self.sizes)
        int32s, int64s = ctypes.c_uint32 * rank, ctypes.c_uint64 * rank
        no_interleave, zeros = 0, 0
        succeed(
            driver().cuTensorMapEncodeTiled(
                made, self.dtype, rank, ctypes.c_void_p(address), int64s(*self.sizes), int64s(*self.strides_bytes),
                int32s(*self.box), int32s(*[1] * rank), no_interleave, self.swizzle, self.l2_promotion, zeros,
            )
        )  # fmt: skip


@dataclass(frozen=True)
class Counter:
    """Kernel parameter for the address of two int32 zeros that no launch on another stream or graph uses.

    The kernel must reset them to zeros, because launches on one stream run one after the other and share them.
    """


@dataclass(frozen=True)
class Struct:
    """Kernel parameter for a struct of addresses, tensor maps and constants, with the layout of C++."""

    members: tuple[Address | TensorMap | Any, ...]

    def offsets(self) -> list[int]:
        """Return the offset of each member in bytes, and last the size of the struct."""
        found, end, alignments = list[int](), 0, [*map(_alignment, self.members)]
        for member, alignment in zip(self.members, alignments, strict=True):
            found.append(-(-end // alignment) * alignment)
            end = found[-1] + parameter_bytes(member)
        return [*found, -(-end // max(alignments)) * max(alignments)]


Parameter = Address | TensorMap | Counter | Struct | Any
"""Address, TensorMap, Counter, Struct, or a ctypes object: a constant."""


def parameter_bytes(parameter: Parameter) -> int:
    if isinstance(parameter, TensorMap):
        return 128
    if isinstance(parameter, Struct):
        return parameter.offsets()[-1]
    return 8 if isinstance(parameter, Address | Counter) else ctypes.sizeof(parameter)


def _alignment(member: Address | TensorMap | Any) -> int:
    if isinstance(member, TensorMap):
        return 64
    return 8 if isinstance(member, Address) else ctypes.alignment(member)


@dataclass(frozen=True)
class KernelCall:
    """Loaded kernel with its parameters.

    overlaps: the kernel may start before the previous kernel has ended, and waits for it in its own code.
    """

    function: int
    grid: tuple[int, int]
    threads: int
    shared_bytes: int
    parameters: tuple[Parameter, ...]
    overlaps: bool = False


class CallSequence:
    """Sequence of kernel calls on operands of one layout, run on the current stream of their device."""

    def __init__(self, device: int, operands: Sequence[str], calls: Sequence[KernelCall]) -> None:
        """Prepare the calls. `run` receives the addresses in the order of `operands`."""
        self._device, self._lock = device, Lock()
        self._kept: list[Any] = []
        self._addresses = (ctypes.c_uint64 * len(operands))()
        self._counter = ctypes.c_uint64()
        self._maps: list[tuple[int, MapsInMemory, Any, int]] = []
        self._maps_in_structs: list[tuple[int, MapsInMemory, int]] = []
        self._addresses_in_structs: list[tuple[int, ctypes.c_uint64]] = []
        counts = any(isinstance(parameter, Counter) for call in calls for parameter in call.parameters)
        self._counters = counters(device) if counts else None
        self._launches = [self._launch(call, list(operands)) for call in calls if all(call.grid)]

    def run(self, addresses: list[int]) -> None:
        """Launch the calls on operands at these addresses."""
        if torch.cuda.current_device() != self._device:
            with torch.cuda.device(self._device):
                return self.run(addresses)
        stream: int = torch._C._cuda_getCurrentRawStream(self._device)
        with self._lock:  # a launch copies its parameters, so they can change as soon as it returns
            self._addresses[:] = addresses  # type: ignore[assignment]
            for operand, maps, pointers, place in self._maps:
                address = addresses[operand]
                pointers[place] = maps.made.get(address) or maps.make(address)
            for operand, maps, to in self._maps_in_structs:
                address = addresses[operand]
                ctypes.memmove(to, maps.made.get(address) or maps.make(address), 128)
            for operand, at in self._addresses_in_structs:
                at.value = addresses[operand]
            if self._counters is not None:
                self._counter.value = self._counters.address(stream)
            for config, launch in self._launches:
                config.stream = stream
                status = launch()
                if status == NO_CONTEXT:
                    _make_context_current(self._device)
                    status = launch()
                succeed(status)
        return None

    def _launch(self, call: KernelCall, operands: list[str]) -> tuple[_Config, partial[int]]:
        """Return the launch's configuration, in which the stream is not set yet, and the driver's function."""
        _check_sizes(call.function, [parameter_bytes(parameter) for parameter in call.parameters])
        pointers = (ctypes.c_void_p * len(call.parameters))()
        for place, parameter in enumerate(call.parameters):
            if isinstance(parameter, TensorMap):
                self._maps.append((operands.index(parameter.operand), MapsInMemory(parameter), pointers, place))
            elif isinstance(parameter, Address):
                pointers[place] = ctypes.addressof(self._addresses) + 8 * operands.index(parameter.operand)
            elif isinstance(parameter, Struct):
                pointers[place] = self._struct(parameter, operands)
            else:
                pointers[place] = ctypes.addressof(self._counter if isinstance(parameter, Counter) else parameter)
        attributes = (_Attribute * 1)()
        attributes[0].id, attributes[0].value[0] = PROGRAMMATIC_STREAM_SERIALIZATION, 1
        sizes = (*call.grid, 1, call.threads, 1, 1, call.shared_bytes)
        config = _Config(*sizes, None, attributes, int(call.overlaps))
        # Keep alive everything that the launch points to, including constants.
        launch = partial(
            driver().cuLaunchKernelEx, ctypes.byref(config), ctypes.c_void_p(call.function), pointers, None
        )
        config.kept = (attributes, pointers, call.parameters)
        return config, launch

    def _struct(self, struct: Struct, operands: list[str]) -> int:
        """Lay out a struct in memory and return its address. `run` fills in its addresses and maps."""
        *offsets, size = struct.offsets()
        raw = (ctypes.c_uint8 * (size + 64))()
        self._kept.append(raw)
        start = -ctypes.addressof(raw) % 64
        for member, offset in zip(struct.members, offsets, strict=True):
            if isinstance(member, TensorMap):
                to = ctypes.addressof(raw) + start + offset
                self._maps_in_structs.append((operands.index(member.operand), MapsInMemory(member), to))
            elif isinstance(member, Address):
                at = ctypes.c_uint64.from_buffer(raw, start + offset)
                self._addresses_in_structs.append((operands.index(member.operand), at))
            else:
                ctypes.memmove(ctypes.addressof(raw) + start + offset, ctypes.addressof(member), ctypes.sizeof(member))
        return ctypes.addressof(raw) + start


class MapsInMemory:
    """Cache of tensor maps of one layout by address, because torch's allocator reuses addresses."""

    def __init__(self, described: TensorMap) -> None:
        self._described = described
        self.made: dict[int, int] = {}
        self._kept: list[Any] = []

    def make(self, address: int) -> int:
        """Make the map of an operand at `address`, and return the map's own address."""
        if len(self.made) >= MOST_MAPS:
            self.made.clear()
            self._kept.clear()
        raw = (ctypes.c_uint64 * 24)()
        made = (ctypes.c_uint64 * 16).from_buffer(raw, -ctypes.addressof(raw) % 64)
        self._described.encode(made, address)
        self._kept.append(made)
        self.made[address] = ctypes.addressof(made)
        return self.made[address]


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


class _Counters:
    """Pairs of int32 zeros on one device: one for each stream, and one for each launch that a graph captures.

    A graph may be replayed on any stream, also at the same time as another graph captured on the same stream.
    """

    def __init__(self, device: int) -> None:
        self._zeros = torch.zeros(1 << 14, 2, dtype=torch.int32, device=torch.device("cuda", device))
        torch.cuda.current_stream(device).synchronize()  # other streams read them too
        self._of_stream: dict[int, int] = {}
        start, end = self._zeros.data_ptr(), self._zeros.data_ptr() + self._zeros.nbytes
        self._streams, self._captured = (itertools.cycle(range(start + odd, end, 16)) for odd in (0, 8))

    def address(self, stream: int) -> int:
        if torch.cuda.is_current_stream_capturing():
            return next(self._captured)
        if stream not in self._of_stream:
            self._of_stream[stream] = next(self._streams)
        return self._of_stream[stream]


counters = cache(_Counters)


def _check_sizes(function: int, sizes: list[int]) -> None:
    """Raise RuntimeError unless the loaded kernel takes parameters of these bytes; before CUDA 12.4, check nothing."""
    query = getattr(driver(), "cuFuncGetParamInfo", None)
    if query is None:
        return
    found, offset, size = list[int](), ctypes.c_size_t(), ctypes.c_size_t()
    while not query(
        ctypes.c_void_p(function), ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)
    ):  # an error means that there are no more parameters
        found.append(size.value)
    if found != sizes:
        raise RuntimeError(
            f"the kernel takes parameters of {found} bytes, but {sizes} bytes were prepared; install the Triton "
            "version that this PyTorch requires, or if it is installed, report a bug of cs-systems"
        )


def _make_context_current(device: int) -> None:
    """Make torch's context current in this thread; a new thread has none until it calls the CUDA runtime."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    succeed(driver().cuDeviceGet(ctypes.byref(handle), device))
    succeed(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle))
    succeed(driver().cuCtxSetCurrent(context))
