"""Tests of recurrent layers with cuDNN's tensors against those that torch runs on a CPU."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from cs_systems.formulas.memory.allocator import MIB
from cs_systems.instrument.like_cuda import like_cuda
from cs_systems.instrument.recurrent import _Layout
from cs_systems.instrument.storages import StorageTracker

LAYERS = {
    "lstm": lambda: nn.LSTM(6, 8, 2, batch_first=True, bidirectional=True),
    "projected": lambda: nn.LSTM(6, 8, 2, proj_size=3, bias=False),
    "gru": lambda: nn.GRU(6, 8, bidirectional=True),
    "tanh": lambda: nn.RNN(6, 8, 3, dropout=0.5),
    "relu": lambda: nn.RNN(6, 8, nonlinearity="relu", batch_first=True),
}
INPUTS: dict[str, Any] = {
    "batch": lambda: torch.randn(4, 5, 6),
    "one sequence": lambda: torch.randn(5, 6),
    "packed": lambda: pack_sequence([torch.randn(length, 6) for length in (5, 3)]),
}


def _shapes(layer: nn.Module, batch: Any) -> list[torch.Size]:
    """Return the shapes of the output, of the final states, and of the gradients of all parameters."""
    output, states = layer(batch)
    data = output if isinstance(output, Tensor) else output.data
    results = [data, *(states if isinstance(states, tuple) else (states,))]
    torch.stack([tensor.sum() for tensor in results]).sum().backward()
    return [tensor.shape for tensor in results + [p.grad for p in layer.parameters() if p.grad is not None]]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_have_the_shapes_of_torchs(name: str, inputs: str) -> None:
    layer, batch = LAYERS[name](), INPUTS[inputs]()
    right = _shapes(layer, batch)
    layer.zero_grad()
    with like_cuda():
        assert _shapes(layer, batch) == right
    assert len(right) > len(list(layer.parameters()))


@pytest.mark.parametrize(("gates", "right"), [(4, 736_000_000), (3, 864_000_000)], ids=["lstm", "gru"])
def test_reserve_has_the_bytes_that_cudnn_reported(gates: int, right: int) -> None:
    """4 layers of width 320 in fp32; source: https://github.com/pytorch/pytorch/issues/2895."""
    layout = _Layout(
        gates, layers=4, directions=1, inputs=320, hidden=320, output=320, has_dropout=False, is_training=True
    )
    assert layout.reserve_bytes(tokens=25_000, item=4) == right


with (Path(__file__).resolve().parents[2] / "profiles/foreign_memory/recurrent.csv").open(newline="") as file:
    MEASURED = list(csv.DictReader(file))
# Passes for which cuDNN took more: type of layer, dtype, hidden size, pass.
LARGER = {
    ("LSTM", "float16", 1024, "forward"),
    ("LSTM", "float16", 1024, "backward"),
    ("RNN", "float32", 256, "forward"),
    ("RNN", "float32", 256, "backward"),
    ("RNN", "float32", 300, "forward"),
}


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: "-".join(list(row.values())[:9]))
def test_reserve_and_workspace_match_an_h200(row: dict[str, str]) -> None:
    """`backward_bytes` include a copy of the reserve, since the graph was kept, and gradients of the states."""
    time, batch, inputs, hidden, layers, directions = (
        int(row[name]) for name in ("time", "batch", "input", "hidden", "layers", "directions")
    )
    dropout, item = float(row["dropout"]), getattr(torch, row["dtype"]).itemsize
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[row["layer"]]
    with torch.device("meta"):
        layer: nn.RNNBase = getattr(nn, row["layer"])(inputs, hidden, layers, bidirectional=directions == 2)
    layout = _Layout(gates, layers, directions, inputs, hidden, hidden, has_dropout=dropout > 0, is_training=True)
    reserve = int(row["reserve_bytes"])
    assert layout.reserve_bytes(time * batch, item) == pytest.approx(reserve, rel=0.001, abs=18_000)

    weights = sum(weight.numel() for weight in layer.parameters())
    predicted = layout.workspace_bytes(time * batch, batch, item, weights)
    states = 2 if row["layer"] == "LSTM" else 1
    gradients = 2 * states * layers * directions * batch * hidden * item
    measured = {"forward": int(row["forward_bytes"]), "backward": int(row["backward_bytes"]) - reserve - gradients}
    for name, right in measured.items():
        off = predicted - right
        is_larger = (row["layer"], row["dtype"], hidden, name) in LARGER
        assert (off < -0.1 * right) if is_larger else (abs(off) <= max(0.05 * right, 5 * MIB))


def test_forward_counts_its_products_and_keeps_the_reserve_only_for_backward() -> None:
    layer, batch = nn.LSTM(6, 8), torch.randn(100, 4, 6)

    def kept(*, training: bool) -> int:
        tracker = StorageTracker("cpu", like_cuda=True)
        with like_cuda(), tracker, tracker.phase(1, "forward"):
            before = tracker.allocated_bytes
            output = layer.train(training)(batch)
            assert tracker.flops == 2 * 400 * 4 * 8 * (6 + 8)
            held = tracker.allocated_bytes - before
        del output
        return held

    reserve = 400 * 5 * 8 * 4
    assert kept(training=True) - kept(training=False) == pytest.approx(reserve, abs=512)


def test_weights_under_autocast_are_copied() -> None:
    layer, batch = nn.GRU(6, 8), torch.randn(3, 2, 6)
    with like_cuda(), torch.autocast("cpu", torch.bfloat16):
        output, _ = layer(batch)
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert {p.grad.dtype for p in layer.parameters() if p.grad is not None} == {torch.float32}
