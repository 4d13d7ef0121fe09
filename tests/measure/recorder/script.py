"""Seeded training script without any code for a recorder: `script.py STATUS KIND`, with words in KIND.

It also prints its standard input.
"""

# ruff: noqa: E402 (the script looks what was imported before it)
import hashlib
import sys

was_imported = "torch" in sys.modules

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

status, kind = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))
criterion = nn.CrossEntropyLoss()
critic = nn.Linear(4, 1)
optimizer, second = torch.optim.AdamW(model.parameters()), torch.optim.SGD(critic.parameters(), 0.1)
loader = DataLoader(TensorDataset(torch.randn(60, 4), torch.randint(2, (60,))), batch_size=4, shuffle=True)
for i, (inputs, labels) in enumerate(loader):
    optimizer.zero_grad()
    loss = criterion(model(inputs), labels)
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if "gan" in kind:
        critic(inputs).mean().backward()
        second.step()
    if kind == "fails" and i == 8:
        raise ValueError("bad batch")
if kind == "below":
    from cs_systems.measure.profilers import _nsys

    assert _nsys.started_this_process()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print(__name__, sys.argv[1:], was_imported, sys.stdin.read(), digest, torch.rand(1).item())
sys.exit(status)
