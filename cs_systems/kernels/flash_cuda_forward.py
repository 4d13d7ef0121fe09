"""From tensors to launches of the FlashAttention forward in CUDA C++ for Hopper (flash_cuda/forward.cu).

NVRTC compiles the kernel on first use through cuda-core; tensor maps and launches go through the driver's C interface:
cuda.bindings keeps a tensor map where Python puts it, and the driver wants it aligned to 64 bytes.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).parent / "flash_cuda"
ROWS = 64  # of a warpgroup
WARPGROUP = 128
EXACT, SLACK, STALE = 0, 1, 2
GRID, PERSISTENT, DYNAMIC = 0, 1, 2
L2_FOR_KEYS_BYTES = 32 << 20


@dataclass(frozen=True)
class ForwardPlan:
    """What the kernel is compiled for: its macros, in lower case; forward.cu says what they do."""

    d: int
    consumers: int
    keys: int
    k_stages: int
    v_stages: int
    causal: int
    tail: int
    fp16: int
    softmax: int
    ping_pong: int
    schedule: int
    q_in_registers: int

    def shared_bytes(self) -> int:
        tiles = 2 * self.consumers * ROWS + (self.k_stages + self.v_stages) * self.keys
        return 1024 + tiles * self.d * 2 + 8 * (3 * self.consumers + 2 * self.k_stages + 2 * self.v_stages)


@dataclass(frozen=True)
class ForwardOptions:
    """As in forward.cu. consumers: warpgroups of 64 queries; keys: of a tile; *_stages: tiles in flight."""

    consumers: int
    keys: int
    k_stages: int
    v_stages: int
    softmax: int = STALE
    ping_pong: bool = False
    schedule: int = DYNAMIC
    q_in_registers: bool = False


class Sizes(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("seq_q", "seq_k", "heads", "group", "batch_heads", "offset", "first_row")),
        *((name, ctypes.c_int) for name in ("row_tiles", "heads_in_l2")),
        ("scale_log2", ctypes.c_float),
    )


def machine_code(plan: ForwardPlan) -> bytes:
    """The cubin for sm_90a; needs no GPU. Raises RuntimeError without cuda-core."""
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError:  # cuda-core before 0.5
        from cuda.core.experimental import Program, ProgramOptions
    macros: Any = [(name.upper(), str(int(value))) for name, value in asdict(plan).items()]
    options = ProgramOptions(name="forward.cu", arch="sm_90a", define_macro=macros, include_path=str(FOLDER))
    return bytes(Program((FOLDER / "forward.cu").read_text(), "c++", options).compile("cubin").code)


@cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def succeed(status: int) -> None:
    if status:
        name = ctypes.c_char_p()
        driver().cuGetErrorName(status, ctypes.byref(name))
        raise RuntimeError(f"CUDA error: the driver answers {status} {name.value!r}")


@cache
def kernel(plan: ForwardPlan, device: int) -> ctypes.c_void_p:
    """The function, loaded into torch's context on that device, allowed its shared memory."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # torch makes its context on first use
        succeed(driver().cuModuleLoadData(ctypes.byref(module), machine_code(plan)))
    succeed(driver().cuModuleGetFunction(ctypes.byref(function), module, b"attend_forward"))
    max_dynamic_shared = 8
    succeed(driver().cuFuncSetAttribute(function, max_dynamic_shared, plan.shared_bytes()))
    return function


