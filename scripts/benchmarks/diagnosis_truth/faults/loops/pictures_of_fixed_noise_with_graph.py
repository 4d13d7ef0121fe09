"""A first GAN on pictures of rings, after the usual tutorial; pictures of fixed noise are kept for an animation."""

# %%
import torch
import torch.nn as nn
import torch.optim as optim

CASE = {
    "generation": 13,
    "truth": "The pictures of the fixed noise are made without no_grad and kept in a list after each step, so each of them keeps the activations of the whole generator: memory grows from step to step.",
    "cause": "growth",
    "also": ["activations"],
    "never": ["data-loading", "evaluation", "start-up", "logging", "host-python", "padding"],
    "healthy": False,
    "place": ["img_list.append(netG(fixed_noise))"],
    "remedy": "make the pictures under torch.no_grad(), or detach them before they are kept",
    "without": [
        [
            "        img_list.append(netG(fixed_noise))\n",
            "        with torch.no_grad():\n            img_list.append(netG(fixed_noise))\n",
        ]
    ],
}

nz, ngf, ndf, batch_size, num_epochs = 32, 16, 16, 32, 4


# %% data
def rings(count, size=32):
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    r = 0.3 + 0.5 * torch.rand(count, 1, 1)
    return 2 * torch.exp(-(((x**2 + y**2).sqrt() - r) ** 2) / 0.01).unsqueeze(1) - 1


# %% networks
class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 4, 4, 1, 0, bias=False),
            nn.BatchNorm2d(ngf * 4),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 4, ngf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, ndf, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(ndf * 2, ndf * 4, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(ndf * 4, 1, 4, 1, 0),
        )

    def forward(self, input):
        return self.main(input).view(-1)


# %% training
torch.manual_seed(999)
data = rings(960)
netG, netD = Generator(), Discriminator()
criterion = nn.BCEWithLogitsLoss()
fixed_noise = torch.randn(16, nz, 1, 1)
optimizerD = optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
img_list, G_losses, D_losses = [], [], []
for epoch in range(num_epochs):
    for real in data[torch.randperm(len(data))].split(batch_size):
        b = real.size(0)
        netD.zero_grad()
        fake = netG(torch.randn(b, nz, 1, 1))
        errD = criterion(netD(real), torch.ones(b)) + criterion(netD(fake.detach()), torch.zeros(b))
        errD.backward()
        optimizerD.step()
        netG.zero_grad()
        for p in netD.parameters():
            p.requires_grad_(False)
        errG = criterion(netD(fake), torch.ones(b))
        errG.backward()
        optimizerG.step()
        for p in netD.parameters():
            p.requires_grad_(True)
        G_losses.append(errG.item())
        D_losses.append(errD.item())
        img_list.append(netG(fixed_noise))
    print(f"[{epoch + 1}/{num_epochs}] Loss_D: {D_losses[-1]:.4f} Loss_G: {G_losses[-1]:.4f}")
frames = torch.cat([one[:1] for one in img_list[::10]])
print("frames of the animation:", tuple(frames.shape))
