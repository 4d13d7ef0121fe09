"""Dtypes of real steps on this machine, read by hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cs_systems.analysis.comparison.dtypes import contradiction, dtypes
from cs_systems.config import PRESETS, Mode, Precision, RunConfig
from cs_systems.instrument.dtype_readings import DtypeReadings, reading
from cs_systems.machine.device import resolve
from cs_systems.measure.workloads import Cell, Unavailable, Workload
from cs_systems.model.attention.naive import attention

CPU = resolve("cpu")


def workload(name: str, precision: Precision, **changes: Any) -> Workload:
    model = {} if name == "toy" else {"model": PRESETS["tiny"]}
    cell = Cell(RunConfig(workload=name, device="cpu", precision=precision, **model, **changes))
    made: Workload = cell.workload(cell, CPU)
    return made


def read(step: Callable[[], object]) -> DtypeReadings:
    readings = DtypeReadings()
    with reading(readings):
        step()
    return readings


def read_step(made: Workload) -> DtypeReadings:
    made.prepare()
    return read(lambda: [run() for _, run in made.step()])


def rows_of(readings: DtypeReadings) -> dict[str, Any]:
    return {row["what"]: row for row in dtypes(readings.rows, readings.loss)}


@pytest.mark.parametrize(("precision", "low"), [(Precision.BF16, "bfloat16"), (Precision.FP16, "float16")])
def test_toy_model_dtypes_under_autocast(precision: Precision, low: str) -> None:
    readings = read_step(workload("toy", precision))
    rows = rows_of(readings)
    assert list(rows) == ["ToyModel", "fc1", "relu", "ln", "fc2", "logits", "loss"]
    assert {rows[name]["parameters"] for name in ("fc1", "ln", "fc2")} == {"float32"}
    assert {rows[name]["parameter_gradients"] for name in ("fc1", "ln", "fc2")} == {"float32"}
    assert (rows["fc1"]["inputs"], rows["fc1"]["outputs"], rows["fc1"]["cast"]) == ("float32", low, "down")
    assert (rows["logits"]["outputs"], rows["logits"]["output_gradients"]) == (low, low)
    assert rows["loss"]["outputs"] == "float32"
    assert contradiction(precision, readings.rows, readings.contexts) is None


@pytest.mark.parametrize(("precision", "dtype"), [(Precision.FP32, "float32"), (Precision.BF16_PURE, "bfloat16")])
def test_dtypes_without_autocast_equal_the_parameters(precision: Precision, dtype: str) -> None:
    readings = read_step(workload("toy", precision))
    seen = {v for row in rows_of(readings).values() for k, v in row.items() if k.endswith(("puts", "ers", "ients"))}
    assert seen - {None} == {dtype}
    assert (readings.loss, readings.contexts) == ([dtype], [])


@pytest.mark.gpu
def test_autocast_normalises_in_fp32_on_gpu() -> None:
    device = resolve("cuda")
    cell = Cell(RunConfig(workload="toy", precision=Precision.FP16))
    made = cell.workload(cell, device)
    rows = rows_of(read_step(made))
    assert (rows["ln"]["inputs"], rows["ln"]["outputs"], rows["ln"]["cast"]) == ("float16", "float32", "up")
    assert (rows["fc2"]["inputs"], rows["fc2"]["outputs"]) == ("float32", "float16")


def test_each_module_of_a_language_model_is_named() -> None:
    rows = rows_of(read_step(workload("train_step", Precision.BF16)))
    assert rows["layers.1.attn.q_proj"]["cast"] == "down"
    assert rows["layers.1.ln2"]["outputs"] == "float32"  # the residual stream is the embedding's dtype
    assert rows["token_embeddings"]["inputs"] == "int64"
    assert rows["layers.0.attn.rope"]["calls"] == 4  # one module, shared by all blocks: q and k of each


def test_forward_alone_has_neither_loss_nor_gradients() -> None:
    rows = rows_of(read_step(workload("toy", Precision.BF16, mode=Mode.FORWARD)))
    assert rows["loss"]["outputs"] is None
    assert {row["output_gradients"] for row in rows.values()} == {None}


def test_autocast_context_disabled_by_torch_is_recorded() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA, so that torch leaves the context on")
    model = nn.Linear(3, 3)

    def step() -> None:
        with pytest.warns(UserWarning, match="Disabling autocast"), torch.autocast("cuda", torch.bfloat16):
            model(torch.zeros(2, 3))

    readings = read(step)
    assert readings.contexts == [{"device": "cuda", "dtype": "bfloat16", "enabled": False}]
    error = contradiction(Precision.BF16, readings.rows, readings.contexts)
    assert error is not None
    assert error.startswith("autocast was entered for cuda (and switched off by torch, with a warning), but Linear's")


def test_keyword_arguments_several_models_and_repeated_calls_are_read() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, *, x: Tensor) -> dict[str, Tensor]:
            return {"y": self.fc(x)}

    first, second = Named(), Named().double()

    def step() -> None:
        first(x=torch.zeros(2, 3))
        first(x=torch.zeros(2, 3))
        second(x=torch.zeros(2, 3, dtype=torch.float64))["y"].sum().backward()

    rows = rows_of(read(step))
    assert list(rows) == ["Named", "fc", "Named.fc", "logits", "loss"]
    assert rows["fc"]["calls"] == 2
    assert rows["Named.fc"]["inputs"] == "float64"
    assert rows["loss"]["outputs"] == "float64"


def test_lazy_parameters_are_read_after_initialization() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    rows = rows_of(read(lambda: model(torch.zeros(2, 5)).sum().backward()))
    assert (rows["0"]["parameters"], rows["0"]["parameter_gradients"]) == ("float32", "float32")
    assert rows["1"]["parameters"] is None


def test_reading_removes_all_hooks() -> None:
    enter, backward = torch.autocast.__enter__, torch.autograd.backward
    made = workload("toy", Precision.BF16)

    def fail() -> None:
        next(iter(made.step()))[1]()
        raise ZeroDivisionError

    readings = DtypeReadings()
    with pytest.raises(ZeroDivisionError), reading(readings):
        fail()
    assert (torch.autocast.__enter__, torch.autograd.backward) == (enter, backward)
    assert not torch.nn.modules.module._has_any_global_hook()
    before = readings.rows
    read_step(made)
    for _, run in made.step():
        run()
    assert readings.rows == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_naive_attention_under_autocast_matches_torch(dtype: torch.dtype) -> None:
    """Compare with torch's unfused attention under torch's autocast: the same products in the same dtype."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 32, 16) for _ in range(3))
    with torch.autocast("cpu", dtype):
        ours = attention(q, k, v, causal=True)
        scores = (q @ k.transpose(-1, -2)) * 16**-0.5
        masked = scores.masked_fill(torch.ones(32, 32).triu(1).bool(), float("-inf"))
        theirs = masked.softmax(-1) @ v
    assert ours.dtype == theirs.dtype == dtype
    exact = nn.functional.scaled_dot_product_attention(*(t.double() for t in (q, k, v)), is_causal=True)
    eps = torch.finfo(dtype).eps
    assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max() + eps
    assert (ours.float() - theirs.float()).abs().max() <= 4 * eps * exact.abs().max()


def test_bf16_step_matches_torch_autocast() -> None:
    made: Any = workload("train_step", Precision.BF16)
    read_step(made)
    ours = {name: p.grad.clone() for name, p in made.model.named_parameters()}
    twin: Any = workload("train_step", Precision.BF16)
    with torch.autocast("cpu", torch.bfloat16):
        logits = twin.model(twin.tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), twin.targets.flatten())
    loss.backward()
    assert torch.equal(loss, made.loss)
    assert all(torch.equal(p.grad, ours[name]) for name, p in twin.model.named_parameters())


def test_toy_model_is_unavailable_in_tf32_on_cpu() -> None:
    with pytest.raises(Unavailable, match=r"tf32 needs an NVIDIA GPU .*; use fp32"):
        workload("toy", Precision.TF32)
