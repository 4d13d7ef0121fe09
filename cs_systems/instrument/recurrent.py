"""Recurrent layers that allocate cuDNN's tensors but compute nothing, for predicting memory.

torch on a CPU runs a recurrent layer as one operation per gate and time step; cuDNN runs all layers, directions and
steps as one. Source of the tensors: aten/src/ATen/native/cudnn/RNN.cpp and aten/src/ATen/cudnn/AutocastRNN.cpp. NVIDIA
documents the size of neither the reserve nor the workspace, and the library reports them only on a GPU: both are fitted
here to profiles/foreign_memory/recurrent.csv.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cs_systems.formulas.memory.allocator import MIB

CAVEAT = (
    "recurrent layers: the prediction is a lower bound, since cuDNN takes a larger workspace for some sizes (for 3 of "
    "93 that were measured)"
)
GATES = {torch.lstm: 4, torch.gru: 3, torch.rnn_tanh: 1, torch.rnn_relu: 1}


@dataclass(frozen=True)
class _Layout:
    """Sizes of a call of one of the functions of GATES; all its layers and directions."""

    gates: int
    layers: int
    directions: int
    inputs: int
    hidden: int
    output: int  # features per direction of the projection, or else of the hidden state
    has_dropout: bool  # dropout between the layers
    is_training: bool

    def reserve_bytes(self, tokens: int, item: int) -> int:
        """Return the bytes that forward keeps for backward, for `tokens` time steps of all sequences.

        These are the gates and the inner state of each cell, and the outputs of all layers but the last, with one bit
        per output that dropout may zero. Source: the sizes printed in https://github.com/pytorch/pytorch/issues/2895,
        for an LSTM and a GRU; the table holds them to 0.1%.
        """
        if not self.is_training:
            return 0
        states = {4: 5, 3: 6, 1: 1}[self.gates]
        outputs = tokens * self.directions * (self.layers - 1) * self.output
        dropped = outputs // 8 if self.has_dropout else 0
        return (tokens * self.directions * self.layers * states * self.hidden + outputs) * item + dropped

    def workspace_bytes(self, tokens: int, batch: int, item: int, weights: int) -> int:
        """Return the bytes that cuDNN takes while forward runs, and again while backward runs.

        These are a copy of the weights, 8 MiB for each layer and direction, five times each state, and for each token
        the larger of two sums: one includes the gates, the other does not. The formula is a fit to 93 layers (one H200,
        cuDNN 9.19): within 5% or 5 MiB for 90, and 17 to 56% too low for the other three.
        """
        wide = max(self.inputs, self.directions * self.hidden)
        outputs = self.directions * self.hidden
        with_gates = self.gates * outputs + self.inputs + (2 * self.directions - 1) * wide
        with_gates += outputs if self.has_dropout and self.layers > 1 else 0
        if self.layers > 1:
            without_gates = 2 * self.inputs + 2 * outputs + (3 * self.directions - 2) * wide
        else:
            without_gates = 2 * self.directions * (self.inputs + self.hidden + max(self.inputs, self.hidden))
        states = (2 if self.gates == GATES[torch.lstm] else 1) * self.layers * outputs
        per_token = max(with_gates, without_gates)
        return 8 * MIB * self.layers * self.directions + (weights + tokens * per_token + 5 * batch * states) * item


class _Recurrent(torch.autograd.Function):
    """Forward and backward of cuDNN by the sizes of their tensors; the values are zeros.

    Shapes: x (time, batch, input), or (batch, time, input) with `batch_first`; states (layers × directions, batch,
    hidden).
    """

    @staticmethod
    def forward(
        ctx: Any, layout: _Layout, batch_first: bool, x: Tensor, hx: Tensor, cx: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        by_time = (x.transpose(0, 1) if batch_first else x).contiguous()
        tokens, item = math.prod(x.shape[:-1]), x.element_size()
        parameters = sum(weight.numel() for weight in weights)
        output = by_time.new_zeros(*by_time.shape[:-1], layout.output * layout.directions)
        states = [torch.zeros_like(state) for state in (hx, cx) if state is not None]
        workspace = x.new_empty(layout.workspace_bytes(tokens, hx.shape[1], item, parameters), dtype=torch.uint8)
        reserve = x.new_empty(layout.reserve_bytes(tokens, item), dtype=torch.uint8)
        del by_time, workspace
        _count_products(tokens, weights)
        output = output.transpose(0, 1) if batch_first else output
        ctx.layout, ctx.batch_first = layout, batch_first
        ctx.save_for_backward(x, hx, cx, output, reserve, *weights)
        return output, *states

    @staticmethod
    def backward(ctx: Any, y_gradient: Tensor, *state_gradients: Tensor) -> tuple[Any, ...]:
        x, hx, cx, _output, _reserve, *weights = ctx.saved_tensors
        tokens, item = math.prod(x.shape[:-1]), x.element_size()
        sizes = [weight.numel() for weight in weights]
        workspace = ctx.layout.workspace_bytes(tokens, hx.shape[1], item, sum(sizes))

        def by_time(tensor: Tensor) -> Tensor:
            copied: Tensor = (tensor.transpose(0, 1) if ctx.batch_first else tensor).contiguous()
            return copied

        # First the gradients of the input and the states, then of the weights.
        used = [by_time(x), by_time(y_gradient)]
        x_gradient = torch.zeros_like(used[0])
        states = [None if state is None else torch.zeros_like(state) for state in (hx, cx)]
        used.append(x.new_empty(workspace, dtype=torch.uint8))
        used.clear()
        used.append(by_time(x))
        flat = x.new_zeros(sum(sizes))
        used.append(x.new_empty(workspace, dtype=torch.uint8))
        for _ in range(2):
            _count_products(tokens, weights)
        gradients = [part.view_as(weight) for part, weight in zip(flat.split(sizes), weights, strict=True)]
        return None, None, x_gradient.transpose(0, 1) if ctx.batch_first else x_gradient, *states, *gradients


def _count_products(tokens: int, weights: Sequence[Tensor]) -> None:
    """Multiply tensors without data, so that a dispatch mode counts the FLOPs of every weight and token."""
    for weight in weights:
        if weight.dim() == 2:
            torch.mm(
                torch.empty(tokens, weight.shape[1], device="meta"), torch.empty(*weight.shape[::-1], device="meta")
            )


def run(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function of GATES with cuDNN's tensors. The arguments are torch's; the batch may be packed."""
    if isinstance(args[3], (list, tuple)):  # packed: data, batch_sizes, states, weights, …
        x, _sizes, states, weights, _biased, layers, dropout, is_training, both = args
        batch_first = False
    else:
        x, states, weights, _biased, layers, dropout, is_training, both, batch_first = args
    hx, cx = states if isinstance(states, (list, tuple)) else (states, None)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        x, hx, cx = (None if tensor is None else tensor.to(dtype) for tensor in (x, hx, cx))
        weights = [weight.to(dtype) for weight in weights]
    layout = _Layout(
        GATES[function],
        layers,
        directions=2 if both else 1,
        inputs=x.shape[-1],
        hidden=weights[1].shape[0] // GATES[function],
        output=hx.shape[-1],
        has_dropout=is_training and dropout > 0,
        is_training=is_training,
    )
    output, *final = _Recurrent.apply(layout, batch_first, x, hx, cx, *weights)
    return (output, *final)
