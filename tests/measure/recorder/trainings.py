"""Small training loops with a fault in what they train, and sound ones that look similar; each returns its step."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.measure.recorder import drawn_codes

Step = Callable[[], None]
STEPS_OF_A_LOOP = 60  # at most, of a recorded one


def net(*, dropout: float = 0.0, outputs: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Dropout(dropout), nn.Linear(24, outputs))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 8), torch.randint(4, (16,))


def loss_of(model: nn.Module) -> Tensor:
    inputs, labels = batch()
    return functional.cross_entropy(model(inputs), labels)


def forget_compilations() -> None:
    """Begin a loop as in a process that has compiled nothing; earlier tests may have."""
    if utils := sys.modules.get("torch._dynamo.utils"):
        utils.counters.clear()


def update(optimizer: Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# Faults


def signs_of_all_results() -> Step:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return lambda: update(optimizer, (model(batch()[0]).sign() - 1).square().mean())


def rate_divided_in_each_step() -> Step:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.1)

    def step() -> None:
        update(optimizer, loss_of(model))
        scheduler.step()

    return step


def noisy(noise: Callable[[Tensor, int], Tensor], *, dropout: float = 0.0) -> Step:
    """Return a step that adds noise to the inputs, or uses a function of them, by the number of the step."""
    model, steps = net(dropout=dropout), count()
    optimizer = AdamW(model.parameters())

    def step() -> None:
        inputs, labels = batch()
        update(optimizer, functional.cross_entropy(model(noise(inputs, next(steps))), labels))

    return step


def with_a_seeded_generator(inputs: Tensor, _: int) -> Tensor:
    return inputs + torch.randn(inputs.shape, generator=torch.Generator().manual_seed(1))


def with_seeded_numpy(inputs: Tensor, _: int) -> Tensor:
    np.random.seed(1)
    return inputs + torch.as_tensor(np.random.normal(0.0, 1.0, tuple(inputs.shape)), dtype=torch.float32)


def with_seeded_dropout(inputs: Tensor, _: int) -> Tensor:
    torch.manual_seed(1)
    return inputs


def with_noise_in_place(inputs: Tensor, _: int) -> Tensor:
    torch.manual_seed(1)
    return inputs + torch.empty_like(inputs).normal_()


def with_two_levels(inputs: Tensor, _: int) -> Tensor:
    torch.manual_seed(1)
    return inputs * torch.empty(16, 8).bernoulli_(0.5)


Validate = Callable[[nn.Module, int], object]


def validated(
    validate: Validate, *, every: int = 10, begins: bool = True, dropout: float = 0.1, model: nn.Module | None = None
) -> Step:
    """Return a step that calls a function after each so many steps.

    begins: whether the model is in training mode at first.
    """
    trained, numbers = (net(dropout=dropout) if model is None else model).train(begins), count(1)
    optimizer = AdamW(trained.parameters())

    def step() -> None:
        update(optimizer, loss_of(trained))
        number = next(numbers)
        if number % every == 0:
            validate(trained, number)

    return step


def evaluated(model: nn.Module, _: int = 0) -> None:
    model.eval()
    with torch.no_grad():
        loss_of(model)


def evaluated_and_trained(model: nn.Module, _: int = 0) -> None:
    evaluated(model)
    model.train()


def evaluated_and_some_trained(model: nn.Module, _: int) -> None:
    evaluated(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train()


def last_steps_in_evaluation_mode(model: nn.Module, number: int) -> None:
    """Evaluate, and train with fixed statistics from the twentieth step on, on purpose."""
    evaluated(model)
    model.train()
    if number >= 20:
        model.eval()


def a_teacher_that_is_trained_first() -> Step:
    """Train a model, and then another one by its outputs."""
    teacher, student, numbers = net(dropout=0.1), net(dropout=0.1), count()
    optimizer = AdamW([*teacher.parameters(), *student.parameters()])

    def step() -> None:
        if next(numbers) < 10:
            update(optimizer, loss_of(teacher))
            return
        evaluated(teacher)
        inputs, _ = batch()
        update(optimizer, functional.mse_loss(student(inputs), teacher(inputs).detach()))

    return step


def attacked() -> Step:
    """Train with adversarial inputs, which are found in evaluation mode."""
    model = net(dropout=0.1)
    optimizer = SGD(model.parameters(), 0.01)

    def step() -> None:
        inputs, labels = batch()
        model.eval()
        inputs.requires_grad_()
        functional.cross_entropy(model(inputs), labels).backward()
        assert inputs.grad is not None
        inputs = (inputs + 0.01 * inputs.grad.sign()).detach()
        model.train()
        update(optimizer, functional.cross_entropy(model(inputs), labels))

    return step


Clip = Callable[[Any, float], object]


def clipped(
    given: Callable[[nn.Module], Callable[[], Any]],
    clip: Clip = nn.utils.clip_grad_norm_,
    *,
    frozen: int = 0,
    rate: float = 0.01,
    also: Clip | None = None,
) -> Step:
    """Return a step that clips the gradients of what the function gives.

    given: called once, with the model; its result is called in each step. frozen: so many first parameters have no
    gradient. also: clips all gradients too.
    """
    model = net()
    for parameter in [*model.parameters()][:frozen]:
        parameter.requires_grad_(False)
    parameters, optimizer = given(model), SGD(model.parameters(), rate)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        clip(parameters(), 0.5)
        if also is not None:
            also(model.parameters(), 0.5)
        optimizer.step()

    return step


def filtered_once(model: nn.Module) -> Callable[[], Any]:
    found = filter(lambda p: p.requires_grad, model.parameters())
    return lambda: found


def parameters_once(model: nn.Module) -> Callable[[], Any]:
    found = model.parameters()
    return lambda: found


def parameters_once_in_two_steps(model: nn.Module) -> Callable[[], Any]:
    numbers, kept = count(), [model.parameters()]

    def given() -> Any:
        if next(numbers) % 2 == 0:
            kept[0] = model.parameters()
        return kept[0]

    return given


def small_rates(
    factor: Callable[[int], float],
    *groups: float,
    second: Callable[[int], float] | None = None,
    steps_per_epoch: int = 1,
    after: int = 0,
) -> Step:
    """Return a step with a LambdaLR for groups of these rates.

    second: the factor of the second group, if it has its own. after: the number of the scheduler at the beginning.
    """
    model, steps = net(), count()
    parts = [model] if len(groups) == 1 else [model[0], model[3]]
    optimizer = AdamW([{"params": part.parameters(), "lr": rate} for part, rate in zip(parts, groups, strict=True)])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [factor, second] if second else factor)
    if after:
        state = scheduler.state_dict()
        scheduler.load_state_dict(state | {"last_epoch": after})

    def step() -> None:
        update(optimizer, loss_of(model))
        if next(steps) % steps_per_epoch == steps_per_epoch - 1:
            scheduler.step()

    return step


def softmax_before_cross_entropy() -> Step:
    model = nn.Sequential(net(), nn.Softmax(1))
    optimizer = AdamW(model.parameters())
    return lambda: update(optimizer, loss_of(model))


def sigmoid_before_a_loss_of_logits() -> Step:
    model = net(outputs=1)
    optimizer = AdamW(model.parameters())

    def step() -> None:
        inputs, labels = batch()
        chance = model(inputs).sigmoid().squeeze(1)
        update(optimizer, functional.binary_cross_entropy_with_logits(chance, (labels > 1).float()))

    return step


class InList(nn.Module):
    """Model with layers in a Python list, which parameters() does not find."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 24)
        self.layers = [nn.Linear(24, 24), nn.Linear(24, 4)]

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs).relu()
        for layer in self.layers:
            hidden = layer(hidden.relu())
        return hidden


def layers_in_a_list() -> Step:
    model = InList()
    optimizer = AdamW(model.parameters())
    return lambda: update(optimizer, loss_of(model))


def optimizer_made_anew(*, is_kept: bool) -> Step:
    model, made = net(), list[AdamW]()

    def step() -> None:
        optimizer = AdamW(model.parameters())
        if is_kept:  # as by a scheduler
            made.append(optimizer)
        inputs, labels = batch()
        update(optimizer, functional.cross_entropy(model(inputs), labels))

    return step


Loss = Callable[[Tensor, Tensor], Tensor]


def regression(loss: Loss, batches: int | None = None, outputs: int = 1, *, is_squeezed: bool = False) -> Step:
    """Fit one number for each sample; the loss gets predictions of shape 16 × 1 and targets of shape 16.

    batches: the number of batches, which come again and again; None for others in each step.
    """
    model = net(outputs=outputs)
    optimizer = SGD(model.parameters(), 1e-3)
    kept = [torch.randn(16, 8) for _ in range(batches or STEPS_OF_A_LOOP)]
    numbers = count()

    def step() -> None:
        inputs = kept[next(numbers) % len(kept)]
        target, prediction = inputs[:, 0].sin(), model(inputs)
        if is_squeezed:
            target, prediction = target[:, None], prediction.squeeze()
        update(optimizer, loss(prediction, target))

    return step


def own_huber(prediction: Tensor, target: Tensor) -> Tensor:
    error = prediction - target
    return torch.where(error.abs() < 0.5, 0.5 * error**2, 0.5 * (error.abs() - 0.25)).mean()


