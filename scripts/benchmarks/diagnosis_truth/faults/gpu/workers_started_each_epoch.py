"""Short epochs of a small data set."""

import torch
from _convnet import Pictures, convnet
from torch.nn import functional as F
from torch.utils.data import DataLoader

CASE = {
    "truth": "Eight workers are started for each epoch of 6 steps; the loop waits for their first batches.",
    "cause": "data-loading",
    "also": ["periodic-pause", "host-python"],
    "never": ["launch-bound", "host-sync", "evaluation", "start-up"],
    "healthy": False,
    "requires": ["cuda"],
}

torch.manual_seed(0)
model = convnet().cuda().to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
loader = DataLoader(Pictures(384), batch_size=64, shuffle=True, num_workers=8, pin_memory=True)
for _epoch in range(8):
    for pictures, labels in loader:
        pictures = pictures.cuda(non_blocking=True).float().div(255).to(memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(pictures), labels.cuda(non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
