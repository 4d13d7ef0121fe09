"""Answers to 64 prompts of the same length, greedily, by a decoder with random weights."""

import time

import torch
from torch import nn
from torch.nn import functional as F

CASE = {
    "truth": "Keys and values of all earlier tokens are concatenated anew in each layer for each token, so that the "
    "whole cache (6 GB) is read and written again, more than attention itself reads. Measured: to be filled.",
    "cause": "needless-copies",
    "also": ["growth", "device-allocation", "cached-memory", "fragmentation"],
    "never": ["data-loading", "launch-bound", "fp32-products", "index-backward", "host-sync"],
    "healthy": False,
    "requires": ["cuda"],
    "place": ["torch.cat([past"],
}

PROMPTS = 64
LENGTH = 2048
TOKENS = 64
WIDTH = 2048
LAYERS = 6
VOCABULARY = 32000
device = "cuda" if torch.cuda.is_available() else "cpu"


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.after = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x, memory, position):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        k, v = memory.append(k, v, position)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.silu(self.up(self.after(x))))


class Memory:
    """Keys and values of one layer."""

    def __init__(self):
        self.past = None

    def append(self, k, v, position):
        if self.past is None:
            self.past = k.contiguous(), v.contiguous()
        else:
            past_k, past_v = self.past
            self.past = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
        return self.past


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(WIDTH, WIDTH // 128) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, memories, position):
        x = self.embedding(ids)
        for layer, memory in zip(self.layers, memories):
            x = layer(x, memory, position)
        return self.head(self.norm(x[:, -1]))


def clock():
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


torch.manual_seed(0)
with torch.device(device):
    model = Decoder().to(torch.bfloat16).eval()
prompts = torch.randint(VOCABULARY, (PROMPTS, LENGTH), device=device)
answers = torch.empty(PROMPTS, TOKENS, dtype=torch.long, device=device)

with torch.inference_mode():
    memories = [Memory() for _ in range(LAYERS)]
    token = model(prompts, memories, 0).argmax(-1)
    for step in range(TOKENS):
        if step == TOKENS - 20:
            start = clock()
        answers[:, step] = token
        token = model(token[:, None], memories, LENGTH + step).argmax(-1)
elapsed = clock() - start
print(f"sum of tokens {int(answers.sum())}")
print(f"20 steps: {elapsed / 20 * 1e3:.2f} ms each")
