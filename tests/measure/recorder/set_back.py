"""Training loops that set their weights back after each update, and sound ones that write into weights as well."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, Optimizer

Step = Callable[[], None]
Write = Callable[[nn.Module, nn.Module, int], object]  # after a step: the trained model, its first weights, the number


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 4))


def loss_of(model: nn.Module) -> Tensor:
    return functional.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,)))


def update(optimizer: Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def writing(
    write: Write, *, before: Write = lambda *_: None, make: Callable[[nn.Module], Optimizer] | None = None
) -> Step:
    """Return a step that calls functions before the forward pass and after the update."""
    model = net()
    other, numbers = copy.deepcopy(model), itertools.count(1)
    optimizer = Adam(model.parameters(), 1e-3) if make is None else make(model)

    def step() -> None:
        number = next(numbers)
        before(model, other, number)
        update(optimizer, loss_of(model))
        with torch.no_grad():
            write(model, other, number)

    return step


def pairs(one: nn.Module, two: nn.Module) -> zip[tuple[nn.Parameter, nn.Parameter]]:
    return zip(one.parameters(), two.parameters(), strict=True)


# Faults


def soft_update_of_the_trained(model: nn.Module, target: nn.Module, _: int) -> None:
    for p, t in pairs(model, target):
        p.copy_(0.01 * p + 0.99 * t)


def soft_update_in_two_calls(model: nn.Module, target: nn.Module, _: int) -> None:
    for p, t in pairs(model, target):
        p.data.mul_(0.01).add_(t.data, alpha=0.99)


def soft_update_by_assignment(model: nn.Module, target: nn.Module, _: int) -> None:
    for p, t in pairs(model, target):
        p.data = 0.01 * p.data + 0.99 * t.data


def soft_update_of_all_at_once(model: nn.Module, target: nn.Module, _: int) -> None:
    torch._foreach_lerp_([*model.parameters()], [*target.parameters()], 0.98)


def loaded_from_the_target(model: nn.Module, target: nn.Module, _: int) -> None:
    model.load_state_dict(target.state_dict())


def average_that_is_not_swapped_back(model: nn.Module, average: nn.Module, _: int) -> None:
    for p, a in pairs(model, average):
        a.lerp_(p, 0.001)
    for p, a in pairs(model, average):
        p.copy_(a)


# Sound loops


def target_of_the_trained(model: nn.Module, target: nn.Module, number: int) -> None:
    for p, t in pairs(model, target):
        t.copy_(0.01 * p + 0.99 * t)
    if number % 10 == 0:
        target.load_state_dict(model.state_dict())


def lookahead(model: nn.Module, slow: nn.Module, number: int) -> None:
    if number % 5 == 0:
        for p, s in pairs(model, slow):
            s.lerp_(p, 0.5)
            p.copy_(s)


def clipped_weights(model: nn.Module, *_: object) -> None:
    for p in model.parameters():
        p.clamp_(-0.01, 0.01)


def rows_of_one_length(model: nn.Module, *_: object) -> None:
    for p in model.parameters():
        if p.dim() == 2:
            p.div_(p.norm(dim=1, keepdim=True))


def pruned(model: nn.Module, first: nn.Module, _: int) -> None:
    for p, f in pairs(model, first):
        p.mul_(f.abs() > f.abs().quantile(0.8))


def first_rows_restored(model: nn.Module, first: nn.Module, _: int) -> None:
    """Train only the last rows of a weight, such as those of new words."""
    for p, f in pairs(model, first):
        p[:-1] = f[:-1]


def evaluated_average(model: nn.Module, average: nn.Module, _: int) -> None:
    kept = [p.clone() for p in model.parameters()]
    for p, a in pairs(model, average):
        a.lerp_(p, 0.001)
        p.copy_(a)
    loss_of(model)
    for p, k in zip(model.parameters(), kept, strict=True):
        p.copy_(k)


def rolled_back_now_and_then(model: nn.Module, first: nn.Module, number: int) -> None:
    if number % 3 == 0:
        model.load_state_dict(first.state_dict())


def noise_while_computing() -> Step:
    noise: list[Tensor] = []

    def add(model: nn.Module, *_: object) -> None:
        with torch.no_grad():
            noise[:] = [0.01 * torch.randn_like(p) for p in model.parameters()]
            torch._foreach_add_([*model.parameters()], noise)

    def subtract(model: nn.Module, *_: object) -> None:
        torch._foreach_sub_([*model.parameters()], noise)

    return writing(subtract, before=add)


def binary_while_computing() -> Step:
    model = net()
    optimizer = Adam(model.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        kept = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.data = p.data.sign() * p.data.abs().mean()
        loss_of(model).backward()
        for p, k in zip(model.parameters(), kept, strict=True):
            p.data.copy_(k)
        optimizer.step()

    return step


def adapted_to_each_sample() -> Step:
    """Adapt a model to each sample from the same weights, and predict with it."""

    def predict(model: nn.Module, *_: object) -> None:
        model(torch.randn(1, 8))

    def reset(model: nn.Module, first: nn.Module, _: int) -> None:
        model.load_state_dict(first.state_dict())

    return writing(predict, before=reset)


def one_inner_step_of_a_meta_training() -> Step:
    model = net()
    inner, outer = SGD(model.parameters(), 0.1), Adam(model.parameters(), 1e-3)

    def step() -> None:
        kept = [p.detach().clone() for p in model.parameters()]
        update(inner, loss_of(model))
        outer.zero_grad()
        loss_of(model).backward()
        with torch.no_grad():
            for p, k in zip(model.parameters(), kept, strict=True):
                p.copy_(k)
        outer.step()

    return step


def perturbed_by_a_proxy() -> Step:
    """Perturb the weights by the change of a copy, as adversarial weight perturbation does."""
    model, proxy = net(), net()
    optimizer, of_proxy = Adam(model.parameters(), 1e-4), SGD(proxy.parameters(), 0.5)

    def step() -> None:
        with torch.no_grad():
            for p, q in pairs(proxy, model):
                p.copy_(q)
        update(of_proxy, -loss_of(proxy))
        with torch.no_grad():
            change = [0.01 * (p - q) for p, q in pairs(proxy, model)]
            torch._foreach_add_([*model.parameters()], change)
        update(optimizer, loss_of(model))
        with torch.no_grad():
            torch._foreach_sub_([*model.parameters()], change)

    return step


def clients_in_turn(copied: Callable[[nn.Module], object]) -> Step:
    """Train each client by one step from the same weights, in one model."""

    def keep(model: nn.Module, *_: object) -> None:
        copied(model)

    def reset(model: nn.Module, first: nn.Module, _: int) -> None:
        model.load_state_dict(first.state_dict())

    return writing(keep, before=reset)


FAULTS: dict[str, tuple[Callable[[], Step], str]] = {
    function.__name__: ((lambda function=function: writing(function)), "undone-update")  # type: ignore[misc]
    for function in (
        soft_update_of_the_trained,
        soft_update_in_two_calls,
        soft_update_by_assignment,
        soft_update_of_all_at_once,
        loaded_from_the_target,
        average_that_is_not_swapped_back,
    )
}
SOUND: dict[str, Callable[[], Step]] = {
    **{
        function.__name__: (lambda function=function: writing(function))  # type: ignore[misc]
        for function in (
            target_of_the_trained,
            lookahead,
            clipped_weights,
            rows_of_one_length,
            pruned,
            first_rows_restored,
            evaluated_average,
            rolled_back_now_and_then,
        )
    },
    "weights_clipped_at_a_high_rate": lambda: writing(clipped_weights, make=lambda model: SGD(model.parameters(), 1.0)),
    "noise_while_computing": noise_while_computing,
    "binary_while_computing": binary_while_computing,
    "adapted_to_each_sample": adapted_to_each_sample,
    "one_inner_step_of_a_meta_training": one_inner_step_of_a_meta_training,
    "perturbed_by_a_proxy": perturbed_by_a_proxy,
    "clients_in_turn_with_copies": lambda: clients_in_turn(copy.deepcopy),
    "clients_in_turn_with_states": lambda: clients_in_turn(lambda model: copy.deepcopy(model.state_dict())),
}
