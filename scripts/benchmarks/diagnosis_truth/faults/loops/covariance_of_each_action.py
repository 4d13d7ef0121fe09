"""Advantage actor-critic for a chain of joints that should reach a posture; many environments run side by side."""

import torch
from torch import nn
from torch.distributions import Independent, MultivariateNormal, Normal  # noqa: F401

CASE = {
    "generation": 11,
    "truth": "The policy's noise is independent per joint, but it is given as a full covariance matrix to MultivariateNormal, which factorises a matrix for each state and solves a triangular system in log_prob.",
    "cause": "decompositions",
    "also": ["small-operators"],
    "never": ["data-loading", "logging", "evaluation", "growth", "host-python", "no-update", "start-up", "padding"],
    "healthy": False,
    "place": [
        "return MultivariateNormal(",
        "torch.diag_embed(",
        "policy.log_prob(actions)",
        "policy.entropy()",
        "policy = agent.policy(states)",
    ],
    "share": 57,
    "remedy": "Independent(Normal(mean, std), 1)",
    "without": [
        [
            "        return MultivariateNormal(mean, torch.diag_embed(std**2))\n",
            "        return Independent(Normal(mean, std), 1)\n",
        ]
    ],
}


class Joints:
    """Joints that follow commanded speeds, loosely; now and then an environment gets a new goal."""

    def __init__(self, count=96, joints=12):
        self.goal = torch.randn(count, joints)
        self.angle = torch.randn(count, joints)

    def observe(self):
        return torch.cat([self.angle, self.goal], 1)

    def act(self, speed):
        self.angle = 0.8 * self.angle + 0.4 * torch.clamp(speed, -3, 3)
        reward = -(self.angle - self.goal).square().mean(1)
        new = torch.rand(len(reward)) < 0.03
        self.goal[new] = torch.randn_like(self.goal[new])
        return reward


class Agent(nn.Module):
    def __init__(self, joints=12, width=160):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2 * joints, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.mean = nn.Linear(width, joints)
        self.log_std = nn.Linear(width, joints)
        self.value = nn.Sequential(nn.Linear(2 * joints, 128), nn.Tanh(), nn.Linear(128, 1))
        nn.init.constant_(self.log_std.bias, -0.7)
        nn.init.normal_(self.mean.weight, std=0.005)

    def policy(self, states):
        hidden = self.body(states)
        mean = self.mean(hidden)
        std = self.log_std(hidden).clamp(-3, 1).exp()
        return MultivariateNormal(mean, torch.diag_embed(std**2))

    def values(self, states):
        return self.value(states).squeeze(-1)


@torch.no_grad()
def collect(agent, world, length, discount=0.5):
    states, actions, rewards = [], [], []
    for _ in range(length):
        state = world.observe()
        hidden = agent.body(state)
        std = agent.log_std(hidden).clamp(-3, 1).exp()
        action = agent.mean(hidden) + std * torch.randn_like(std)
        states.append(state)
        actions.append(action)
        rewards.append(world.act(action))
    ahead = agent.values(world.observe())
    returns = []
    for reward in reversed(rewards):
        ahead = reward + discount * ahead
        returns.append(ahead)
    return torch.cat(states), torch.cat(actions), torch.cat(returns[::-1]), torch.cat(rewards).mean()


def main(updates=150, length=4):
    torch.manual_seed(8)
    world, agent = Joints(), Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=5e-4)
    for update in range(updates):
        states, actions, returns, reward = collect(agent, world, length)
        policy = agent.policy(states)
        values = agent.values(states)
        advantage = (returns - values).detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        actor = -(policy.log_prob(actions) * advantage).mean() - 1e-3 * policy.entropy().mean()
        loss = actor + 0.5 * (returns - values).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
        optimizer.step()
        if update % 30 == 0:
            print(f"update {update}: mean reward {reward:.3f}")


if __name__ == "__main__":
    main()
