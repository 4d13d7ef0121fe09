"""Gestures in short clips: a small convolutional net looks at each frame, an LSTM at the sequence."""

import torch
import torch.nn as nn

CASE = {
    "generation": 13,
    "truth": "The forward loops over the 48 frames of a clip and gives the convolutional net one frame of four clips at a time; all 192 frames could go through it at once.",
    "cause": "small-operators",
    "also": ["host-python"],
    "never": ["data-loading", "evaluation", "growth", "start-up", "logging", "duplicate-forward"],
    "healthy": False,
    "place": ["for t in range(clip.size(1)):", "self.cnn(clip[:, t])", "features = []"],
    "share": 87,
    "remedy": "fold the frames into the batch: cnn(clip.flatten(0, 1)).unflatten(0, clip.shape[:2])",
    "without": [
        [
            "        features = []\n        for t in range(clip.size(1)):\n            features.append(self.cnn(clip[:, t]))\n        features = torch.stack(features, dim=1)\n",
            "        features = self.cnn(clip.flatten(0, 1)).unflatten(0, clip.shape[:2])\n",
        ]
    ],
}

try:
    from tqdm import trange
except ImportError:
    trange = range


class FrameEncoder(nn.Module):
    def __init__(self, out=64):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.GroupNorm(2, 16),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 4 * 4, out),
            nn.ReLU(),
        )

    def forward(self, frame):
        return self.layers(frame)


class CNNLSTM(nn.Module):
    def __init__(self, classes=6):
        super().__init__()
        self.cnn = FrameEncoder()
        self.lstm = nn.LSTM(64, 64, batch_first=True)
        self.fc = nn.Linear(64, classes)

    def forward(self, clip):
        features = []
        for t in range(clip.size(1)):
            features.append(self.cnn(clip[:, t]))
        features = torch.stack(features, dim=1)
        _, (h, _) = self.lstm(features)
        return self.fc(h[-1])


def clips(count, frames=48, size=16):
    """A dot that moves along one of six paths."""
    kind = torch.randint(6, (count,))
    time = torch.linspace(0, 6.28, frames)
    turn = (kind // 2 + 1).view(-1, 1) * time + 6.28 * torch.rand(count, 1)
    x = torch.cos(turn)
    y = torch.where(kind.view(-1, 1) % 2 == 0, torch.sin(turn), torch.sin(2 * turn))
    grid = torch.linspace(-1.3, 1.3, size)
    near = (grid.view(1, 1, 1, -1) - x[..., None, None]) ** 2 + (grid.view(1, 1, -1, 1) - y[..., None, None]) ** 2
    return (torch.exp(-near / 0.05) + 0.1 * torch.randn(count, frames, size, size)).unsqueeze(2), kind


torch.manual_seed(21)
video, gesture = clips(240)
model = CNNLSTM()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()
progress = trange(3)
for epoch in progress:
    hits = 0
    for pick in torch.randperm(len(video)).split(4):
        scores = model(video[pick])
        loss = criterion(scores, gesture[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hits += (scores.argmax(1) == gesture[pick]).sum()
    if hasattr(progress, "set_postfix"):
        progress.set_postfix(accuracy=f"{hits.item() / len(video):.2f}")