def normal_likelihood(prediction: Tensor, target: Tensor) -> Tensor:
    return -torch.distributions.Normal(prediction, 1.0).log_prob(target).mean()


def own_cross_entropy(prediction: Tensor, target: Tensor) -> Tensor:
    label = (target > 0).float()
    chances = prediction.sigmoid()
    return -(label * chances.log() + (1 - label) * (1 - chances).log()).mean()


BROADCAST_LOSSES: dict[str, Loss] = {
    "squared": lambda prediction, target: ((prediction - target) ** 2).mean(),
    "absolute": lambda prediction, target: (target - prediction).abs().sum(),
    "root_of_the_mean_square": lambda prediction, target: (prediction - target).square().mean().sqrt(),
    "norm": lambda prediction, target: torch.linalg.vector_norm(prediction - target),
    "huber_of_torch": functional.huber_loss,
    "mse_of_torch": functional.mse_loss,
    "weighted_mse_of_torch": lambda prediction, target: (
        functional.mse_loss(prediction, target, reduction="none") * target.abs()
    ).mean(),
    "l1_of_torch": functional.l1_loss,
    "poisson_of_torch": functional.poisson_nll_loss,
    "own_huber": own_huber,
    "own_cross_entropy": own_cross_entropy,
    "margin": lambda prediction, target: functional.relu(1 - prediction * target.sign()).mean(),
    "normal_likelihood": normal_likelihood,
    "rescaled": lambda prediction, target: functional.mse_loss(3 * prediction + 1, target),
}

# Losses that pair each prediction with all others on purpose, or with constants, or do not pair.
WEIGHTS = torch.rand(16, 16)
LEVELS = torch.linspace(0.05, 0.95, 16)


def ranking(prediction: Tensor, target: Tensor) -> Tensor:
    wins = (target[:, None] > target[None, :]).float()
    return (functional.softplus(prediction.T - prediction) * wins).mean()


def partial_likelihood(prediction: Tensor, target: Tensor) -> Tensor:
    """Return the loss of Cox: each risk is compared with those that live longer."""
    at_risk = (target[None, :] >= target[:, None]).float()
    return -(prediction.squeeze(1) - torch.log((prediction.exp().T * at_risk).sum(1))).mean()


def kernel_distance(prediction: Tensor, target: Tensor) -> Tensor:
    """Return the distance of the distributions of predictions and targets by a kernel."""
    of_both = torch.exp(-((prediction - target) ** 2)).mean()
    return torch.exp(-((prediction - prediction.T) ** 2)).mean() - 2 * of_both


def nearest(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).abs().amin(1).mean()


def with_transport(prediction: Tensor, target: Tensor) -> Tensor:
    with torch.no_grad():
        plan = torch.softmax(-((prediction - target) ** 2), 1)
    return (plan * (prediction - target) ** 2).mean()


def with_a_mask(prediction: Tensor, target: Tensor) -> Tensor:
    error = (prediction - target) ** 2
    return torch.where(target[:, None] > target[None, :], error, 0.0).sum()


PAIRING_LOSSES: dict[str, Loss] = {
    "same_shape": lambda prediction, target: functional.mse_loss(prediction.squeeze(1), target),
    "ranking": ranking,
    "partial_likelihood": partial_likelihood,
    "kernel_distance": kernel_distance,
    "nearest_targets": nearest,
    "transport_plan": with_transport,
    "mask_of_pairs": with_a_mask,
    "added_matrix": lambda prediction, _: functional.softplus(prediction - WEIGHTS).mean(),
    "likelihood_of_a_mixture": lambda prediction, target: -torch.logsumexp(-((prediction - target) ** 2), 0).mean(),
    "constant_label": lambda prediction, _: ((prediction - torch.ones(16)) ** 2).mean(),
    "constant_label_of_torch": lambda prediction, _: functional.mse_loss(prediction, torch.ones(16)),
    "thresholds": lambda prediction, _: functional.softplus(prediction - LEVELS).mean(),
    "quantiles": lambda prediction, target: torch.maximum(
        LEVELS * (target[:, None] - prediction), (LEVELS - 1) * (target[:, None] - prediction)
    ).mean(),
    "weights_of_samples": lambda prediction, target: ((prediction - target[:, None]) ** 2 * target.abs()).mean(),
    "regression_and_pairs": lambda prediction, target: (
        functional.mse_loss(prediction.squeeze(1), target) + 0.1 * torch.exp(-((prediction - target) ** 2)).mean()
    ),
}


Use = Callable[[Tensor], object]


def wide() -> nn.Sequential:
    """Return a model with most of its work in its first layer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 4))


def input_with_a_gradient(
    use: Use = lambda _: None,
    prepare: Use = lambda _: None,
    call: Callable[[nn.Module, Tensor], Tensor] = lambda model, inputs: model(inputs),
    model: nn.Module | None = None,
    *,
    inputs: Tensor | None = None,
) -> Step:
    """Train a model with an input that requires a gradient.

    use: called with the input after the update. prepare: called with it before forward. inputs: of all steps; None for
    others in each step.
    """
    trained = wide() if model is None else model
    optimizer = SGD(trained.parameters(), 1e-3)

    def step() -> None:
        batch = torch.randn(256, 512) if inputs is None else inputs
        batch.requires_grad_()
        prepare(batch)
        update(optimizer, call(trained, batch).square().mean())
        use(batch)

    return step


def normalised_in_graph(model: nn.Module, inputs: Tensor) -> Tensor:
    result: Tensor = model((inputs - 0.1) / 2)
    return result


def read_in_place(inputs: Tensor) -> None:
    assert inputs.grad is not None
    with torch.no_grad():
        inputs -= 0.1 * inputs.grad


def kept_inputs() -> Step:
    kept: list[Tensor] = []
    return input_with_a_gradient(kept.append)


def input_of_an_optimizer() -> Step:
    """Fit an image and a model together, as style transfer does with the image alone."""
    model, inputs = wide(), torch.randn(256, 512, requires_grad=True)
    optimizer = SGD([*model.parameters(), inputs], 1e-3)
    return lambda: update(optimizer, model(inputs).square().mean())


def first_half_elsewhere() -> Step:
    """Train two halves, where the second sends the gradient of its input to the first, as split learning does."""
    first, second = nn.Linear(8, 512), wide()
    optimizers = SGD(first.parameters(), 1e-3), SGD(second.parameters(), 1e-3)

    def step() -> None:
        sent = first(torch.randn(256, 8))
        received = sent.detach().requires_grad_()
        for each in optimizers:
            each.zero_grad()
        second(received).square().mean().backward()
        sent.backward(received.grad)
        for each in optimizers:
            each.step()

    return step


class CheckpointedFirst(nn.Module):
    """Model with a checkpoint around its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = wide()

    def forward(self, inputs: Tensor) -> Tensor:
        first, *others = self.layers
        return nn.Sequential(*others)(checkpoint(first, inputs, use_reentrant=True))


def hooked_layers() -> Step:
    model, seen = wide(), list[float]()
    model[0].register_full_backward_hook(lambda _, inputs, __: seen.append(float(inputs[0].norm())))
    return input_with_a_gradient(model=model)


def deep_after_a_cheap_first_layer() -> Step:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 256), *(nn.Linear(256, 256) for _ in range(3))]
    model = nn.Sequential(nn.Flatten(0, 1), nn.Unflatten(1, (64, 8)), nn.Flatten(0, 1), *layers)
    return input_with_a_gradient(model=model, inputs=torch.randn(1, 32, 512))


def never_cleared() -> Step:
    model = net()
    optimizer = SGD(model.parameters(), 1e-3)

    def step() -> None:
        loss_of(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def another_optimizer_cleared() -> Step:
    model, other = net(), net()
    optimizer, of_other = AdamW(model.parameters()), AdamW(other.parameters())

    def step() -> None:
        of_other.zero_grad()
        loss_of(model).backward()
        optimizer.step()

    return step


def accumulated_without_clearing() -> Step:
    model = net()
    optimizer = AdamW(model.parameters(), fused=True)

    def step() -> None:
        for _ in range(4):
            (loss_of(model) / 4).backward()
        optimizer.step()

    return step


def cleared_too_early() -> Step:
    model = net()
    optimizer = AdamW(model.parameters())

    def step() -> None:
        loss_of(model).backward()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()

    return step


def optimizer_of_a_copy() -> Step:
    model = net()
    optimizer = AdamW(copy.deepcopy(model).parameters())
    return lambda: update(optimizer, loss_of(model))


def rate_of_zero() -> Step:
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.0)
    return lambda: update(optimizer, loss_of(model))


def detached() -> Step:
    model, scale = net(), nn.Parameter(torch.ones(()))
    optimizer = AdamW(model.parameters())

    def step() -> None:
        inputs, labels = batch()
        update(optimizer, functional.cross_entropy(model(inputs).detach() * scale, labels))

    return step


def rounded_away() -> Step:
    model = net().bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    optimizer = SGD(model.parameters(), 1e-6)

    def step() -> None:
        inputs, labels = batch()
        update(optimizer, functional.cross_entropy(model(inputs.bfloat16()), labels))

    return step


