"""Code shared by the backends for Hopper GPUs: from a call on tensors to their kernels, and its gradient."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cs_systems.formulas.cost import AttentionAlgorithm
from cs_systems.instrument.attention_calls import as_operators
from cs_systems.model.attention import TOLERANCE, AttentionBackend, AttentionCall
from cs_systems.model.attention._autograd import applied, without_second_derivative
from cs_systems.model.attention._mask import causal_offset, uneven_heads
from cs_systems.model.attention._operators import operators
from cs_systems.model.attention._refusals import check_one_device, no_cuda, wrong_dtype
from cs_systems.model.kernels.driver import multiprocessors
from cs_systems.model.kernels.layout import padded_d_head, takes_layout
from cs_systems.model.kernels.prepared import PreparedPass, empty_rows

DTYPES = ("float16", "bfloat16")
INPUTS = ("q", "k", "v")
NOT_DETERMINISTIC = (
    "the gradient of q is not deterministic, and torch.use_deterministic_algorithms is on; use flash_triton, whose "
    "gradients are deterministic, or call torch.use_deterministic_algorithms(False)"
)


@dataclass(frozen=True)
class HopperKernels:
    """Kernels of one Hopper backend.

    Attributes:
        name: the name of the backend.
        problem: imports the class whose launches are the kernels; `Problem` of kernels/gluon/launch defines its
            interface.
        missing: returns the reason that required software is missing, with the remedy, or None.
        repeatable: where torch requires deterministic algorithms, `prepare` and `backward` receive as many int32 as the
            problem's `turns`, and sum each number of dq in one order. Without it a backward is rejected there.
        padded_queries: returns, for a call, the number that the problem's `padded_q` is a multiple of.
        largest_d_head: the largest head size.
        computed_d_head: returns the head size that the products take.
    """

    name: str
    problem: Callable[[], Any]
    missing: Callable[[], str | None]
    padded_queries: Callable[[AttentionCall], int]
    largest_d_head: int
    computed_d_head: Callable[[int], int] = padded_d_head
    repeatable: bool = False

    def unavailable(self, call: AttentionCall) -> str | None:
        """Return the reason that this call is not supported, with the remedy, or None."""
        if call.device != "cuda":
            return "a Hopper GPU is required; use flash_torch on the CPU"
        if reason := wrong_dtype(call, DTYPES):
            return reason
        if call.d_head % 8 or not 8 <= call.d_head <= self.largest_d_head:
            from cs_systems.model.attention.flash_triton import LARGEST_D_HEAD

            instead = "flash_triton" if call.d_head <= LARGEST_D_HEAD else "sdpa_math or naive"
            return f"d_head {call.d_head} is not a multiple of 8 from 8 to {self.largest_d_head}; use {instead}"
        if call.heads_q % call.heads_kv:
            return uneven_heads(call.heads_q, call.heads_kv)
        needs_determinism = torch.are_deterministic_algorithms_enabled() and not self.repeatable
        if call.needs_backward and needs_determinism and not torch.is_deterministic_algorithms_warn_only_enabled():
            return NOT_DETERMINISTIC
        if reason := no_cuda():
            return reason
        capability = torch.cuda.get_device_capability()
        if capability != (9, 0):
            have, instead = ".".join(map(str, capability)), "flash_triton" if capability >= (8, 0) else "sdpa_efficient"
            return f"compute capability 9.0 (Hopper) is required, and this GPU has {have}; use {instead}"
        return self.missing()

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Raise ValueError with the reason and the remedy for a call that cannot be served."""
        check_one_device(q, k, v)
        if not q.dtype == k.dtype == v.dtype:
            dtypes = f"{q.dtype}, {k.dtype}, {v.dtype}"
            raise ValueError(f"q, k, v are {dtypes}; cast them to one dtype, or call under autocast")
        if not q.ndim == k.ndim == 4 or k.shape != v.shape or q.shape[-1] != k.shape[-1] or q.shape[0] != k.shape[0]:
            shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
            raise ValueError(
                f"q, k, v have shapes {shapes}; give each the shape (batch, heads, seq, d_head): k and v alike, with "
                "the batch and the d_head of q"
            )
        dtype, (_, heads_q, seq_q, d_head) = str(q.dtype).removeprefix("torch."), q.shape
        call = AttentionCall(
            q.device.type, dtype, d_head, seq_q, k.shape[-2], heads_q, k.shape[1], needs_backward=False
        )
        if reason := self.unavailable(call):
            raise ValueError(f"{self.name}: {reason}")

    def algorithm(self, call: AttentionCall) -> AttentionAlgorithm:
        """Return forward's tiles, the head sizes of the products and of dq's buffer, and backward's padded queries."""
        depth = padded_d_head(call.d_head)
        return AttentionAlgorithm(
            64, 128 if depth <= 128 else 80, self.computed_d_head(call.d_head), backward_matmuls=5,
            dq_accumulator_bytes=4, dq_accumulator_d_head=depth, padded_queries=self.padded_queries(call),
        )  # fmt: skip

    def alert_not_deterministic(self) -> None:
        """Raise RuntimeError where only deterministic algorithms are allowed, or warn, as torch's own operators do."""
        if self.repeatable or not torch.are_deterministic_algorithms_enabled():
            return
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError(f"{self.name}: {NOT_DETERMINISTIC}")
        warnings.warn(f"{self.name}: {NOT_DETERMINISTIC}", stacklevel=2)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, offset: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the output, laid out as q, and the log-sum-exp."""
        o, lse = torch.empty_like(q), empty_rows(q)
        if q.numel() and k.numel():
            self._forward.run((q, k, v), (o, lse), causal, offset, scale)
            return o, lse
        self.check(q, k, v)
        return o.zero_(), lse.fill_(-torch.inf)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor,
        causal: bool, offset: int, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the gradients of q, k and v, each laid out as its tensor."""
        self.alert_not_deterministic()
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        if not q.numel() or not k.numel():
            return dq.zero_(), dk.zero_(), dv.zero_()
        in_order = self.repeatable and torch.are_deterministic_algorithms_enabled()
        self._backward.run((q, k, v, o, lse, do), (dq, dk, dv), causal, offset, scale, in_order)
        return dq, dk, dv

    @cached_property
    def _forward(self) -> PreparedPass:
        return PreparedPass(INPUTS, ("o", "lse"), self._forward_launches, takes_layout, self.check)

    @cached_property
    def _backward(self) -> PreparedPass:
        inputs, outputs = (*INPUTS, "o", "lse", "do"), ("dq", "dk", "dv")
        return PreparedPass(
            inputs, outputs, self._backward_launches, takes_layout, lambda *inputs: self.check(*inputs[:3])
        )

    def _forward_launches(
        self, device: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
        causal: bool, offset: int, scale: float,
    ) -> tuple[list[Any], dict[str, Tensor]]:  # fmt: skip
        return [self.problem()(q, k, v, causal, offset, scale, multiprocessors(device)).forward(o, lse)], {}

    def _backward_launches(
        self, device: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor,
        dq: Tensor, dk: Tensor, dv: Tensor, causal: bool, offset: int, scale: float, in_order: bool,
    ) -> tuple[list[Any], dict[str, Tensor]]:  # fmt: skip
        problem = self.problem()(q, k, v, causal, offset, scale, multiprocessors(device))
        rows = (q.shape[0] * q.shape[1], problem.padded_q)
        lse_log2, delta = lse.new_empty(rows), lse.new_empty(rows)
        summed = lse.new_empty(*rows, padded_d_head(q.shape[-1]))
        turns = {"turns": lse.new_empty(problem.turns, dtype=torch.int32)} if in_order else {}
        launches = [
            problem.prepare(o, lse, do, lse_log2, delta, summed, **turns),
            problem.backward(do, lse_log2, delta, summed, dk, dv, **turns),
            problem.finish(summed, dq),
        ]
        return launches, {"lse_log2": lse_log2, "delta": delta, "summed": summed, **turns}


