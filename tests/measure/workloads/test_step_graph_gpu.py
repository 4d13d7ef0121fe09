"""Tests that the whole step as one CUDA graph gives the same bits as without a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cs_systems.config import RunConfig, preset
from cs_systems.machine.device import resolve
from cs_systems.measure.workloads import Cell, _graph
from cs_systems.measure.workloads.train_step import TrainStep

pytestmark = [
    pytest.mark.gpu,
    # torch's own, when dynamo traces a block under torch.compile
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

MASTER: dict[str, Any] = {"precision": "bf16-pure", "optimizer": "adamw_master"}
PARTS = ("joined_projections", "fused_cross_entropy")
FUSED = ("fused_embedding_gradient", "fused_rmsnorm", "fused_rotary", "fused_swiglu")
STEPS = _graph.EAGER_STEPS + 3


def trained(**options: Any) -> tuple[list[float], list[torch.Tensor]]:
    torch._dynamo.reset()
    config = RunConfig(model=preset("tiny"), batch_size=2, seq_len=64, device="cuda", attention="sdpa_flash", **options)
    train, losses = TrainStep(Cell(config), resolve("cuda")), []
    for _ in range(STEPS):
        train.prepare()
        for _, run in train.step():
            run()
        torch.cuda.synchronize()
        assert train.loss is not None
        losses.append(float(train.loss.detach()))
    assert (train.graph is not None and train.graph.captured) == (config.graph == "step")
    return losses, [p.detach().clone() for p in train.model.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"precision": "bf16", "clip": 0.1},
        {"precision": "fp16", "clip": 0.1},
        {**MASTER, "parts": (*FUSED, *PARTS), "compile": "default", "compile_scope": "block", "clip": 0.1},
        {**MASTER, "parts": PARTS},
        {**MASTER, "parts": (*PARTS, "update_in_backward")},
        {**MASTER, "parts": (*FUSED, *PARTS)},
        {"precision": "bf16", "parts": FUSED, "compile": "default", "compile_scope": "block"},
        {**MASTER, "parts": (*FUSED, *PARTS), "compile": "default", "compile_scope": "block"},
        {**MASTER, "parts": (*FUSED, *PARTS, "fused_weight_update"), "compile": "default", "compile_scope": "block"},
        {**MASTER, "parts": (*FUSED, *PARTS, "fp8_linear"), "compile": "default", "compile_scope": "block"},
        {**MASTER, "optimizer": "adamw_bf16_state", "compile": "default", "compile_scope": "block", "parts": PARTS},
    ],
    ids=str,
)
def test_captured_step_is_bit_identical_to_the_uncaptured_step(options: dict[str, Any]) -> None:
    losses, parameters = trained(**options)
    captured_losses, captured = trained(**options, graph="step")
    assert losses == captured_losses
    assert all(torch.equal(a, b) for a, b in zip(parameters, captured, strict=True))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"compile": "reduce-overhead"},
            "compile reduce-overhead captures CUDA graphs itself; use compile default, or graph none",
        ),
        (
            {"optimizer": "adamw"},
            "adamw counts its steps on the CPU, where a CUDA graph does not repeat it; use optimizer adamw_fused",
        ),
        ({"warmup": 3}, "graph step requires more than 3 warm-up steps, and warmup is 3; use warmup 4 or more"),
        ({"profiler": "kineto"}, "kineto does not see the phases of a CUDA graph"),
    ],
    ids=str,
)
def test_step_that_cannot_be_captured_is_unavailable(options: dict[str, Any], reason: str) -> None:
    config = RunConfig(model=preset("tiny"), device="cuda", graph="step", **options)
    assert reason in (_graph.unavailable(config, resolve("cuda")) or "")


def test_gradient_kernel_of_cross_entropy_matches_torch() -> None:
    from cs_systems.model.training.parts import fused_cross_entropy

    for rows, vocabulary in ((3, 7), (33, 1000), (5, 40_000)):
        torch.manual_seed(0)
        hidden, weight = torch.randn(rows, 64, device="cuda"), torch.randn(vocabulary, 64, device="cuda")
        targets = torch.randint(vocabulary, (rows,), device="cuda")
        h, w = hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
        fused_cross_entropy.head_loss(h, w, targets).backward()
        h64, w64 = (x.detach().double().requires_grad_() for x in (h, w))
        torch.nn.functional.cross_entropy(h64 @ w64.t(), targets).backward()
        for mine, exact in ((h.grad, h64.grad), (w.grad, w64.grad)):
            assert mine is not None
            assert exact is not None
            assert float((mine.double() - exact).norm() / exact.norm()) < 2e-2
