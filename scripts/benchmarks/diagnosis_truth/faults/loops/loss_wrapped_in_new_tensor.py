"""One network hears three things in a voice: who speaks, in which mood, and how old the person is."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 10,
    "truth": "The losses are put into a new tensor with requires_grad=True: it is a leaf of its own, so backward ends there, no weight gets a gradient, and the optimizer changes nothing. Measured: the speaker's loss is 3.43 at the end (chance), 0.06 without the fault.",
    "cause": "no-update",
    "also": [],
    "never": ["data-loading", "logging", "evaluation", "growth", "start-up", "padding", "host-python", "divergence"],
    "healthy": False,
    "place": ["torch.tensor([who, mood, age]", "loss.backward()", "requires_grad=True"],
    "remedy": "torch.stack the losses, or add them",
    "without": [
        [
            "        losses = torch.tensor([who, mood, age], requires_grad=True)\n",
            "        losses = torch.stack([who, mood, age])\n",
        ]
    ],
}


class Listener(nn.Module):
    def __init__(self, bands=40, width=64, speakers=30, moods=5):
        super().__init__()
        self.ears = nn.Sequential(
            nn.Conv1d(bands, width, 5, 2, 2), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Conv1d(width, width, 5, 2, 2), nn.BatchNorm1d(width), nn.ReLU(),
        )  # fmt: skip
        self.memory = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.speaker = nn.Linear(2 * width, speakers)
        self.mood = nn.Linear(2 * width, moods)
        self.age = nn.Linear(2 * width, 1)

    def forward(self, x):
        h, _ = self.memory(self.ears(x).transpose(1, 2))
        h = h.mean(1)
        return self.speaker(h), self.mood(h), self.age(h).squeeze(1)


class Voices:
    def __init__(self, speakers=30, moods=5, bands=40):
        self.timbre = torch.randn(speakers, bands)
        self.tune = torch.randn(moods, bands)
        self.years = torch.rand(speakers)

    def draw(self, batch, frames=120):
        who = torch.randint(len(self.timbre), (batch,))
        mood = torch.randint(len(self.tune), (batch,))
        swing = torch.sin(0.1 * torch.arange(frames) * (1 + mood[:, None]))
        x = self.timbre[who][:, :, None] + self.tune[mood][:, :, None] * swing[:, None, :]
        return x + torch.randn_like(x), who, mood, self.years[who]


class Multitask:
    def __init__(self, weights=(1.0, 0.7, 2.0), lr=2e-3):
        self.model = Listener()
        self.weights = torch.tensor(weights)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)

    def step(self, x, speakers, moods, years):
        speaker, feeling, guess = self.model(x)
        who = F.cross_entropy(speaker, speakers)
        mood = F.cross_entropy(feeling, moods)
        age = F.mse_loss(guess, years)
        losses = torch.tensor([who, mood, age], requires_grad=True)
        loss = (self.weights * losses).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return losses.detach()


def main(steps=220, batch=16):
    torch.manual_seed(30)
    voices, task = Voices(), Multitask()
    mean = torch.zeros(3)
    for step in range(1, steps + 1):
        mean += task.step(*voices.draw(batch)) / 20
        if step % 20 == 0:
            print(f"step {step}: speaker {mean[0]:.3f}, mood {mean[1]:.3f}, age {mean[2]:.4f}")
            mean.zero_()


if __name__ == "__main__":
    main()
