"""TD3 on a pendulum that has to be kept upright: two critics learn in each step, the actor in every second one."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 10,
    "truth": "Every second step is longer, some weights stand still in the others, and three networks are copies: that is TD3, with its delayed actor and slow targets. Adam's momentum of dead ReLUs fades to denormal numbers: its last steps take a fifth longer, unless they are flushed.",
    "cause": None,
    "also": ["growth", "unfused-optimizer"],
    "never": ["periodic-pause", "no-update", "skipped-steps", "model-copies", "data-loading", "logging"],
    "healthy": True,
}


class Pendulums:
    """Many pendulums side by side, so that each step brings a batch of experience."""

    def __init__(self, count=16, limit=60):
        self.limit = limit
        self.angle, self.speed = torch.empty(count), torch.empty(count)
        self.age = torch.randint(limit, (count,))
        self.renew(torch.ones(count, dtype=torch.bool))

    def renew(self, which):
        n = int(which.sum())
        self.angle[which] = 1.6 * torch.rand(n) - 0.8
        self.speed[which] = 2 * torch.rand(n) - 1
        self.age[which] = 0

    def state(self):
        return torch.stack([self.angle.cos(), self.angle.sin(), self.speed / 8], 1)

    def step(self, push):
        torque = 6 * push.squeeze(1)
        wrapped = torch.remainder(self.angle + math.pi, 2 * math.pi) - math.pi
        reward = -(wrapped**2 + 0.1 * self.speed**2 + 0.001 * torque**2)
        self.speed = (self.speed + 0.05 * (15 * self.angle.sin() + 3 * torque)).clamp(-8, 8)
        self.angle = self.angle + 0.05 * self.speed
        self.age += 1
        following = self.state()
        self.renew(self.age >= self.limit)
        return following, reward


def mlp(inputs, outputs, width=192):
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )


class Critics(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = mlp(4, 1), mlp(4, 1)

    def forward(self, states, pushes):
        x = torch.cat([states, pushes], 1)
        return self.first(x).squeeze(1), self.second(x).squeeze(1)


class TD3:
    def __init__(self, gamma=0.95, tau=0.02, delay=2):
        self.actor, self.critics = nn.Sequential(mlp(3, 1), nn.Tanh()), Critics()
        self.slow_actor, self.slow_critics = copy.deepcopy(self.actor), copy.deepcopy(self.critics)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=2e-3)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=2e-3)
        self.gamma, self.tau, self.delay = gamma, tau, delay

    def update(self, t, states, pushes, rewards, following):
        with torch.no_grad():
            noise = (0.2 * torch.randn_like(pushes)).clamp(-0.5, 0.5)
            goal = rewards + self.gamma * torch.min(
                *self.slow_critics(following, (self.slow_actor(following) + noise).clamp(-1, 1))
            )
        first, second = self.critics(states, pushes)
        loss = F.mse_loss(first, goal) + F.mse_loss(second, goal)
        self.critic_optimizer.zero_grad()
        loss.backward()
        self.critic_optimizer.step()
        if t % self.delay == 0:
            value = self.critics(states, self.actor(states))[0].mean()
            self.actor_optimizer.zero_grad()
            (-value).backward()
            self.actor_optimizer.step()
            self.follow()
        return loss.detach()

    @torch.no_grad()
    def follow(self):
        for slow, fast in ((self.slow_actor, self.actor), (self.slow_critics, self.critics)):
            torch._foreach_lerp_(list(slow.parameters()), list(fast.parameters()), self.tau)


def main(steps=900, warm=60, batch=128, capacity=20000):
    torch.manual_seed(26)
    world, agent = Pendulums(), TD3()
    memory = torch.zeros(capacity, 8)
    count, n = 0, len(world.angle)
    for t in range(steps + warm):
        states = world.state()
        with torch.no_grad():
            pushes = (
                (agent.actor(states) + 0.2 * torch.randn(n, 1)).clamp(-1, 1) if t > warm else 2 * torch.rand(n, 1) - 1
            )
        following, rewards = world.step(pushes)
        memory[count : count + n] = torch.cat([states, pushes, rewards[:, None], following], 1)
        count += n
        if t >= warm:
            rows = memory[torch.randint(count, (batch,))]
            loss = agent.update(t, rows[:, :3], rows[:, 3:4], rows[:, 4], rows[:, 5:])
            if t % 100 == 0:
                recent = memory[max(0, count - 100 * n) : count, 4].mean().item()
                print(f"step {t}: critics {loss.item():.3f}, reward {recent:.2f}")


if __name__ == "__main__":
    main()
