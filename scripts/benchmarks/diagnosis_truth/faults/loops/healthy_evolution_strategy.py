"""A quantised classifier, which has no useful gradient, trained by an antithetic evolution strategy."""

import torch

CASE = {
    "generation": 8,
    "truth": "Each step evaluates forty perturbed networks at once with batched products and never calls backward, as an evolution strategy does; the products take most of the time.",
    "cause": None,
    "also": [],
    "never": [
        "no-update",
        "duplicate-forward",
        "evaluation",
        "host-python",
        "small-operators",
        "data-loading",
        "unused-gradients",
    ],
    "healthy": True,
}


def unpack(flat, shapes):
    """Views of (population, parameters) as one batched tensor per weight."""
    parts, at = [], 0
    for shape in shapes:
        size = shape.numel()
        parts.append(flat[:, at : at + size].view(len(flat), *shape))
        at += size
    return parts


def accuracy_of_each(flat, shapes, x, y):
    """Share of correct answers of each network of the population; activations have eight levels."""
    w1, b1, w2, b2, w3, b3 = unpack(flat, shapes)
    h = torch.bmm(w1, x.expand(len(flat), -1, -1)).add_(b1).round_().clamp_(0, 7)
    h = torch.bmm(w2, h).add_(b2).round_().clamp_(0, 7)
    logits = torch.bmm(w3, h).add_(b3)
    own = logits.gather(1, y.expand(len(flat), 1, -1)).squeeze(1)
    return (own >= logits.amax(1)).float().mean(1)


def centred_ranks(fitness):
    ranks = fitness.argsort().argsort().float()
    return ranks / (len(fitness) - 1) - 0.5


def spirals(count, dim=32, arms=5):
    y = torch.randint(arms, (count,))
    radius = torch.rand(count)
    angle = 6.2832 * y / arms + 2.0 * radius
    plane = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    lift = torch.randn(2, dim)
    return plane @ lift + 0.05 * torch.randn(count, dim), y


@torch.no_grad()
def main(generations=160, pairs=20, sigma=0.05, batch=320, hidden=112, arms=5):
    torch.manual_seed(43)
    x, y = spirals(4000, arms=arms)
    sizes = [(hidden, 32), (hidden, 1), (hidden, hidden), (hidden, 1), (arms, hidden), (arms, 1)]
    shapes = [torch.Size(s) for s in sizes]
    mean = torch.nn.Parameter(torch.cat([torch.randn(s).flatten() / s[1] ** 0.5 for s in shapes]))
    optimizer = torch.optim.Adam([mean], lr=0.02)
    population = torch.empty(2 * pairs, mean.numel())
    for generation in range(generations):
        pick = torch.randint(len(x), (batch,))
        noise = torch.randn(pairs, mean.numel())
        torch.add(mean, noise, alpha=sigma, out=population[:pairs])
        torch.sub(mean, noise, alpha=sigma, out=population[pairs:])
        fitness = accuracy_of_each(population, shapes, x[pick].T, y[pick])
        weight = centred_ranks(fitness)
        mean.grad = -((weight[:pairs] - weight[pairs:]) @ noise) / (2 * pairs * sigma)
        optimizer.step()
        if generation % 40 == 0:
            print(f"generation {generation}: mean fitness {fitness.mean():.3f}, best {fitness.max():.3f}")


if __name__ == "__main__":
    main()
