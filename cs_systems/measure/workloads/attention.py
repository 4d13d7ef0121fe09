"""One attention call on random q, k, v without a model: forward, backward over a retained graph, or both.

The tensors have the precision's dtype, without autocast. Backward is `torch.autograd.grad`, which returns the
gradients without accumulating them. With `l2` "clear", the L2 cache is filled with other data before each step; with
"warm" it keeps the data of the previous step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cs_systems.analysis.comparison.own_code import OWN_CODE
from cs_systems.config import AttentionShape, Mode, Phase, Precision, RunConfig
from cs_systems.core.tables import Tables
from cs_systems.formulas import cost
from cs_systems.formulas.cost import AttentionAlgorithm
from cs_systems.formulas.memory.attention import attention_memory
from cs_systems.machine.device import Device
from cs_systems.measure.workloads import Cell, Unavailable
from cs_systems.measure.workloads._calls import COMPUTE_DTYPES, check_backend, check_output
from cs_systems.measure.workloads._own_code import attention_row
from cs_systems.model.attention import AttentionCall
from cs_systems.record import Ran


@dataclass(frozen=True)
class Problem:
    """Function to differentiate: `function(*leaves)`, a tensor of shape `out_shape`, with respect to its leaves."""

    function: Callable[..., Tensor]
    leaves: tuple[Tensor, ...]
    out_shape: tuple[int, ...]


class Attention:
    """Workload of one attention call; `config.mode` selects the phases of a step.

    problem: returns the same call on tensors of another layout.
    """

    hides_launches = True  # many kernels here are shorter than their launch

    def __init__(self, cell: Cell, device: Device, problem: Problem | None = None) -> None:
        config = cell.config
        self.cell, self.config, self.device, self.shape = cell, config, device, shape_of(config)
        self.call = attention_call(config, device)
        self.backend = check_backend(cell, device, self.call)
        self.problem = problem or _separate(cell, device)
        self.clear_l2 = device.l2_clearer() if config.l2 == "clear" else None
        self.retain_graph = config.mode is Mode.BACKWARD
        self._out: Tensor | None = None
        self._out_gradient: Tensor | None = None
        if config.mode is not Mode.FORWARD:
            dtype = getattr(torch, self.call.dtype)
            self._out_gradient = torch.randn(self.problem.out_shape, dtype=dtype, device=device.torch)
        self._gradients: tuple[Tensor, ...] | None = None
        if self.backend is None:
            check_output(config.attention, self.problem.function, self.problem.leaves, self.problem.out_shape)

    @staticmethod
    def preflight(cell: Cell, device: Device, *, packed: bool = False) -> int | None:
        config = cell.config
        if config.precision is Precision.FP8:
            raise Unavailable("no attention backend computes in fp8, which is for linear layers; use bf16")
        if config.l2 == "clear" and not device.is_cuda:
            raise Unavailable("l2 clear requires a GPU; use l2 warm")
        call = attention_call(config, device)
        backend = check_backend(cell, device, call)
        return None if backend is None else _predicted_peak_bytes(config, device, backend.algorithm(call), packed)

    def prepare(self) -> None:
        self._gradients = None
        if not self.retain_graph:
            self._out = None
        if self.config.mode is Mode.BACKWARD and self._out is None:
            self._forward()
        if self.clear_l2:
            self.clear_l2()

    def step(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        if self.config.mode is not Mode.BACKWARD:
            yield Phase.FORWARD, self._forward
        if self.config.mode is not Mode.FORWARD:
            yield Phase.BACKWARD, self._backward

    def _forward(self) -> None:
        with torch.set_grad_enabled(self.call.needs_backward):
            self._out = self.problem.function(*self.problem.leaves)

    def _backward(self) -> None:
        try:
            self._gradients = self._differentiate()
        except RuntimeError as error:
            # torch.compile may reuse ("donate") the graph's buffers in backward, and then refuses a retained graph.
            if not self.retain_graph or "donated buffers" not in str(error):
                raise
            self.retain_graph = False
            self._gradients = self._differentiate()

    def _differentiate(self) -> tuple[Tensor, ...]:
        assert self._out is not None
        return torch.autograd.grad(self._out, self.problem.leaves, self._out_gradient, retain_graph=self.retain_graph)

    def cost(self) -> Mapping[str, cost.PhaseCost] | None:
        if self.backend is None:
            return None
        element, algorithm = cost.COMPUTE_BYTES[self.config.precision], self.backend.algorithm(self.call)
        return cost.attention_cost(self.shape, self.config.mode, algorithm, element)

    def _before_backward_bytes(self) -> int | None:
        """Return the bytes of the call between forward and backward, by one more forward; None on a CPU.

        This is the memory of the inputs, the output with its gradient, and the tensors that forward keeps for backward.
        """
        if not self.device.is_cuda or self._out_gradient is None:
            return None
        self._gradients = self._out = None
        held = self.device.allocated_bytes()
        self._forward()
        return self.device.allocated_bytes() - held + sum(x.nbytes for x in (*self.problem.leaves, self._out_gradient))

    def tables(self) -> Tables:
        """Return the table `own_code` for a user's own function, compared with naive attention."""
        if self.backend is not None:
            return {}
        return OWN_CODE.filled([attention_row(self.config.attention, self.cell.attention, self.call)])

    def describe(self) -> Ran:
        """Return the record's description of the call.

        `graph`: the graph that backward alone ran over. `executed_d_head` and the block sizes: forward's padding and
        tile.
        """
        graph = "retained" if self.retain_graph else "rebuilt, untimed, before each step"
        algorithm = self.backend.algorithm(self.call) if self.backend else None
        return {
            "attention": self.config.attention,
            "attention_version": self.backend.describe() if self.backend else None,
            "tokens": self.shape.batch * self.shape.seq,
            "l2": self.config.l2,
            "launches_hidden": self.device.is_cuda,
            "graph": graph if self.config.mode is Mode.BACKWARD else None,
            "before_backward_bytes": self._before_backward_bytes(),
            "executed_d_head": (algorithm.d_head or self.shape.d_head) if algorithm else None,
            "block_q": algorithm.block_q if algorithm else None,
            "block_k": algorithm.block_k if algorithm else None,
        }


