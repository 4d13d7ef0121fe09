"""Contrastive training of two encoders on two ranks, which share their small embeddings for more negatives."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CASE = {
    "generation": 4,
    "truth": "Both ranks compute alike; the gathered embeddings and 0.5 MB of gradients are little, and convolutions take the time.",
    "cause": None,
    "also": [],
    "never": ["exposed-communication", "straggler", "small-buckets", "find-unused-parameters", "host-python"],
    "healthy": True,
    "ranks": 2,
}


class ImageEncoder(nn.Sequential):
    def __init__(self, out=64, width=24):
        super().__init__(
            nn.Conv2d(3, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, out),
        )


class TextEncoder(nn.Module):
    def __init__(self, vocab=500, d=96, out=64):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.conv = nn.Conv1d(d, d, 5, padding=2)
        self.out = nn.Linear(d, out)

    def forward(self, tokens):
        h = F.relu(self.conv(self.emb(tokens).transpose(1, 2)))
        return self.out(h.amax(2))


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = ImageEncoder(), TextEncoder()
        self.scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, images, tokens):
        return F.normalize(self.image(images), dim=-1), F.normalize(self.text(tokens), dim=-1), self.scale.exp()


def gathered(mine):
    """All ranks' embeddings, of which only this rank's carry gradients."""
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.detach().contiguous())
    parts[dist.get_rank()] = mine
    return torch.cat(parts)


def clip_loss(image, text, scale):
    labels = torch.arange(len(image)) + len(image) * dist.get_rank()
    of_images = scale * image @ gathered(text).T
    of_texts = scale * text @ gathered(image).T
    return (F.cross_entropy(of_images, labels) + F.cross_entropy(of_texts, labels)) / 2


def main(steps=30, batch=24):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(CLIP())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1)
    torch.manual_seed(dist.get_rank())
    for step in range(steps):
        tokens = torch.randint(0, 500, (batch, 24))
        images = torch.randn(batch, 3, 32, 32) + tokens.float().mean(1).view(-1, 1, 1, 1) / 500
        loss = clip_loss(*model(images, tokens))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
