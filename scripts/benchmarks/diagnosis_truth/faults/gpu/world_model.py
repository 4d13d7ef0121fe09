"""A recurrent world model with a stochastic state, from recorded episodes."""

import time

import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

CASE = {
    "truth": "Each Normal checks its arguments, and log_prob its value, on the GPU, and waits for the answer: seven "
    "times for each of 50 moments; set_default_validate_args(False) stops it. Measured: 18%.",
    "cause": "host-sync",
    "also": ["launch-bound", "small-operators", "host-python"],
    "never": ["data-loading", "fp32-products", "exposed-copies", "logging"],
    "healthy": False,
    "requires": ["cuda"],
    "place": ["Normal("],
}

STEPS = 50
EPISODES = 64
MOMENTS = 50
OBSERVATION = 48
ACTION = 6
WIDTH = 256
STATE = 32
device = "cuda" if torch.cuda.is_available() else "cpu"


class WorldModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(OBSERVATION, WIDTH), nn.ELU(), nn.Linear(WIDTH, WIDTH))
        self.cell = nn.GRUCell(STATE + ACTION, WIDTH)
        self.prior = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ELU(), nn.Linear(WIDTH, 2 * STATE))
        self.posterior = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.ELU(), nn.Linear(WIDTH, 2 * STATE))
        self.decoder = nn.Linear(WIDTH + STATE, 2 * OBSERVATION)

    @staticmethod
    def gaussian(numbers):
        mean, spread = numbers.chunk(2, dim=-1)
        return Normal(mean, F.softplus(spread) + 0.1)

    def forward(self, observations, actions):
        """The negative bound on the likelihood of each episode, per moment."""
        episodes = observations.shape[1]
        seen = self.encoder(observations)
        hidden = observations.new_zeros(episodes, WIDTH)
        state = observations.new_zeros(episodes, STATE)
        total = 0.0
        for moment in range(len(observations)):
            hidden = self.cell(torch.cat([state, actions[moment]], -1), hidden)
            prior = self.gaussian(self.prior(hidden))
            posterior = self.gaussian(self.posterior(torch.cat([hidden, seen[moment]], -1)))
            state = posterior.rsample()
            predicted = self.gaussian(self.decoder(torch.cat([hidden, state], -1)))
            total = total - predicted.log_prob(observations[moment]).sum(-1).mean()
            total = total + kl_divergence(posterior, prior).sum(-1).mean()
        return total / len(observations)


def clock():
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


torch.manual_seed(0)
model = WorldModel().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=6e-4, fused=True)
observations = torch.randn(8, MOMENTS, EPISODES, OBSERVATION, device=device).cumsum(1) * 0.1
actions = torch.randn(8, MOMENTS, EPISODES, ACTION, device=device)

for step in range(STEPS):
    if step == STEPS - 20:
        start = clock()
    loss = model(observations[step % 8], actions[step % 8])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 100.0)
    optimizer.step()
elapsed = clock() - start
print(f"loss {loss.item():.5f}")
print(f"20 steps: {elapsed / 20 * 1e3:.2f} ms each")
