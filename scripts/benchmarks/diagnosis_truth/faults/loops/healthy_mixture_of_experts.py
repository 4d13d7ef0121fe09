"""A language model with a mixture of experts, which sorts its tokens by expert and shows its loss by tqdm."""

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import trange

CASE = {
    "generation": 2,
    "truth": "Tokens are gathered by expert, each expert is one large product, and the products take the step. fused=True saves some: 97 to 84 ms, the median of four pairs.",
    "cause": None,
    "also": ["unfused-optimizer"],
    "never": ["small-operators", "expert-imbalance", "host-sync", "data-loading", "logging"],
    "healthy": True,
}


class Expert(nn.Module):
    def __init__(self, d, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(d, hidden), nn.Linear(hidden, d)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class MoE(nn.Module):
    def __init__(self, d, hidden, experts=4, k=2):
        super().__init__()
        self.router = nn.Linear(d, experts, bias=False)
        self.experts = nn.ModuleList(Expert(d, hidden) for _ in range(experts))
        self.k = k

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights = self.router(flat).softmax(-1)
        top, chosen = weights.topk(self.k, dim=-1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == i)
            out = out.index_add(0, token, expert(flat[token]) * top[token, slot, None])
        share = F.one_hot(chosen, len(self.experts)).float().mean((0, 1))
        return out.view_as(x), len(self.experts) * (share * weights.mean(0)).sum()


class Layer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.qkv, self.proj, self.moe = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False), MoE(d, 4 * d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        y, balance = self.moe(self.norm2(x))
        return x + y, balance


class Model(nn.Module):
    def __init__(self, vocabulary=256, d=256, depth=2, heads=4):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d)
        self.layers = nn.ModuleList(Layer(d, heads) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(d), nn.Linear(d, vocabulary, bias=False)

    def forward(self, ids):
        x, auxiliary = self.embed(ids), 0.0
        for layer in self.layers:
            x, balance = layer(x)
            auxiliary = auxiliary + balance
        return self.head(self.norm(x)), auxiliary


torch.manual_seed(0)
text = torch.randint(0, 256, (40_000,))
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, foreach=True)
progress = trange(30, mininterval=2)
for step in progress:
    starts = torch.randint(0, len(text) - 129, (3, 1))
    ids = text[starts + torch.arange(129)]
    logits, auxiliary = model(ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) + 0.01 * auxiliary
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    progress.set_postfix(loss=f"{loss.item():.3f}")