def steps_of_a_third() -> Step:
    model, numbers = net(), count()
    optimizer = SGD(model.parameters(), 1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if next(numbers) % 3 == 0:
            optimizer.step()

    return step


def diverging() -> Step:
    weight, target = nn.Parameter(torch.ones(8)), torch.full((8,), 3.0)
    model = nn.ParameterList([weight])
    optimizer = SGD(model.parameters(), 9.0)
    return lambda: update(optimizer, functional.mse_loss(weight, target))


def backbone_with_gradients() -> Step:
    backbone, head = net(outputs=8), nn.Linear(8, 4)
    optimizer = AdamW(head.parameters())

    def step() -> None:
        inputs, labels = batch()
        update(optimizer, functional.cross_entropy(head(backbone(inputs)), labels))

    return step


def table_of_which_few_rows_are_used(sparse: bool = False) -> Step:
    table = nn.Embedding(12_000, 64, sparse=sparse)
    optimizer = torch.optim.SparseAdam(table.parameters()) if sparse else torch.optim.Adam(table.parameters())
    return lambda: update(optimizer, table(torch.randint(12_000, (200,))).square().mean())


def penalty_on_all_rows_of_a_table() -> Step:
    table = nn.Embedding(12_000, 64)
    optimizer = torch.optim.Adam(table.parameters())

    def step() -> None:
        loss = table(torch.randint(12_000, (200,))).square().mean()
        update(optimizer, loss + 1e-6 * table.weight.square().sum())

    return step


def attention_and_a_loss_of_its_own() -> Step:
    """Train with softmax inside the model, a loss over its weights, and the usual one over logits."""
    model, scores = net(), nn.Linear(8, 8)
    optimizer = AdamW([*model.parameters(), *scores.parameters()])

    def step() -> None:
        inputs, labels = batch()
        weights = scores(inputs).softmax(1)
        loss = functional.cross_entropy(model(weights * inputs), labels)
        update(optimizer, loss + 0.1 * (weights * weights.log()).sum(1).mean())

    return step


def softmax_over_rows_and_then_columns() -> Step:
    model = net(outputs=16)
    optimizer = AdamW(model.parameters())

    def step() -> None:
        inputs, _ = batch()
        update(optimizer, functional.cross_entropy(model(inputs).softmax(0), torch.arange(16)))

    return step


def parameters_of_an_encoder_that_is_not_called() -> Step:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position, self.body = nn.Parameter(torch.randn(8)), nn.Linear(8, 8)

    encoder, head = Encoder(), nn.Linear(8, 4)
    optimizer = AdamW(head.parameters())

    def step() -> None:
        inputs, labels = batch()
        with torch.no_grad():
            encoder.body(inputs)
        update(optimizer, functional.cross_entropy(head(inputs + encoder.position), labels))
        encoder.position.grad = None

    return step


def own_updates_of_layers_in_a_list() -> Step:
    model = InList()
    optimizer = AdamW(model.parameters())

    def step() -> None:
        update(optimizer, loss_of(model))
        with torch.no_grad():
            for parameter in (p for layer in model.layers for p in layer.parameters()):
                assert parameter.grad is not None
                parameter -= 0.01 * parameter.grad
                parameter.grad = None

    return step


class Around(Optimizer):
    """Optimizer that steps another one for the same parameters in its own step, as in sharpness-aware minimisation."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def optimizer_around_another() -> Step:
    model = net()
    optimizer = Around(AdamW(model.parameters()))
    return lambda: update(optimizer, loss_of(model))


def short_cycle_of_the_rate() -> Step:
    model = net()
    optimizer = AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=41)

    def step() -> None:
        update(optimizer, loss_of(model))
        scheduler.step()

    return step


def with_new_numbers(inputs: Tensor, number: int) -> Tensor:
    return inputs + torch.randn(inputs.shape, generator=torch.Generator().manual_seed(number))


def with_noise_made_once() -> Callable[[Tensor, int], Tensor]:
    noise = torch.randn(16, 8)
    return lambda inputs, _: inputs + noise


def with_the_same_noise_in_pairs(inputs: Tensor, number: int) -> Tensor:
    both = [torch.randn(16, 8, generator=torch.Generator().manual_seed(number)) for _ in range(2)]
    return inputs + both[0] - both[1] / 2


def with_a_seeded_evaluation(inputs: Tensor, _: int) -> Tensor:
    with torch.no_grad():
        torch.randn(inputs.shape, generator=torch.Generator().manual_seed(1)).sum()
    return inputs


def with_a_seeded_helper(inputs: Tensor, _: int) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return inputs + torch.randn(16, 8)


def with_a_restored_state(inputs: Tensor, _: int) -> Tensor:
    state = np.random.get_state()
    np.random.seed(1)
    noise = np.random.randn(16, 8)
    np.random.set_state(state)
    return inputs + torch.as_tensor(noise, dtype=torch.float32)


def with_a_fixed_projection(inputs: Tensor, _: int) -> Tensor:
    return inputs @ torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


def with_weights_made_anew(inputs: Tensor, number: int) -> Tensor:
    torch.manual_seed(1)
    layer = nn.Linear(16, 16)
    torch.manual_seed(number)
    return layer(inputs.T).T


def with_no_choice(inputs: Tensor, _: int) -> Tensor:
    return inputs + torch.bernoulli(torch.arange(128).reshape(16, 8).fmod(2.0)) + torch.zeros(16, 8).uniform_(1, 1)


def with_few_bits(inputs: Tensor, _: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return inputs + torch.randint(2, (16, 1), generator=generator)


def noise_in_a_checkpoint() -> Step:
    model = nn.Sequential(nn.Linear(8, 24), nn.Dropout(), nn.Linear(24, 4))
    optimizer = AdamW(model.parameters())

    def noised(inputs: Tensor) -> Tensor:
        return model(inputs + torch.randn_like(inputs))

    def step() -> None:
        inputs, labels = batch()
        logits: Any = checkpoint(noised, inputs, use_reentrant=False)
        update(optimizer, functional.cross_entropy(logits, labels))

    return step


def other_optimizer_of_the_same_parameters() -> Step:
    model = net()
    optimizers = AdamW(model.parameters()), torch.optim.SGD(model.parameters(), 0.1)
    steps = iter(range(1000))

    def step() -> None:
        inputs, labels = batch()
        update(optimizers[next(steps) >= 20], functional.cross_entropy(model(inputs), labels))

    return step


def penalty_on_a_table_that_also_gives_the_logits() -> Step:
    table = nn.Embedding(12_000, 64)
    optimizer = torch.optim.Adam(table.parameters())

    def step() -> None:
        words = torch.randint(12_000, (40,))
        loss = functional.cross_entropy(table(words) @ table.weight.T, words.roll(1))
        update(optimizer, loss + 1e-4 * table.weight.square().sum())

    return step


def table_of_equal_weights_with_equal_gradients() -> Step:
    table = nn.Embedding(12_000, 64)
    nn.init.ones_(table.weight)
    optimizer = torch.optim.Adam(table.parameters())
    return lambda: update(optimizer, table(torch.arange(12_000)).square().mean())


def penalty_on_a_table_of_which_all_rows_are_used() -> Step:
    table = nn.Embedding(12_000, 64)
    optimizer = torch.optim.Adam(table.parameters())

    def step() -> None:
        loss = (table(torch.randperm(12_000)) - 1).square().mean()
        update(optimizer, loss + 1e-6 * table.weight.square().sum())

    return step


def linear_of_which_few_rows_are_used() -> Step:
    layer = nn.Linear(64, 12_000, bias=False)
    optimizer = torch.optim.Adam(layer.parameters())
    return lambda: update(optimizer, layer(torch.randn(4, 64))[:, :200].square().mean())


def metric_by_another_call(*, after_update: bool) -> Step:
    model = net()
    optimizer = AdamW(model.parameters())

    def step() -> None:
        inputs, labels = batch()
        loss = functional.cross_entropy(model(inputs), labels)
        if after_update:
            update(optimizer, loss)
        (model(inputs.clone()).argmax(1) == labels).float().mean()
        if not after_update:
            update(optimizer, loss)

    return step


def evaluation_on_the_same_batch() -> Step:
    model = net(dropout=0.5)
    optimizer = AdamW(model.parameters())
    inputs, labels = batch()

    def step() -> None:
        model.train()
        update(optimizer, functional.cross_entropy(model(inputs), labels))
        model.eval()
        (model(inputs).argmax(1) == labels).float().mean()

    return step


def two_losses_of_two_calls() -> Step:
    model = net()
    optimizer = AdamW(model.parameters())

    def step() -> None:
        inputs, labels = batch()
        loss = functional.cross_entropy(model(inputs), labels)
        update(optimizer, loss + 0.1 * model(inputs).square().mean())

    return step


def two_losses_with_two_passes() -> Step:
    trunk, heads = net(outputs=8), [nn.Linear(8, 4), nn.Linear(8, 4)]
    optimizer = AdamW([p for part in (trunk, *heads) for p in part.parameters()])

    def step() -> None:
        inputs, labels = batch()
        shared = trunk(inputs)
        optimizer.zero_grad()
        for head in heads:
            functional.cross_entropy(head(shared), labels).backward(retain_graph=True)
        optimizer.step()

    return step


Derive = Callable[[Tensor, Tensor], Tensor]  # from fields and the points at which they are known to a residual


def with_derivatives(derive: Derive) -> Step:
    """Return a step that trains fields to fulfil an equation between their derivatives."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = AdamW(model.parameters())

    def step() -> None:
        points = torch.rand(64, 3, requires_grad=True)
        update(optimizer, derive(model(points), points).square().mean())

    return step


def gradient(output: Tensor, *inputs: Tensor, weights: Tensor | None = None) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output, inputs, weights, create_graph=True)


