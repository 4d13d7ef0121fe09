"""Solubility of molecules by a graph transformer, with eigenvectors of the graph as positions of the atoms."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

CASE = {
    "generation": 15,
    "truth": "The dataset computes the eigenvectors of a molecule's Laplacian each time that the molecule is read, although its graph is the same in every epoch: 30% of the loop's time.",
    "cause": "decompositions",
    "also": ["data-loading"],
    "never": ["growth", "evaluation", "logging", "checkpoint-writing", "start-up", "padding", "no-update"],
    "healthy": False,
    "place": [
        "_, vectors = torch.linalg.eigh(laplacian)",
        "positions = laplacian_positions(bonds, SIZES)",
        "def __getitem__(self, index):",
        "def laplacian_positions(bonds, count):",
    ],
    "share": 30,
    "remedy": "compute the eigenvectors of each molecule once, and keep them next to its graph",
    "without": [
        [
            "        self.molecules = molecules\n",
            "        self.molecules = molecules\n"
            "        self.positions = [laplacian_positions(m[1], SIZES) for m in molecules]\n",
        ],
        ["        positions = laplacian_positions(bonds, SIZES)\n", "        positions = self.positions[index]\n"],
    ],
}

ATOMS, NODES, SIZES = 9, 60, 8


def make_molecule():
    bonds = torch.zeros(NODES, NODES)
    for atom in range(1, NODES):
        other = int(torch.randint(max(0, atom - 4), atom, ()))
        bonds[atom, other] = bonds[other, atom] = 1.0
    kinds = torch.randint(ATOMS, (NODES,))
    target = (kinds < 3).float().mean() + 0.1 * (bonds.sum(0) > 2).float().sum()
    return kinds, bonds, target


def laplacian_positions(bonds, count):
    """Return the eigenvectors of the normalised Laplacian with the smallest eigenvalues above zero."""
    scale = bonds.sum(1).clamp(min=1).rsqrt()
    laplacian = torch.eye(len(bonds)) - scale[:, None] * bonds * scale[None, :]
    _, vectors = torch.linalg.eigh(laplacian)
    return vectors[:, 1 : count + 1]


class Molecules(Dataset):
    def __init__(self, molecules):
        self.molecules = molecules

    def __len__(self):
        return len(self.molecules)

    def __getitem__(self, index):
        kinds, bonds, target = self.molecules[index]
        positions = laplacian_positions(bonds, SIZES)
        flips = torch.randint(2, (SIZES,)) * 2 - 1
        return kinds, bonds, positions * flips, target


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.bias = nn.Parameter(torch.zeros(heads, 1, 1))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, bonds):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bonds[:, None] * self.bias)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GraphTransformer(nn.Module):
    def __init__(self, dim=40, depth=2):
        super().__init__()
        self.atom, self.place = nn.Embedding(ATOMS, dim), nn.Linear(SIZES, dim)
        self.layers = nn.ModuleList([Layer(dim, 4) for _ in range(depth)])
        self.head = nn.Linear(dim, 1)

    def forward(self, kinds, bonds, positions):
        x = self.atom(kinds) + self.place(positions)
        for layer in self.layers:
            x = layer(x, bonds)
        return self.head(x.mean(1)).squeeze(1)


def main(epochs=18):
    torch.manual_seed(4)
    loader = DataLoader(Molecules([make_molecule() for _ in range(240)]), batch_size=24, shuffle=True)
    model = GraphTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for kinds, bonds, positions, target in loader:
            loss = F.mse_loss(model(kinds, bonds, positions), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: squared error {loss.item():.4f}")


if __name__ == "__main__":
    main()
