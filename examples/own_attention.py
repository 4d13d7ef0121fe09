"""Time your own attention function next to a built-in backend, alone and inside the model.

    cs-systems attention --attention naive examples/own_attention.py:attend --dtype fp32
    cs-systems time --size tiny --attention naive examples/own_attention.py:attend

Shows `--attention path:function`. The function takes and returns tensors of shape (batch, heads, tokens, d_head). The
record keeps its path and hash. Its FLOPs and bytes are not known, so that its MFU stays empty.
"""

import math

import torch

import cs_systems
from cs_systems import RunConfig, grid


def attend(q, k, v, *, causal=False, scale=None, align="upper_left"):
    """Return softmax(q kᵀ · scale) v, with the causal mask added to the scores."""
    scores = q @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
    if causal:
        rows, columns = scores.shape[-2:]
        diagonal = columns - rows if align == "lower_right" else 0
        scores = scores + torch.full_like(scores, -math.inf).triu(diagonal + 1)
    return scores.softmax(-1) @ v


def main() -> None:
    cells = grid(RunConfig(batch_size=1, steps=5), size=["tiny"], attention=["naive", f"{__file__}:attend"])
    for record in cs_systems.sweep(cells):
        print(record.frame()[["attention", "phase", "median_s"]].to_string())  # print alone cuts a long path


if __name__ == "__main__":
    main()
