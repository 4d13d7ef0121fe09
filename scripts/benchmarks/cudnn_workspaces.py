"""Workspaces of cuDNN for convolutions and recurrent layers, to which the prediction of memory is fitted.

Method: each row of a committed table names a layer; the workspace is the peak of allocated memory while a pass runs,
less what is allocated when it has returned. `ieee` is fp32 without TF32. A recurrent layer's backward pass copies the
reserve, because its graph is kept.
Output: the same table with what this GPU measures. The rows unet_* and resnet_* of the committed one do not come from
this script: they are allocations recorded in training steps of scripts/benchmarks/foreign_memory.py.

    python3 scripts/benchmarks/cudnn_workspaces.py profiles/foreign_memory/convolutions.csv
    python3 scripts/benchmarks/cudnn_workspaces.py profiles/foreign_memory/recurrent.csv
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

MIB = 2**20
PASSES = ("forward_mib", "input_gradient_mib", "weight_gradient_mib")


def workspace_bytes(run: Callable[[], Any]) -> int:
    """Return the peak of allocated memory while `run` runs, above the memory with its result."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del result
    return found


def convolution(row: dict[str, str], device: str) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    """Return input, weight and further arguments of the convolution in a row."""
    shape = [int(size) for size in row["input"].split("x")]
    outputs, kernel, stride, padding, groups, transposed = (
        int(row[name]) for name in ("out_channels", "kernel", "stride", "padding", "groups", "transposed")
    )
    count = len(shape) - 2
    channels = (shape[1], outputs) if transposed else (outputs, shape[1] // groups)
    dtype = torch.bfloat16 if row["precision"] == "bf16" else torch.float32
    x = torch.randn(shape, device=device, dtype=dtype)
    weight = torch.randn((*channels, *[kernel] * count), device=device, dtype=dtype)
    if row["layout"] == "channels_last":
        x, weight = (tensor.to(memory_format=torch.channels_last) for tensor in (x, weight))
    return x, weight, ([stride] * count, [padding] * count, [1] * count, bool(transposed), [0] * count, groups)


def measured_convolution(row: dict[str, str]) -> dict[str, str]:
    torch.backends.cudnn.conv.fp32_precision = "ieee" if row["precision"] == "ieee" else "tf32"
    x, weight, how = convolution(row, "cuda")

    def forward() -> torch.Tensor:
        return torch.ops.aten.convolution(x, weight, None, *how)

    y = forward()

    def backward(*of: bool) -> Any:
        return torch.ops.aten.convolution_backward(y, x, weight, None, *how, [*of, False])

    passes = (forward, lambda: backward(True, False), lambda: backward(False, True))
    for run in passes:
        run()  # the first call loads kernels and plans
    found = (workspace_bytes(run) for run in passes)
    return {name: f"{size / MIB:.2f}" for name, size in zip(PASSES, found, strict=True)}


def measured_recurrent(row: dict[str, str]) -> dict[str, str]:
    torch.backends.cudnn.rnn.fp32_precision = "tf32"
    time, batch, inputs, hidden, layers, directions = (
        int(row[name]) for name in ("time", "batch", "input", "hidden", "layers", "directions")
    )
    dtype = getattr(torch, row["dtype"])
    options = {"bidirectional": directions == 2, "dropout": float(row["dropout"])}
    layer = getattr(nn, row["layer"])(inputs, hidden, layers, **options).cuda().to(dtype)
    layer.flatten_parameters()
    x = torch.randn(time, batch, inputs, device="cuda", dtype=dtype, requires_grad=True)
    layer(x)[0].sum().backward()
    forward_bytes = workspace_bytes(lambda: layer(x))
    y, _ = layer(x)
    node = y.grad_fn
    while not hasattr(node, "_saved_result3"):
        node = node.next_functions[0][0]
    gradient, leaves = torch.ones_like(y), [x, *layer.parameters()]
    return {
        "reserve_bytes": str(node._saved_result3.nbytes),
        "forward_bytes": str(forward_bytes),
        "backward_bytes": str(workspace_bytes(lambda: torch.autograd.grad(y, leaves, gradient, retain_graph=True))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="profiles/foreign_memory/convolutions.csv, or recurrent.csv")
    with parser.parse_args().table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    writer = csv.DictWriter(sys.stdout, rows[0], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(row | (measured_recurrent(row) if "layer" in row else measured_convolution(row)))


if __name__ == "__main__":
    main()
