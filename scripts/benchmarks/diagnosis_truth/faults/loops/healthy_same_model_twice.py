"""One model with two kinds of attention, measured one after the other with cs_systems.run: its model FLOPs are the same."""

import dataclasses

import torch
import torch.nn.functional as F

import cs_systems
from cs_systems.model import BasicTransformerLM

CASE = {
    "truth": "Both runs are one and the same model with the same model FLOPs; on a CPU neither has a fault to name.",
    "cause": None,
    "also": ["unfused-attention", "score-matrices", "small-operators"],
    "never": ["data-loading", "host-python", "evaluation"],
    "healthy": True,
    "command": "python",
}

size = dataclasses.replace(cs_systems.preset("tiny"), context_length=512)
for attention in ("sdpa_flash", "naive"):
    model = BasicTransformerLM(size, attention=attention)
    x = torch.randint(256, (1, 512))
    result = cs_systems.run(
        model=model,
        inputs=x,
        loss=lambda out, x=x: F.cross_entropy(out.flatten(0, 1), x.flatten()),
        optimizer=torch.optim.AdamW,
        steps=4,
    )
    rows = result.frame()
    row = rows[rows.phase == "step"].iloc[0]
    print(attention, "model GFLOP", row.model_flops / 1e9)
