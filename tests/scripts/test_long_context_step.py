"""Tests of the plan of the long training step: bytes kept by a compiled block, and recomputed blocks."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cs_systems
from cs_systems.config import ModelConfig, RunConfig, preset
from cs_systems.core.checkpoint_plan import segments
from cs_systems.model import BasicTransformerLM
from cs_systems.model.training.checkpointing import checkpoint_forwards

MODEL = ModelConfig("x", d_model=128, d_ff=352, num_layers=2, num_heads=4, vocab_size=64, context_length=256)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts" / "benchmarks"))
    return importlib.import_module("long_context_step")


def kept_bytes(checkpoint: str) -> list[int]:
    """Return the bytes that each compiled block keeps for backward, its parameters left out."""
    model = BasicTransformerLM(MODEL, "sdpa_flash").bfloat16()
    checkpoint_forwards(model.layers, segments(checkpoint, MODEL.num_layers))
    owned = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    x = torch.randn(1, MODEL.context_length, MODEL.d_model, dtype=torch.bfloat16, requires_grad=True)
    found = []
    for block in model.layers:
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor, kept: dict[int, Tensor] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        # Inductor's partitioner without Inductor: it decides what is kept.
        run = torch.compile(block.forward, backend="aot_eager_decomp_partition")
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            x = run(x)
        found.append(sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in owned))
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, in dynamo
@pytest.mark.filterwarnings("ignore:Detected that context_fn is passed")  # torch's own, for each selective plan
def test_compiled_block_keeps_the_tensors_that_the_plan_counts(script: Any) -> None:
    torch._dynamo.reset()
    plan = script.Plan(MODEL, MODEL.context_length, 2, "adamw_fused", 1)
    hidden = MODEL.context_length * MODEL.d_model * 2
    recomputed, selective = kept_bytes("selective:products:1")
    assert recomputed == pytest.approx(hidden, rel=0.1)  # small numbers for the random state come on top
    assert selective == plan.kept_by_a_block()


def test_plan_recomputes_the_fewest_blocks_that_fit(script: Any) -> None:
    model = replace(preset("8B"), context_length=32_768)
    plans = [script.plan(model, 32_768, 2, optimizer) for optimizer in ("adamw_fused", "adamw_master")]
    assert plans[0].recomputed < plans[1].recomputed
    for plan in plans:
        assert plan.peak_bytes() + script.RESERVE_BYTES <= script.CAPACITY_BYTES
        fewer = replace(plan, recomputed=plan.recomputed - 1)
        assert plan.recomputed == 0 or fewer.peak_bytes() + script.RESERVE_BYTES > script.CAPACITY_BYTES
        assert sum(fewer.seconds("flash_cuda").values()) < sum(plan.seconds("flash_cuda").values())
    with pytest.raises(ValueError, match=r"adamw_master needs .* GiB with every block recomputed"):
        script.plan(model, 32_768, 2, "adamw_master", 40 * script.GIB)


def test_cells_of_the_plan_are_valid(script: Any) -> None:
    model = replace(preset("8B"), context_length=32_768)
    for optimizer in script.STATE_BYTES:
        plan = script.plan(model, 32_768, 2, optimizer)
        cell = script.config(plan, "fsdp", "flash_cuda")
        kept = [segment.keeps for segment in segments(cell.checkpoint, model.num_layers)]
        assert kept == [None] * plan.recomputed + ["products"] * (model.num_layers - plan.recomputed)


def test_measured_cells_are_listed_with_their_predictions(script: Any) -> None:
    plan = script.Plan(preset("tiny"), 64, 1, "adamw_fused", 0)
    cell = RunConfig(model=preset("tiny"), optimizer="adamw_fused", device="cpu", warmup=0, steps=3, rounds=1)
    record = replace(cs_systems.run(cell, in_process=True), config={**cell.to_dict(), "attention": "sdpa_cudnn"})
    out_of_memory = replace(record, status="oom", reason="no memory", measurement=None)
    *_, measured, failed = script.measured([record, out_of_memory], {"adamw_fused": plan})
    assert re.fullmatch(
        r"\| single \| adamw_fused \| 0 \| sdpa_cudnn \| default \| \d.\d\d \| \d.\d\d–\d.\d\d \| 0.00 \|  \| 0.0 \|",
        measured,
    )
    assert failed == "| single | adamw_fused | 0 | sdpa_cudnn | default | oom: no memory | | 0.00 |  | 0.0 |"


def test_committed_page_is_made_from_the_committed_records(script: Any) -> None:
    folder = Path(__file__).parents[2] / "profiles" / "long_context"
    assert script.report(folder) == (folder / "table.md").read_text(encoding="utf-8")
