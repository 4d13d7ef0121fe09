"""Training loops that draw from distributions: with a gradient, without one by mistake, and without one on purpose."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, LogNormal, MultivariateNormal, Normal, kl_divergence
from torch.nn import functional
from torch.optim import Adam
from torch.utils.checkpoint import checkpoint

Step = Callable[[], None]
WIDTH = 6  # of a code


class Coder(nn.Module):
    """Two networks, the first of which gives the parameters of a distribution for the input of the second."""

    def __init__(self, labels: int = 0) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 2 * WIDTH))
        self.decoder = nn.Sequential(nn.Linear(WIDTH + labels, 24), nn.GELU(), nn.Linear(24, 8))

    def posterior(self, inputs: Tensor, kind: type[Normal | LogNormal] = Normal) -> Distribution:
        mean, spread = self.encoder(inputs).chunk(2, 1)
        return kind(mean, functional.softplus(spread) + 0.1)


def fixed(like: Distribution) -> Normal:
    return Normal(torch.zeros_like(like.mean), torch.ones_like(like.mean))


def divergence(posterior: Distribution) -> Tensor:
    return kl_divergence(posterior, fixed(posterior)).sum(1).mean()


Loss = Callable[[Coder, Tensor], Tensor]


def trained(loss: Loss, model: Callable[[], Coder] = Coder) -> Step:
    """Return a step that minimises a function of a model and its inputs."""
    torch.manual_seed(0)
    coder = model()
    optimizer = Adam(coder.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss(coder, torch.randn(16, 8)).backward()
        optimizer.step()

    return step


# Faults


def drawn_without_gradient(model: Coder, inputs: Tensor) -> Tensor:
    posterior = model.posterior(inputs)
    return functional.mse_loss(model.decoder(posterior.sample()), inputs) + 0.1 * divergence(posterior)


def drawn_from_independent(model: Coder, inputs: Tensor) -> Tensor:
    posterior = Independent(model.posterior(inputs), 1)
    prior = Independent(Normal(torch.zeros(WIDTH), torch.ones(WIDTH)), 1).expand(posterior.batch_shape)
    output = Normal(model.decoder(posterior.sample()), 1.0)
    return kl_divergence(posterior, prior).mean() - output.log_prob(inputs).mean()


def drawn_log_normal(model: Coder, inputs: Tensor) -> Tensor:
    posterior = model.posterior(inputs, LogNormal)
    prior = LogNormal(torch.zeros(WIDTH), torch.ones(()))
    return functional.mse_loss(model.decoder(posterior.sample()), inputs) + kl_divergence(posterior, prior).mean()


def drawn_next_to_a_label(model: Coder, inputs: Tensor) -> Tensor:
    posterior, labels = model.posterior(inputs), functional.one_hot(torch.randint(3, (16,)), 3)
    code = torch.cat([posterior.sample(), labels], 1)
    return functional.mse_loss(model.decoder(code), inputs) + divergence(posterior)


# Sound loops


def with_gradient(model: Coder, inputs: Tensor) -> Tensor:
    posterior = model.posterior(inputs)
    return functional.mse_loss(model.decoder(posterior.rsample()), inputs) + divergence(posterior)


def drawn_twice(model: Coder, inputs: Tensor) -> Tensor:
    """Train a second head by codes without gradient, next to a reconstruction with them."""
    posterior = model.posterior(inputs)
    second = model.decoder(posterior.sample()).square().mean()
    return functional.mse_loss(model.decoder(posterior.rsample()), inputs) + second + divergence(posterior)


def only_shown(model: Coder, inputs: Tensor) -> Tensor:
    """Draw for a metric alone."""
    posterior = model.posterior(inputs)
    functional.mse_loss(model.decoder(posterior.sample()), inputs).item()
    return functional.mse_loss(model.decoder(posterior.rsample()), inputs) + divergence(posterior)


def by_the_score(model: Coder, inputs: Tensor) -> Tensor:
    """Train by the score function, as REINFORCE does, with a penalty on the divergence."""
    policy = model.posterior(inputs)
    action = policy.sample()
    error = (model.decoder(action) - inputs).square().mean(1)
    return (error.detach() * policy.log_prob(action).sum(1)).mean() + error.mean() + divergence(policy)


def by_the_score_of_a_new_distribution(model: Coder, inputs: Tensor) -> Tensor:
    action = model.posterior(inputs).sample()
    error, policy = (model.decoder(action) - inputs).square().mean(1), model.posterior(inputs + 1e-3)
    return (error.detach() * policy.log_prob(action).sum(1)).mean() + error.mean() + divergence(policy)


def by_an_own_score(model: Coder, inputs: Tensor) -> Tensor:
    policy = model.posterior(inputs)
    action = policy.sample()
    error = (model.decoder(action) - inputs).square().mean(1)
    score = -(((action - policy.mean) / policy.stddev).square() / 2 + policy.stddev.log()).sum(1)
    return (error.detach() * score).mean() + error.mean() + divergence(policy)


def of_a_teacher(model: Coder, inputs: Tensor) -> Tensor:
    """Train a policy by its divergence from a teacher alone, and a critic by what the policy does."""
    policy = model.posterior(inputs)
    teacher = Normal(inputs[:, :WIDTH], 1.0)
    critic = model.decoder(policy.sample())
    return functional.mse_loss(critic, inputs) + kl_divergence(policy, teacher).sum(1).mean()


def of_the_second_distribution(model: Coder, inputs: Tensor) -> Tensor:
    """Train what predicts a fixed distribution, and use its predictions."""
    predicted = model.posterior(inputs)
    second = functional.mse_loss(model.decoder(predicted.sample()), inputs)
    return second + kl_divergence(fixed(predicted), predicted).sum(1).mean()


def with_the_mean(model: Coder, inputs: Tensor) -> Tensor:
    """Decode the mean with a gradient, and noise without one."""
    posterior = model.posterior(inputs)
    noisy = functional.mse_loss(model.decoder(posterior.sample()), inputs)
    return functional.mse_loss(model.decoder(posterior.mean), inputs) + noisy + divergence(posterior)


def straight_through(model: Coder, inputs: Tensor) -> Tensor:
    posterior = model.posterior(inputs)
    code = posterior.mean + (posterior.sample() - posterior.mean).detach()
    return functional.mse_loss(model.decoder(code), inputs) + divergence(posterior)


def of_a_frozen_encoder(model: Coder, inputs: Tensor) -> Tensor:
    """Train the decoder alone, by codes of an encoder that is complete."""
    return functional.mse_loss(model.decoder(model.posterior(inputs).sample()), inputs)


def of_inputs_with_noise(model: Coder, inputs: Tensor) -> Tensor:
    posterior = model.posterior(Normal(inputs, 0.1).sample())
    return functional.mse_loss(model.decoder(posterior.rsample()), inputs) + divergence(posterior)


def in_checkpoints(model: Coder, inputs: Tensor) -> Tensor:
    """Compute the reconstruction inside a checkpoint, which hides what uses the sample."""
    posterior = model.posterior(inputs)
    drawn = posterior.sample().requires_grad_()

    def error(code: Tensor) -> Tensor:
        return functional.mse_loss(model.decoder(code + model.posterior(inputs).mean), inputs)

    return checkpoint(error, drawn, use_reentrant=True) + model.decoder(drawn).mean() + divergence(posterior)


def in_two_passes() -> Step:
    """Train the encoder by the reconstruction in each second step, and by the divergence in the others."""
    torch.manual_seed(0)
    model, number = Coder(), 0
    optimizer = Adam(model.parameters(), 1e-3)

    def step() -> None:
        nonlocal number
        number += 1
        inputs = torch.randn(16, 8)
        posterior = model.posterior(inputs)
        optimizer.zero_grad()
        (model.decoder(posterior.sample()).square().mean() + divergence(posterior)).backward()
        if number % 2:
            functional.mse_loss(model.decoder(model.posterior(inputs).rsample()), inputs).backward()
        optimizer.step()

    return step


def of_constant_covariance(model: Coder, inputs: Tensor) -> Tensor:
    """Add noise to targets, by a distribution without parameters to train."""
    noise = MultivariateNormal(torch.zeros(8), torch.eye(8) + 0.5).sample((16,))
    return functional.mse_loss(model.decoder(model.encoder(inputs)[:, :WIDTH]), inputs + 0.1 * noise)


class Policy(nn.Module):
    """Policy with noise of this many joints: one factor for all states, or the noise of each state."""

    def __init__(self, joints: int = 12) -> None:
        super().__init__()
        self.body = nn.Linear(8, 2 * joints)
        self.factor = nn.Parameter(torch.eye(joints))


def policy(made: Callable[[Policy, Tensor, Tensor], Distribution], states: int = 512) -> Step:
    """Return a step that trains a policy by the actions of a rollout."""
    torch.manual_seed(0)
    model = Policy()
    optimizer = Adam(model.parameters(), 1e-3)

    def distribution(inputs: Tensor) -> Distribution:
        mean, spread = model.body(inputs).chunk(2, 1)
        return made(model, mean, functional.softplus(spread) + 0.1)

    def step() -> None:
        inputs = torch.randn(states, 8)
        with torch.no_grad():
            actions = distribution(inputs).sample()
        optimizer.zero_grad()
        (-distribution(inputs + 1e-3).log_prob(actions) * torch.randn(states)).mean().backward()
        optimizer.step()

    return step


def with_diagonal_matrices(_: Policy, mean: Tensor, std: Tensor) -> Distribution:
    return MultivariateNormal(mean, torch.diag_embed(std**2))


def with_diagonal_factors(_: Policy, mean: Tensor, std: Tensor) -> Distribution:
    return MultivariateNormal(mean, scale_tril=torch.diag_embed(std))


def with_independent_noise(_: Policy, mean: Tensor, std: Tensor) -> Distribution:
    return Independent(Normal(mean, std), 1)


def with_full_matrices(_: Policy, mean: Tensor, std: Tensor) -> Distribution:
    return MultivariateNormal(mean, torch.diag_embed(std**2) + 0.01)


def with_a_trained_factor(model: Policy, mean: Tensor, std: Tensor) -> Distribution:
    """Begin with a factor that is diagonal, and train all of it."""
    factor = model.factor.tril(-1) + torch.diag_embed(std)
    return MultivariateNormal(mean, scale_tril=factor)


def with_a_factor_that_waits(model: Policy, mean: Tensor, std: Tensor) -> Distribution:
    """Begin with a factor of 0, so that the first updates change nothing, as in a warm-up of the learning rate."""
    factor = 0.0 * model.factor.tril(-1) + torch.diag_embed(std)
    return MultivariateNormal(mean, scale_tril=factor)


FAULTS: dict[str, Callable[[], Step]] = {
    "code_without_gradient": lambda: trained(drawn_without_gradient),
    "code_of_independent_parts_without_gradient": lambda: trained(drawn_from_independent),
    "log_normal_code_without_gradient": lambda: trained(drawn_log_normal),
    "code_without_gradient_next_to_a_label": lambda: trained(drawn_next_to_a_label, lambda: Coder(3)),
}
WITH_MATRICES: dict[str, Callable[[], Step]] = {
    "policy_with_diagonal_matrices": lambda: policy(with_diagonal_matrices),
    "policy_with_diagonal_factors": lambda: policy(with_diagonal_factors),
}
SOUND: dict[str, Callable[[], Step]] = {
    "code_with_gradient": lambda: trained(with_gradient),
    "code_drawn_twice": lambda: trained(drawn_twice),
    "code_that_is_only_shown": lambda: trained(only_shown),
    "policy_by_the_score": lambda: trained(by_the_score),
    "policy_by_the_score_of_a_new_distribution": lambda: trained(by_the_score_of_a_new_distribution),
    "policy_by_an_own_score": lambda: trained(by_an_own_score),
    "policy_of_a_teacher": lambda: trained(of_a_teacher),
    "prediction_of_a_fixed_distribution": lambda: trained(of_the_second_distribution),
    "mean_of_a_code_with_gradient": lambda: trained(with_the_mean),
    "code_straight_through": lambda: trained(straight_through),
    "code_of_a_frozen_encoder": lambda: trained(of_a_frozen_encoder),
    "inputs_with_drawn_noise": lambda: trained(of_inputs_with_noise),
    "code_in_checkpoints": lambda: trained(in_checkpoints),
    "code_with_gradient_in_each_second_step": in_two_passes,
    "policy_with_independent_noise": lambda: policy(with_independent_noise),
    "policy_with_full_matrices": lambda: policy(with_full_matrices),
    "policy_with_a_factor_that_waits": lambda: policy(with_a_factor_that_waits),
    "policy_with_a_trained_factor": lambda: policy(with_a_trained_factor),
    "targets_with_drawn_noise": lambda: trained(of_constant_covariance),
}
