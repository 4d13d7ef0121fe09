"""Neural style transfer: the pixels of a picture are optimised against features of a fixed network."""

import torch
import torch.nn as nn
import torch.nn.functional as F

CASE = {
    "generation": 5,
    "truth": "The picture is the only parameter, the network is fixed and runs once per step; its convolutions take the time.",
    "cause": None,
    "also": [],
    "never": ["unused-gradients", "no-update", "duplicate-forward", "host-python", "small-operators", "evaluation"],
    "healthy": True,
}

CONTENT_LAYERS, STYLE_LAYERS = {"conv4"}, {"conv1", "conv2", "conv3", "conv5"}


def features(width=24):
    """A fixed network with named layers; orthogonal weights stand in for pretrained ones."""
    network, n_in = nn.Sequential(), 3
    for number, n_out in enumerate((width, width, 2 * width, 2 * width, 2 * width), 1):
        conv = nn.Conv2d(n_in, n_out, 3, padding=1, padding_mode="reflect")
        nn.init.orthogonal_(conv.weight)
        network.add_module(f"conv{number}", conv)
        network.add_module(f"relu{number}", nn.ReLU())
        if number in (2, 4):
            network.add_module(f"pool{number}", nn.AvgPool2d(2))
        n_in = n_out
    return network.requires_grad_(False)


def gram(activation):
    flat = activation.flatten(2)
    return flat @ flat.transpose(1, 2) / flat.shape[1] / flat.shape[2]


def collect(network, picture):
    found = {}
    for name, layer in network.named_children():
        picture = layer(picture)
        found[name] = picture
    return found


def variation(picture):
    return (picture[..., 1:] - picture[..., :-1]).abs().mean() + (
        picture[..., 1:, :] - picture[..., :-1, :]
    ).abs().mean()


def scene(size, kind):
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    if kind == "content":
        layers = [(x**2 + y**2 < r).float() for r in (0.3, 0.5, 0.8)]
    else:
        layers = [torch.sin(20 * (x * c + y * s)) * 0.5 + 0.5 for c, s in ((1.0, 0.2), (0.4, 1.0), (0.7, 0.7))]
    return torch.stack(layers)[None]


torch.manual_seed(12)
network = features()
content, style = scene(128, "content"), scene(128, "style")
with torch.no_grad():
    wanted_content = {n: a for n, a in collect(network, content).items() if n in CONTENT_LAYERS}
    wanted_style = {n: gram(a) for n, a in collect(network, style).items() if n in STYLE_LAYERS}

picture = content.clone().requires_grad_(True)
optimizer = torch.optim.Adam([picture], lr=0.03)
iteration = 0
while iteration < 220:
    optimizer.zero_grad()
    found = collect(network, picture)
    content_loss = sum(F.mse_loss(found[name], wanted) for name, wanted in wanted_content.items())
    style_loss = sum(F.mse_loss(gram(found[name]), wanted) for name, wanted in wanted_style.items())
    loss = content_loss + 1e3 * style_loss + 0.01 * variation(picture)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        picture.clamp_(0, 1)
    iteration += 1
    if iteration % 40 == 0:
        print(f"{iteration:4d} content {content_loss.item():.4f} style {style_loss.item():.6f}")
