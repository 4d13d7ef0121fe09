"""Tensors that forward saves for backward: operation, module, each memory once, and the bytes of the formula."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import cs_systems
from cs_systems.cli import main
from cs_systems.config import ModelConfig, RunConfig
from cs_systems.formulas.cost import FULL_MATRIX
from cs_systems.formulas.memory.model import kept_by_a_block, step_memory
from cs_systems.instrument.memory_readings import backward_of_blocks
from cs_systems.instrument.saved_tensors import by_block, saved_tensors, summed
from cs_systems.machine.device import resolve
from cs_systems.measure.profilers._blocks import gradients_of_a_block
from cs_systems.measure.profilers.residuals import collect, region
from cs_systems.model.training.checkpointing import apply_checkpointing
from cs_systems.model.training.losses import cross_entropy
from cs_systems.model.transformer import BasicTransformerLM, RMSNorm
from cs_systems.record import RunRecord
from tests.formulas.memory.test_model import LiveBytes
from tests.test_record import ENVIRONMENT

MODEL = ModelConfig("wide", 64, 192, 3, 4, 500, 64)


def test_norm_saves_input_and_normalised_input() -> None:
    norm, x = RMSNorm(32), torch.randn(4, 8, 32, requires_grad=True)
    with saved_tensors(norm) as found:
        norm(x).sum().backward()
    kept = [row for row in found.rows if row.parameter is None and not row.again]
    assert [(row.operation, row.shape) for row in kept] == [
        ("PowBackward0", [4, 8, 32]),  # x
        ("RsqrtBackward0", [4, 8, 1]),
        ("MulBackward0", [4, 8, 32]),  # x / rms
    ]
    assert [row.parameter for row in found.rows if row.parameter] == ["weight"]
    assert sum(row.bytes for row in kept) == 2 * 4 * 8 * 32 * 4 + 4 * 8 * 4


def kept_by_the_model(precision: str, steps: int = 1) -> tuple[list[dict[str, object]], RunConfig]:
    torch.manual_seed(0)
    config = RunConfig(model=MODEL, batch_size=4, seq_len=48, precision=precision, device="cpu")  # type: ignore[arg-type]
    model = BasicTransformerLM(MODEL, "naive")
    tokens = torch.randint(500, (4, 48))
    with saved_tensors(model) as found:
        for _ in range(steps):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = cross_entropy(model(tokens), tokens)
            loss.backward()
    return found.rows, config


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bytes_kept_by_blocks_match_the_formula(precision: str) -> None:
    rows, config = kept_by_the_model(precision)
    blocks = {row["block"]: row["bytes"] for row in by_block(rows)}
    for i in range(MODEL.num_layers):
        assert blocks[f"block {i}"] == pytest.approx(kept_by_a_block(config, FULL_MATRIX), rel=0.01)
    ends = step_memory(config, FULL_MATRIX).instants["loss"]
    whole = ends["activations"] + ends["attention_scores"] + ends["weight_copies"] + 4 * 48 * 500 * 4
    assert sum(blocks.values()) == pytest.approx(whole, rel=0.01)


def test_only_first_step_is_listed_with_named_operations() -> None:
    once, _ = kept_by_the_model("fp32")
    assert kept_by_the_model("fp32", steps=2)[0] == once
    assert all(str(row.operation).endswith("Backward0") for row in once)
    assert {"layers.1.ffn.w2", "layers.0.attn", "lm_head", "token_embeddings"} <= {row.module for row in once}


def test_equal_blocks_are_summed_and_shares_add_up() -> None:
    rows, _ = kept_by_the_model("fp32")
    made = summed(rows)
    assert sum(row["share"] for row in made) == pytest.approx(1)
    assert [row["total_bytes"] for row in made] == sorted((row["total_bytes"] for row in made), reverse=True)
    silu = next(row for row in made if row["operation"] == "SiluBackward0")
    assert (silu["module"], silu["count"], silu["shape"]) == ("layers.*.ffn", 3, "4×48×192")
    assert silu["total_bytes"] == 3 * 4 * 48 * 192 * 4
    assert all(row["total_bytes"] == 0 for row in made if row["parameter"])


def test_backward_of_block_allocates_gradients_and_frees_saved_tensors() -> None:
    model, config = BasicTransformerLM(MODEL, "naive"), RunConfig(model=MODEL, batch_size=4, seq_len=48, device="cpu")
    expected = gradients_of_a_block(config) - kept_by_a_block(config, FULL_MATRIX)
    tokens = torch.randint(500, (4, 48))
    with LiveBytes() as live, backward_of_blocks(model, lambda: live.now) as rows:
        for _ in range(2):
            cross_entropy(model(tokens), tokens).backward()
    assert [row["block"] for row in rows] == ["block 2", "block 1", "block 0"]
    assert [row["change_bytes"] for row in rows] == pytest.approx([expected] * 3, rel=0.001)
    with backward_of_blocks(model, lambda: None) as unknown:
        cross_entropy(model(tokens), tokens).backward()
    assert unknown == []


def test_custom_autograd_function_is_listed() -> None:
    linear = nn.Linear(8, 8)
    with saved_tensors() as found:
        torch.utils.checkpoint.checkpoint(linear, torch.randn(2, 8), use_reentrant=False).sum().backward()
    assert [(row.module, row.operation) for row in found.rows] == [("", "checkpoint")]


@pytest.mark.parametrize(
    ("reentrant", "saved"), [(False, ("0", "checkpoint")), (True, ("", "CheckpointFunctionBackward"))]
)
def test_checkpoint_input_belongs_to_its_first_module(reentrant: bool, saved: tuple[str, str]) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(2, 8, requires_grad=True)
    with saved_tensors(model) as found:
        y = torch.utils.checkpoint.checkpoint(model[0], x, use_reentrant=reentrant)
        model[2](model[1](y)).sum().backward()
    kept = [(row.module, row.operation) for row in found.rows if row.parameter is None]
    assert kept == [saved, ("1", "TanhBackward0"), ("2", "AddmmBackward0")]


@pytest.mark.parametrize(
    ("compile", "scope"),
    [("none", "model"), pytest.param("aot_eager", "model", marks=pytest.mark.slow), ("aot_eager", "block")],
)
def test_record_has_saved_tensors(compile: str, scope: str) -> None:
    sizes = {"model": MODEL, "batch_size": 4, "seq_len": 48}
    config = RunConfig(
        **sizes, device="cpu", warmup=0, steps=2, profiler="residuals", compile=compile, compile_scope=scope
    )
    record = cs_systems.run(config)
    assert record.status == "ok"
    assert record.results["residual_stream"] == [{"bytes": 4 * 48 * 64 * 4}]
    kept = sum(row["total_bytes"] for row in record.results["residuals"])
    assert kept == sum(row["bytes"] for row in record.results["residual_blocks"])
    operations = {row["operation"] for row in record.results["residuals"]}
    if compile == "none":
        assert record.results["residual_blocks"][1]["predicted_bytes"] == kept_by_a_block(config, FULL_MATRIX)
    else:
        assert "CompiledFunctionBackward" in operations
        found = {row["block"]: row["bytes"] for row in record.results["residual_blocks"]}
        found.pop("outside of modules")
        assert [*found] == ([f"block {i}" for i in range(3)] if scope == "block" else [])
        assert len({*found.values()}) == len(found) // 3, "equal blocks keep the same"
    if scope == "block" or compile == "none":
        shares = [row["of_block"] for row in record.results["residuals"] if row["of_block"] is not None]
        assert sum(shares) == pytest.approx(1)
    json.dumps(record.results)


@pytest.mark.parametrize(
    ("checkpoint", "kept"),
    [
        ("none", [("block 0", False, 1), ("block 1", False, 1), ("block 2", False, 1)]),
        ("blocks:1", [("block 0", False, 1), ("block 1", True, 1), ("block 2", False, 1)]),
        ("every:2", [("block 0", True, 2), ("block 2", True, 1)]),
        ("nested:3:1", [("block 0", True, 3)]),
    ],
)
def test_record_of_checkpointed_block_has_its_input(
    checkpoint: str, kept: list[tuple[str, bool, int]], tmp_path: Path
) -> None:
    config = RunConfig(model=MODEL, batch_size=4, seq_len=48, device="cpu", checkpoint=checkpoint)
    torch.manual_seed(0)
    model, tokens = BasicTransformerLM(MODEL, "naive"), torch.randint(500, (4, 48))
    apply_checkpointing(model, checkpoint)
    with region(tmp_path, resolve("cpu"), model):
        cross_entropy(model(tokens), tokens).backward()
    record = RunRecord("", config.to_dict(), "ok", environment=replace(ENVIRONMENT, device="cpu"))
    blocks = collect(tmp_path, record).results["residual_blocks"]
    found = [row for row in blocks if row["block"].startswith("block")]
    assert [(row["block"], row["checkpoint"], row["blocks"]) for row in found] == kept
    assert [row["bytes"] for row in found] == [row["predicted_bytes"] for row in found]
    assert {row["bytes"] for row in found if row["checkpoint"]} <= {4 * 48 * 64 * 4}


def test_long_operation_names_fit_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--size", "tiny", "--attention", "sdpa_flash", "--mode", "forward-backward", "--device", "cpu"]
    assert main(["memory", *words, "--residuals", "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out.split("records:")[0]
    assert re.search(r"^layers\.\*\.attn +Scaled\w*…\w*Backward0 ", output, re.MULTILINE)
    assert max(map(len, output.splitlines())) <= 80


def test_memory_command_prints_five_largest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--size", "tiny", "--device", "cpu", "--residuals", "--mode", "forward-backward", "--out", str(tmp_path)]
    assert main(["memory", *words]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "tensors that forward keeps for backward" in output
    assert "one tensor of the residual stream takes 64.0 KiB" in output
    assert "block 0 … block 1" in output
    assert output.count("Backward0") == 5


def test_memory_command_prints_checkpoint_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--size", "tiny", "--num-layers", "5", "--mode", "forward-backward", "--checkpoint", "every:2"]
    words += ["selective:matmul", "--context-length", "32", "--device", "cpu", "--residuals", "--out", str(tmp_path)]
    assert main(["memory", *words]) == 0
    output = capsys.readouterr().out
    assert re.search(r"^block 0 … block 3: a checkpoint every 2 +32\.0 +32\.0$", output, re.MULTILINE)
    assert re.search(r"^block 4: a checkpoint +32\.0 +32\.0$", output, re.MULTILINE)
    assert output.count("checkpoint: it keeps its input, and backward recomputes the rest") == 2
    assert re.search(r"^block 0 … block 4: a checkpoint each +32\.0 +320$", output, re.MULTILINE)
    assert output.count("a selective checkpoint also keeps outputs that are no saved tensors") == 1
    assert max(map(len, output.split("records:")[0].splitlines())) <= 80
