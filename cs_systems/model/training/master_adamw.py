"""AdamW for bfloat16 parameters with exact float32 master weights, kept as the parameter and a 16-bit remainder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cs_systems.config import ConfigError
from cs_systems.core.optimizers import OPTIMIZERS, USUAL
from cs_systems.model.training.adamw import AdamW

MOMENTS: dict[str, torch.dtype] = {
    name: getattr(torch, each.moments) for name, each in OPTIMIZERS.items() if each.moments
}
"""Name of the optimizer → dtype of its two moments."""


class MasterAdamW(AdamW):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2) on float32 master weights.

    Parameters and gradients are bfloat16. A parameter is its master weight, rounded half up; its state `remainder`
    (int16) holds the rest, so that no bit is lost. The moments are float32, or bfloat16 with stochastic rounding
    (`moments=torch.bfloat16`), which is unbiased: a step moves 26 or 18 bytes for each element.

    On a GPU one launch of `kernels/triton/adamw` updates all parameters of a group; `step` never waits for the device,
    so a CUDA graph can capture it. On a CPU the same function is computed by torch.

    Raises:
        ConfigError: a parameter is not bfloat16, not contiguous, or a DTensor.
    """

    # Each call of `step` counts as a step of the group, even if only some parameters have gradients.
    counts_by_group = True

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        moments: torch.dtype = torch.float32,
    ) -> None:
        self.moments = moments
        self._tables: dict[tuple[int, ...], Any] = {}
        super().__init__(params, lr, betas, eps, weight_decay)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        this = f"optimizer {' or '.join(MOMENTS)}"
        for p in group["params"]:
            if hasattr(p, "device_mesh"):
                raise ConfigError(
                    f"{this} requires plain tensors, and a parameter of shape {tuple(p.shape)} is a DTensor, as "
                    f"strategy torch_fsdp2 makes them; use strategy fsdp, or optimizer {USUAL}"
                )
            if p.dtype is not torch.bfloat16:
                raise ConfigError(
                    f"{this} requires bfloat16 parameters, and one of shape {tuple(p.shape)} is {p.dtype}; use "
                    f"precision bf16-pure (model.bfloat16()), or optimizer {USUAL}"
                )
            if not p.is_contiguous():
                raise ConfigError(
                    f"{this} requires contiguous parameters, and one of shape {tuple(p.shape)} is not; store "
                    f"its contiguous() copy in the model, or use optimizer {USUAL}"
                )
        # The step t, and 1 - beta^t of both betas. A rank may have no parameter of a group.
        device = next((p.device for p in group["params"]), None)
        group.setdefault("progress", torch.zeros(3, dtype=torch.float64, device=device))

    def step_group(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        self.advance(group)
        self.update(parameters, group)

    def advance(self, group: dict[str, Any]) -> None:
        """Count the step on the device: its number t, and 1 - beta^t of both betas, in float64."""
        t, *corrections = group["progress"]
        t.add_(1)
        for beta, correction in zip(group["betas"], corrections, strict=True):
            torch.sub(1, torch.pow(beta, t), out=correction)  # recomputed, because a scheduler may change the betas

    def update(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Update some parameters of a group after `advance` has counted the step."""
        tensors = [self.tensors_of(p) for p in parameters]
        gradients = [_aligned(p.grad) for p in parameters if p.grad is not None]
        if not parameters[0].is_cuda:
            for number, (p, gradient) in enumerate(zip(parameters, gradients, strict=True)):
                _update_with_torch(p, gradient, self.state[p], group, number)
            return
        from cs_systems.model.kernels.triton.adamw import Hyperparameters, Tables

        key = tuple(map(id, parameters))
        if key not in self._tables:
            self._tables[key] = Tables(tensors)
        beta1, beta2 = group["betas"]
        settings = Hyperparameters(group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
        self._tables[key].launch(gradients, group["progress"], settings)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state without torch's cast to the parameters' bfloat16, which would lose the master weights."""
        loaded: dict[str, Any] = {}
        # The last hook sees the result of a strategy's hooks: this rank's part of the state.
        last = self.register_load_state_dict_pre_hook(lambda _, given: loaded.update(given))
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
        parameters = (p for group in self.param_groups for p in group["params"])
        numbers = (number for group in loaded["param_groups"] for number in group["params"])
        for number, p in zip(numbers, parameters, strict=True):
            saved: dict[str, Tensor] = loaded["state"].get(number, {})
            self.state[p] = {name: value.to(p.device, copy=True) for name, value in saved.items()}
        for group in self.param_groups:
            if group["params"]:
                group["progress"] = group["progress"].to(group["params"][0].device)
        self._tables.clear()

    def tensors_of(self, p: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return a parameter, its remainder, and its first and second moment, after creating missing ones as zeros."""
        state: dict[str, Tensor] = self.state[p]
        if not state:
            state["remainder"] = torch.zeros_like(p, dtype=torch.int16)
            state["exp_avg"] = torch.zeros_like(p, dtype=self.moments)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=self.moments)
        return p, state["remainder"], state["exp_avg"], state["exp_avg_sq"]


def master_weight(p: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 master weight of a bfloat16 parameter."""
    return ((p.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def _aligned(gradient: Tensor) -> Tensor:
    """Return the gradient, copied if the kernel's wide loads cannot read it."""
    ready = gradient.is_contiguous() and gradient.data_ptr() % 16 == 0
    return gradient if ready else gradient.clone(memory_format=torch.contiguous_format)


def _update_with_torch(
    p: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any], number: int
) -> None:
    """Compute the same update as `kernels.triton.adamw.adamw_kernel`, with the same random bits."""
    (beta1, beta2), progress = group["betas"], group["progress"]
    g = gradient.float()
    m, v = state["exp_avg"].float(), state["exp_avg_sq"].float()
    m += (1 - beta1) * (g - m)
    v += (1 - beta2) * (g * g - v)
    correction1, correction2 = progress[1].float(), progress[2].float()
    w = master_weight(p, state["remainder"]) * (1 - group["lr"] * group["weight_decay"])
    w -= group["lr"] / correction1 * m / ((v / correction2).sqrt() + group["eps"])
    if state["exp_avg"].dtype is torch.bfloat16:
        noise = _random_bits(p.numel(), int(progress[0]), number).view_as(p)
        m, v = _rounded(m, noise & 0xFFFF), _rounded(v, noise >> 16)
    state["exp_avg"].copy_(m)
    state["exp_avg_sq"].copy_(v)
    bits = w.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    p.view(torch.int16).copy_(upper)
    state["remainder"].copy_(bits - (upper << 16))


def _rounded(x: Tensor, noise: Tensor) -> Tensor:
    """Round float32 to bfloat16, up with the probability noise / 2¹⁶; noise holds 16 random bits."""
    return (x.view(torch.int32) + noise.int() & ~0xFFFF).view(torch.float32)


def _random_bits(count: int, step: int, tensor: int) -> Tensor:
    """Return the kernel's random bits as (count,) int64, each below 2³²."""
    salt = (step * 0x85EBCA77 + tensor) * 0x27D4EB2F & 0xFFFFFFFF
    x = torch.arange(count) * 0x9E3779B1 + salt & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = _times(x ^ (x >> shift), factor)
    return x ^ (x >> 16)


def _times(x: Tensor, factor: int) -> Tensor:
    """Multiply modulo 2³²; the halves keep each product below 2⁶³."""
    return (x * (factor & 0xFFFF) + ((x * (factor >> 16) & 0xFFFF) << 16)) & 0xFFFFFFFF
