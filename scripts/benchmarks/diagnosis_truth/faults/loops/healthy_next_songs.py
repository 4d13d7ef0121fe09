"""Next songs of a playlist: a causal transformer over songs, with sampled negatives."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CASE = {
    "generation": 17,
    "truth": "Each place of a playlist is trained against negatives drawn for its batch, and the few short playlists are padded at their end; the table of songs is small, and products take most of the time.",
    "cause": None,
    "also": [],
    "never": [
        "padding",
        "dense-gradient",
        "index-backward",
        "logits",
        "data-loading",
        "unfused-attention",
        "host-python",
        "growth",
        "unused-outputs",
    ],
    "healthy": True,
}

SONGS, MOODS, LENGTH = 481, 12, 40


def playlists(count):
    """Return playlists of which each keeps to two moods; song 0 pads the one in ten that is short."""
    moods = torch.randint(MOODS, (count, 2))
    mood = moods.gather(1, torch.randint(2, (count, LENGTH + 1)))
    songs = 1 + mood + MOODS * (torch.rand(count, LENGTH + 1) ** 2 * ((SONGS - 1) // MOODS)).long()
    lengths = torch.where(torch.rand(count) < 0.1, torch.randint(20, LENGTH, (count,)), LENGTH + 1)
    return songs.masked_fill(torch.arange(LENGTH + 1) >= lengths[:, None], 0)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.joined, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x):
        parts = self.joined(self.norms[0](x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*parts.unbind(), is_causal=True).transpose(1, 2).flatten(2))
        return x + self.feed(self.norms[1](x))


class NextSong(nn.Module):
    def __init__(self, width=160, heads=4, blocks=2):
        super().__init__()
        self.songs = nn.Embedding(SONGS, width, padding_idx=0)
        nn.init.normal_(self.songs.weight, std=0.05)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)

    def forward(self, heard, following, negatives):
        hidden = self.norm(self.blocks(self.songs(heard) + self.places))
        good = (hidden * self.songs(following)).sum(2)
        bad = hidden @ self.songs(negatives).T
        losses = F.softplus(-good) + F.softplus(bad).mean(2)
        real = following != 0
        return losses[real].mean(), (good[real] > bad[real].mean(1)).float().mean()


def main(epochs=4):
    torch.manual_seed(176)
    loader = DataLoader(TensorDataset(playlists(400)), batch_size=20, shuffle=True)
    model = NextSong()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), fused=True)
    for epoch in range(epochs):
        history = []
        for (songs,) in loader:
            loss, right = model(songs[:, :-1], songs[:, 1:], torch.randint(1, SONGS, (64,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append((loss.item(), right.item()))
        loss, right = torch.tensor(history).mean(0).tolist()
        print(f"epoch {epoch}: loss {loss:.4f}, in order {right:.1%}")


if __name__ == "__main__":
    main()
