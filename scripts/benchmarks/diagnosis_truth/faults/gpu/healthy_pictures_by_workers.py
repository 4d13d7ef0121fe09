"""Workers prepare the pictures as bytes; the GPU normalises them."""

import torch
from _convnet import Pictures, convnet
from torch.nn import functional as F
from torch.utils.data import DataLoader

CASE = {
    "truth": "Eight workers with pinned memory keep up with a compiled network in bf16 and channels_last.",
    "cause": None,
    "also": [],
    "never": ["data-loading", "pageable-copies", "host-python", "layout-conversion"],
    "healthy": True,
    "requires": ["cuda"],
}

torch.manual_seed(0)
model = convnet(width=128, depth=(3, 4, 6, 3)).cuda().to(memory_format=torch.channels_last)
compiled = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=True)
loader = DataLoader(
    Pictures(10240),
    batch_size=256,
    shuffle=True,
    num_workers=8,
    pin_memory=True,
    persistent_workers=True,
    drop_last=True,
)
for pictures, labels in loader:
    pictures, labels = pictures.cuda(non_blocking=True), labels.cuda(non_blocking=True)
    pictures = pictures.float().div_(255).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(compiled(pictures), labels)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
