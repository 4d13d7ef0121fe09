"""Masked autoencoder of maps: the encoder sees a quarter of the patches, and a small decoder draws the others."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 17,
    "truth": "Three quarters of the patches are left out by a random order and never encoded, mask tokens stand in for them in the decoder, and the loss reads the hidden patches alone, as the method wants; products take most of the time.",
    "cause": None,
    "also": [],
    "never": [
        "unused-outputs",
        "padding",
        "index-backward",
        "needless-copies",
        "duplicate-forward",
        "unfused-attention",
        "data-loading",
        "growth",
    ],
    "healthy": True,
}

SIZE, PATCH = 64, 8
COUNT = (SIZE // PATCH) ** 2


def maps(count):
    """Return maps of one coast with different hills: smooth noise in three scales."""
    layers = [F.interpolate(torch.randn(count, 1, n, n), SIZE, mode="bicubic") * 2 / n**0.5 for n in (2, 4, 8)]
    coast = F.interpolate(torch.randn(1, 1, 6, 6), SIZE, mode="bicubic") * 4
    return F.layer_norm(coast + sum(layers), (1, SIZE, SIZE))


def patches_of(pictures):
    return F.unfold(pictures, PATCH, stride=PATCH).transpose(1, 2)


def blocks(width, heads, count):
    layer = nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, count, nn.LayerNorm(width), enable_nested_tensor=False)


class MaskedAutoencoder(nn.Module):
    def __init__(self, width=192, narrow=96, hidden=0.75):
        super().__init__()
        self.kept = int(COUNT * (1 - hidden))
        self.enter, self.between = nn.Linear(PATCH * PATCH, width), nn.Linear(width, narrow)
        self.places = nn.Parameter(0.5 * torch.randn(COUNT, width))
        self.places_again = nn.Parameter(0.5 * torch.randn(COUNT, narrow))
        self.mask_token = nn.Parameter(0.02 * torch.randn(narrow))
        self.encoder, self.decoder = blocks(width, 6, 3), blocks(narrow, 3, 1)
        self.leave = nn.Linear(narrow, PATCH * PATCH)

    def forward(self, pictures):
        patches = patches_of(pictures)
        order = torch.rand(patches.shape[:2]).argsort(1)
        back = order.argsort(1)
        kept = order[:, : self.kept, None]
        seen = torch.gather(patches, 1, kept.expand(-1, -1, patches.shape[2]))
        codes = self.between(self.encoder(self.enter(seen) + self.places[kept.squeeze(2)]))
        tokens = torch.cat([codes, self.mask_token.expand(len(codes), COUNT - self.kept, -1)], 1)
        tokens = torch.gather(tokens, 1, back[..., None].expand(-1, -1, tokens.shape[2]))
        drawn = self.leave(self.decoder(tokens + self.places_again))
        return F.mse_loss(drawn, patches, reduction="none").mean(2)[back >= self.kept].mean()


class Pretraining:
    def __init__(self, model, pictures, size):
        self.model, self.pictures, self.size = model, pictures, size
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-3, weight_decay=0.05, betas=(0.9, 0.95), fused=True
        )

    def run(self, steps):
        for step in range(1, steps + 1):
            pictures = self.pictures[torch.randint(len(self.pictures), (self.size,))]
            loss = self.model(torch.where(torch.rand(len(pictures), 1, 1, 1) < 0.5, pictures, pictures.flip(3)))
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            if step % 25 == 0:
                print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    torch.manual_seed(172)
    Pretraining(MaskedAutoencoder(), maps(1500), size=16).run(75)
