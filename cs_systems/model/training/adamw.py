"""AdamW in readable form, one parameter after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2), one parameter after the other.

    State per parameter: two tensors of its size and dtype, and a step count. Subclasses may update a group
    differently.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            if not value >= 0:  # `not >=` also catches NaN
                raise ValueError(f"{name} is {value}; give a number of at least 0")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas is {betas}; give two numbers from 0 to below 1")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if trained := [p for p in group["params"] if p.grad is not None]:
                self.step_group(trained, group)
        return loss

    def step_group(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Step the parameters of a group that have gradients."""
        beta1, beta2 = group["betas"]
        for p in parameters:
            assert p.grad is not None
            state = self.state[p]
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state["step"] += 1
            m, v, t = state["exp_avg"], state["exp_avg_sq"], state["step"]
            p.mul_(1 - group["lr"] * group["weight_decay"])
            m.lerp_(p.grad, 1 - beta1)
            v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
            denominator = (v / (1 - beta2**t)).sqrt_().add_(group["eps"])
            p.addcdiv_(m, denominator, value=-group["lr"] / (1 - beta1**t))