def shape_of(config: RunConfig) -> AttentionShape:
    return config.shape or AttentionShape()


def attention_call(config: RunConfig, device: Device) -> AttentionCall:
    shape = shape_of(config)
    return AttentionCall(
        device.torch.type,
        COMPUTE_DTYPES[config.precision],
        shape.d_head,
        shape.seq,
        shape.key_length,
        shape.heads,
        shape.kv_heads,
        shape.causal,
        shape.align,
        needs_backward=config.keep_graph or config.mode is not Mode.FORWARD,
        window=shape.window,
    )


def random_leaves(config: RunConfig, device: Device, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return standard normal tensors of the call's dtype, the same for the same seed.

    They require gradients if the mode needs them.
    """
    call = attention_call(config, device)
    dtype = getattr(torch, call.dtype)
    torch.manual_seed(config.seed)
    return tuple(
        torch.randn(shape, dtype=dtype, device=device.torch, requires_grad=call.needs_backward) for shape in shapes
    )


def _predicted_peak_bytes(config: RunConfig, device: Device, algorithm: AttentionAlgorithm, packed: bool) -> int:
    """Return the cell's predicted peak in bytes, including the buffer that clears the L2 cache, if any."""
    shape, element = shape_of(config), cost.COMPUTE_BYTES[config.precision]
    mode = Mode.FORWARD_BACKWARD if config.keep_graph and config.mode is Mode.FORWARD else config.mode
    prediction = attention_memory(shape, mode, element, algorithm, packed=packed, cuda=device.is_cuda)
    # With --keep-graph, forward saves the tensors for a backward that never runs.
    only_forward = sum(prediction.instants["forward"].values())
    peak = only_forward if config.mode is Mode.FORWARD else prediction.peak_bytes
    return peak + (device.l2_clear_bytes() if config.l2 == "clear" else 0)


def _separate(cell: Cell, device: Device) -> Problem:
    """Return the call on separate tensors q (batch, heads, seq, d_head) and k, v (batch, heads_kv, seq_k, d_head)."""
    shape = shape_of(cell.config)
    q = (shape.batch, shape.heads, shape.seq, shape.d_head)
    k = (shape.batch, shape.kv_heads, shape.key_length, shape.d_head)
    window = {} if shape.window is None else {"window": shape.window}
    function = partial(cell.attention, causal=shape.causal, scale=None, align=shape.align, **window)
    return Problem(function, random_leaves(cell.config, device, q, k, k), q)


WORKLOAD = Attention
