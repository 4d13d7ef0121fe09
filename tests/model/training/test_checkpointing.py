"""Tests of activation checkpointing: its forms, identical gradients, and recomputed FLOPs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import cs_systems
from cs_systems.config import ConfigError, Mode, ModelConfig, Precision, RunConfig, preset
from cs_systems.core import plugins
from cs_systems.core.checkpoint_plan import Segment, items, segments
from cs_systems.formulas.cost import FULL_MATRIX, recomputed_flops, step_cost
from cs_systems.machine.device import Device
from cs_systems.model import BasicTransformerLM
from cs_systems.model.training import checkpointing
from cs_systems.model.training.checkpointing import apply_checkpointing
from cs_systems.model.training.losses import cross_entropy

DEEP = ModelConfig("deep", 32, 64, 7, 4, 100, 64)
FORMS = ("every:1", "every:3", "every:99", "blocks:0,2,5-6", "selective:matmul", "nested:4:2", "nested:6:3:1")
KEEP_ATTENTION = ("selective:attention", "selective:products", "selective:products:3")
WITH_ATTENTION = [*((form, "naive") for form in FORMS), *((f, "sdpa_flash") for f in (*FORMS, *KEEP_ATTENTION))]


def test_checkpoint_forms_give_expected_segments() -> None:
    assert segments("none", 4) == ()
    assert segments("every:3", 5) == (Segment(0, 3), Segment(3, 5))
    assert segments("blocks:4,0-1", 5) == (Segment(0, 1), Segment(1, 2), Segment(4, 5))
    assert segments("selective:attention", 2) == (Segment(0, 1, (), "attention"), Segment(1, 2, (), "attention"))
    assert segments("selective:matmul:1", 2) == (Segment(0, 1), Segment(1, 2, (), "matmul"))
    assert segments("nested:4:2", 5) == (Segment(0, 4, (Segment(0, 2), Segment(2, 4))), Segment(4, 5, (Segment(4, 5),)))
    assert list(items(0, 4, segments("blocks:1,2", 4))) == [0, Segment(1, 2), Segment(2, 3), 3]


@given(layers=st.integers(1, 40), size=st.integers(1, 50))
def test_every_k_covers_each_block_once(layers: int, size: int) -> None:
    covered = [block for segment in segments(f"every:{size}", layers) for block in range(segment.first, segment.stop)]
    assert covered == list(range(layers))


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("evry:4", r"unknown checkpoint 'evry:4'; did you mean every\? The names are none, every:K, blocks:0,2,5-7"),
        ("every", "unknown checkpoint 'every'; choose among"),
        ("every:0", "0 in checkpoint 'every:0' is too few blocks; give a whole number of at least 1$"),
        ("every:x", "'x' in checkpoint 'every:x' is not a number of blocks"),
        ("blocks:9", "names block 9, which does not exist; choose among blocks 0 to 6"),
        ("blocks:1-", "'1-' in checkpoint 'blocks:1-' is not a block or a range; write a form such"),
        ("blocks:5-2", "range 5-2 in checkpoint 'blocks:5-2' ends before it begins; write 2-5"),
        ("blocks:0-99999999999", "names block 99999999999, which does not exist; choose among blocks 0"),
        ("every:²", "'²' in checkpoint 'every:²' is not a number of blocks"),
        ("selective:products:0", "too few blocks; .* at least 1, or write selective:products for none$"),
        ("selective:norm", "unknown checkpoint 'selective:norm'"),
        (
            "nested:2:4",
            "the numbers of blocks in checkpoint 'nested:2:4' must become smaller from left to right; write a form",
        ),
        ("nested:4", "unknown checkpoint 'nested:4'"),
    ],
)
def test_malformed_checkpoint_is_rejected_with_remedy(written: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig(model=DEEP, checkpoint=written)


def test_checkpoint_changes_key_and_requires_a_model() -> None:
    assert RunConfig().key() == RunConfig(checkpoint="none").key() != RunConfig(checkpoint="every:1").key()
    with pytest.raises(ConfigError, match=r"^checkpoint does not apply to workload attention"):
        RunConfig(workload="attention", mode=Mode.FORWARD, checkpoint="every:1")


@cache
def trained(form: str, attention: str, precision: Precision) -> tuple[dict[str, Tensor | None], int]:
    """Return the gradients by parameter, and the executed FLOPs."""
    torch.manual_seed(0)
    model = BasicTransformerLM(DEEP, attention)
    names = [name for name, _ in model.named_parameters()]
    apply_checkpointing(model, form)
    assert [name for name, _ in model.named_parameters()] == names
    tokens, targets = torch.randint(100, (2, 2, 64))
    with FlopCounterMode(display=False) as counted:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision is Precision.BF16):
            loss = cross_entropy(model(tokens), targets)
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, counted.get_total_flops()


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize(("form", "attention"), WITH_ATTENTION)
def test_checkpointed_gradients_are_bit_identical(form: str, attention: str, precision: Precision) -> None:
    plain, executed = trained("none", attention, precision)
    gradients, with_recomputation = trained(form, attention, precision)
    for name, expected in plain.items():
        found = gradients[name]
        assert expected is not None and found is not None and torch.equal(expected, found), name  # noqa: PT018
    if attention == "naive":  # torch's counter does not know the CPU's fused kernel
        assert with_recomputation - executed == recomputed_flops(DEEP, 2, 64, FULL_MATRIX, form)


def test_recomputation_counts_in_hardware_flops_only() -> None:
    args: tuple[Any, ...] = (DEEP, 2, 64, Mode.TRAIN_STEP, FULL_MATRIX, Precision.FP32)
    plain, again = step_cost(*args), step_cost(*args, "every:1")
    forward, w2 = plain["forward"].hardware_flops or 0, 2 * 2 * 64 * 32 * 64
    head = 2 * 2 * 64 * 32 * 100
    extra = (again["backward"].hardware_flops or 0) - (plain["backward"].hardware_flops or 0)
    assert extra == forward - head - 7 * w2  # backward does not need the output of w2
    assert again["backward"].model_flops == plain["backward"].model_flops
    assert again["forward"] == plain["forward"]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["every:2", "selective:attention", "selective:products:2", "nested:2:1"])
def test_compiled_checkpointed_gradients_match_plain_gradients(form: str) -> None:
    torch._dynamo.reset()
    gradients = []
    for written in ("none", form):
        torch.manual_seed(0)
        model = BasicTransformerLM(replace(DEEP, num_layers=3), "sdpa_flash")
        apply_checkpointing(model, written)
        tokens = torch.randint(100, (2, 64))
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if written != "none" else model
        run(tokens).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again)


def test_record_has_checkpoint_or_reason() -> None:
    config = RunConfig(model=preset("tiny"), batch_size=1, device="cpu", warmup=0, steps=1, checkpoint="every:1")
    record = cs_systems.run(config, in_process=True)
    assert (record.status, record.config["checkpoint"]) == ("ok", "every:1")
    (memory,) = record.results["memory"]
    assert memory["predicted_peak_bytes"] > 0
    refused = cs_systems.run(
        RunConfig(model=preset("tiny"), device="cpu", checkpoint="selective:attention"), in_process=True
    )
    assert refused.status == "unavailable"
    assert refused.reason is not None
    assert (
        "naive does not compute in one operator; use attention sdpa_flash, or checkpoint selective:matmul"
        in refused.reason
    )


def test_selective_checkpoint_names_a_backend_that_computes_in_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's flash kernel takes no float32 on a GPU."""
    monkeypatch.setattr(checkpointing, "resolve_or_cpu", lambda name: Device(torch.device("cuda", 0)))
    config = RunConfig(checkpoint="selective:attention")
    naive, efficient, triton = (plugins.get("attention", n) for n in ("naive", "sdpa_efficient", "flash_triton"))
    assert "use attention sdpa_efficient" in str(checkpointing.unavailable(config, naive))
    in_half = replace(config, precision=Precision.BF16)
    assert "use attention sdpa_flash" in str(checkpointing.unavailable(in_half, naive))
    assert "computes in one operator only if compiled" in str(checkpointing.unavailable(config, triton))
    assert "does not compute in one operator" in str(checkpointing.unavailable(config, None))
    assert checkpointing.unavailable(replace(config, compile="default"), triton) is None
    assert checkpointing.unavailable(config, efficient) is None
