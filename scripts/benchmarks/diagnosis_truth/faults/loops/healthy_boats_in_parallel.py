"""Boats learn to hold a course in changing wind: an actor and a critic with memory, on many boats at once."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 17,
    "truth": "Each update plays ten moves with all boats and keeps their graphs for one backward pass; the memory goes on between updates without its graph, values are a target without gradients, and each move needs the one before it. Products of the cell take most of the time.",
    "cause": None,
    "also": [],
    "never": [
        "growth",
        "cut-gradients",
        "host-python",
        "data-loading",
        "recomputation",
        "duplicate-forward",
        "gradients-not-cleared",
        "divergence",
        "launch-bound",
    ],
    "healthy": True,
}

SEEN, RUDDER = 64, 5


class Boats:
    """Boats on a wide water; each has a course, a heading and a wind that turns slowly."""

    def __init__(self, count):
        self.count = count
        self.view = torch.randn(4, SEEN) / 2
        self.course = torch.rand(count) * 6.28
        self.heading, self.wind, self.turn = torch.rand(count) * 6.28, torch.rand(count) * 6.28, torch.zeros(count)

    def see(self):
        off = self.course - self.heading
        parts = torch.stack([torch.sin(off), torch.cos(off), torch.sin(self.wind - self.heading), self.turn], 1)
        return parts @ self.view + 0.05 * torch.randn(self.count, SEEN)

    def step(self, rudder):
        self.wind = self.wind + 0.05 * torch.randn(self.count)
        self.turn = 0.8 * self.turn + 0.1 * (rudder - RUDDER // 2) + 0.05 * torch.sin(self.wind - self.heading)
        self.heading = self.heading + 0.3 * self.turn
        return self.see(), torch.cos(self.course - self.heading)


class Helm(nn.Module):
    def __init__(self, width=320):
        super().__init__()
        self.enter = nn.Linear(SEEN, width)
        self.cell = nn.GRUCell(width, width)
        self.steer, self.worth = nn.Linear(width, RUDDER), nn.Linear(width, 1)

    def forward(self, seen, memory):
        memory = self.cell(F.relu(self.enter(seen)), memory)
        return torch.log_softmax(self.steer(memory), 1), self.worth(memory).squeeze(1), memory


def returns(rewards, last, ahead=0.95):
    found = []
    for reward in reversed(rewards):
        last = reward + ahead * last
        found.append(last)
    return torch.stack(found[::-1])


def main(updates=70, moves=10, count=64):
    torch.manual_seed(178)
    boats, helm = Boats(count), Helm()
    optimizer = torch.optim.Adam(helm.parameters(), lr=5e-4, eps=1e-5, fused=True)
    seen, memory = boats.see(), torch.zeros(count, 320)
    for update in range(1, updates + 1):
        memory = memory.detach()
        logs, worths, rewards, spreads = [], [], [], []
        for _ in range(moves):
            chances, worth, memory = helm(seen, memory)
            rudder = torch.multinomial(chances.detach().exp(), 1)
            logs.append(chances.gather(1, rudder).squeeze(1))
            spreads.append(-(chances.exp() * chances).sum(1))
            worths.append(worth)
            seen, reward = boats.step(rudder.squeeze(1))
            rewards.append(reward)
        with torch.no_grad():
            wanted = returns(rewards, helm(seen, memory)[1])
        logs, worths, spreads = torch.stack(logs), torch.stack(worths), torch.stack(spreads)
        gain = wanted - worths.detach()
        loss = -(gain * logs).mean() + 0.5 * F.mse_loss(worths, wanted) - 0.01 * spreads.mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(helm.parameters(), 0.5)
        optimizer.step()
        if update % 10 == 0:
            print(f"update {update}: reward {torch.stack(rewards).mean().item():.3f}, loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
