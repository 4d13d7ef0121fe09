"""Scenarios of a rank besides training; each returns the values that the tests compare."""

from __future__ import annotations

import sys
import time
import weakref
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs_systems.config import ConfigError
from cs_systems.machine.device import resolve
from cs_systems.model import BasicTransformerLM
from cs_systems.model.parallel import compose
from cs_systems.model.parallel._collectives import counting, total
from cs_systems.model.parallel.zero1 import ShardedOptimizer
from cs_systems.model.training.master_adamw import MasterAdamW
from tests.model.parallel.misuses import message
from tests.model.parallel.training import CONFIG


class Backwards(nn.Module):
    """Model with layers that run in the reverse order of their registration."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


def learned_order(rank: int, world_size: int) -> list[list[int]]:
    """Return, for each step, the buckets sent before each layer's gradient was ready, in the order of backward."""
    model: Any = compose("ddp_overlap", send_thread=False).wrap(Backwards())
    seen: list[list[int]] = []
    for layer in model.module.layers:
        layer.weight.register_post_accumulate_grad_hook(lambda p: seen[-1].append(len(calls)))
    for _ in range(2):
        seen.append([])
        with counting() as calls:
            model(torch.ones(1, 4)).sum().backward()
            model.finish_gradient_synchronization()
    return seen


def kept_alive(rank: int, world_size: int) -> list[str]:
    """Return the strategies with objects that stay alive after their last reference is dropped.

    Their memory would count in the peak of the next cell.
    """
    kept = []
    for name in ("ddp_naive", "ddp_flat", "ddp_overlap", "ddp_bucketed+zero1", "zero1_flat", "fsdp"):
        strategy = compose(name)
        model: Any = strategy.wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        optimizer = strategy.make_optimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        model(torch.ones(1, 4)).sum().backward()
        strategy.finish_gradients(model)
        optimizer.step()
        references = [weakref.ref(x) for x in (model, optimizer, *model.parameters())]
        del model, optimizer
        resolve("cpu").release_memory()
        kept += [name] if any(ref() is not None for ref in references) else []
    return kept


class MeanOverRanks(torch.autograd.Function):
    """Mean over the ranks that communicates in forward and in backward, as synchronised batch norm does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x / dist.get_world_size()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size()


def model_that_communicates(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    """Return by strategy the parameters after two steps; ddp_naive, the reference, sends after backward."""

    class Model(Backwards):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = MeanOverRanks.apply(layer(x) * (rank + 1))
            return x

    trained = {}
    for name in ("ddp_naive", "ddp_overlap", "ddp_bucketed", "zero1_flat"):
        strategy = compose(name, **({} if name == "ddp_naive" else {"send_thread": False}))
        model: Any = strategy.wrap(Model())
        optimizer = strategy.make_optimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((1, 4), rank + 1.0)).square().sum().backward()
            strategy.finish_gradients(model)
            optimizer.step()
        trained[name] = [p.detach().clone() for p in model.parameters()]
    return trained


def collectives_of_two_models(rank: int, world_size: int) -> dict[str, Any]:
    """Train two models with one loss, which the caller averages before the gradients.

    On the last rank the thread that starts the collectives is late.
    """
    torch.manual_seed(0)
    towers: list[Any] = [compose("ddp_overlap").wrap(nn.Linear(4, 4, bias=False)) for _ in range(2)]

    def backward() -> Tensor:
        first, second = (tower(torch.full((1, 4), rank + 1.0)) for tower in towers)
        loss = (first * second).sum()
        loss.backward()
        return loss.detach()

    with towers[0].no_sync(), towers[1].no_sync():
        loss = backward()
    own = [loss, *(tower.module.weight.grad.clone() for tower in towers)]
    for tower in towers:
        tower.zero_grad()
        tower._sender.put(time.sleep, 0.1 * (rank == world_size - 1) * (tower is towers[0]))
    loss = backward()
    total(loss).wait()
    for tower in towers:
        tower.finish_gradient_synchronization()
    return {"own": own, "mean": [loss / world_size, *(tower.module.weight.grad for tower in towers)]}


class Added(nn.Module):
    """Model of two parameters with gradients that share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.ones(4, 2))

    def forward(self, factor: float) -> Tensor:
        return ((self.p.view(-1) + self.q.view(-1)) * factor).sum()


