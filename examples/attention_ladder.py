"""Two rungs from plain attention to FlashAttention, in PyTorch: tiles of keys, then the online softmax.

    cs-systems attention --attention naive examples/attention_ladder.py:tiled --dtype fp32 --seq 256
    cs-systems attention --attention naive examples/attention_ladder.py:online --dtype fp32 --seq 256

`tiled` reads the keys twice, first for the largest score of each row. `online` reads them once, and rescales its sums
whenever a larger score comes. Neither needs more than one tile of scores at a time.
"""

import math

import torch

import cs_systems
from cs_systems import RunConfig
from cs_systems.config import AttentionShape

TILE = 64


def scores_of(q, k, begin, causal, scale, align):
    """Return the scores of one tile of keys, which begins at `begin`: (batch, heads, queries, tile)."""
    scores = q @ k[..., begin : begin + TILE, :].transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
    if causal:
        offset = k.shape[-2] - q.shape[-2] if align == "lower_right" else 0
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 - begin + offset)
        scores = scores.masked_fill(later, -math.inf)
    return scores


def tiled(q, k, v, *, causal=False, scale=None, align="upper_left"):
    """Return attention in two passes over tiles of keys: the softmax's maximum, then its sum and the output."""
    tiles = range(0, k.shape[-2], TILE)
    maxima = [scores_of(q, k, begin, causal, scale, align).amax(-1, keepdim=True) for begin in tiles]
    largest = torch.stack(maxima).amax(0)
    weights = ((begin, (scores_of(q, k, begin, causal, scale, align) - largest).exp()) for begin in tiles)
    parts = [(w.sum(-1, keepdim=True), w @ v[..., begin : begin + TILE, :]) for begin, w in weights]
    return sum(output for _, output in parts) / sum(total for total, _ in parts)


def online(q, k, v, *, causal=False, scale=None, align="upper_left"):
    """Return attention in one pass over tiles of keys: a larger maximum rescales the sums so far."""
    largest = q.new_full((*q.shape[:-1], 1), -math.inf)
    total, output = torch.zeros_like(largest), torch.zeros_like(q)
    for begin in range(0, k.shape[-2], TILE):
        scores = scores_of(q, k, begin, causal, scale, align)
        new = torch.maximum(largest, scores.amax(-1, keepdim=True))
        correction, weights = (largest - new).exp(), (scores - new).exp()
        total = total * correction + weights.sum(-1, keepdim=True)
        output = output * correction + weights @ v[..., begin : begin + TILE, :]
        largest = new
    return output / total


if __name__ == "__main__":
    shape = AttentionShape(1, 1, 256, 64)
    cell = RunConfig(workload="attention", mode="forward", precision="fp32", steps=5, shape=shape)
    for name in ("naive", f"{__file__}:tiled", f"{__file__}:online"):
        record = cs_systems.run(cell, attention=name)
        print(f"{name.rpartition(':')[2]:<6} {record.measurement.median_s() * 1e3:.2f} ms")
