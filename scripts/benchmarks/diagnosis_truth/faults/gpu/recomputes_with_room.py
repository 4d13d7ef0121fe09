"""Gradient checkpointing, as the recipe for a smaller card had it."""

import torch
from _gpt import GPT, batches
from torch.utils.checkpoint import checkpoint

CASE = {
    "truth": "Each block is computed again in backward, a quarter of the step, though most of the memory is free.",
    "cause": "recomputation",
    "also": ["elementwise-chain"],
    "never": ["host-python", "data-loading", "launch-bound", "duplicate-forward"],
    "healthy": False,
    "requires": ["cuda"],
}


class Checkpointed(GPT):
    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits = self.head(self.norm(x))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


torch.manual_seed(0)
model = Checkpointed(d_model=1024, layers=12, heads=16).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for _step, (ids, targets) in enumerate(batches(40, 32, 1024)):
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(ids, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