def described(tensor: Tensor, rows: int) -> ctypes.Array[ctypes.c_uint64]:
    """A tensor map: boxes of `rows` rows x 64 columns of a (batch, heads, seq, d_head) tensor, 128-byte swizzle; zeros
    are read past its ends.
    """
    raw = (ctypes.c_uint64 * 24)()
    made = (ctypes.c_uint64 * 16).from_buffer(raw, -ctypes.addressof(raw) % 64)
    sizes = list(reversed(tensor.shape))
    # A dimension of one element may have any stride, and the copy engine still wants one that it could step by.
    strides = [s if n > 1 else 64 for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    strides_bytes = [stride * tensor.element_size() for stride in reversed(strides[:-1])]
    types = {torch.float16: 6, torch.bfloat16: 9}
    u32, u64 = ctypes.c_uint32, ctypes.c_uint64
    swizzle_128, l2_256 = 3, 3
    succeed(
        driver().cuTensorMapEncodeTiled(
            made, types[tensor.dtype], 4, ctypes.c_void_p(tensor.data_ptr()), (u64 * 4)(*sizes),
            (u64 * 3)(*strides_bytes), (u32 * 4)(64, rows, 1, 1), (u32 * 4)(1, 1, 1, 1), 0, swizzle_128, l2_256, 0,
        )
    )  # fmt: skip
    return made


@cache
def counter(device: torch.device, stream: int) -> Tensor:
    """Two zeros, which the kernel leaves as zeros: launches of one stream come one after the other."""
    return torch.zeros(2, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Launch:
    function: ctypes.c_void_p
    blocks: int
    threads: int
    shared_bytes: int
    arguments: tuple[Any, ...]
    keep: tuple[Tensor, ...]

    def run(self) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        pointers = (ctypes.c_void_p * len(self.arguments))(*(ctypes.addressof(x) for x in self.arguments))
        grid = (self.blocks, 1, 1, self.threads, 1, 1)
        succeed(driver().cuLaunchKernel(self.function, *grid, self.shared_bytes, stream, pointers, None))


def plan_of(q: Tensor, seq_k: int, causal: bool, options: ForwardOptions) -> ForwardPlan:
    return ForwardPlan(
        d=64 if q.shape[-1] <= 64 else 128,
        consumers=options.consumers,
        keys=options.keys,
        k_stages=options.k_stages,
        v_stages=options.v_stages,
        causal=int(causal),
        tail=int(not causal and seq_k % options.keys != 0),
        fp16=int(q.dtype == torch.float16),
        softmax=options.softmax,
        ping_pong=int(options.ping_pong),
        schedule=options.schedule,
        q_in_registers=int(options.q_in_registers),
    )


def forward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *,
    causal: bool, offset: int, scale: float, multiprocessors: int, options: ForwardOptions,
) -> Launch:  # fmt: skip
    """Writes o and lse (batch, heads, seq_q), float32, natural logarithm, −inf where no key is seen.

    q, o (batch, heads, seq_q, d_head), k, v (batch, heads_kv, seq_k, d_head), as the copy engine reads them. Query i
    sees key j if not causal or j <= i + offset; scale > 0.
    """
    batch, heads, seq_q, _ = q.shape
    heads_kv, seq_k = k.shape[1:3]
    plan = plan_of(q, seq_k, causal, options)
    rows = ROWS * options.consumers
    row_tiles = -(-seq_q // rows)
    group = heads // heads_kv
    sizes = Sizes(
        seq_q=seq_q,
        seq_k=seq_k,
        heads=heads,
        group=group,
        batch_heads=batch * heads,
        offset=offset,
        # Causal tiles end with the queries: the one that is not full is the shortest.
        first_row=seq_q - row_tiles * rows if causal else 0,
        row_tiles=row_tiles,
        heads_in_l2=max(1, L2_FOR_KEYS_BYTES // (2 * seq_k * plan.d * k.element_size())) * group,
        scale_log2=scale * math.log2(math.e),
    )
    tiles = batch * heads * row_tiles
    count = counter(q.device, torch.cuda.current_stream().cuda_stream)
    arguments = (
        described(q, ROWS),
        described(k, options.keys),
        described(v, options.keys),
        described(o, 16),
        ctypes.c_void_p(lse.data_ptr()),
        ctypes.c_void_p(count.data_ptr()),
        sizes,
    )
    return Launch(
        kernel(plan, q.device.index or 0),
        tiles if options.schedule == GRID else min(tiles, multiprocessors),
        (options.consumers + 1) * WARPGROUP,
        plan.shared_bytes(),
        arguments,
        (q, k, v, o, lse, count),
    )
