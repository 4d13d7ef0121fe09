"""Graph network for the energy of small molecules; the ranks own files of slightly different length."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CASE = {
    "generation": 11,
    "truth": "Rank 1 has 2 batches fewer of 62, which is what model.join() is for: it joins the last reductions with zeros and gets the final weights; the extra collective of join in a step is tiny, and the graph layers take the time.",
    "cause": None,
    "also": ["straggler"],
    "never": [
        "exposed-communication",
        "small-buckets",
        "data-loading",
        "skipped-steps",
        "expert-imbalance",
        "padding",
        "checkpoint-writing",
        "growth",
    ],
    "healthy": True,
    "ranks": 2,
}

ATOMS, KINDS, BATCH = 20, 5, 32
BATCHES = {0: 62, 1: 60}


def make_file(batches, generator):
    """Batches of kinds of atoms, neighbourhoods as dense matrices, and energies."""
    for _ in range(batches):
        kinds = torch.randint(0, KINDS, (BATCH, ATOMS), generator=generator)
        places = torch.randn(BATCH, ATOMS, 3, generator=generator)
        near = torch.exp(-(torch.cdist(places, places) ** 2))
        charge = kinds.float() - 2
        energy = torch.einsum("bi,bij,bj->b", charge, near, charge) / ATOMS
        yield kinds, near, energy


class Passing(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.message = nn.Linear(width, width)
        self.update = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, atoms, near):
        h = self.norm(atoms)
        arriving = near @ self.message(h)
        return atoms + self.update(torch.cat([h, arriving], -1))


class EnergyNet(nn.Module):
    def __init__(self, width=112, depth=3):
        super().__init__()
        self.kinds = nn.Embedding(KINDS, width)
        self.layers = nn.ModuleList(Passing(width) for _ in range(depth))
        self.leave = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, kinds, near):
        atoms = self.kinds(kinds)
        for layer in self.layers:
            atoms = layer(atoms, near)
        return self.leave(atoms).sum((1, 2)) / ATOMS


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(6)
    model = DDP(EnergyNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    file = make_file(BATCHES[rank], torch.Generator().manual_seed(60 + rank))
    done = 0
    with model.join():
        for kinds, near, energy in file:
            loss = nn.functional.mse_loss(model(kinds, near), energy)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            if rank == 0 and done % 20 == 0:
                print(f"{done} batches: loss {loss.item():.3f}")
    count = torch.tensor(float(done * BATCH))
    dist.all_reduce(count)
    if rank == 0:
        print(f"{int(count)} molecules seen")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
