"""A schedule is a Python integer of the module, on which the compiled code depends."""

import torch
import torch._dynamo
from torch import nn

CASE = {
    "truth": "The module's integer self.stage changes in every third step, so torch.compile's guards fail and it compiles again.",
    "cause": "recompilation",
    "also": [],
    "never": ["start-up", "data-loading", "evaluation"],
    "healthy": False,
}


class Annealed(nn.Module):
    def __init__(self, width=64, depth=2):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.stage = 0

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * (1 + 0.5 / (1 + self.stage))
        return x


def train(steps):
    model = Annealed()
    step_model = torch.compile(model, backend="aot_eager")
    opt = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(steps):
        model.stage = step // 3
        x = torch.randn(16, 64)
        loss = (step_model(x) - x.roll(1, 1)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss.item()


if __name__ == "__main__":
    torch._dynamo.config.recompile_limit = 100
    torch.manual_seed(0)
    print(train(30))
