# mypy: allow-untyped-defs, allow-incomplete-defs
"""AdamW for bfloat16 parameters with exact float32 master weights, all tensors in one Triton launch.

A master weight w is kept as two halves: the parameter is w rounded to bfloat16 (half up), and `remainder` is the int16
difference between the bits of w and the parameter's bits. No bit of w is lost, and it takes 4 bytes instead of 6 with a
copy. A step moves 26 bytes for each element, or 18 with moments in bfloat16, which are rounded stochastically.

A program updates CHUNK elements of one tensor. It finds the addresses of its tensor in a table on the device. Importing
this module needs triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 8192  # elements per program
BLOCK = 1024  # elements that a program holds at once
_HALF = tl.constexpr(0x8000)


@triton.jit
def _load_state(pointer, i, mask, BF16: tl.constexpr, MASKED: tl.constexpr):
    """Load moments as float32; a bfloat16 is read as the upper half of a float32."""
    if BF16:
        p = pointer.to(tl.pointer_type(tl.int16))
        bits = tl.load(p + i, mask=mask, other=0) if MASKED else tl.load(p + i)
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    p = pointer.to(tl.pointer_type(tl.float32))
    return tl.load(p + i, mask=mask, other=0.0) if MASKED else tl.load(p + i)


@triton.jit
def _store_state(pointer, i, mask, value, noise, BF16: tl.constexpr, MASKED: tl.constexpr):
    """Store moments; a bfloat16 is rounded up with a probability decided by 16 random bits of `noise`."""
    if BF16:
        p = pointer.to(tl.pointer_type(tl.int16))
        bits = ((value.to(tl.int32, bitcast=True) + noise) >> 16).to(tl.int16)
    else:
        p = pointer.to(tl.pointer_type(tl.float32))
        bits = value
    if MASKED:
        tl.store(p + i, bits, mask=mask)
    else:
        tl.store(p + i, bits)


@triton.jit
def _random_bits(i, salt):
    """Return 32 bits that depend on the element and the salt (the finalizer of MurmurHash3)."""
    x = i.to(tl.uint32) * 0x9E3779B1 + salt
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _update(
    upper, lower, gradient, first, second, start, size, salt, lr, rate1, rate2, correction1, correction2, eps, decay,
    BF16_STATE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    for offset in range(0, CHUNK, BLOCK):
        i = start + offset + tl.arange(0, BLOCK)
        mask = i < size
        if MASKED:
            high, low = tl.load(upper + i, mask=mask, other=0), tl.load(lower + i, mask=mask, other=0)
            g_bits = tl.load(gradient + i, mask=mask, other=0)
        else:
            high, low, g_bits = tl.load(upper + i), tl.load(lower + i), tl.load(gradient + i)
        w = ((high.to(tl.int32) << 16) + low.to(tl.int32)).to(tl.float32, bitcast=True)
        g = (g_bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        m = _load_state(first, i, mask, BF16_STATE, MASKED)
        v = _load_state(second, i, mask, BF16_STATE, MASKED)
        m = m + rate1 * (g - m)
        v = v + rate2 * (g * g - v)
        w = w * (1 - lr * decay)
        w = w - lr / correction1 * m / (tl.sqrt(v / correction2) + eps)
        noise = _random_bits(i, salt)
        _store_state(first, i, mask, m, (noise & 0xFFFF).to(tl.int32), BF16_STATE, MASKED)
        _store_state(second, i, mask, v, (noise >> 16).to(tl.int32), BF16_STATE, MASKED)
        bits = w.to(tl.int32, bitcast=True)
        high = (bits + _HALF) >> 16
        low = bits - (high << 16)
        if MASKED:
            tl.store(upper + i, high.to(tl.int16), mask=mask)
            tl.store(lower + i, low.to(tl.int16), mask=mask)
        else:
            tl.store(upper + i, high.to(tl.int16))
            tl.store(lower + i, low.to(tl.int16))


@triton.jit
def adamw_kernel(
    addresses, gradients, sizes, owners, numbers, progress, lr, rate1, rate2, eps, decay,
    BF16_STATE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one chunk: addresses (tensors, 4) of parameter, remainder, first and second moment; gradients (tensors,).

    owners, numbers (chunks,): the tensor of each chunk, and its index in the tensor. progress: float64, the number t of
    this step from 1, 1 - beta1^t and 1 - beta2^t. rate1, rate2: 1 - beta1 and 1 - beta2, too inexact in float32.
    """
    chunk = tl.program_id(0)
    t = tl.load(owners + chunk)
    start, size = tl.load(numbers + chunk) * CHUNK, tl.load(sizes + t)
    upper = tl.multiple_of(tl.load(addresses + 4 * t).to(tl.pointer_type(tl.int16)), 16)
    lower = tl.multiple_of(tl.load(addresses + 4 * t + 1).to(tl.pointer_type(tl.int16)), 16)
    first = tl.multiple_of(tl.load(addresses + 4 * t + 2).to(tl.pointer_type(tl.int16)), 16)
    second = tl.multiple_of(tl.load(addresses + 4 * t + 3).to(tl.pointer_type(tl.int16)), 16)
    gradient = tl.multiple_of(tl.load(gradients + t).to(tl.pointer_type(tl.int16)), 16)
    correction1, correction2 = tl.load(progress + 1).to(tl.float32), tl.load(progress + 2).to(tl.float32)
    salt = (tl.load(progress).to(tl.uint32) * 0x85EBCA77 + t.to(tl.uint32)) * 0x27D4EB2F
    if start + CHUNK <= size:
        _update(upper, lower, gradient, first, second, start, size, salt, lr, rate1, rate2, correction1, correction2,
                eps, decay, BF16_STATE, CHUNK, BLOCK, False)  # fmt: skip
    else:
        _update(upper, lower, gradient, first, second, start, size, salt, lr, rate1, rate2, correction1, correction2,
                eps, decay, BF16_STATE, CHUNK, BLOCK, True)  # fmt: skip


