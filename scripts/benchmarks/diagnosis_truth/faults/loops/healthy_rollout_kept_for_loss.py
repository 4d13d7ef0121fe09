"""Learned simulator of heat in a plate: the network is applied eight times, and all states are compared."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 15,
    "truth": "The list of states of one rollout is needed for the loss and freed after each step, and the history holds plain numbers; convolutions, forward and backward, take most of the time.",
    "cause": None,
    "also": [],
    "never": [
        "growth",
        "duplicate-forward",
        "repeated-backward",
        "host-python",
        "logging",
        "checkpoint-writing",
        "data-loading",
        "garbage-collection",
        "needless-copies",
    ],
    "healthy": True,
}


class Plate:
    """Plates with random conductivity, simulated by finite differences."""

    def __init__(self, count, size=24, moments=9):
        smooth = nn.AvgPool2d(5, 1, 2)
        self.conductivity = 0.05 + 0.15 * smooth(torch.rand(count, 1, size, size))
        state = smooth(smooth(3 * torch.randn(count, 1, size, size)))
        states = [state]
        for _ in range(moments - 1):
            for _ in range(4):
                edged = F.pad(state, (1, 1, 1, 1), mode="replicate")
                around = edged[..., 2:, 1:-1] + edged[..., :-2, 1:-1] + edged[..., 1:-1, 2:] + edged[..., 1:-1, :-2]
                state = state + self.conductivity * (around - 4 * state)
            states.append(state)
        self.states = torch.stack(states, 1)

    def sample(self, size):
        pick = torch.randint(len(self.states), (size,))
        return self.states[pick], self.conductivity[pick]


class Simulator(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(2, width, 5, padding=2, padding_mode="replicate"), nn.GELU(),
            nn.Conv2d(width, width, 3, padding=1, padding_mode="replicate"), nn.GELU(),
            nn.Conv2d(width, 1, 5, padding=2, padding_mode="replicate"),
        )  # fmt: skip

    def forward(self, state, conductivity):
        return state + 0.1 * self.net(torch.cat([state, 5 * conductivity], 1))

    def rollout(self, state, conductivity, moments):
        states = []
        for _ in range(moments):
            state = self(state, conductivity)
            states.append(state)
        return torch.stack(states, 1)


def main(steps=90, size=6):
    torch.manual_seed(23)
    plates, model = Plate(200), Simulator()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    history = {"loss": [], "rate": [], "norm": []}
    for step in range(1, steps + 1):
        states, conductivity = plates.sample(size)
        guess = model.rollout(states[:, 0], conductivity, states.shape[1] - 1)
        loss = F.mse_loss(guess, states[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        history["loss"].append(loss.item())
        history["norm"].append(norm.item())
        history["rate"].append(scheduler.get_last_lr()[0])
        scheduler.step()
        if step % 15 == 0:
            recent = history["loss"][-15:]
            print(f"step {step}: error {sum(recent) / len(recent):.5f}, norm {history['norm'][-1]:.3f}")


if __name__ == "__main__":
    main()