def one_gradient_for_two(rank: int, world_size: int) -> dict[str, list[float]]:
    """Return by strategy the values of two such parameters after a step with the mean of 1, 2, … as gradient."""
    found = {}
    for name in ("ddp_naive", "ddp_flat", "ddp_overlap", "ddp_bucketed", "zero1_flat"):
        size = {"bucket_size_mb": 2**-20} if name == "zero1_flat" else {}  # one bucket per parameter
        strategy = compose(name, **size)
        model: Any = strategy.wrap(Added())
        optimizer = strategy.make_optimizer(model.parameters(), torch.optim.SGD, lr=1.0)
        model(rank + 1.0).backward()
        strategy.finish_gradients(model)
        optimizer.step()
        found[name] = sorted({float(x) for parameter in model.parameters() for x in parameter.flatten()})
    return found


def python_calls(rank: int, world_size: int) -> int:
    """Return the number of Python calls to send the gradient of one more layer during backward."""
    return _python_calls(3) - _python_calls(2)


def _python_calls(layers: int) -> int:
    model: Any = compose("ddp_overlap").wrap(Backwards(layers))
    counts = []

    def backward() -> None:
        loss = model(torch.ones(1, 4)).sum()
        events: list[str] = []
        sys.setprofile(lambda frame, event, argument: events.append(event))
        loss.backward()
        sys.setprofile(None)
        counts.append(events.count("call"))

    for _ in range(2):  # the first step learns the order of sending
        backward()
        model.finish_gradient_synchronization()
    with model.no_sync():
        backward()
    return counts[1] - counts[2]


def narrowed(rank: int, world_size: int, device: str = "cpu", **options: Any) -> dict[str, Any]:
    """Return the rank's own gradients and those averaged in two buckets, in bf16 or with the given options."""
    torch.manual_seed(0)
    options = options or {"comm_dtype": "bf16"}
    model: Any = compose("ddp_bucketed", bucket_size_mb=1e-4, **options).wrap(Backwards().to(device))
    torch.manual_seed(rank)
    x = torch.randn(5, 4).to(device)
    with model.no_sync():
        model(x).square().sum().backward()
    own = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with counting() as calls:
        model(x).square().sum().backward()
        model.finish_gradient_synchronization()
    return {
        "own": [x.cpu() for x in own],
        "mean": [p.grad.cpu() for p in model.parameters()],
        "sent": sum(call.whole_bytes for call in calls if call.collective == "all_reduce"),
    }


