"""PPO on a vectorised pole, with short rollouts and large updates."""

import torch
from torch import nn
from torch.distributions import Categorical

CASE = {
    "generation": 2,
    "truth": "The rollout of 16 vectorised steps takes 9 to 16%, as measured; the epochs of updates on large batches take the rest. fused=True takes the optimizer from 1.2 to 0.45 of 9.8 ms.",
    "cause": None,
    "also": ["periodic-pause", "unfused-optimizer"],
    "never": ["evaluation", "data-loading", "host-python", "small-operators", "duplicate-forward", "growth"],
    "healthy": True,
}


class Pole:
    """A pole on a cart, many at once."""

    def __init__(self, count):
        self.state = torch.zeros(count, 4)

    def step(self, action):
        force = action.float() * 2 - 1
        x, v, angle, spin = self.state.unbind(1)
        push = 9.8 * angle.sin() - angle.cos() * force
        self.state = torch.stack([x + 0.02 * v, v + 0.02 * force, angle + 0.02 * spin, spin + 0.02 * push], 1)
        done = angle.abs() > 0.2
        self.state = torch.where(done[:, None], 0.05 * torch.randn_like(self.state), self.state)
        return self.state, 1.0 - done.float(), done


class Agent(nn.Module):
    def __init__(self, hidden=512):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.policy, self.value = nn.Linear(hidden, 2), nn.Linear(hidden, 1)

    def forward(self, state):
        h = self.body(state)
        return Categorical(logits=self.policy(h)), self.value(h).squeeze(-1)


@torch.no_grad()
def rollout(agent, env, length):
    rows = []
    state = env.state
    for _ in range(length):
        policy, value = agent(state)
        action = policy.sample()
        after, reward, done = env.step(action)
        rows.append((state, action, policy.log_prob(action), value, reward, done.float()))
        state = after
    states, actions, log_probs, values, rewards, dones = (torch.stack(c) for c in zip(*rows))
    advantages, running, following = torch.zeros_like(rewards), torch.zeros(rewards.shape[1]), agent(state)[1]
    for t in reversed(range(length)):
        delta = rewards[t] + 0.99 * following * (1 - dones[t]) - values[t]
        running = delta + 0.99 * 0.95 * (1 - dones[t]) * running
        advantages[t], following = running, values[t]
    return [c.flatten(0, 1) for c in (states, actions, log_probs, advantages, advantages + values)]


def main():
    torch.manual_seed(0)
    env, agent = Pole(32), Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5)
    for update in range(5):
        states, actions, old, advantages, returns = rollout(agent, env, 16)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        for _ in range(8):
            policy, value = agent(states)
            ratio = (policy.log_prob(actions) - old).exp()
            clipped = ratio.clamp(0.8, 1.2)
            loss = -torch.min(ratio * advantages, clipped * advantages).mean()
            loss = loss + 0.5 * (value - returns).square().mean() - 0.01 * policy.entropy().mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
        print(f"update {update}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