def one_call_per_derivative(fields: Tensor, points: Tensor) -> Tensor:
    u, v = fields.unbind(1)
    x, y = (gradient(field.sum(), points)[0][:, axis] for axis, field in enumerate((u, v)))
    return x + y + gradient(u.sum(), points)[0][:, 2] + gradient(v.sum(), points)[0][:, 2]


def one_call_per_field(fields: Tensor, points: Tensor) -> Tensor:
    (of_u,), (of_v,) = (gradient(field.sum(), points) for field in fields.unbind(1))
    return of_u[:, 0] + of_v[:, 1] + of_u[:, 2] + of_v[:, 2]


def second_derivatives(fields: Tensor, points: Tensor) -> Tensor:
    (of_u,) = gradient(fields[:, 0].sum(), points)
    along_x, along_y = (gradient(of_u[:, axis].sum(), points)[0][:, axis] for axis in range(2))
    return along_x + along_y


def products_with_two_vectors(fields: Tensor, points: Tensor) -> Tensor:
    """Return the divergence as estimated with two random vectors, each with a pass of its own."""
    probes = (torch.randn_like(fields) for _ in range(2))
    return torch.stack([(gradient(fields, points, weights=each)[0][:, :2] * each).sum(1) for each in probes]).mean(0)


def sums_along_axes(fields: Tensor, points: Tensor) -> Tensor:
    """Return the derivatives of sums and means of the fields, which differ in nothing but an argument."""
    first = gradient(fields[:8].sum(), points)[0] + gradient(fields[8:].sum(), points)[0]
    return first + gradient(fields.sum(0)[0], points)[0] + gradient(fields.sum(0)[1], points)[0]


def rows_with_one_vector(*, is_hidden: bool) -> Step:
    """Train with the rows of a Jacobian, each from a call with the same vector, which changes in place.

    is_hidden: autograd does not know of the changes.
    """
    torch.manual_seed(0)
    model = net()
    parameters, optimizer = [*model.parameters()], torch.optim.SGD(model.parameters(), 1e-2)

    def step() -> None:
        outputs, rows = model(batch()[0]), []
        unit = torch.zeros_like(outputs)
        for column in range(4):
            changed = unit.data if is_hidden else unit
            changed.zero_()
            changed[:, column] = 1
            rows.append(torch.autograd.grad(outputs, parameters, unit, retain_graph=True))
        for parameter, *of_rows in zip(parameters, *rows, strict=True):
            parameter.grad = torch.stack(of_rows).square().mean(0)
        optimizer.step()

    return step


def gradient_of_each_sample() -> Step:
    """Train a tabular policy with the gradients of each sample, many of which are equal."""
    torch.manual_seed(0)
    states, model = torch.eye(8)[:3], net(outputs=2)
    parameters, optimizer = [*model.parameters()], torch.optim.SGD(model.parameters(), 1e-2)

    def step() -> None:
        scores = model(states[torch.arange(12) % 3]).log_softmax(1)[:, 0]
        each = [torch.autograd.grad(score, parameters, retain_graph=True) for score in scores]
        for parameter, *of_samples in zip(parameters, *each, strict=True):
            parameter.grad = torch.stack(of_samples).square().mean(0)
        optimizer.step()

    return step


def gradients_routed_by_hooks() -> Step:
    """Differentiate one loss through some hidden features at a time, which a hook selects."""
    torch.manual_seed(0)
    first, second = net(outputs=32), nn.Linear(32, 4)
    parameters, optimizer = [*first.parameters()], torch.optim.SGD(first.parameters(), 1e-2)

    def step() -> None:
        inputs, labels = batch()
        hidden, groups = first(inputs), torch.arange(32) % 2
        mask = torch.ones(32)
        hidden.register_hook(lambda gradient: gradient * mask)
        loss, gradients = functional.cross_entropy(second(hidden), labels), []
        for group in range(2):
            mask.copy_(groups == group)
            gradients.append(torch.autograd.grad(loss, parameters, retain_graph=True))
        for parameter, one, other in zip(parameters, *gradients, strict=True):
            parameter.grad = one + 0.5 * other
        optimizer.step()

    return step


