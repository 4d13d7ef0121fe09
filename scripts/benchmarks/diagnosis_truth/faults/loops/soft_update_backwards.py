"""Double Q-learning from a log of a made-up warehouse robot, with a slowly moving target network."""

import copy

import torch
from torch import nn

CASE = {
    "generation": 14,
    "truth": "The soft update writes its mean to the trained network, not to the target: after each step the trained network is 99.5% the target, which never moves, so that nearly all of what the optimizer did is undone.",
    "cause": "undone-update",
    "also": ["no-update"],
    "never": ["data-loading", "host-python", "growth", "start-up", "logging", "evaluation", "gradients-not-cleared"],
    "healthy": False,
    "place": ["p.copy_(tau * p + (1 - tau) * t)", "soft_update(online, target, tau=0.005)", "optimizer.step()"],
    "remedy": "write to the target: t.copy_(tau * p + (1 - tau) * t)",
    "without": [["p.copy_(tau * p + (1 - tau) * t)", "t.copy_(tau * p + (1 - tau) * t)"]],
}


@torch.no_grad()
def soft_update(online, target, tau):
    for p, t in zip(online.parameters(), target.parameters()):
        p.copy_(tau * p + (1 - tau) * t)


def q_network(observation, actions, width=384):
    return nn.Sequential(
        nn.Linear(observation, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, actions)
    )


def log_of_robot(rows, observation, actions):
    state = torch.randn(rows, observation)
    action = torch.randint(actions, (rows,))
    after = 0.9 * state + 0.1 * torch.randn(rows, observation)
    after[torch.arange(rows), action] += 0.5
    return state, action, after[:, :actions].amax(1) - state[:, -1].abs(), after


torch.manual_seed(1)
observation, actions, gamma = 24, 6, 0.9
states, moves, rewards, nexts = log_of_robot(20_000, observation, actions)
online = q_network(observation, actions)
target = copy.deepcopy(online).requires_grad_(False)
optimizer = torch.optim.Adam(online.parameters(), lr=1e-3, fused=True)

for step in range(1, 151):
    rows = torch.randint(len(states), (512,))
    with torch.no_grad():
        best = online(nexts[rows]).argmax(1, keepdim=True)
        goal = rewards[rows] + gamma * target(nexts[rows]).gather(1, best).squeeze(1)
    value = online(states[rows]).gather(1, moves[rows].unsqueeze(1)).squeeze(1)
    loss = nn.functional.smooth_l1_loss(value, goal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    soft_update(online, target, tau=0.005)
    if step % 30 == 0:
        print(f"{step}: loss {loss.item():.4f}, mean value {value.mean().item():.3f}")
