"""Pictures are turned and normalised in the data set, which the main process reads."""

import torch
from _convnet import Pictures, convnet
from torch.nn import functional as F
from torch.utils.data import DataLoader

CASE = {
    "truth": "Each batch is made in the main process by num_workers=0; the GPU waits for it most of the time.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": ["launch-bound", "host-sync", "layout-conversion"],
    "healthy": False,
    "requires": ["cuda"],
}


class Augmented(Pictures):
    def __getitem__(self, index):
        picture, label = super().__getitem__(index)
        picture = picture.float() / 255
        if index % 2:
            picture = picture.flip(-1)
        picture = (picture - picture.mean((1, 2), keepdim=True)) / (picture.std((1, 2), keepdim=True) + 1e-6)
        return picture + 0.01 * torch.randn_like(picture), label


torch.manual_seed(0)
model = convnet().cuda().to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
loader = DataLoader(Augmented(1600), batch_size=64, shuffle=True, drop_last=True)
for epoch in range(2):
    for pictures, labels in loader:
        pictures = pictures.cuda().to(memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(pictures), labels.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