def one_sum_per_input() -> Step:
    """Take the derivative by each coordinate from a call of its own, each of which has its own sum."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    unused = nn.Parameter(torch.zeros(0, 3))
    optimizer = AdamW([*model.parameters(), unused])

    def step() -> None:
        places = [torch.rand(64, 1, requires_grad=True) for _ in range(3)]
        u = model(torch.cat(places, 1)) + unused.sum()
        slopes = [gradient(u.sum(), each, unused)[0] for each in places]
        update(optimizer, torch.stack(slopes).square().mean())

    return step


def one_call_per_input() -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = AdamW(model.parameters())

    def step() -> None:
        x, t = (torch.rand(64, 1, requires_grad=True) for _ in range(2))
        u = model(torch.cat([x, t], 1))
        (along_x,), (along_t,) = (gradient(u, each, weights=torch.ones_like(u)) for each in (x, t))
        update(optimizer, (along_t + u * along_x).square().mean())

    return step


def gradient_of_each_loss() -> Step:
    """Train two tasks with the mean of their gradients, each of which has a pass of its own."""
    trunk, heads = net(outputs=8), [nn.Linear(8, 4), nn.Linear(8, 4)]
    optimizer = AdamW(trunk.parameters())

    def step() -> None:
        inputs, labels = batch()
        shared, parameters = trunk(inputs), [*trunk.parameters()]
        losses = [functional.cross_entropy(head(shared), labels) for head in heads]
        each = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
        for parameter, *of_losses in zip(parameters, *each, strict=True):
            parameter.grad = torch.stack(of_losses).mean(0)
        optimizer.step()

    return step


def anomaly_in_backward() -> Step:
    model = net()
    optimizer = AdamW(model.parameters())

    def step() -> None:
        with torch.autograd.detect_anomaly(check_nan=False):
            update(optimizer, loss_of(model))

    return step


def hook_per_step() -> Step:
    model = net()
    optimizer = AdamW(model.parameters())

    def step() -> None:
        model[0].register_forward_hook(lambda *_: None)
        update(optimizer, loss_of(model))

    return step


def tensor_hook_per_step() -> Step:
    model = net()
    optimizer = AdamW(model.parameters())

    def step() -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient)
        update(optimizer, loss_of(model))

    return step


class Fixed(nn.Module):
    """Fixed network that is compared at several depths; `call` runs its first layers."""

    def __init__(self, call: Callable[[nn.Sequential, int, Tensor], Tensor], depths: tuple[int, ...] = (2, 4, 6)):
        super().__init__()
        self.layers = nn.Sequential(*[part for _ in range(3) for part in (nn.Linear(256, 256), nn.GELU())])
        self.layers.requires_grad_(False)
        self.call, self.depths = call, depths

    def forward(self, inputs: Tensor, wanted: Tensor) -> Tensor:
        losses = [functional.l1_loss(self.call(self.layers, depth, inputs), wanted) for depth in self.depths]
        return torch.stack(losses).sum()


def sliced(layers: nn.Sequential, depth: int, inputs: Tensor) -> Tensor:
    return layers[:depth](inputs)


def with_functions_between(layers: nn.Sequential, depth: int, inputs: Tensor) -> Tensor:
    for layer in layers[:depth:2]:
        inputs = functional.relu(layer(inputs) * 0.5)
    return inputs


def with_dropout_between(layers: nn.Sequential, depth: int, inputs: Tensor) -> Tensor:
    for layer in layers[:depth]:
        inputs = layer(functional.dropout(inputs, 0.1))
    return inputs


def perceptual(call: Callable[[nn.Sequential, int, Tensor], Tensor], depths: tuple[int, ...] = (2, 4, 6)) -> Step:
    """Train a model by a fixed network that runs for each of some depths."""
    torch.manual_seed(0)
    model, fixed = nn.Linear(256, 256), Fixed(call, depths)
    optimizer = SGD(model.parameters(), 1e-3)
    wanted = torch.randn(256, 256)

    def step() -> None:
        update(optimizer, fixed(model(torch.randn(256, 256)), wanted))

    return step


def rows_into_a_linear(
    make: Callable[[], Tensor], call: Callable[[nn.Linear, Tensor], Tensor] | None = None, width: int = 2000
) -> Step:
    """Train a network that begins with a linear layer of this width."""
    torch.manual_seed(0)
    first, head = nn.Linear(width, 32), nn.Linear(32, 4)
    optimizer = SGD([*first.parameters(), *head.parameters()], 0.1)
    project = call or (lambda layer, inputs: layer(inputs))

    def step() -> None:
        inputs = make()
        logits = head(functional.relu(project(first, inputs)).flatten(0, -2))
        update(optimizer, functional.cross_entropy(logits, torch.randint(4, (len(logits),))))

    return step


def one_hot(rows: int = 64, width: int = 2000) -> Tensor:
    return functional.one_hot(torch.randint(width, (rows,)), width).float()


def share_of_ones(share: float) -> Tensor:
    return (torch.rand(64, 2000) < share).float()


def few_rows_that_are_not_padding() -> Tensor:
    rows = torch.zeros(64, 2000)
    rows[::8] = torch.randn(8, 2000)
    return rows


def largest_activations() -> Tensor:
    """Return sparse activations, to which gradients flow."""
    values = torch.randn(64, 2000, requires_grad=True)
    top = values.topk(8)
    return torch.zeros(64, 2000).scatter(1, top.indices, top.values)


def with_its_transpose(layer: nn.Linear, inputs: Tensor) -> Tensor:
    """Reconstruct the inputs with the weight of the encoder, as a tied autoencoder does."""
    hidden = layer(inputs)
    return hidden + 1e-3 * functional.linear(hidden, layer.weight.t()).mean()


def once_with_dense_rows(layer: nn.Linear, inputs: Tensor) -> Tensor:
    first: Tensor = layer(inputs)
    return first + layer(torch.randn_like(inputs))


def in_a_large_network() -> Step:
    first = nn.Linear(300, 32)
    body = nn.Sequential(nn.Linear(32, 512), *[nn.Linear(512, 512) for _ in range(12)])
    optimizer = SGD([*first.parameters(), *body.parameters()], 0.1)
    return lambda: update(optimizer, body(first(one_hot(64, 300))).square().mean())


class Recurrent(nn.Module):
    """Recurrent layer with embeddings in front of it and a classifier behind."""

    def __init__(self, read: Callable[[Recurrent, Tensor], Tensor], *, batch_first: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(50, 8)
        self.layer, self.head = nn.GRU(8, 12, batch_first=batch_first), nn.Linear(12, 4)
        self.read = read

    def states(self, inputs: Tensor, *state: Tensor) -> Tensor:
        found: Tensor = self.layer(inputs, *state)[0]
        return found

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(self.read(self, inputs))
        return logits


def recurrent(
    read: Callable[[Recurrent, Tensor], Tensor],
    shape: tuple[int, ...] = (16, 6, 8),
    loader: dict[str, Any] | None = None,
    **options: Any,
) -> Step:
    """Train a recurrent network on random inputs, or on those of a data loader with these options."""
    model = Recurrent(read, **options)
    optimizer = SGD(model.parameters(), 0.1)
    samples = DataLoader(torch.randn(16 * 60, *shape[1:]), batch_size=shape[0], **loader) if loader else None
    batches = iter(samples) if samples is not None else None

    def step() -> None:
        inputs = (
            torch.randint(50, shape) if len(shape) == 2 else torch.randn(shape) if batches is None else next(batches)
        )
        logits = model(inputs).flatten(0, -2)
        update(optimizer, functional.cross_entropy(logits, torch.randint(4, (len(logits),))))

    return step


def last_along_dimension_1(model: Recurrent, inputs: Tensor) -> Tensor:
    return model.states(inputs)[:, -1]


def mean_along_dimension_1(model: Recurrent, inputs: Tensor) -> Tensor:
    return model.states(inputs).mean(1)


def last_of_words(model: Recurrent, inputs: Tensor) -> Tensor:
    return model.states(model.words(inputs))[:, -1, :]


FAULTS: dict[str, tuple[Callable[[], Step], str]] = {  # name → (the loop, the code of the first cause)
    "never_cleared": (never_cleared, "gradients-not-cleared"),
    "another_optimizer_cleared": (another_optimizer_cleared, "gradients-not-cleared"),
    "accumulated_without_clearing": (accumulated_without_clearing, "gradients-not-cleared"),
    "cleared_too_early": (cleared_too_early, "no-update"),
    "optimizer_of_a_copy": (optimizer_of_a_copy, "no-update"),
    "signs_of_all_results": (signs_of_all_results, "flat-operators"),
    "rate_of_zero": (rate_of_zero, "no-update"),
    "detached": (detached, "no-update"),
    "rounded_away": (rounded_away, "no-update"),
    "steps_of_a_third": (steps_of_a_third, "unused-passes"),
    "diverging": (diverging, "divergence"),
    "noise_of_a_seeded_generator": (lambda: noisy(with_a_seeded_generator), "same-randomness"),
    "noise_of_seeded_numpy": (lambda: noisy(with_seeded_numpy), "same-randomness"),
    "noise_in_place": (lambda: noisy(with_noise_in_place), "same-randomness"),
    "masks_of_two_levels": (lambda: noisy(with_two_levels), "same-randomness"),
    "seeded_dropout": (lambda: noisy(with_seeded_dropout, dropout=0.5), "same-randomness"),
    "evaluation_mode_stays": (lambda: validated(evaluated), "evaluation-mode"),
    "evaluation_mode_stays_with_statistics": (
        lambda: validated(evaluated, model=nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Linear(24, 4))),
        "evaluation-mode",
    ),
    "clipping_of_a_filter_that_is_used_up": (lambda: clipped(filtered_once), "empty-clipping"),
    "clipping_of_a_used_up_filter_and_a_loss_of_nan": (lambda: clipped(filtered_once, rate=1e30), "empty-clipping"),
    "clipping_of_parameters_that_are_used_up": (lambda: clipped(parameters_once), "empty-clipping"),
    "rate_as_a_factor": (lambda: small_rates(lambda _: 1e-3, 1e-3), "rate-as-factor"),
    "rate_as_a_factor_after_a_warm_up": (
        lambda: small_rates(lambda number: 1e-3 * min(1, (number + 1) / 12), 1e-3, 1e-4),
        "rate-as-factor",
    ),
    "softmax_before_cross_entropy": (softmax_before_cross_entropy, "double-softmax"),
    "sigmoid_before_a_loss_of_logits": (sigmoid_before_a_loss_of_logits, "double-softmax"),
    "layers_in_a_list": (layers_in_a_list, "unregistered-parameters"),
    "rate_divided_in_each_step": (rate_divided_in_each_step, "vanishing-rate"),
    "optimizer_made_anew": (lambda: optimizer_made_anew(is_kept=False), "remade-optimizers"),
    "optimizer_made_anew_and_kept": (lambda: optimizer_made_anew(is_kept=True), "remade-optimizers"),
    **{
        f"targets_broadcast_in_{name}": (lambda loss=loss: regression(loss), "paired-targets")  # type: ignore[misc]
        for name, loss in BROADCAST_LOSSES.items()
    },
    "targets_broadcast_in_one_batch": (lambda: regression(BROADCAST_LOSSES["squared"], 1), "paired-targets"),
    "squeezed_predictions": (lambda: regression(BROADCAST_LOSSES["squared"], is_squeezed=True), "paired-targets"),
    "squeezed_predictions_in_mse_of_torch": (
        lambda: regression(functional.mse_loss, is_squeezed=True),
        "paired-targets",
    ),
    "input_marked_for_a_saliency_map": (input_with_a_gradient, "input-gradients"),
    "one_input_marked_for_a_saliency_map": (
        lambda: input_with_a_gradient(inputs=torch.randn(256, 512)),
        "input-gradients",
    ),
    "normalised_input_marked_for_a_saliency_map": (
        lambda: input_with_a_gradient(call=normalised_in_graph),
        "input-gradients",
    ),
    "backbone_with_gradients": (backbone_with_gradients, "unused-gradients"),
    "table_of_which_few_rows_are_used": (table_of_which_few_rows_are_used, "dense-gradients"),
    "penalty_on_all_rows_of_a_table": (penalty_on_all_rows_of_a_table, "dense-gradients"),
    "metric_before_update": (lambda: metric_by_another_call(after_update=False), "repeated-calls"),
    "metric_after_update": (lambda: metric_by_another_call(after_update=True), "repeated-calls"),
    "evaluation_on_the_same_batch": (evaluation_on_the_same_batch, "repeated-calls"),
    "two_losses_of_two_calls": (two_losses_of_two_calls, "repeated-calls"),
    "one_call_per_derivative": (lambda: with_derivatives(one_call_per_derivative), "repeated-backward"),
    "one_call_per_input": (one_call_per_input, "repeated-backward"),
    "one_sum_per_input": (one_sum_per_input, "repeated-backward"),
    "two_losses_with_two_passes": (two_losses_with_two_passes, "repeated-backward"),
    "first_layers_for_each_depth": (lambda: perceptual(sliced), "repeated-calls"),
    "first_layers_in_own_code": (lambda: perceptual(with_functions_between), "repeated-calls"),
    "dense_adjacency": (lambda: over_a_graph(torch.matmul), "sparse-factors"),
    "gelu_by_a_formula": (lambda: activated(gelu_by_a_formula), "activation-formulas"),
    "attention_with_scores": (lambda: attention(with_scores), "product-order"),
    "one_hot_into_a_linear": (lambda: rows_into_a_linear(one_hot), "one-hot-products"),
    "one_hot_of_some_rows": (
        lambda: rows_into_a_linear(lambda: one_hot() * (torch.arange(64) % 4 != 0)[:, None]),
        "one-hot-products",
    ),
    "several_ones_into_a_linear": (lambda: rows_into_a_linear(lambda: share_of_ones(0.003)), "one-hot-products"),
    "last_along_dimension_1": (lambda: recurrent(last_along_dimension_1), "samples-as-time"),
    "last_of_words": (lambda: recurrent(last_of_words, (16, 6)), "samples-as-time"),
    "mean_of_a_shuffled_batch": (
        lambda: recurrent(mean_along_dimension_1, loader={"shuffle": True}),
        "samples-as-time",
    ),
    "head_replaced_after_the_optimizer": (lambda: head_replaced(lambda *_: ()), "replaced-parameters"),
    "anomaly_in_backward": (anomaly_in_backward, "anomaly-detection"),
    "hook_per_step": (hook_per_step, "growing-hooks"),
    "tensor_hook_per_step": (tensor_hook_per_step, "growing-hooks"),
    **{name: (loop, "cut-samples") for name, loop in drawn_codes.FAULTS.items()},
    **{name: (loop, "decompositions") for name, loop in drawn_codes.WITH_MATRICES.items()},
}


class Replaced(nn.Module):
    """Network with a body and a head, of which the head is replaced for another task."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = net(outputs=12), nn.Linear(12, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(inputs).relu())
        return result


