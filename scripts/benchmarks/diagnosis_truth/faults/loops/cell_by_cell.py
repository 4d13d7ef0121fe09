"""A recurrent network with steps in time that are a Python loop over cells of 16 units."""

import torch
from torch import nn

CASE = {
    "truth": "Thousands of operators of a few microseconds, one time step after the other: overhead, not arithmetic.",
    "cause": "small-operators",
    "also": ["launch-bound", "host-python"],
    "never": ["start-up", "data-loading", "evaluation"],
    "healthy": False,
}


class SlowRNN(nn.Module):
    def __init__(self, n=16):
        super().__init__()
        self.x2h, self.h2h, self.out = nn.Linear(4, n), nn.Linear(n, n), nn.Linear(n, 1)
        self.n = n

    def forward(self, x):
        h = x.new_zeros(x.shape[0], self.n)
        for t in range(x.shape[1]):
            gate = torch.sigmoid(self.x2h(x[:, t]) + self.h2h(h))
            h = gate * h + (1 - gate) * torch.tanh(self.x2h(x[:, t]))
        return self.out(h)


torch.manual_seed(0)
rnn = SlowRNN()
optimizer = torch.optim.Adam(rnn.parameters(), lr=1e-2)
for epoch in range(30):
    x = torch.randn(4, 150, 4)
    loss = nn.functional.mse_loss(rnn(x), x.sum((1, 2))[:, None])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
