"""Yields of chemical reactions with an uncertainty: eight networks, trained together with torch.func."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

CASE = {
    "generation": 16,
    "truth": "Eight members of an ensemble are trained at once on stacked parameters, each on rows of its own, and nothing calls backward(); batched products take the time.",
    "cause": None,
    "also": [],
    "never": [
        "no-update",
        "small-operators",
        "unused-gradients",
        "model-copies",
        "cut-gradients",
        "duplicate-forward",
        "needless-copies",
        "growth",
        "data-loading",
        "broadcast-loss",
    ],
    "healthy": True,
}

INPUTS, MEMBERS = 64, 8


def reactions(count):
    """Return descriptions of reactions, and yields that depend on pairs of the numbers."""
    inputs = torch.randn(count, INPUTS)
    mixed = inputs @ torch.randn(INPUTS, 24) / 8
    yields = torch.sigmoid((mixed[:, ::2] * mixed[:, 1::2]).sum(1)) + 0.05 * torch.randn(count)
    return inputs, yields


def make_net(width=256):
    return nn.Sequential(
        nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1), nn.Flatten(0)
    )


def main(steps=150, batch=128, rate=0.05, momentum=0.9):
    torch.manual_seed(70)
    inputs, yields = reactions(4000)
    nets = [make_net() for _ in range(MEMBERS)]
    empty = copy.deepcopy(nets[0]).to("meta")
    weights, buffers = stack_module_state(nets)
    weights = {name: value.detach() for name, value in weights.items()}
    speeds = {name: torch.zeros_like(value) for name, value in weights.items()}

    def error(weights, buffers, rows, wanted):
        return F.mse_loss(functional_call(empty, (weights, buffers), (rows,)), wanted)

    train = vmap(grad_and_value(error))
    for step in range(1, steps + 1):
        pick = torch.randint(len(inputs), (MEMBERS, batch))
        gradients, errors = train(weights, buffers, inputs[pick], yields[pick])
        for name, gradient in gradients.items():
            speeds[name].mul_(momentum).add_(gradient)
            weights[name].sub_(speeds[name], alpha=rate)
        if step % 50 == 0:
            print(f"step {step}: errors {errors.min():.4f} to {errors.max():.4f}")
    with torch.no_grad():
        found = vmap(lambda w, b: functional_call(empty, (w, b), (inputs[:500],)))(weights, buffers)
    print(f"spread between members {found.std(0).mean():.4f}")


if __name__ == "__main__":
    main()
