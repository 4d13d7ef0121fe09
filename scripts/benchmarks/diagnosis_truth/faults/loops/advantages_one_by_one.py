"""Actor-critic on recorded episodes, with generalised advantages."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributions import Categorical

CASE = {
    "generation": 3,
    "truth": "The advantages are computed element by element of tensors, time by time and episode by episode: most of each step.",
    "cause": "small-operators",
    "also": ["host-python"],
    "never": ["start-up", "data-loading", "evaluation", "growth", "periodic-pause", "logging", "padding"],
    "healthy": False,
    "place": [
        "for t in reversed(range(steps))",
        "following = ",
        "delta = ",
        "running = delta",
        "advantages[e, t] = running",
        "self.advantages(",
    ],
    "share": 74,
    "remedy": "loop over time alone, on vectors of all episodes",
    "without": [
        [
            "        for e in range(episodes):\n            running = 0.0\n            for t in reversed(range(steps)):\n                following = values[e, t + 1] if t + 1 < steps else 0.0\n                delta = rewards[e, t] + self.gamma * following - values[e, t]\n                running = delta + self.gamma * self.decay * running\n                advantages[e, t] = running\n",
            "        running = torch.zeros(episodes)\n        for t in reversed(range(steps)):\n            following = values[:, t + 1] if t + 1 < steps else 0.0\n            delta = rewards[:, t] + self.gamma * following - values[:, t]\n            running = delta + self.gamma * self.decay * running\n            advantages[:, t] = running\n",
        ]
    ],
}


@dataclass
class Episodes:
    obs: torch.Tensor
    actions: torch.Tensor
    rewards: torch.Tensor


class ActorCritic(nn.Module):
    def __init__(self, n_obs=16, n_act=4):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(n_obs, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())
        self.policy, self.value = nn.Linear(128, n_act), nn.Linear(128, 1)

    def forward(self, obs):
        h = self.trunk(obs)
        return Categorical(logits=self.policy(h)), self.value(h).squeeze(-1)


class A2C:
    gamma, decay = 0.99, 0.95

    def __init__(self):
        self.net = ActorCritic()
        self.opt = torch.optim.RMSprop(self.net.parameters(), lr=7e-4, eps=1e-5)

    @torch.no_grad()
    def advantages(self, rewards, values):
        episodes, steps = rewards.shape
        advantages = torch.zeros_like(rewards)
        for e in range(episodes):
            running = 0.0
            for t in reversed(range(steps)):
                following = values[e, t + 1] if t + 1 < steps else 0.0
                delta = rewards[e, t] + self.gamma * following - values[e, t]
                running = delta + self.gamma * self.decay * running
                advantages[e, t] = running
        return advantages

    def update(self, data):
        policy, values = self.net(data.obs)
        advantages = self.advantages(data.rewards, values.detach())
        returns = advantages + values.detach()
        weights = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        actor = -(policy.log_prob(data.actions) * weights).mean()
        critic = nn.functional.mse_loss(values, returns)
        loss = actor + 0.5 * critic - 0.01 * policy.entropy().mean()
        self.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        self.opt.step()
        return loss.detach()


def recorded(episodes=16, steps=40):
    obs = torch.randn(episodes, steps, 16)
    actions = torch.randint(0, 4, (episodes, steps))
    return Episodes(obs, actions, (obs[..., 0] > 0).float() * (actions == 1))


if __name__ == "__main__":
    torch.manual_seed(0)
    agent = A2C()
    for iteration in range(60):
        loss = agent.update(recorded())
        if iteration % 20 == 0:
            print("iteration", iteration, "loss", loss.item())
