"""A small GPT after a lecture, on a text of its own."""

import torch
import torch.nn as nn
from torch.nn import functional as F

CASE = {
    "generation": 5,
    "truth": "Each of the 12 heads of a block is a module with three projections and a mask of its own: about 2,000 operators, with views.",
    "cause": "small-operators",
    "also": ["unfused-attention"],
    "never": ["start-up", "data-loading", "evaluation", "growth", "periodic-pause", "logging", "duplicate-forward"],
    "healthy": False,
    "place": [
        "[h(x) for h in self.heads]",
        "k = self.key(x)",
        "q = self.query(x)",
        "v = self.value(x)",
        "wei = ",
        "x = x + self.sa(self.ln1(x))",
        "return wei @ v",
    ],
    "share": 58,
    "remedy": "compute all heads in one projection and one scaled_dot_product_attention",
    "without": [
        [
            "        self.heads = nn.ModuleList([Head(head_size) for _ in range(num_heads)])\n",
            "        self.heads, self.qkv = num_heads, nn.Linear(n_embd, 3 * n_embd, bias=False)\n",
        ],
        [
            "        out = torch.cat([h(x) for h in self.heads], dim=-1)\n",
            "        B, T, C = x.shape\n"
            "        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)\n"
            "        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)\n",
        ],
    ],
}

# hyperparameters
batch_size = 4
block_size = 48
max_iters = 220
log_interval = 44
learning_rate = 1e-3
n_embd = 96
n_head = 12
n_layer = 5
dropout = 0.0
# ------------

torch.manual_seed(1337)

text = " ".join(f"{a} plus {b} is {a + b}, and {a} times {b} is {a * b}." for a in range(60) for b in range(40))
chars = sorted(set(text))
vocab_size = len(chars)
stoi = {ch: i for i, ch in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text], dtype=torch.long)


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + block_size + 1] for i in ix])
    return x, y


class Head(nn.Module):
    """one head of self-attention"""

    def __init__(self, head_size):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        B, T, C = x.shape
        k = self.key(x)
        q = self.query(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        wei = F.softmax(wei, dim=-1)
        wei = self.dropout(wei)
        v = self.value(x)
        return wei @ v


class MultiHeadAttention(nn.Module):
    """multiple heads of self-attention in parallel"""

    def __init__(self, num_heads, head_size):
        super().__init__()
        self.heads = nn.ModuleList([Head(head_size) for _ in range(num_heads)])
        self.proj = nn.Linear(head_size * num_heads, n_embd)

    def forward(self, x):
        out = torch.cat([h(x) for h in self.heads], dim=-1)
        return self.proj(out)


class FeedForward(nn.Module):
    def __init__(self, n_embd):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.ReLU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        return self.net(x)


class Block(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.sa = MultiHeadAttention(n_head, n_embd // n_head)
        self.ffwd = FeedForward(n_embd)
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)

    def forward(self, x):
        x = x + self.sa(self.ln1(x))
        return x + self.ffwd(self.ln2(x))


class GPTLanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.token_embedding_table = nn.Embedding(vocab_size, n_embd)
        self.position_embedding_table = nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(*[Block(n_embd, n_head=n_head) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size)

    def forward(self, idx, targets):
        B, T = idx.shape
        x = self.token_embedding_table(idx) + self.position_embedding_table(torch.arange(T))
        logits = self.lm_head(self.ln_f(self.blocks(x)))
        loss = F.cross_entropy(logits.view(B * T, -1), targets.view(B * T))
        return logits, loss


model = GPTLanguageModel()
print(sum(p.numel() for p in model.parameters()) / 1e6, "M parameters")
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)

for iter in range(max_iters):
    xb, yb = get_batch()
    logits, loss = model(xb, yb)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if iter % log_interval == 0 or iter == max_iters - 1:
        print(f"step {iter}: train loss {loss.item():.4f}")
