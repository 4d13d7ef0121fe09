"""Small loops of two ranks with one cause of lost time each, one after the other: `rank_causes.py OUT`."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cs_systems import Recorder

ALONE = ("module", "by_hand", "averaged")  # the model is called without DistributedDataParallel
ADVERSARIAL = ("adversary", "frozen_adversary")
KINDS = ("sleeps", "batch", "passes", "no_sync", "buckets", "tensors", "searches", "stages", "tokens", "buffers",
         *ALONE, "evaluates", *ADVERSARIAL)  # fmt: skip
STEPS = 12


def metrics() -> None:
    time.sleep(0.03)  # pause of one rank


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    width, layers = {"passes": (64, 1), "no_sync": (64, 1), "batch": (256, 4)}.get(kind, (8, 6))
    net = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    if kind in ("tensors", "stages", "tokens"):
        return net
    if kind == "buffers":
        net.register_buffer("table", torch.zeros(1 << 18))  # 1 MiB, which no step changes
    options = {"buckets": {"bucket_cap_mb": 1e-5}, "searches": {"find_unused_parameters": True}}.get(kind, {})
    return DistributedDataParallel(net, **options)


class Exchange(torch.autograd.Function):
    """Exchange of rows, of which rank 1 gets most."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        here = dist.get_rank()
        out = rows.new_empty(2 * (7 if here else 1), rows.shape[1])
        dist.all_to_all_single(out, rows, [7 if here else 1] * 2, [1, 7])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        out = grad.new_empty(8, grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), [1, 7], [7 if dist.get_rank() else 1] * 2)
        return out


class Adversary:
    """Critic that is trained on the results of a model, which is trained through it."""

    def __init__(self, *, is_frozen: bool) -> None:
        self.is_frozen = is_frozen
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 1)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)

    def loss(self, made: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        self.model(made.detach()).mean().backward()
        self.optimizer.step()
        self.model.requires_grad_(not self.is_frozen)
        loss: Tensor = -(self.model.module if self.is_frozen else self.model)(made).mean()
        self.model.requires_grad_(True)
        return loss


def alone(kind: str, model: Any, rank: int, number: int) -> Tensor:
    """Run forward and backward on a rank's own numbers, and average gradients or weights as far as the kind does."""
    loss: Tensor = model.module(torch.full((8, 8), 1.0 + rank)).square().mean()  # module
    loss.backward()
    averaged = {"by_hand": [p.grad for p in model.parameters()], "averaged": [p.data for p in model.parameters()]}
    if kind == "by_hand" or number % 3 == 0:
        for each in averaged.get(kind, ()):
            dist.all_reduce(each)
            each /= 2
    return loss.detach()


def step(kind: str, model: Any, rank: int, number: int, adversary: Adversary | None) -> Tensor:
    """Run forward and backward, and return the loss."""
    if kind == "stages":
        return stages(model, rank)
    if kind in ALONE:
        return alone(kind, model, rank, number)
    if adversary is not None:
        against = adversary.loss(model(torch.full((8, 8), 1.0 + rank)))
        against.backward()  # through the adversary
        return against.detach()
    width = next(model.parameters()).shape[0]
    passes = 3 if kind in ("passes", "no_sync") else 1
    for number in range(passes):
        is_last = number == passes - 1
        context: AbstractContextManager[Any] = model.no_sync() if kind == "no_sync" and not is_last else nullcontext()
        with context:
            inputs = torch.ones(4096 if kind == "batch" and rank else 8, width)
            rows = Exchange.apply(inputs.requires_grad_()) if kind == "tokens" else inputs
            loss: Tensor = model(rows).square().mean()  # forward
            if kind == "tokens" and rank:
                time.sleep(0.02)  # the work of an expert with many tokens
            loss.backward()
    if kind == "evaluates":
        with torch.no_grad():
            model.module(inputs)
    if kind == "tensors":
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    return loss.detach()


def stages(model: Any, rank: int) -> Tensor:
    """Run a pipeline of two stages, one of which waits for the other."""
    if rank == 0:
        out = model(torch.ones(8, 8))
        time.sleep(0.01)
        dist.send(out.detach(), 1)
        gradient = torch.empty_like(out)
        dist.recv(gradient, 1)
        out.backward(gradient)
        return out.detach().mean()
    inputs = torch.empty(8, 8)
    dist.recv(inputs, 0)
    loss: Tensor = model(inputs.requires_grad_()).square().mean()
    time.sleep(0.01)
    loss.backward()
    dist.send(inputs.grad, 0)
    return loss.detach()


def train(kind: str, out: Path | None, rank: int) -> list[float]:
    """Run a loop, recorded if a folder is given, and return its losses."""
    model = model_of(kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    adversary = Adversary(is_frozen=kind.startswith("frozen")) if kind in ADVERSARIAL else None
    trained = ([model, adversary.model], [optimizer, adversary.optimizer]) if adversary else (model, optimizer)
    losses = []
    recorder = out and Recorder(*trained, out=out, warmup=3, steps=3, profile="none", patience_s=20)
    with recorder or nullcontext():
        for number in range(STEPS):
            with recorder.step() if recorder else nullcontext():
                optimizer.zero_grad()
                losses.append(step(kind, model, rank, number, adversary))
                optimizer.step()
                if kind == "sleeps" and rank == 1:
                    metrics()
    return [float(loss) for loss in losses]


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, autograd = dist.get_rank(), vars(torch.autograd)
    replaced = [vars(dist.ProcessGroup), vars(dist.Work), vars(DistributedDataParallel)]
    before = [{**names} for names in replaced], autograd["_engine_run_backward"]
    for kind in KINDS:
        losses = train(kind, Path(sys.argv[1]) / kind, rank)
        same = losses == train(kind, None, rank)
        if rank == 0:
            print(kind, "same results" if same else "other results", flush=True)
    after = [{**names} for names in replaced], autograd["_engine_run_backward"]
    if rank == 0:
        print("all put back" if before == after else "not put back", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
