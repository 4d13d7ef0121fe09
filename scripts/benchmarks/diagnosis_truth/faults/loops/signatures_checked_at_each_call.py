"""A small network for molecules, with functions that check the shapes of their arguments by annotations."""

import functools
import inspect
import re
import typing

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 4,
    "truth": "A decorator resolves the annotations and binds the signature of each function at every call in forward.",
    "cause": "host-python",
    "also": ["small-operators"],
    "never": ["start-up", "data-loading", "evaluation", "growth", "periodic-pause", "logging"],
    "healthy": False,
    "place": [
        "inspect.signature(",
        "typing.get_type_hints(",
        "bound = ",
        "for name, value in bound.arguments.items()",
        "match(hints",
        "pattern.findall(",
        "return fn(*args, **kwargs)",
        "for dim, want in zip(",
        "def wrapper",
        "names = ",
    ],
    "share": None,
    "remedy": "resolve annotations once when the function is decorated, and check in tests alone",
    "without": [["CHECK_SHAPES = True", "CHECK_SHAPES = False"]],
}

CHECK_SHAPES = True


class Shaped:
    """Annotation of a tensor: its dimensions by name."""

    def __init__(self, dims):
        self.dims = dims

    def __class_getitem__(cls, dims):
        return typing.Annotated[torch.Tensor, cls(dims)]


def match(spec, value, bindings, where):
    pattern = re.compile(r"[A-Za-z_]\w*|\d+|\.\.\.")
    names = pattern.findall(spec.dims)
    if "..." not in names and len(names) != value.dim():
        raise TypeError(f"{where}: expected {spec.dims}, got {tuple(value.shape)}")
    for dim, want in zip(reversed(value.shape), reversed(names)):
        if want == "...":
            break
        known = int(want) if want.isdigit() else bindings.setdefault(want, dim)
        if known != dim:
            raise TypeError(f"{where}: {want} is {known}, got {dim}")


def shapecheck(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        if not CHECK_SHAPES:
            return fn(*args, **kwargs)
        hints = typing.get_type_hints(fn, include_extras=True)
        bound = inspect.signature(fn).bind(*args, **kwargs)
        bound.apply_defaults()
        bindings = {}
        for name, value in bound.arguments.items():
            for spec in getattr(hints.get(name), "__metadata__", ()):
                if isinstance(spec, Shaped):
                    match(spec, value, bindings, f"{fn.__qualname__}({name})")
        return fn(*args, **kwargs)

    return wrapper


@shapecheck
def gaussians(d: Shaped["b n n"], centres: Shaped["k"], gamma: float = 4.0) -> Shaped["b n n k"]:
    return torch.exp(-gamma * (d.unsqueeze(-1) - centres) ** 2)


@shapecheck
def residual(x: Shaped["b n d"], y: Shaped["b n d"], scale: float = 1.0) -> Shaped["b n d"]:
    return x + scale * y


@shapecheck
def pool(x: Shaped["b n d"], mask: Shaped["b n"]) -> Shaped["b d"]:
    return (x * mask.unsqueeze(-1)).sum(1)


class Interaction(nn.Module):
    def __init__(self, d, k):
        super().__init__()
        self.filters, self.inner, self.outer = nn.Linear(k, d), nn.Linear(d, d, bias=False), nn.Linear(d, d)

    @shapecheck
    def weights(self, rbf: Shaped["b n n k"]) -> Shaped["b n n d"]:
        return F.softplus(self.filters(rbf))

    @shapecheck
    def messages(self, x: Shaped["b n d"], w: Shaped["b n n d"]) -> Shaped["b n d"]:
        return torch.einsum("bjd,bijd->bid", self.inner(x), w)

    @shapecheck
    def forward(self, x: Shaped["b n d"], rbf: Shaped["b n n k"]) -> Shaped["b n d"]:
        return residual(x, self.outer(F.silu(self.messages(x, self.weights(rbf)))))


class MiniSchNet(nn.Module):
    def __init__(self, d=24, k=12, depth=4):
        super().__init__()
        self.atoms = nn.Embedding(10, d)
        self.register_buffer("centres", torch.linspace(0, 4, k))
        self.layers = nn.ModuleList([Interaction(d, k) for _ in range(depth)])
        self.energy = nn.Sequential(nn.Linear(d, d), nn.SiLU(), nn.Linear(d, 1))

    @shapecheck
    def forward(self, z: Shaped["b n"], pos: Shaped["b n 3"]) -> Shaped["b"]:
        rbf = gaussians(torch.cdist(pos, pos), self.centres)
        x = self.atoms(z)
        for layer in self.layers:
            x = layer(x, rbf)
        return self.energy(pool(x, (z > 0).float())).squeeze(-1)


def batch(size=8, n=9):
    z = torch.randint(0, 10, (size, n))
    pos = torch.randn(size, n, 3)
    return z, pos, (z.float().mean(1) + pos.square().sum((1, 2)) / n).float()


def main(steps=250):
    torch.manual_seed(0)
    model = MiniSchNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    history = []
    for step in range(steps):
        z, pos, energy = batch()
        loss = F.l1_loss(model(z, pos), energy)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        history.append(loss.detach())
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}: MAE {torch.stack(history[-50:]).mean():.3f}")


if __name__ == "__main__":
    main()
