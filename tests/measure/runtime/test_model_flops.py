"""Tests of a live model's FLOPs in its record: they equal the formula; an unreadable mask gives a caveat."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cs_systems
from cs_systems import preset
from cs_systems.config import Mode, Precision
from cs_systems.core import plugins
from cs_systems.core.shapes import AttentionCall
from cs_systems.formulas import cost
from cs_systems.model import BasicTransformerLM
from cs_systems.record import RunRecord


def measured(model: nn.Module, inputs: Tensor) -> RunRecord:
    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), inputs.flatten())

    record = cs_systems.run(
        model=model, inputs=inputs, loss=loss, optimizer=torch.optim.SGD, warmup=1, steps=2, device="cpu"
    )
    assert record.status == "ok", record.reason
    return record


@pytest.mark.parametrize("attention", ["naive", "sdpa_flash"])
def test_record_of_a_live_model_has_the_flops_of_the_built_in_one(attention: str) -> None:
    config = replace(preset("tiny"), num_layers=2, context_length=256)
    record = measured(BasicTransformerLM(config, attention=attention), torch.zeros(1, 256, dtype=torch.int64))
    call = AttentionCall("cpu", "float32", config.d_head, 256, 256, config.num_heads, config.num_heads, causal=True)
    algorithm = plugins.get("attention", attention).algorithm(call)
    expected = cost.step_cost(config, 1, 256, Mode.TRAIN_STEP, algorithm, Precision.FP32)
    for row in record.results["cost"]:
        phase = cost.total(expected.values()) if row["phase"] == "step" else expected[row["phase"]]
        assert (row["model_flops"], row["hardware_flops"]) == (phase.model_flops, phase.hardware_flops)
    assert "full-attention" not in [caveat.code for caveat in record.warnings]


class Unreadable(nn.Module):
    """Model that also attends on tensors without values, so that its mask cannot be read."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        q = torch.empty(1, 2, 16, 8, device="meta")
        F.scaled_dot_product_attention(q, q, q, attn_mask=torch.empty(16, 16, dtype=torch.bool, device="meta"))
        out: Tensor = self.head(self.table(tokens))
        return out


def test_record_says_where_the_whole_score_matrix_is_counted() -> None:
    record = measured(Unreadable(), torch.zeros(1, 8, dtype=torch.int64))
    (caveat,) = (caveat for caveat in record.warnings if caveat.code == "full-attention")
    assert caveat.message == (
        "model FLOPs count the whole score matrix of attention: the masks of 1 call cannot be read"
    )
    assert "is_causal=True" in caveat.remedy
