"""Predicts the shape of short molecular chains from their sequence; the error is measured after the best rotation."""

import torch
from torch import nn

CASE = {
    "generation": 11,
    "truth": "The singular value decomposition of one 3 x 3 matrix per chain gives the rotation for the loss, is taken without gradients and costs little beside the recurrent network.",
    "cause": None,
    "also": [],
    "never": ["decompositions", "host-python", "growth", "no-update", "data-loading", "logging", "needless-copies"],
    "healthy": True,
}


def chains(count, length=24, kinds=8):
    """Each kind of link bends and twists in its own way; positions follow by walking along."""
    habit = torch.Generator().manual_seed(1)
    bend = torch.randn(kinds, 3, generator=habit)
    kind = torch.randint(kinds, (count, length))
    frame = torch.eye(3).repeat(count, 1, 1)
    place, places = torch.zeros(count, 3), []
    for i in range(length):
        a = 0.6 * bend[kind[:, i]]
        zero = torch.zeros(count)
        skew = torch.stack([zero, -a[:, 2], a[:, 1], a[:, 2], zero, -a[:, 0], -a[:, 1], a[:, 0], zero], 1).view(
            -1, 3, 3
        )
        frame = frame @ torch.linalg.matrix_exp(skew)
        place = place + frame[:, :, 0]
        places.append(place)
    rotation = torch.linalg.qr(torch.randn(count, 3, 3)).Q
    rotation = rotation * torch.linalg.det(rotation).view(-1, 1, 1)
    return kind, torch.stack(places, 1) @ rotation.transpose(1, 2)


class Folder(nn.Module):
    def __init__(self, kinds=8, width=72):
        super().__init__()
        self.enter = nn.Embedding(kinds, width)
        self.read = nn.LSTM(width, width, num_layers=2, batch_first=True, bidirectional=True)
        self.link = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, 3))

    def forward(self, kind):
        links = self.link(self.read(self.enter(kind))[0])
        return links.cumsum(1)


def aligned_error(guess, truth):
    guess = guess - guess.mean(1, keepdim=True)
    truth = truth - truth.mean(1, keepdim=True)
    with torch.no_grad():
        u, _, vt = torch.linalg.svd(guess.transpose(1, 2) @ truth)
        flip = torch.ones(len(u), 3)
        flip[:, 2] = torch.linalg.det(u @ vt)
        rotation = (u * flip[:, None, :]) @ vt
    return (guess @ rotation - truth).square().sum(2).mean()


class Fit:
    def __init__(self, steps=120, batch=24):
        self.steps, self.batch = steps, batch
        self.kind, self.place = chains(1500)
        self.model = Folder()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)

    def __iter__(self):
        for step in range(1, self.steps + 1):
            pick = torch.randint(len(self.kind), (self.batch,))
            loss = aligned_error(self.model(self.kind[pick]), self.place[pick])
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
            self.optimizer.step()
            yield step, loss


if __name__ == "__main__":
    torch.manual_seed(6)
    for step, loss in Fit():
        if step % 30 == 0:
            print(f"step {step}: mean squared error after alignment {loss.item():.3f}")