def head_replaced(then: Callable[[Replaced, Optimizer], Sequence[Optimizer]], *, first: bool = True) -> Step:
    """Return a step after the head was replaced; `then` returns further optimizers.

    first: make the optimizer before that.
    """
    model = Replaced()
    if not first:
        model.head = nn.Linear(12, 4)
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    if first:
        model.head = nn.Linear(12, 4)
    others = then(model, optimizer)

    def step() -> None:
        for other in others:
            other.zero_grad()
        update(optimizer, loss_of(model))
        for other in others:
            other.step()

    return step


def frozen_head(model: Replaced, optimizer: Optimizer) -> Sequence[Optimizer]:
    model.head.requires_grad_(False)
    return ()


def with_new_head(model: Replaced, optimizer: Optimizer) -> Sequence[Optimizer]:
    optimizer.add_param_group({"params": [*model.head.parameters()]})
    return ()


# Sound loops


def accumulation(clear: Callable[[nn.Module, Optimizer], object], *, first: bool) -> Step:
    model = net()
    optimizer = AdamW(model.parameters(), foreach=True)

    def step() -> None:
        if first:
            clear(model, optimizer)
        for _ in range(4):
            (loss_of(model) / 4).backward()
        optimizer.step()
        if not first:
            clear(model, optimizer)

    return step


def by_hand(model: nn.Module, _: Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()


def none_by_hand(model: nn.Module, _: Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def gradients_set_by_hand() -> Step:
    model = net()
    optimizer = SGD(model.parameters(), 0.01)

    def step() -> None:
        gradients = torch.autograd.grad(loss_of(model), [*model.parameters()])
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()

    return step


def decayed_gradients() -> Step:
    """Keep a running average of the gradients on purpose."""
    model = net()
    optimizer = SGD(model.parameters(), 0.01)

    def step() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.9)
        loss_of(model).backward()
        optimizer.step()

    return step


def combined_gradients() -> Step:
    """Combine the gradients of three tasks, each of which has a backward pass."""
    model = net()
    optimizer = SGD(model.parameters(), 0.01)

    def step() -> None:
        kept = []
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model).backward()
            kept.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        for parameter, *gradients in zip(model.parameters(), *kept, strict=True):
            parameter.grad = torch.stack(gradients).mean(0)
        optimizer.step()

    return step


def penalty_of_the_gradient() -> Step:
    """Train with a penalty on a gradient, which leads through the same graph again."""
    model = net()
    optimizer = AdamW(model.parameters())

    def step() -> None:
        inputs, labels = batch()
        inputs.requires_grad_()
        loss = functional.cross_entropy(model(inputs), labels)
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
        update(optimizer, loss + gradient.square().sum())

    return step


def passes_for_two_players() -> Step:
    """Compute the gradients of two players from one graph, each for its own parameters alone."""
    trunk, player, opponent = net(outputs=8), nn.Linear(8, 4), nn.Linear(8, 4)
    first, second = AdamW([*trunk.parameters(), *player.parameters()]), AdamW(opponent.parameters())

    def step() -> None:
        inputs, labels = batch()
        shared = trunk(inputs)
        loss = functional.cross_entropy(player(shared), labels)
        other = functional.cross_entropy(opponent(shared), labels)
        first.zero_grad()
        loss.backward(retain_graph=True, inputs=[*trunk.parameters(), *player.parameters()])
        second.zero_grad()
        other.backward(inputs=[*opponent.parameters()])
        first.step()
        second.step()

    return step


def adversarial_examples() -> Step:
    """Find an adversarial input by gradients of the input, then train with it."""
    model = net()
    optimizer = SGD(model.parameters(), 0.01)

    def step() -> None:
        inputs, labels = batch()
        for _ in range(3):
            inputs.requires_grad_()
            functional.cross_entropy(model(inputs), labels).backward()
            assert inputs.grad is not None
            inputs = (inputs + 0.01 * inputs.grad.sign()).detach()
            optimizer.zero_grad()
        update(optimizer, functional.cross_entropy(model(inputs), labels))

    return step


def generative_adversarial() -> Step:
    generator, critic = net(outputs=8), net(outputs=1)
    of_generator, of_critic = AdamW(generator.parameters()), AdamW(critic.parameters())

    def step() -> None:
        fake = generator(torch.randn(16, 8))
        update(of_generator, functional.softplus(-critic(fake)).mean())
        real = functional.softplus(-critic(torch.randn(16, 8))).mean()
        update(of_critic, real + functional.softplus(critic(fake.detach())).mean())

    return step


def critic_steps_more_often() -> Step:
    generator, critic = net(outputs=8), net(outputs=1)
    of_generator, of_critic = AdamW(generator.parameters()), AdamW(critic.parameters())

    def step() -> None:
        for _ in range(3):
            fake = generator(torch.randn(16, 8)).detach()
            update(of_critic, critic(fake).mean() - critic(torch.randn(16, 8)).mean())
        update(of_generator, -critic(generator(torch.randn(16, 8))).mean())

    return step


def low_rank_adapters() -> Step:
    base, down, up = net(outputs=8).requires_grad_(False), nn.Linear(8, 2), nn.Linear(2, 4)
    model = nn.ModuleDict({"base": base, "down": down, "up": up})
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad])

    def step() -> None:
        inputs, labels = batch()
        update(optimizer, functional.cross_entropy(up(down(base(inputs))), labels))

    return step


def frozen_backbone() -> Step:
    backbone, head = net(outputs=8), nn.Linear(8, 4)
    optimizer = AdamW(head.parameters())

    def step() -> None:
        inputs, labels = batch()
        with torch.no_grad():
            features = backbone(inputs)
        update(optimizer, functional.cross_entropy(head(features), labels))

    return step


def master_weights() -> Step:
    """Train copies in float32, from which the weights in bfloat16 are written; the learning rate is in its warm-up."""
    model = net().bfloat16()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = AdamW(masters, lr=1e-7)

    def step() -> None:
        inputs, labels = batch()
        model.zero_grad()
        functional.cross_entropy(model(inputs.bfloat16()), labels).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)

    return step


def own_updates_beside_an_optimizer() -> Step:
    model, head = net(outputs=8), nn.Linear(8, 4)
    optimizer = AdamW(head.parameters())

    def step() -> None:
        inputs, labels = batch()
        model.zero_grad()
        update(optimizer, functional.cross_entropy(head(model(inputs)), labels))
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.01 * parameter.grad

    return step


def warm_up_from_zero() -> Step:
    model = net()
    optimizer = AdamW(model.parameters(), 1e-5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: number / 1000)

    def step() -> None:
        update(optimizer, loss_of(model))
        scheduler.step()

    return step


def scaler_skips_now_and_then() -> Step:
    model, numbers = net(), count()
    optimizer = AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)

    def step() -> None:
        optimizer.zero_grad()
        factor = float("inf") if next(numbers) % 3 else 1.0
        scaler.scale(loss_of(model) * factor).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


def dropout_twice() -> Step:
    """Compare two passes with dropout, as R-Drop and SimCSE do."""
    model = net(dropout=0.1)
    optimizer = AdamW(model.parameters())

    def step() -> None:
        inputs, labels = batch()
        one, two = model(inputs), model(inputs)
        update(optimizer, functional.cross_entropy(one, labels) + functional.mse_loss(one, two))

    return step


