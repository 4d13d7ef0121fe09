"""The whole data set is one tensor in the host's memory."""

import torch
from _convnet import convnet
from torch.nn import functional as F

CASE = {
    "truth": "A batch of 154 MB in fp32 is copied from pageable memory in every step; the copy is half of it or more.",
    "cause": "pageable-copies",
    "also": ["exposed-copies", "data-loading"],
    "never": ["launch-bound", "fp32-products"],
    "healthy": False,
    "requires": ["cuda"],
}

torch.manual_seed(0)
images, labels = torch.randn(1024, 3, 224, 224), torch.randint(0, 100, (1024,))
model = convnet(width=32).cuda().to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(50):
    start = step % 4 * 256
    x = images[start : start + 256].to("cuda").to(memory_format=torch.channels_last)
    y = labels[start : start + 256].to("cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
