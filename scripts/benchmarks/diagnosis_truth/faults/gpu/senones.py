"""Speech: states of phones from log-mel frames, with bands of time and frequency masked out."""

import time

import torch
from torch import nn
from torch.nn import functional as F

CASE = {
    "truth": "The masks of the augmentation are drawn utterance by utterance on the GPU, and .item() fetches each "
    "start and width, 512 times a step. Measured: 47%.",
    "cause": "host-sync",
    "also": ["launch-bound", "small-operators", "host-python", "data-loading"],
    "never": ["fp32-products", "logging", "exposed-copies", "evaluation"],
    "healthy": False,
    "requires": ["cuda"],
    "place": [".item()"],
}

STEPS = 50
BATCH = 64
FRAMES = 1000
MELS = 80
STATES = 2000
device = "cuda" if torch.cuda.is_available() else "cpu"


def mask_bands(features, time_width=70, mel_width=27):
    """Two bands of time and two of frequency, anew for each utterance."""
    batch, frames, mels = features.shape
    for row in range(batch):
        for _ in range(2):
            width = torch.randint(0, mel_width, (), device=features.device).item()
            first = torch.randint(0, mels - width, (), device=features.device).item()
            features[row, :, first : first + width] = 0
            width = torch.randint(0, time_width, (), device=features.device).item()
            first = torch.randint(0, frames - width, (), device=features.device).item()
            features[row, first : first + width] = 0
    return features


class Encoder(nn.Module):
    def __init__(self, width=512, layers=8):
        super().__init__()
        self.shrink = nn.Sequential(
            nn.Conv1d(MELS, width, 3, stride=2, padding=1), nn.GELU(), nn.Conv1d(width, width, 3, stride=2, padding=1)
        )
        self.positions = nn.Parameter(torch.randn(FRAMES // 4, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, 8, 4 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, STATES)

    def forward(self, features):
        x = self.shrink(features.transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm(self.layers(x + self.positions)))


def clock():
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


torch.manual_seed(0)
model = Encoder().to(device).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01, fused=True)
spectra = torch.randn(512, FRAMES, MELS, device=device)
states = torch.randint(STATES, (512, FRAMES // 4), device=device)

for step in range(STEPS):
    if step == STEPS - 20:
        start = clock()
    rows = (torch.arange(BATCH, device=device) + step * BATCH) % len(spectra)
    features = mask_bands(spectra[rows])
    with torch.autocast(device, torch.bfloat16):
        scores = model(features)
        loss = F.cross_entropy(scores.flatten(0, 1), states[rows].flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
elapsed = clock() - start
print(f"loss {loss.item():.5f}")
print(f"20 steps: {elapsed / 20 * 1e3:.2f} ms each")