@dataclass(frozen=True)
class Hyperparameters:
    """Settings of one step of AdamW, in the notation of Loshchilov & Hutter 2019, algorithm 2."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class Tables:
    """Tables on the device with the addresses of one group's tensors, for the kernel.

    tensors: for each parameter the parameter, its remainder, and its first and second moment, contiguous, at fixed
    addresses.
    """

    def __init__(self, tensors: Sequence[Sequence[Tensor]]) -> None:
        self.tensors = tensors
        device = tensors[0][0].device
        chunks = [(t, n) for t, (p, *_) in enumerate(tensors) for n in range(triton.cdiv(p.numel(), CHUNK))]
        self.addresses = torch.tensor([[x.data_ptr() for x in each] for each in tensors], device=device)
        self.sizes = torch.tensor([p.numel() for p, *_ in tensors], device=device)
        self.owners = torch.tensor([t for t, _ in chunks], dtype=torch.int32, device=device)
        self.numbers = torch.tensor([n for _, n in chunks], dtype=torch.int32, device=device)
        self.gradients = torch.empty(len(tensors), dtype=torch.int64, device=device)
        self._uploaded: tuple[int, ...] = ()
        # a graph repeats the copy from the table that it captured, so that table gets separate memory
        self._captured = torch.empty_like(self.gradients, device="cpu", pin_memory=self.gradients.is_cuda)

    def launch(self, gradients: Sequence[Tensor], progress: Tensor, settings: Hyperparameters) -> None:
        """Update all tensors of the group. gradients: bfloat16, contiguous; progress: as for the kernel."""
        self._upload(tuple(g.data_ptr() for g in gradients))
        arguments: dict[str, Any] = {
            "addresses": self.addresses,
            "gradients": self.gradients,
            "sizes": self.sizes,
            "owners": self.owners,
            "numbers": self.numbers,
            "progress": progress,
            "lr": settings.lr,
            "rate1": 1 - settings.beta1,
            "rate2": 1 - settings.beta2,
            "eps": settings.eps,
            "decay": settings.weight_decay,
        }
        bf16_state = self.tensors[0][2].dtype is torch.bfloat16
        adamw_kernel[(len(self.owners),)](**arguments, BF16_STATE=bf16_state, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=4)

    def _upload(self, addresses: tuple[int, ...]) -> None:
        """Copy the gradients' addresses to the device, unless they are the same as in the last step.

        The copy may be captured in one CUDA graph, not in several.
        """
        if addresses == self._uploaded:
            return
        self._uploaded = addresses
        table = torch.tensor(addresses)
        if self.gradients.is_cuda and torch.cuda.is_current_stream_capturing():
            self.gradients.copy_(self._captured.copy_(table), non_blocking=True)
        elif self.gradients.is_cuda:
            self.gradients.copy_(table.pin_memory(), non_blocking=True)
        else:
            self.gradients.copy_(table)
