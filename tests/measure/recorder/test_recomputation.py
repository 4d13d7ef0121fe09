"""Recomputation under torch.utils.checkpoint belongs to backward, in every way of calling it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cs_systems.measure.recorder import hooks
from cs_systems.measure.recorder.unedited import ScriptRecorder
from cs_systems.record import RunRecord

STEPS = 6


class Ticks:
    """Clock that advances when the program says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Ticks()


class Block(nn.Module):
    """Layer with a forward that takes 1 s of the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        CLOCK.now += 1.0
        return self.linear(x).tanh()


class Gradient(torch.autograd.Function):
    """Identity with a backward that takes 3 s of the clock."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        CLOCK.now += 3.0
        return gradient


def _both(x: Tensor, blocks: nn.ModuleList, reentrant: bool) -> Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=reentrant)
    return x


def reentrant(x: Tensor, blocks: nn.ModuleList) -> Tensor:
    return _both(x, blocks, True)


def not_reentrant(x: Tensor, blocks: nn.ModuleList) -> Tensor:
    return _both(x, blocks, False)


def nested(x: Tensor, blocks: nn.ModuleList) -> Tensor:
    return checkpoint(lambda x: _both(x, blocks, False), x, use_reentrant=False)


def nested_reentrant(x: Tensor, blocks: nn.ModuleList) -> Tensor:
    return checkpoint(lambda x: _both(x, blocks, True), x, use_reentrant=True)


class Net(nn.Module):
    def __init__(self, call: Callable[[Tensor, nn.ModuleList], Tensor]) -> None:
        super().__init__()
        self.blocks, self.call = nn.ModuleList(Block() for _ in range(2)), call

    def forward(self, x: Tensor) -> Tensor:
        return Gradient.apply(self.call(x, self.blocks))


@contextmanager
def recorded(out: Path) -> Iterator[list[RunRecord]]:
    """Record the loop inside the block with the clock above."""
    CLOCK.now = 0.0
    found: list[RunRecord] = []
    recorder = ScriptRecorder("loop", out=out, warmup=1, steps=4, profile="none", clock=CLOCK)
    try:
        yield found
    finally:
        recorder.close()
    found.extend(recorder.records)


def phases(records: list[RunRecord]) -> dict[str, float]:
    measurement = records[0].measurement
    assert measurement is not None
    found = {name: measurement.durations_s(name)[-1] for name in measurement.phase_names()}
    assert sum(found.values()) == measurement.durations_s("step")[-1]
    return {name: time for name, time in found.items() if time}


# Nested checkpoints repeat an inner block for the outer checkpoint and for its own; PyTorch stops where it has enough.
REPEATED_S = {reentrant: 2.0, not_reentrant: 2.0, nested: 3.0, nested_reentrant: 4.0}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # inside a reentrant checkpoint
@pytest.mark.parametrize("call", REPEATED_S)
def test_recomputation_belongs_to_backward(call: Callable[[Tensor, nn.ModuleList], Tensor], tmp_path: Path) -> None:
    net = Net(call)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with recorded(tmp_path) as records:
        for _ in range(STEPS):
            out = net(torch.randn(2, 4, requires_grad=True))
            CLOCK.now += 0.5
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert phases(records) == {"forward": 2.0, "loss": 0.5, "backward": 3.0 + REPEATED_S[call]}
    (caveat,) = (each for each in records[0].warnings if each.code == "recomputed")
    share = REPEATED_S[call] / (3.0 + REPEATED_S[call])
    assert caveat.message == f"{100 * share:.0f}% of backward repeats forward, for torch.utils.checkpoint"


def test_gradient_of_a_gradient_is_part_of_the_loss(tmp_path: Path) -> None:
    """A gradient penalty differentiates the result of one backward pass by another."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with recorded(tmp_path) as records:
        for _ in range(STEPS):
            x = torch.randn(2, 4, requires_grad=True)
            out = plain(Gradient.apply(x))
            (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            CLOCK.now += 0.25
            (out.mean() + gradient.square().sum()).backward()
            CLOCK.now += 0.125
            optimizer.step()
            optimizer.zero_grad()
    assert phases(records) == {"loss": 0.25, "backward": 6.0, "other": 0.125}
    assert "recomputed" not in {each.code for each in records[0].warnings}


def test_recomputation_with_an_unobserved_start_still_belongs_to_backward() -> None:
    """Hooks are away while something is compiled, in another thread too, and come back in between."""
    blocks = nn.ModuleList(Block() for _ in range(2))
    end = hooks._ends_recomputation()
    try:
        not_reentrant(torch.randn(2, 4, requires_grad=True), blocks).sum().backward()
    finally:
        end()
    assert all(parameter.grad is not None for parameter in blocks.parameters())
