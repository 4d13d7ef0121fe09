"""torch.compile(dynamic=False) meets a new length of the batch in every second step."""

import torch
import torch._dynamo
from torch import nn

CASE = {
    "truth": "The compiled model is compiled again in every second step, as the lengths keep changing and dynamic=False.",
    "cause": "recompilation",
    "also": [],
    "never": ["start-up", "data-loading", "evaluation", "host-python"],
    "healthy": False,
}


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(300, 48)
        self.conv = nn.Conv1d(48, 48, 3, padding=1)
        self.head = nn.Linear(48, 9)

    def forward(self, ids):
        h = self.conv(self.embed(ids).transpose(1, 2)).relu()
        return self.head(h.transpose(1, 2))


torch._dynamo.config.recompile_limit = 64
torch.manual_seed(0)
model = Tagger()
compiled = torch.compile(model, backend="aot_eager", dynamic=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(30):
    ids = torch.randint(300, (8, 20 + step // 2))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(compiled(ids).flatten(0, 1), (ids % 9).flatten())
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.3f}")
