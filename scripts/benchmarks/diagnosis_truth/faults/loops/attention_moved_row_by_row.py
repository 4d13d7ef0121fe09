"""A controller that reads a memory at each time step, whose attention is moved one sample after the other."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "truth": "The attention of each sample is convolved by itself at each time step: thousands of operators of a few "
    "microseconds, where one could move the attention of the whole batch.",
    "cause": "small-operators",
    "also": ["host-python"],
    "never": ["start-up", "data-loading", "evaluation", "unfused-attention", "growth"],
    "healthy": False,
}


class Reader(nn.Module):
    def __init__(self, width=9, units=16, rows=32):
        super().__init__()
        self.controller = nn.LSTM(width + units, units)
        self.memory = nn.Parameter(0.1 * torch.randn(rows, units))
        self.key, self.moves = nn.Linear(units, units), nn.Linear(units, 3)
        self.out = nn.Linear(2 * units, width - 1)

    def moved(self, weights, moves):
        rows = torch.cat([weights[:, -1:], weights, weights[:, :1]], 1)
        return torch.cat([F.conv1d(row[None, None], move[None, None])[0] for row, move in zip(rows, moves)])

    def forward(self, inputs):
        state, outputs = None, []
        read = inputs.new_zeros(inputs.shape[1], self.memory.shape[1])
        for each in inputs:
            hidden, state = self.controller(torch.cat([each, read], 1)[None], state)
            weights = (self.key(hidden[0]) @ self.memory.T).softmax(1)
            read = self.moved(weights, self.moves(hidden[0]).softmax(1)) @ self.memory
            outputs.append(self.out(torch.cat([hidden[0], read], 1)))
        return torch.stack(outputs)


torch.manual_seed(0)
reader = Reader()
optimizer = torch.optim.RMSprop(reader.parameters(), lr=1e-4, momentum=0.9)
for step in range(40):
    bits = torch.randint(2, (16, 16, 8)).float()
    inputs = torch.zeros(32, 16, 9)
    inputs[:16, :, :8], inputs[16, :, 8] = bits, 1.0
    loss = F.binary_cross_entropy_with_logits(reader(inputs)[16:], bits)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"{step}: {loss.item():.3f}")