def one_pass_with_gradients(*, is_checkpointed: bool) -> Step:
    """Call a model once with gradients; its layers run again in backward, or have run without gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    optimizer = SGD(model.parameters(), 1e-3)

    def step() -> None:
        inputs = torch.randn(256, 256)
        if is_checkpointed:
            update(optimizer, checkpoint(model, inputs, use_reentrant=False).square().mean())
            return
        with torch.no_grad():
            wanted = model(inputs)
        update(optimizer, functional.mse_loss(model(inputs), wanted + 1))

    return step


def one_cell_many_times(*, is_recurrent: bool) -> Step:
    """Call a cell for each item of a sequence, or until its result no longer changes much."""
    torch.manual_seed(0)
    cell = nn.GRUCell(256, 256)
    optimizer = SGD(cell.parameters(), 1e-3)

    def step() -> None:
        inputs, state = torch.randn(8, 128, 256), torch.zeros(128, 256)
        for each in inputs:
            state = cell(each if is_recurrent else inputs[0], state)
        update(optimizer, state.square().mean())

    return step


def two_views() -> Step:
    model = net()
    optimizer = AdamW(model.parameters())

    def step() -> None:
        inputs, _ = batch()
        one, two = (model(inputs + 0.1 * torch.randn_like(inputs)) for _ in range(2))
        update(optimizer, -functional.cosine_similarity(one, two).mean())

    return step


def same_micro_batches() -> Step:
    """Accumulate gradients of the same input, as a benchmark with synthetic data does."""
    model, inputs = net(), torch.randn(16, 8)
    optimizer = AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(4):
            model(inputs).square().mean().backward()
        optimizer.step()

    return step


def closure_of_lbfgs() -> Step:
    model, (inputs, labels) = net(), batch()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        loss.backward()
        return loss

    return lambda: optimizer.step(closure) and None


def sharpness_aware() -> Step:
    model = net()
    optimizer = SGD(model.parameters(), 0.01)

    def step() -> None:
        inputs, labels = batch()
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        with torch.no_grad():
            moved = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in model.parameters() if p.grad is not None]
            torch._foreach_add_([*model.parameters()], moved)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        with torch.no_grad():
            torch._foreach_sub_([*model.parameters()], moved)
        optimizer.step()

    return step


def step_in_backward() -> Step:
    model = net()
    optimizers = {p: SGD([p], 0.01) for p in model.parameters()}

    def stepped(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(stepped)

    return lambda: loss_of(model).backward()


def hooks_registered_once() -> Step:
    model, seen = net(), dict[str, Any]()
    optimizer = AdamW(model.parameters())
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _, __, output, name=name: seen.update({name: output.shape}))
    model[3].register_full_backward_hook(lambda *_: None)

    def step() -> None:
        handles = [p.register_hook(lambda gradient: gradient) for p in model.parameters()]
        update(optimizer, loss_of(model))
        for handle in handles:
            handle.remove()

    return step


def small_in_double() -> Step:
    model = net().double()
    optimizer = AdamW(model.parameters())

    def step() -> None:
        inputs, labels = batch()
        update(optimizer, functional.cross_entropy(model(inputs.double()), labels))

    return step


def average_of_the_weights() -> Step:
    model = net()
    average, optimizer = torch.optim.swa_utils.AveragedModel(model), AdamW(model.parameters())

    def step() -> None:
        update(optimizer, loss_of(model))
        average.update_parameters(model)
        with torch.no_grad():
            average(batch()[0])

    return step


def policy_gradient() -> Step:
    policy = net()
    optimizer = AdamW(policy.parameters())

    def step() -> None:
        chosen, rewards = [], []
        observation = torch.zeros(1, 8)
        for _ in range(10):
            choice = torch.distributions.Categorical(logits=policy(observation))
            action = choice.sample()
            chosen.append(choice.log_prob(action))
            rewards.append(float(action))
            observation = torch.randn(1, 8)
        update(optimizer, -(torch.cat(chosen) * torch.tensor(rewards)).mean())

    return step


def last_of_packed(model: Recurrent, inputs: Tensor) -> Tensor:
    lengths = torch.randint(1, len(inputs), (inputs.shape[1],))
    state: Tensor = model.layer(nn.utils.rnn.pack_padded_sequence(inputs, lengths, enforce_sorted=False))[1]
    return state[0]


def attention(use: Callable[[Tensor, Tensor, Tensor], Tensor], rows: int = 768) -> Step:
    """Return a step of a layer of attention, multiplied by `use`."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 24)
    optimizer = AdamW(layer.parameters())

    def step() -> None:
        q, k, v = layer(torch.randn(2, rows, 8)).sigmoid().chunk(3, -1)
        update(optimizer, (use(q, k, v) - 1).square().mean())

    return step


def with_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1)
    return scores @ v / scores.sum(-1, keepdim=True)


