"""Answers to questions, padded to the context that the model has."""

import torch
from _gpt import GPT
from torch.nn import functional as F
from torch.utils.data import DataLoader

CASE = {
    "truth": "Examples have 40 to 200 tokens and are padded to 1024: seven eighths of the work are for padding.",
    "cause": "padding",
    "also": ["elementwise-chain"],
    "never": ["host-python", "launch-bound", "host-sync", "data-loading"],
    "healthy": False,
    "requires": ["cuda"],
}
PAD = 0


class Examples(torch.utils.data.Dataset):
    def __init__(self, n=640):
        generator = torch.Generator().manual_seed(1)
        lengths = torch.randint(40, 200, (n,), generator=generator).tolist()
        self.items = [torch.randint(1, 32768, (length,), generator=generator) for length in lengths]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        ids = torch.full((1024,), PAD)
        ids[: len(self.items[index])] = self.items[index]
        return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


torch.manual_seed(0)
model = GPT(d_model=768, layers=8, heads=12).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for batch in DataLoader(Examples(), batch_size=16, shuffle=True):
    ids = batch["input_ids"].cuda()
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=PAD)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
