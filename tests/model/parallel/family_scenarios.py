"""Training of foreign models by two ranks under every strategy, and by one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cs_systems.model.parallel import compose
from cs_systems.model.parallel._collectives import counting
from cs_systems.model.parallel.fsdp import FullyShardedDataParallel
from cs_systems.model.training.checkpointing import checkpoint_blocks
from tests.families.models import FAMILIES
from tests.model.parallel.ranks import TP_DEGREE, attempt, composed, join, leave, scaled
from tests.model.parallel.training import tensors

STEPS = 3
AVAILABLE = [name for name, family in FAMILIES.items() if not family.is_missing]
# Families for strategies other than fsdp: experts, frozen weights, recurrent and convolutional layers.
FEW = [name for name in ("gpt2", "mixtral", "lora", "resnet", "lstm") if name in AVAILABLE]


def pairs() -> list[tuple[str, str]]:
    """Return (strategy, family) of each training."""
    found = [(name, family) for name in scaled() if name != "tp" for family in FEW]
    return found + [("fsdp", family) for family in AVAILABLE if family not in FEW]


@dataclass(frozen=True)
class Task:
    """Model of a family, and the inputs and loss of one rank's batch."""

    model: nn.Module
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    loss_of: Callable[[Any], Tensor]

    @classmethod
    def of(cls, family: str, rank: int) -> Task:
        """Return the task of a rank; its model is initialised with the rank's own seed."""
        torch.manual_seed(rank)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the libraries' imports
            model, forward, loss_of = FAMILIES[family].make()
        if FAMILIES[family].needs is not None:
            model.eval()  # no dropout, which would differ between the ranks and one process
        given: list[Any] = []
        hook = model.register_forward_pre_hook(lambda m, args, options: given.append((args, options)), with_kwargs=True)
        with torch.no_grad():
            forward()
        hook.remove()
        return cls(model, given[0], loss_of)

    def loss(self, model: nn.Module) -> Tensor:
        args, options = self.inputs
        return self.loss_of(model(*args, **options))


def sgd(params: Any, make: Callable[..., Any] = lambda params, cls, **options: cls(params, **options)) -> Any:
    """Return an optimizer with a first step that is proportional to the gradients."""
    return make(params, torch.optim.SGD, lr=0.1, momentum=0.9)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole parameters by name, without the buffers: each rank has its own."""
    names = {name for name, _ in getattr(model, "module", model).named_parameters(remove_duplicate=False)}
    return {name: x for name, x in tensors(model) if name in names}


def train_family(name: str, family: str, rank: int, world_size: int) -> dict[str, Any]:
    """Train on one rank; return losses, parameters after the first and the last step, and the rank's own tensors."""
    task, strategy = Task.of(family, rank), composed(name)
    sizes = [p.nbytes for p in task.model.parameters()]
    trained = sum(p.nbytes for p in task.model.parameters() if p.requires_grad)
    model = strategy.wrap(task.model)
    optimizer = sgd(model.parameters(), strategy.make_optimizer)
    kept = sum(p.untyped_storage().nbytes() for p in _one_of_each_storage(model))
    found: dict[str, Any] = {"losses": [], "after": [], "kept_bytes": kept, "sizes": sizes, "trained_bytes": trained}
    for step in range(STEPS):
        model.zero_grad()
        optimizer.zero_grad()
        with counting() as calls:
            loss = task.loss(model)
            loss.backward()
            strategy.finish_gradients(model)
            optimizer.step()
        found["losses"].append(loss.item())
        if step in (0, STEPS - 1):
            found["after"].append(parameters(model))
    found["sent_bytes"] = sum(call.sent_bytes for call in calls)
    if isinstance(model, FullyShardedDataParallel):
        found["gathered_bytes"], found["units"] = model.gathered_bytes(), len(model._units)
    return found


def _one_of_each_storage(model: nn.Module) -> list[Tensor]:
    local = [getattr(p, "_local_tensor", p) for p in model.parameters()]
    return list({x.untyped_storage().data_ptr(): x for x in local}.values())


def train_family_alone(family: str, world_size: int) -> dict[str, Any]:
    """Train one process that averages over the ranks' batches in turn, from rank 0's parameters."""
    tasks = [Task.of(family, rank) for rank in range(world_size)]
    model = tasks[0].model
    optimizer = sgd(model.parameters())
    found: dict[str, Any] = {"losses": [], "after": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [task.loss(model) for task in tasks]
        for loss in losses:
            (loss / world_size).backward()
        optimizer.step()
        found["losses"].append([loss.item() for loss in losses])
        if step in (0, STEPS - 1):
            found["after"].append(parameters(model))
    return found


def checkpointed(rank: int, world_size: int) -> dict[str, Any]:
    """Return the trained parameters of a sharded model without and with checkpointed blocks."""
    trained = []
    for plan in ("none", "every:1"):
        task = Task.of("gpt2", rank)
        assert checkpoint_blocks(task.model, plan) is None
        model: Any = compose("fsdp").wrap(task.model)
        optimizer = sgd(model.parameters())
        for _ in range(STEPS):
            optimizer.zero_grad()
            task.loss(model).backward()
            model.finish_gradient_synchronization()
            optimizer.step()
        trained.append(parameters(model))
    return {"none": trained[0], "every:1": trained[1]}


def in_bf16(rank: int, world_size: int) -> dict[str, list[float]]:
    """Return each family's losses under autocast with weights sent in bf16."""
    found = {}
    for family in AVAILABLE:
        task = Task.of(family, rank)
        model: Any = compose("fsdp", compute_dtype="bf16").wrap(task.model)
        optimizer = sgd(model.parameters())
        found[family] = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = task.loss(model)
            loss.backward()
            model.finish_gradient_synchronization()
            optimizer.step()
            found[family].append(loss.item())
    return found


def refused(rank: int, world_size: int) -> dict[str, str]:
    """Return the errors of strategies that do not support a family."""
    found = {}
    for family in FEW:
        each: list[tuple[str, dict[str, Any]]] = [("tp", {}), ("fsdp+tp", {"tp_degree": TP_DEGREE})]
        for name, options in each:
            try:
                compose(name, **options).wrap(Task.of(family, rank).model)
            except Exception as error:
                found[f"{name}-{family}"] = f"{type(error).__name__}: {error}"
    try:
        compose("torch_fsdp2").wrap(nn.ParameterList([torch.zeros(())]))
    except Exception as error:
        found["torch_fsdp2-scalar"] = f"{type(error).__name__}: {error}"
    return found


def run_family_rank(rank: int, world_size: int, folder: Path) -> None:
    """Train every pair and run the scenarios of a rank on a CPU."""
    join("gloo", rank, world_size, folder)
    results = {
        f"{name}-{family}": attempt(lambda n=name, f=family: train_family(n, f, rank, world_size))
        for name, family in pairs()
    }
    for scenario in (checkpointed, in_bf16, refused):
        results[scenario.__name__] = attempt(lambda s=scenario: s(rank, world_size))
    leave(results, rank, folder)