def attention_of(kernels: HopperKernels) -> Callable[..., Tensor]:
    """Return the backend's function.

    Registers its two passes as custom operators, so that a compiled model keeps one graph.
    """
    forward_op, backward_op = operators(kernels.name, kernels.forward, kernels.backward)

    class FlashAttention(torch.autograd.Function):
        """Autograd function of the backend.

        Keeps q, k, v, the output, and the log-sum-exp of the scaled scores: (batch, heads, seq_q), float32, natural
        logarithm, −inf where a query sees no key.
        """

        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, offset: int, scale: float) -> Tensor:
            run = forward_op if as_operators() else kernels.forward
            o, lse = run(q, k, v, causal, offset, scale)
            ctx.save_for_backward(q, k, v, o, lse)
            ctx.call = (causal, offset, scale)
            return o

        @staticmethod
        @without_second_derivative
        def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
            run = backward_op if as_operators() else kernels.backward
            gradients = run(*(*ctx.saved_tensors, do, *ctx.call))
            return *gradients, None, None, None

    apply = applied(FlashAttention)

    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, align: str = "upper_left"
    ) -> Tensor:
        """Compute attention with the backend's kernels.

        q (batch, heads, seq_q, d_head); k, v (batch, heads_kv, seq_k, d_head) → (batch, heads, seq_q, d_head), where
        heads_kv divides heads. scale defaults to 1/√d_head. Under autocast the inputs are cast, as torch does for its
        own attention. Raises ValueError with the reason and the remedy for a call that `unavailable` rejects.
        """
        device = q.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        if scale <= 0:  # the kernels take the maximum before they scale
            q, scale = (q * 0, 1.0) if scale == 0 else (-q, -scale)
        out: Tensor = apply(q, k, v, causal, causal_offset(q.shape[-2], k.shape[-2], align), scale)
        return out

    return attention


def backend_of(kernels: HopperKernels, describe: Callable[[], str | None]) -> AttentionBackend:
    return AttentionBackend(
        attention_of(kernels),
        unavailable=kernels.unavailable,
        tolerance={dtype: TOLERANCE[dtype] for dtype in DTYPES},
        algorithm=kernels.algorithm,
        describe=describe,
    )
