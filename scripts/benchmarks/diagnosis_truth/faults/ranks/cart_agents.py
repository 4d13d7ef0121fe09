"""Advantage actor-critic on carts with poles; each rank plays its own carts."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CASE = {
    "generation": 11,
    "truth": "The loss comes from agent.module.evaluate(), which bypasses DDP's forward, so no gradient is ever averaged: each rank trains alone on its own games and the replicas drift apart.",
    "cause": "gradients-not-reduced",
    "also": ["small-operators"],
    "never": [
        "exposed-communication",
        "small-buckets",
        "straggler",
        "data-loading",
        "no-update",
        "no-sync-missing",
        "find-unused-parameters",
    ],
    "healthy": False,
    "ranks": 2,
    "place": ["agent.module.evaluate(", "loss.backward()", "agent = DDP("],
    "remedy": "call the wrapped model (agent(...)) for the pass that is differentiated, so that DDP reduces its gradients",
    "without": [
        [
            "        log_probs, entropy, values = agent.module.evaluate(obs, actions)\n",
            "        logits, values = agent(obs)\n"
            "        policy = torch.distributions.Categorical(logits=logits)\n"
            "        log_probs, entropy = policy.log_prob(actions), policy.entropy()\n",
        ]
    ],
}

CARTS, HORIZON, GAMMA = 64, 16, 0.97


class Carts:
    """Many carts at once: position, speed, angle and turning speed of the pole."""

    def __init__(self, generator):
        self.generator = generator
        self.state = self.fresh(CARTS)

    def fresh(self, n):
        return (torch.rand(n, 4, generator=self.generator) - 0.5) * 0.1

    def step(self, action):
        x, v, angle, turn = self.state.unbind(1)
        force = (action.float() * 2 - 1) * 10.0
        sin, cos = angle.sin(), angle.cos()
        push = (force + 0.05 * turn**2 * sin) / 1.1
        turn_rate = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        speed_rate = push - 0.05 * turn_rate * cos / 1.1
        self.state = torch.stack([x + 0.02 * v, v + 0.02 * speed_rate, angle + 0.02 * turn, turn + 0.02 * turn_rate], 1)
        fallen = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.21)
        self.state = torch.where(fallen[:, None], self.fresh(CARTS), self.state)
        return self.state, 1.0 - fallen.float(), fallen.float()


class Agent(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.actor = nn.Linear(width, 2)
        self.critic = nn.Linear(width, 1)

    def forward(self, obs):
        h = self.body(obs)
        return self.actor(h), self.critic(h).squeeze(-1)

    def evaluate(self, obs, actions):
        logits, values = self.forward(obs)
        policy = torch.distributions.Categorical(logits=logits)
        return policy.log_prob(actions), policy.entropy(), values


@torch.no_grad()
def play(agent, carts):
    obs, actions, rewards, ends = [], [], [], []
    for _ in range(HORIZON):
        state = carts.state
        logits, _ = agent(state)
        action = torch.multinomial(logits.softmax(-1), 1).squeeze(1)
        _, reward, end = carts.step(action)
        obs.append(state)
        actions.append(action)
        rewards.append(reward)
        ends.append(end)
    value = agent(carts.state)[1]
    returns = []
    for reward, end in zip(reversed(rewards), reversed(ends)):
        value = reward + GAMMA * value * (1 - end)
        returns.append(value)
    return torch.cat(obs), torch.cat(actions), torch.cat(returns[::-1]), torch.stack(ends).mean().item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    agent = DDP(Agent())
    optimizer = torch.optim.Adam(agent.parameters(), lr=2e-3)
    torch.manual_seed(50 + rank)
    carts = Carts(torch.Generator().manual_seed(rank))
    for step in range(150):
        obs, actions, returns, fallen = play(agent.module, carts)
        log_probs, entropy, values = agent.module.evaluate(obs, actions)
        advantage = returns - values.detach()
        loss = -(log_probs * advantage).mean() - 0.01 * entropy.mean()
        loss = loss + 0.5 * nn.functional.smooth_l1_loss(values, returns)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
        optimizer.step()
        if step % 30 == 0 and rank == 0:
            print(f"update {step}: {100 * fallen:.1f}% of moves end in a fall")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
