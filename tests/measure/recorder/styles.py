"""Seeded training loops in the styles of public scripts, without any code for a recorder.

Each runs `STEPS` iterations and returns its modules. As a script, `styles.py STYLE` prints a digest of the parameters.
"""

from __future__ import annotations

import hashlib
import io
import sys
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

STEPS = 7
ACTION_S = 0.002  # time of one step of the environment


def two_layers(outputs: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, outputs))


def batches(count: int = STEPS, workers: int = 0) -> DataLoader[tuple[Tensor, ...]]:
    data = TensorDataset(torch.randn(3 * count, 4), torch.randint(2, (3 * count,)))
    return DataLoader(data, batch_size=3, shuffle=True, num_workers=workers)


def gan(critic_steps: int = 1) -> Iterable[nn.Module]:
    """Train two models with two optimizers: the critic on a real and a generated batch, then the generator."""
    generator, critic = two_layers(4), two_layers(1)
    of_critic, of_generator = (torch.optim.Adam(model.parameters()) for model in (critic, generator))
    for real, _ in batches():
        for _ in range(critic_steps):
            of_critic.zero_grad()
            F.softplus(-critic(real)).mean().backward()
            false = generator(torch.randn(3, 4))
            F.softplus(critic(false.detach())).mean().backward()
            of_critic.step()
        of_generator.zero_grad()
        F.softplus(-critic(false)).mean().backward()
        of_generator.step()
    return generator, critic


def three_critic_steps() -> Iterable[nn.Module]:
    return gan(3)


def reinforcement() -> Iterable[nn.Module]:
    """Run several forward passes with an environment between them, then one backward pass."""
    policy = two_layers()
    optimizer = torch.optim.Adam(policy.parameters())
    for _ in range(STEPS):
        state, found = torch.zeros(4), []
        for _ in range(4):
            actions = torch.distributions.Categorical(logits=policy(state))
            action = actions.sample()
            found.append(actions.log_prob(action))
            time.sleep(ACTION_S)
            state = state + torch.randn(4) * (action.item() + 1)
        optimizer.zero_grad()
        torch.stack(found).sum().neg().backward()
        optimizer.step()
    return [policy]


def accumulation() -> Iterable[nn.Module]:
    """Accumulate two batches per step, with evaluation and a checkpoint between steps, and data from forked workers."""
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters())
    for i, (inputs, labels) in enumerate(batches(2 * STEPS, workers=1)):
        (F.cross_entropy(model(inputs), labels) / 2).backward()
        if i % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if i % 6 == 5:
            model.eval()
            with torch.no_grad():
                model(inputs).argmax(-1)
            model.train()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, io.BytesIO())
    return [model]


def closure() -> Iterable[nn.Module]:
    """Use an optimizer that computes the loss itself, several times per step."""
    model = two_layers()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for inputs, labels in batches():

        def loss_of(inputs: Tensor = inputs, labels: Tensor = labels) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            return loss

        optimizer.step(loss_of)
    return [model]


def compiled() -> Iterable[nn.Module]:
    """Train a compiled model with clipped gradients."""
    model = two_layers()
    called = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters())
    for inputs, labels in batches():
        optimizer.zero_grad()
        F.cross_entropy(called(inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [model]


def several_optimizers() -> Iterable[nn.Module]:
    """Train two parts of one model with an optimizer each; the second steps only in every other iteration."""
    body, head = nn.Linear(4, 8), nn.Linear(8, 2)
    first, second = torch.optim.AdamW(body.parameters()), torch.optim.SGD(head.parameters(), 0.1)
    for i, (inputs, labels) in enumerate(batches()):
        F.cross_entropy(head(body(inputs).relu()), labels).backward()
        for optimizer in (first, second)[: 1 + i % 2]:
            optimizer.step()
        body.zero_grad()
        head.zero_grad()
    return body, head


def scaler() -> Iterable[nn.Module]:
    """Scale gradients, some of them infinite, so that the scaler skips the optimizer's step."""
    model = two_layers()
    optimizer, scale = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu")
    for i, (inputs, labels) in enumerate(batches()):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(inputs), labels)
        scale.scale(loss * (float("inf") if i in (0, 3) else 1.0)).backward()
        scale.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale.step(optimizer)
        scale.update()
    return [model]


def no_optimizer() -> Iterable[nn.Module]:
    """Update the parameters in the script itself."""
    model = two_layers()
    for inputs, labels in batches():
        model.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data.add_(parameter.grad, alpha=-0.1)
    return [model]


STYLES: dict[str, Callable[[], Iterable[nn.Module]]] = {
    each.__name__: each
    for each in (
        gan,
        three_critic_steps,
        reinforcement,
        accumulation,
        closure,
        compiled,
        several_optimizers,
        scaler,
        no_optimizer,
    )
}


def digest(style: str) -> str:
    """Run a loop, and return a digest of its parameters and of the state of the random numbers after it."""
    torch.manual_seed(0)
    tensors = [p.detach() for module in STYLES[style]() for p in module.parameters()]
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in (*tensors, torch.get_rng_state()))).hexdigest()


if __name__ == "__main__":
    print(digest(sys.argv[1]))
