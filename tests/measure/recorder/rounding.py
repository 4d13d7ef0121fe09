"""Training loops with an operator without a slope in the way of a gradient, and sound ones that look similar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam

Step = Callable[[], None]
Code = Callable[[Tensor], Tensor]


class Codec(nn.Module):
    """Autoencoder with a function between its encoder and its decoder."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 24), nn.GELU(), nn.Linear(24, 8))
        self.code = code

    def forward(self, inputs: Tensor) -> Tensor:
        decoded: Tensor = self.decoder(self.code(self.encoder(inputs)))
        return decoded


def coded(code: Code, other: Callable[[Codec, Tensor], Tensor | float] = lambda *_: 0.0) -> Step:
    """Return a step of an autoencoder; `other` is a further term of its loss."""
    model = Codec(code)
    optimizer = Adam(model.parameters(), 1e-3)

    def step() -> None:
        inputs = torch.randn(16, 8)
        optimizer.zero_grad()
        (functional.mse_loss(model(inputs), inputs) + other(model, inputs)).backward()
        optimizer.step()

    return step


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def with_a_hook(inputs: Tensor) -> Tensor:
    """Round, and put the gradient of the rounded numbers in place of the zeros by hooks."""
    kept: list[Tensor] = []
    ways = inputs * 1.0
    ways.register_hook(lambda _: kept[0])
    rounded = ways.round()
    rounded.register_hook(kept.append)
    return rounded


def in_place(inputs: Tensor) -> Tensor:
    return (8 * inputs).round_() / 8


def rate(model: Codec, inputs: Tensor) -> Tensor:
    return 0.01 * functional.softplus(model.encoder(inputs)).mean()


def regression_of_rounded_numbers() -> Step:
    model = nn.Linear(8, 1)
    optimizer = Adam(model.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        (model(torch.randn(16, 8)).round() - torch.randint(4, (16, 1))).pow(2).mean().backward()
        optimizer.step()

    return step


def dead_units() -> Step:
    model = Codec(functional.relu)
    with torch.no_grad():
        assert isinstance(model.encoder[2], nn.Linear)
        model.encoder[2].bias.fill_(-1e3)
    optimizer = Adam(model.parameters(), 1e-3)

    def step() -> None:
        inputs = torch.randn(16, 8)
        optimizer.zero_grad()
        functional.mse_loss(model(inputs), inputs).backward()
        optimizer.step()

    return step


def head_that_begins_with_zeros() -> Step:
    model = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 4))
    with torch.no_grad():
        for parameter in model[2].parameters():
            parameter.zero_()
    optimizer = Adam(model.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(torch.randn(16, 8)), torch.randint(4, (16,))).backward()
        optimizer.step()

    return step


def first_steps_of_one_expert() -> Step:
    model = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))
    optimizer = Adam(model.parameters(), 1e-3)

    def step() -> None:
        inputs = torch.randn(16, 8)
        optimizer.zero_grad(set_to_none=False)
        every = [expert(inputs) for expert in model]
        chosen = torch.stack([each * share for each, share in zip(every, (1.0, 0.0, 0.0), strict=True)]).sum(0)
        functional.cross_entropy(chosen, torch.randint(4, (16,))).backward()
        optimizer.step()

    return step


FAULTS: dict[str, Callable[[], Step]] = {
    "codes_rounded": lambda: coded(lambda codes: torch.round(codes * 8) / 8),
    "codes_rounded_by_a_method": lambda: coded(lambda codes: codes.round(decimals=1)),
    "codes_rounded_in_place": lambda: coded(in_place),
    "signs_as_codes": lambda: coded(torch.sign),
    "codes_cut_off": lambda: coded(lambda codes: torch.floor(4 * codes) / 4),
    "rounded_predictions": regression_of_rounded_numbers,
}
SOUND: dict[str, Callable[[], Step]] = {
    "rounded_straight_through": lambda: coded(lambda codes: codes + (codes.round() - codes).detach()),
    "rounded_without_gradient": lambda: coded(lambda codes: codes - codes.detach() + codes.detach().round()),
    "rounded_in_a_function": lambda: coded(lambda codes: StraightThrough.apply(codes)),  # type: ignore[no-any-return]
    "rounded_with_hooks": lambda: coded(with_a_hook),
    "rounded_and_a_penalty": lambda: coded(torch.round, rate),
    "rests_of_rounding": lambda: coded(lambda codes: codes - torch.floor(codes)),
    "units_that_are_dead": dead_units,
    "head_that_begins_with_zeros": head_that_begins_with_zeros,
    "experts_that_get_no_weight": first_steps_of_one_expert,
}