def activated(activation: Callable[[Tensor], Tensor]) -> Step:
    """Return a step of narrow layers with wide results, two of which go through an activation."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(8, 1024), nn.Linear(1024, 8), nn.Linear(8, 1024), nn.Linear(1024, 8)])
    optimizer = torch.optim.SGD(layers.parameters(), 1e-3)

    def step() -> None:
        x = layers[1](activation(layers[0](torch.randn(256, 8))))
        update(optimizer, (layers[3](activation(layers[2](x))) - 1).square().mean())

    return step


def gelu_by_a_formula(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


def adjacency(nodes: int, neighbours: int = 3) -> Tensor:
    """Return a matrix with the neighbours of each node, and the node itself."""
    generator = torch.Generator().manual_seed(0)
    links = torch.eye(nodes)
    links[torch.arange(nodes)[:, None], torch.randint(nodes, (nodes, neighbours), generator=generator)] = 1.0
    return links / links.sum(1, keepdim=True)


def over_a_graph(
    gather: Callable[[Tensor, Tensor], Tensor], matrix: Callable[[], Tensor] = lambda: adjacency(1024)
) -> Step:
    """Return a step of a layer over the nodes of a graph; `gather` adds up those of neighbours by a constant matrix."""
    torch.manual_seed(0)
    links, layer = matrix(), nn.Linear(16, 64)
    optimizer, inputs = AdamW(layer.parameters()), torch.randn(len(links), 16)

    def step() -> None:
        update(optimizer, (gather(links, layer(inputs).tanh()) - 1).square().mean())

    return step


def of_each_sample(has_gradients: bool) -> Step:
    """Return a step that calls the model for each sample inside a transformation of torch.func."""
    model = net()
    optimizer = AdamW(model.parameters())

    def loss(parameters: dict[str, Tensor], sample: Tensor, label: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(model, parameters, (sample[None],)), label[None])

    def step() -> None:
        inputs, labels = batch()
        if not has_gradients:
            update(optimizer, functional.cross_entropy(vmap(model)(inputs), labels))
            return
        held = {name: parameter.detach() for name, parameter in model.named_parameters()}
        gradients = vmap(grad(loss), in_dims=(None, 0, 0))(held, inputs, labels)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].mean(0)
        optimizer.step()

    return step


SOUND: dict[str, Callable[[], Step]] = {
    "samples_under_vmap": lambda: of_each_sample(has_gradients=False),
    "gradients_of_each_sample": lambda: of_each_sample(has_gradients=True),
    "sparse_adjacency": lambda: over_a_graph(torch.sparse.mm, lambda: adjacency(1024).to_sparse()),
    "identity_in_a_product": lambda: over_a_graph(torch.matmul, lambda: torch.eye(1024)),
    "causal_mean": lambda: over_a_graph(torch.matmul, lambda: torch.ones(1024, 1024).tril() / 1024),
    "attention_with_softmax": lambda: attention(lambda q, k, v: (q @ k.transpose(-2, -1)).softmax(-1) @ v),
    "linear_attention": lambda: attention(lambda q, k, v: q @ (k.transpose(-2, -1) @ v) / len(q)),
    "causal_attention_without_softmax": lambda: attention(lambda q, k, v: (q @ k.transpose(-2, -1)).tril() @ v / 9),
    "new_numbers_in_each_step": lambda: noisy(with_new_numbers, dropout=0.5),
    "noise_made_once": lambda: noisy(with_noise_made_once()),
    "the_same_noise_in_pairs": lambda: noisy(with_the_same_noise_in_pairs),
    "seeded_evaluation": lambda: noisy(with_a_seeded_evaluation),
    "seeded_helper": lambda: noisy(with_a_seeded_helper),
    "restored_state": lambda: noisy(with_a_restored_state),
    "fixed_projection": lambda: noisy(with_a_fixed_projection),
    "weights_made_anew": lambda: noisy(with_weights_made_anew),
    "random_numbers_without_choice": lambda: noisy(with_no_choice),
    "random_numbers_of_few_bits": lambda: noisy(with_few_bits),
    "noise_in_a_checkpoint": noise_in_a_checkpoint,
    "evaluation_and_training_mode": lambda: validated(evaluated_and_trained),
    "evaluation_mode_from_the_start": lambda: validated(evaluated, begins=False),
    "evaluation_mode_without_dropout": lambda: validated(evaluated, dropout=0.0),
    "evaluation_mode_on_purpose": lambda: validated(last_steps_in_evaluation_mode),
    "training_mode_of_some_modules": lambda: validated(evaluated_and_some_trained),
    "teacher_in_evaluation_mode": a_teacher_that_is_trained_first,
    "adversarial_inputs_in_evaluation_mode": attacked,
    "clipping_of_a_new_iterator": lambda: clipped(lambda model: model.parameters),
    "clipping_of_values": lambda: clipped(lambda model: model.parameters, nn.utils.clip_grad_value_),
    "clipping_of_a_list": lambda: clipped(lambda model: lambda: [*model.parameters()]),
    "clipping_of_an_empty_list": lambda: clipped(lambda _: list),
    "clipping_of_frozen_parameters": lambda: clipped(lambda model: lambda: [*model.parameters()][:2], frozen=2),
    "clipping_of_a_new_filter_of_frozen_parameters": lambda: clipped(
        lambda model: lambda: filter(lambda p: p.requires_grad, [*model.parameters()][:2]), frozen=2
    ),
    "clipping_of_all_after_an_iterator": lambda: clipped(filtered_once, also=nn.utils.clip_grad_norm_),
    "clipping_of_values_after_an_iterator": lambda: clipped(filtered_once, also=nn.utils.clip_grad_value_),
    "clipping_in_each_second_step": lambda: clipped(parameters_once_in_two_steps),
    "long_warm_up": lambda: small_rates(lambda number: (number + 1) / 1000, 1e-2),
    "end_of_a_cosine": lambda: small_rates(lambda number: 0.5 * (1 + math.cos(math.pi * min(1, number / 41))), 1e-3),
    "end_of_a_resumed_schedule": lambda: small_rates(lambda number: 10 / (number + 1), 1e-3, after=9_990),
    "rate_of_one_by_a_factor": lambda: small_rates(lambda _: 1e-3, 1.0),
    "one_group_with_a_small_factor": lambda: small_rates(lambda _: 1e-3, 1e-3, 1e-3, second=lambda _: 1.0),
    "warm_up_by_epochs": lambda: small_rates(lambda number: (number + 1) / 100, 1e-2, steps_per_epoch=50),
    "head_replaced_first": lambda: head_replaced(lambda *_: (), first=False),
    "head_replaced_and_given": lambda: head_replaced(with_new_head),
    "head_replaced_with_its_optimizer": lambda: head_replaced(lambda model, _: [AdamW(model.head.parameters())]),
    "head_replaced_and_frozen": lambda: head_replaced(frozen_head),
    "accumulation": lambda: accumulation(lambda _, optimizer: optimizer.zero_grad(), first=True),
    "accumulation_cleared_after": lambda: accumulation(lambda _, optimizer: optimizer.zero_grad(), first=False),
    "accumulation_to_zero": lambda: accumulation(
        lambda _, optimizer: optimizer.zero_grad(set_to_none=False), first=True
    ),
    "accumulation_by_model": lambda: accumulation(lambda model, _: model.zero_grad(), first=False),
    "accumulation_by_hand": lambda: accumulation(by_hand, first=True),
    "accumulation_none_by_hand": lambda: accumulation(none_by_hand, first=False),
    "gradients_set_by_hand": gradients_set_by_hand,
    "decayed_gradients": decayed_gradients,
    "combined_gradients": combined_gradients,
    "passes_for_two_players": passes_for_two_players,
    "penalty_of_the_gradient": penalty_of_the_gradient,
    "one_call_per_field": lambda: with_derivatives(one_call_per_field),
    "second_derivatives": lambda: with_derivatives(second_derivatives),
    "products_with_two_vectors": lambda: with_derivatives(products_with_two_vectors),
    "derivatives_with_one_vector": lambda: rows_with_one_vector(is_hidden=False),
    "derivatives_with_data_of_one_vector": lambda: rows_with_one_vector(is_hidden=True),
    "derivatives_of_sums": lambda: with_derivatives(sums_along_axes),
    "derivatives_of_each_sample": gradient_of_each_sample,
    "derivatives_routed_by_hooks": gradients_routed_by_hooks,
    "gradient_of_each_loss": gradient_of_each_loss,
    "adversarial_examples": adversarial_examples,
    "generative_adversarial": generative_adversarial,
    "critic_steps_more_often": critic_steps_more_often,
    "low_rank_adapters": low_rank_adapters,
    "other_optimizer_of_the_same_parameters": other_optimizer_of_the_same_parameters,
    "short_cycle_of_the_rate": short_cycle_of_the_rate,
    "attention_and_a_loss_of_its_own": attention_and_a_loss_of_its_own,
    "own_updates_of_layers_in_a_list": own_updates_of_layers_in_a_list,
    "optimizer_around_another": optimizer_around_another,
    "softmax_over_rows_and_then_columns": softmax_over_rows_and_then_columns,
    "parameters_of_an_encoder_that_is_not_called": parameters_of_an_encoder_that_is_not_called,
    "frozen_backbone": frozen_backbone,
    "linear_of_which_few_rows_are_used": linear_of_which_few_rows_are_used,
    "penalty_on_a_table_of_which_all_rows_are_used": penalty_on_a_table_of_which_all_rows_are_used,
    "penalty_on_a_table_that_also_gives_the_logits": penalty_on_a_table_that_also_gives_the_logits,
    "table_of_equal_weights_with_equal_gradients": table_of_equal_weights_with_equal_gradients,
    "sparse_table": lambda: table_of_which_few_rows_are_used(sparse=True),
    "master_weights": master_weights,
    "own_updates_beside_an_optimizer": own_updates_beside_an_optimizer,
    "warm_up_from_zero": warm_up_from_zero,
    "scaler_skips_now_and_then": scaler_skips_now_and_then,
    "dropout_twice": dropout_twice,
    "two_views": two_views,
    "layers_with_dropout_for_each_depth": lambda: perceptual(with_dropout_between),
    "layers_once": lambda: perceptual(sliced, (6,)),
    "checkpointed_layers": lambda: one_pass_with_gradients(is_checkpointed=True),
    "targets_by_the_model": lambda: one_pass_with_gradients(is_checkpointed=False),
    "recurrent_cell": lambda: one_cell_many_times(is_recurrent=True),
    "fixed_point": lambda: one_cell_many_times(is_recurrent=False),
    "same_micro_batches": same_micro_batches,
    "closure_of_lbfgs": closure_of_lbfgs,
    "sharpness_aware": sharpness_aware,
    "step_in_backward": step_in_backward,
    "hooks_registered_once": hooks_registered_once,
    "small_in_double": small_in_double,
    "average_of_the_weights": average_of_the_weights,
    "policy_gradient": policy_gradient,
    "bag_of_many_words": lambda: rows_into_a_linear(lambda: share_of_ones(0.03)),
    "images_with_many_zeros": lambda: rows_into_a_linear(lambda: share_of_ones(0.2) * torch.rand(64, 2000)),
    "rows_of_padding": lambda: rows_into_a_linear(few_rows_that_are_not_padding),
    "sparse_activations": lambda: rows_into_a_linear(largest_activations),
    "one_hot_of_few_classes": lambda: rows_into_a_linear(lambda: one_hot(256, 200), width=200),
    "one_hot_and_tied_weights": lambda: rows_into_a_linear(one_hot, with_its_transpose),
    "one_hot_and_dense_rows": lambda: rows_into_a_linear(one_hot, once_with_dense_rows),
    "one_hot_in_a_large_network": in_a_large_network,
    "recurrent_over_time": lambda: recurrent(lambda model, inputs: model.states(inputs)[-1]),
    "recurrent_with_batch_first": lambda: recurrent(last_along_dimension_1, batch_first=True),
    "recurrent_batch_first_and_shuffled": lambda: recurrent(
        last_along_dimension_1, loader={"shuffle": True}, batch_first=True
    ),
    "recurrent_language_model": lambda: recurrent(lambda model, words: model.states(model.words(words)), (16, 6)),
    "recurrent_result_per_step": lambda: recurrent(lambda model, inputs: model.states(inputs).flatten(0, 1)),
    "recurrent_model_transposes": lambda: recurrent(
        lambda model, inputs: model.states(inputs.transpose(0, 1))[-1], loader={"shuffle": True}
    ),
    "recurrent_and_as_long_as_the_batch": lambda: recurrent(
        lambda model, inputs: model.states(inputs.transpose(0, 1))[-1], (16, 16, 8), {"shuffle": True}
    ),
    "recurrent_over_one_sample": lambda: recurrent(last_along_dimension_1, (16, 1, 8)),
    "recurrent_over_time_of_stations": lambda: recurrent(mean_along_dimension_1),
    "recurrent_over_a_series": lambda: recurrent(mean_along_dimension_1, loader={"shuffle": False}),
    "recurrent_with_first_state": lambda: recurrent(
        lambda model, inputs: model.states(inputs, torch.zeros(1, inputs.shape[1], 12))[:, -1]
    ),
    "recurrent_over_packed_sequences": lambda: recurrent(last_of_packed),
    "saliency_of_each_step": lambda: input_with_a_gradient(lambda inputs: inputs.grad.abs().amax(1)),  # type: ignore[union-attr]
    "saliency_by_a_hook": lambda: input_with_a_gradient(prepare=lambda inputs: inputs.register_hook(lambda _: None)),
    "input_changed_by_its_gradient": lambda: input_with_a_gradient(read_in_place, inputs=torch.randn(256, 512)),
    "inputs_kept_for_later": kept_inputs,
    "input_of_an_optimizer": input_of_an_optimizer,
    "input_of_a_reentrant_checkpoint": lambda: input_with_a_gradient(
        call=lambda model, inputs: checkpoint(model, inputs, use_reentrant=True)
    ),
    "reentrant_checkpoint_of_a_layer": lambda: input_with_a_gradient(model=CheckpointedFirst()),
    "first_half_elsewhere": first_half_elsewhere,
    "hooked_layers": hooked_layers,
    "deep_after_a_cheap_first_layer": deep_after_a_cheap_first_layer,
    "plain_input": lambda: input_with_a_gradient(prepare=lambda inputs: inputs.requires_grad_(False)),
    **{f"loss_with_{name}": (lambda loss=loss: regression(loss)) for name, loss in PAIRING_LOSSES.items()},  # type: ignore[misc]
    "thresholds_for_one_batch": lambda: regression(PAIRING_LOSSES["thresholds"], 1),
    "ensemble": lambda: regression(lambda prediction, target: ((prediction - target[:, None]) ** 2).mean(), outputs=16),
    **drawn_codes.SOUND,
}
