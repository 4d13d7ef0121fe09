"""Charges of atoms in made-up molecules, by a graph net that passes messages along the bonds."""

import torch
from torch import nn

CASE = {
    "generation": 9,
    "truth": "The message layers stand in a plain Python list, so model.parameters() does not name them: they get gradients (which nothing uses or clears, so that they add up) but are never updated. Mean squared error at the end 0.283, without the fault 0.027.",
    "cause": "no-update",
    "also": ["unused-gradients", "gradients-not-cleared"],
    "never": [
        "data-loading",
        "logging",
        "evaluation",
        "start-up",
        "padding",
        "nan-loss",
        "divergence",
        "lost-state",
        "checkpoint-writing",
    ],
    "healthy": False,
    "place": ["self.layers = [MessageLayer(width) for _ in range(depth)]", "torch.optim.Adam(model.parameters()"],
    "remedy": "keep the layers in nn.ModuleList",
    "without": [
        [
            "        self.layers = [MessageLayer(width) for _ in range(depth)]\n",
            "        self.layers = nn.ModuleList([MessageLayer(width) for _ in range(depth)])\n",
        ]
    ],
}


class MessageLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width + 1, width), nn.SiLU(), nn.Linear(width, width))
        self.change = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, atoms, bonds, lengths):
        source, target = bonds
        message = self.message(torch.cat([atoms[source], atoms[target], lengths], 1))
        received = torch.zeros_like(atoms).index_add_(0, target, message)
        return atoms + self.change(torch.cat([atoms, received], 1))


class ChargeNet(nn.Module):
    def __init__(self, elements, width=48, depth=3):
        super().__init__()
        self.embed = nn.Embedding(elements, width)
        self.layers = [MessageLayer(width) for _ in range(depth)]
        self.read = nn.Linear(width, 1)

    def forward(self, elements, bonds, lengths):
        atoms = self.embed(elements)
        for layer in self.layers:
            atoms = layer(atoms, bonds, lengths)
        return self.read(atoms).squeeze(1)


class Molecules:
    """Chains with side bonds; charge flows to the more electronegative of two bonded atoms, less over long bonds."""

    def __init__(self, count, elements=8):
        pull = torch.linspace(-1, 1, elements)[torch.randperm(elements)]
        self.graphs = [self.molecule(pull) for _ in range(count)]

    @staticmethod
    def molecule(pull):
        size = int(torch.randint(12, 24, ()))
        elements = torch.randint(len(pull), (size,))
        chain = torch.stack([torch.arange(size - 1), torch.arange(1, size)])
        side = torch.randint(size, (2, size // 4))
        bonds = torch.cat([chain, side[:, side[0] != side[1]]], 1)
        lengths = 0.5 + torch.rand(bonds.shape[1], 1)
        bonds, lengths = torch.cat([bonds, bonds.flip(0)], 1), torch.cat([lengths, lengths])
        source, target = bonds
        flow = torch.tanh(2 * (pull[elements[target]] - pull[elements[source]])) * torch.exp(-lengths[:, 0])
        near = torch.zeros(size).index_add_(0, target, flow)
        far = torch.zeros(size).index_add_(0, target, near[source] * flow.abs())
        return elements, bonds, lengths, near - 0.5 * far

    def batches(self, size):
        order = torch.randperm(len(self.graphs)).tolist()
        for at in range(0, len(order), size):
            chosen = [self.graphs[i] for i in order[at : at + size]]
            offset, shifted = 0, []
            for elements, bonds, _, _ in chosen:
                shifted.append(bonds + offset)
                offset += len(elements)
            elements, _, lengths, charge = zip(*chosen)
            yield torch.cat(elements), torch.cat(shifted, 1), torch.cat(lengths), torch.cat(charge)


def main(epochs=6, size=24):
    torch.manual_seed(11)
    data = Molecules(600)
    model = ChargeNet(elements=8)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(epochs):
        total, atoms = 0.0, 0
        for elements, bonds, lengths, charge in data.batches(size):
            loss = nn.functional.mse_loss(model(elements, bonds, lengths), charge)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.item() * len(charge)
            atoms += len(charge)
        print(f"epoch {epoch}: mean squared error {total / atoms:.4f}")


if __name__ == "__main__":
    main()