def sharding(rank: int, world_size: int) -> dict[str, Any]:
    """Step a ShardedOptimizer with a closure, a scheduler and a parameter group added later."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(n)) for n in (30, 10, 10, 10, 7)]
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    losses = []
    for made, mine in ((ShardedOptimizer, params), (None, twins)):
        build: Any = made or (lambda params, cls, **options: cls(params, **options))
        optimizer = build(mine[:4], torch.optim.SGD, lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        for step in range(3):
            if step == 1:
                optimizer.add_param_group({"params": mine[4:], "lr": 0.3})

            def closure(mine: list[nn.Parameter] = mine, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = sum((p**2).sum() for p in mine)
                loss.backward()  # type: ignore[union-attr]
                return loss  # type: ignore[return-value]

            losses.append(float(optimizer.step(closure)))
            scheduler.step()
        if made:
            state_bytes = sum(x.nbytes for s in optimizer.state.values() for x in s.values() if x is not None)
    return {
        "mine": [p.detach() for p in params],
        "expected": [p.detach() for p in twins],
        "losses": losses,
        "state_bytes": state_bytes,
    }


def _small(**sizes: int) -> Any:
    torch.manual_seed(0)
    return BasicTransformerLM(replace(CONFIG, **sizes))


def indivisible(rank: int, world_size: int) -> dict[str, str]:
    """Return the errors of tensor parallelism for models that it cannot divide."""

    def twice() -> None:
        tp = compose("tp")
        tp.wrap(tp.wrap(_small()))

    def tied_outside() -> None:
        model = _small()
        model.lm_head.weight = model.layers[0].ffn.w1.weight
        compose("tp").wrap(model)

    return {
        "foreign": message(lambda: compose("tp").wrap(nn.Linear(2, 2))),
        "heads": message(lambda: compose("tp").wrap(_small(d_model=30, num_heads=5, d_ff=30))),
        "d_ff": message(lambda: compose("tp").wrap(_small(d_ff=7))),
        "twice": message(twice),
        "tied outside": message(tied_outside),
        "degree": message(lambda: compose("tp", tp_degree=7).wrap(_small())),
    }


def tensor_parallel(rank: int, world_size: int) -> dict[str, Any]:
    """Train a model with layers that share w1 under autocast, on all ranks and on one; save, zero and load it."""

    def build() -> Any:
        model = _small()
        model.layers[1].ffn.w1.weight = model.layers[0].ffn.w1.weight
        return model

    def backward(model: nn.Module) -> None:
        tokens = torch.arange(16).view(2, 8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(tokens).float().logsumexp(-1).mean().backward()

    mine, alone = compose("tp").wrap(build()), build()
    with counting() as calls:
        backward(mine)
    backward(alone)
    kept = {name: mine.get_parameter(f"layers.0.{name}.weight") for name in ("attn.q_proj", "ffn.w2")}
    whole = ("layers.0.ln1.weight", "token_embeddings.weight", "lm_head.weight")
    saved = {name: x.clone() for name, x in mine.state_dict().items()}
    for p in mine.parameters():
        p.data.zero_()
    mine.load_state_dict(saved)
    return {
        "kept": {name.split(".")[1]: tuple(p.shape) for name, p in kept.items()}
        | {"lm_head": tuple(mine.lm_head.weight.shape)},  # type: ignore[union-attr]
        "tied": mine.layers[0].ffn.w1.weight is mine.layers[1].ffn.w1.weight,  # type: ignore[index,union-attr]
        "calls": calls,
        "gradients": {name: mine.get_parameter(name).grad for name in whole},
        "expected": {name: alone.get_parameter(name).grad for name in whole},
        "saved": saved,
        "loaded": mine.state_dict(),
    }


class Gain(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1)
        self.gain = nn.Parameter(torch.tensor(1.5))  # without dimensions

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * super().forward(x)


def without_dimensions(rank: int, world_size: int) -> dict[str, Any]:
    """Return by strategy the parameters after two steps, with the state saved and loaded between them."""
    found = {}
    for name in ("ddp_flat+zero1", "zero1_flat", "fsdp") if world_size > 1 else ("single",):
        torch.manual_seed(0)
        strategy, saved = compose(name), dict[str, Any]()
        model = strategy.wrap(nn.Sequential(Gain(), nn.Linear(1, 2)))
        for _ in range(2):
            optimizer = strategy.make_optimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
            for name_of_state, state in saved.items():
                {"model": model, "optimizer": optimizer}[name_of_state].load_state_dict(state)
            model.zero_grad()
            model(torch.ones(1, 3)).square().sum().backward()
            strategy.finish_gradients(model)
            optimizer.step()
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        found[name] = {key.removeprefix("module."): x.clone() for key, x in saved["model"].items()}
    return found


def master_weights(rank: int, world_size: int) -> dict[str, Any]:
    """Return by strategy the parameters after three steps of MasterAdamW, saved and loaded before the last."""
    found: dict[str, Any] = {}
    for name in ("ddp_flat+zero1", "zero1_flat", "fsdp", "tp") if world_size > 1 else ("single",):
        torch.manual_seed(0)
        strategy = compose(name, **{"bucket_size_mb": 0.001} if name == "zero1_flat" else {})
        model = strategy.wrap(BasicTransformerLM(CONFIG).bfloat16())
        optimizer = strategy.make_optimizer(model.parameters(), MasterAdamW, lr=1e-2, eps=1e-2)
        for step in range(3):
            if step == 2:
                saved = optimizer.state_dict()
                optimizer = strategy.make_optimizer(model.parameters(), MasterAdamW, lr=0.5)
                optimizer.load_state_dict(saved)
            model.zero_grad()
            model(torch.arange(8)[None] + step).float().square().mean().backward()
            strategy.finish_gradients(model)
            optimizer.step()
        found[name] = {key.removeprefix("module."): x.clone() for key, x in model.state_dict().items()}
    try:
        sharded = compose("torch_fsdp2").wrap(nn.Linear(4, 4).bfloat16()) if world_size > 1 else nn.Linear(4, 4)
        MasterAdamW(sharded.parameters())
    except ConfigError as error:
        found["refused"] = str(error)
    return found


SCENARIOS = [
    without_dimensions,
    master_weights,
    learned_order,
    kept_alive,
    one_gradient_for_two,
    model_that_communicates,
    collectives_of_two_models,
    python_calls,
    narrowed,
    sharding,
    indivisible,
    tensor_parallel,
]
