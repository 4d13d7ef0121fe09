"""Tests of the contract of every part: the plain modules' function in float64, and their parameter names.

Parts that are Triton kernels run in its interpreter, which must be chosen before triton is imported. One test therefore
runs this file in a new process, with the tests of the other kernels of a training step.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cs_systems import sweep
from cs_systems.config import ConfigError, Precision, RunConfig, preset
from cs_systems.core import plugins
from cs_systems.machine.device import resolve
from cs_systems.measure.runtime.sweep import check
from cs_systems.measure.workloads import Cell, Unavailable
from cs_systems.measure.workloads.train_step import TrainStep
from cs_systems.model import BasicTransformerLM
from cs_systems.model.training import parts, triton_operators
from cs_systems.model.training.losses import cross_entropy
from cs_systems.model.training.parts import Part, fused_cross_entropy
from cs_systems.record import make_key

NAMES = [name for name in plugins.names(parts.PACKAGE) if name != "fp8_linear"]  # not the plain function
TRITON = ("fused_embedding_gradient", "fused_rmsnorm", "fused_rotary", "fused_swiglu")
SETS = (*((name,) for name in NAMES), (*TRITON, "joined_projections"))
SHAPES = ((2, 7), (1, 1))  # (batch, tokens), also odd and single ones
SMALL = replace(preset("tiny"), vocab_size=37)  # the interpreter runs a program for a few rows of the embedding
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INTERPRETED = pytest.mark.skipif(not IS_INTERPRETED, reason="needs Triton's interpreter: TRITON_INTERPRET=1")


def on_cpu(names: tuple[str, ...]) -> Any:
    """Return the names as a parameter of a test on a CPU."""
    marks = [INTERPRETED] if {*names} & {*TRITON} else []
    return pytest.param(names, marks=marks, id="+".join(names))


EACH = pytest.mark.parametrize("names", [on_cpu(names) for names in SETS])


@pytest.mark.slow
@pytest.mark.skipif(IS_INTERPRETED, reason="TRITON_INTERPRET is set")
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: pip install triton")
@pytest.mark.timeout(600)  # a minute, or several on a busy machine
def test_parts_in_triton_pass_in_its_interpreter() -> None:
    files = (__file__, *(Path(__file__).with_name(name) for name in ("test_part_kernels.py", "test_master_adamw.py")))
    chosen = "fused_ and not fused_cross or fused_rmsnorm or test_part_kernels or interpreted_kernel"
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "-k", chosen, *files]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) > 150, "most tests were skipped"


def part(name: str) -> Part:
    found: Part = plugins.get(parts.PACKAGE, name)
    return found


def model(dtype: torch.dtype) -> BasicTransformerLM:
    torch.manual_seed(0)
    return BasicTransformerLM(SMALL).to(dtype)


def loss_and_gradients(
    lm: BasicTransformerLM, tokens: Tensor, names: tuple[str, ...] = ()
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the gradients by the plain model's names."""
    targets = tokens.roll(1)
    chosen = parts.chosen(names).values()
    parts.apply(chosen, lm)
    head_loss = next((part.head_loss for part in chosen if part.head_loss), None)
    if head_loss is None:
        loss = cross_entropy(lm(tokens), targets)
    else:
        weight = lm.get_parameter("lm_head.weight")
        loss = head_loss(lm(tokens, with_head=False).flatten(0, 1), weight, targets.flatten())
    loss.backward()
    for p in lm.parameters():
        assert p.grad is not None
        p.data = p.grad  # so that state_dict names the gradients
    return loss.detach(), {name: value.double() for name, value in lm.state_dict().items()}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@EACH
def test_part_computes_the_plain_loss_and_gradients(names: tuple[str, ...], dtype: str, shape: tuple[int, int]) -> None:
    compare_with_plain(names, dtype, shape, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("names", SETS, ids="+".join)
def test_part_computes_the_plain_loss_and_gradients_on_a_gpu(names: tuple[str, ...], dtype: str) -> None:
    if dtype == "float32" and "fused_feed_forward" in names:
        pytest.skip("fused_feed_forward computes in bfloat16 on a GPU")
    for shape in SHAPES:
        compare_with_plain(names, dtype, shape, "cuda")


def compare_with_plain(names: tuple[str, ...], dtype: str, shape: tuple[int, int], device: str) -> None:
    torch.manual_seed(1)
    tokens = torch.randint(SMALL.vocab_size, shape)
    expected, reference = loss_and_gradients(model(torch.float64), tokens)
    loss, gradients = loss_and_gradients(model(getattr(torch, dtype)).to(device), tokens.to(device), names)
    tolerance = max(part(name).tolerance[dtype] for name in names)
    assert abs(float(loss) - float(expected)) <= tolerance * float(expected)
    assert gradients.keys() == reference.keys()
    if dtype != "bfloat16":  # a whole model in bfloat16 has a larger error than a part
        for key, gradient in gradients.items():
            assert (gradient.cpu() - reference[key]).norm() <= tolerance * reference[key].norm(), key


@EACH
def test_state_dict_moves_between_the_part_and_the_plain_model(names: tuple[str, ...]) -> None:
    plain, other = model(torch.float32), model(torch.float32)
    chosen = [part(name) for name in names]
    parts.apply(chosen, other)
    for p in other.parameters():
        torch.nn.init.normal_(p)
    plain.load_state_dict(other.state_dict())
    again = model(torch.float32)
    parts.apply(chosen, again)
    again.load_state_dict(plain.state_dict())
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(plain(tokens), again(tokens), rtol=1e-4, atol=1e-4)
    assert {*plain.state_dict()} == {*again.state_dict()}


@pytest.mark.parametrize("order", [TRITON, TRITON[::-1]], ids=str)
def test_parts_replace_the_modules_that_other_parts_made_in_any_order(order: tuple[str, ...]) -> None:
    def classes(names: tuple[str, ...]) -> list[type]:
        lm = model(torch.float32)
        parts.apply(parts.chosen(names).values(), lm)
        return [type(module) for module in lm.modules()]

    found = classes((*order, "joined_projections"))
    assert found == classes(("joined_projections", *order))
    replacing = {"FusedEmbedding", "FusedJoinedSwiGLU", "RotatingJoinedAttention", "FusedBlock"}
    assert replacing <= {cls.__name__ for cls in found}


@pytest.mark.parametrize("rows", [2, 3, 100])
def test_cross_entropy_in_chunks_equals_a_single_chunk(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(10, 2), torch.randn(37, 2)
    targets = torch.randint(37, (10,))

    def gradients() -> Iterator[Tensor]:
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = fused_cross_entropy.head_loss(h, w, targets)
        (3 * loss).backward()
        assert h.grad is not None
        assert w.grad is not None
        yield from (loss.detach(), h.grad, w.grad)

    whole = [*gradients()]
    monkeypatch.setattr(fused_cross_entropy, "CHUNK_BYTES", rows * 37 * 4)
    for chunked, one in zip(gradients(), whole, strict=True):
        torch.testing.assert_close(chunked, one)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_second_backward_of_the_fused_loss_is_refused(device: str) -> None:
    h, w = (torch.ones(n, 2, device=device, requires_grad=True) for n in (10, 37))
    loss = fused_cross_entropy.head_loss(h, w, torch.arange(10, device=device))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def step(**options: Any) -> TrainStep:
    config = RunConfig(model=SMALL, batch_size=2, seq_len=16, device="cpu", **options)
    return TrainStep(Cell(config), resolve("cpu"))


@pytest.mark.parametrize(("optimizer", "bytes_each"), [("default", 14), ("adamw_master", 26), ("adamw_bf16_state", 18)])
@pytest.mark.parametrize("names", [(), ("fp8_linear",)], ids="+".join)
def test_bytes_of_an_optimizer_step_follow_from_its_state(
    names: tuple[str, ...], optimizer: str, bytes_each: int
) -> None:
    train = step(precision=Precision.BF16_PURE, optimizer=optimizer, parts=names)
    costs = train.cost()
    assert costs is not None
    assert costs["optimizer"].bytes == bytes_each * train.parameters


def test_bytes_of_an_update_in_backward_count_in_backward() -> None:
    options: dict[str, Any] = {"precision": Precision.BF16_PURE, "optimizer": "adamw_master"}
    train = step(**options)
    plain, costs = train.cost(), step(**options, parts=("update_in_backward",)).cost()
    assert plain is not None
    assert costs is not None
    assert costs["optimizer"].bytes == 0
    assert costs["backward"].bytes == plain["backward"].bytes + 26 * train.parameters  # type: ignore[operator]


def trained(train: TrainStep, steps: int = 2) -> list[Tensor]:
    losses = []
    for _ in range(steps):
        train.prepare()
        for _, run in train.step():
            run()
        assert train.loss is not None
        losses.append(train.loss.detach().clone())
    return losses


WIDE = replace(preset("tiny"), d_model=16400, num_heads=2)
MASTER: dict[str, Any] = {"precision": Precision.BF16_PURE, "optimizer": "adamw_master"}


@pytest.mark.parametrize("checkpoint", ["none", "every:1"])
@pytest.mark.parametrize("others", [on_cpu(()), on_cpu(("fused_embedding_gradient",))])
def test_update_in_backward_trains_as_an_update_after_it(others: tuple[str, ...], checkpoint: str) -> None:
    options = {**MASTER, "checkpoint": checkpoint}
    after, inside = step(**options, parts=others), step(**options, parts=(*others, "update_in_backward"))
    assert trained(after) == trained(inside)
    assert all(torch.equal(a, b) for a, b in zip(after.model.parameters(), inside.model.parameters(), strict=True))
    assert all(p.grad is None for p in inside.model.parameters())


def test_update_in_backward_does_not_keep_the_model_alive() -> None:
    import gc
    import weakref

    train = step(**MASTER, parts=("update_in_backward",))
    trained(train, 1)
    weight = weakref.ref(train.model.get_parameter("lm_head.weight"))
    del train
    gc.collect()
    assert weight() is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, in dynamo
def test_block_scope_compiles_the_same_step() -> None:
    plain = step(parts=("joined_projections",))
    compiled = step(parts=("joined_projections",), compile="aot_eager", compile_scope="block")
    torch.testing.assert_close(trained(plain), trained(compiled))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, in dynamo
@pytest.mark.filterwarnings("ignore:Detected that context_fn is passed")
@pytest.mark.parametrize("checkpoint", ["every:1", "selective:products:1"])
def test_block_scope_compiles_checkpointed_blocks(checkpoint: str) -> None:
    plain = step(attention="sdpa_flash")
    compiled = step(attention="sdpa_flash", checkpoint=checkpoint, compile="aot_eager", compile_scope="block")
    torch.testing.assert_close(trained(plain), trained(compiled))


@pytest.mark.slow
def test_parts_and_compiled_blocks_train_ranks_as_the_plain_step_does() -> None:
    plain = RunConfig(model=preset("tiny"), batch_size=1, seq_len=16, device="cpu", world_size=2, strategy="fsdp")
    for_ranks = tuple(name for name in NAMES if part(name).on_ranks and name not in TRITON)
    changed = replace(plain, parts=for_ranks, compile="aot_eager", compile_scope="block", attention="sdpa_flash")
    plans = {"fsdp": "selective:products:1", "ddp_overlap": "blocks:0", "torch_fsdp2": "selective:products"}
    cells = [plain, *(replace(changed, strategy=name, checkpoint=plan) for name, plan in plans.items())]
    records = list(sweep(replace(cell, warmup=1, steps=3) for cell in cells))
    assert [record.reason for record in records] == [None] * len(cells)
    losses = [record.results["ran"][0]["loss"] for record in records]
    assert losses == pytest.approx([losses[0]] * len(cells), rel=1e-6)
    assert losses[0] < 0.98 * math.log(plain.model.vocab_size)


@INTERPRETED
def test_fused_kernels_train_ranks_and_recomputed_blocks_as_the_plain_step_does() -> None:
    plain = RunConfig(model=SMALL, batch_size=1, seq_len=4, device="cpu", warmup=0, steps=2)
    plain = replace(plain, attention="sdpa_flash", world_size=2, strategy="fsdp")
    compiled: dict[str, Any] = {"compile": "aot_eager", "compile_scope": "block"}
    fused = replace(plain, parts=TRITON, checkpoint="selective:products:1", **compiled)
    before, after = sweep([plain, fused])
    assert after.reason is None
    assert after.results["ran"][0]["loss"] == pytest.approx(before.results["ran"][0]["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"parts": ("update_in_backward",)},
            "the default optimizer updates all parameters at once; use optimizer adamw_master",
        ),
        (
            {**MASTER, "parts": ("update_in_backward",), "mode": "forward-backward"},
            "mode forward-backward does not update the parameters",
        ),
        (
            {"parts": ("joined_projections",), "precision": "fp8"},
            "fp8 replaces the same linear layers; leave joined_projections out",
        ),
        (
            {"parts": ("fused_rotary", "joined_projections"), "checkpoint": "selective:matmul"},
            "selective:matmul keeps the joined product, which fused_rotary overwrites; leave joined_projections out",
        ),
        (
            {"parts": ("fused_rmsnorm",), "model": WIDE},
            "fused_rmsnorm: d_model 16400 is over 16384; leave the part out of parts",
        ),
        (
            {"parts": ("fused_cross_entropy",), "precision": "fp16"},
            "small ones would become 0 in fp16; use precision bf16, or leave it out of parts",
        ),
        ({"optimizer": "adamw_master"}, "adamw_master keeps master weights of bf16 parameters"),
        ({"graph": "step"}, "a CUDA graph needs a GPU; use graph none"),
        (
            {"parts": ("joined_projections",), "world_size": 2, "strategy": "ddp_naive"},
            "joined_projections does not support several ranks; leave it out of parts, or use one process without a s",
        ),
        (
            {"compile": "default", "compile_scope": "block", "world_size": 2, "strategy": "tp"},
            "divides each block over ranks, which compile_scope block does not support; use compile_scope model",
        ),
        (
            {"checkpoint": "selective:products", "attention": "naive"},
            "naive does not compute in one operator; use attention sdpa_flash, or checkpoint selective:matmul",
        ),
    ],
    ids=str,
)
def test_cell_that_cannot_apply_an_option_is_unavailable(options: dict[str, Any], reason: str) -> None:
    settings = {"model": preset("tiny"), "batch_size": 2, "seq_len": 16, "device": "cpu"} | options
    config = RunConfig(**settings)
    with pytest.raises(Unavailable, match=reason):
        TrainStep.preflight(Cell(config), resolve("cpu"))


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"parts": ("fused_cross_entropy",)}, "leave the part out of parts"),
        ({"optimizer": "adamw_master", "precision": Precision.BF16_PURE}, "use adamw_fused"),
    ],
    ids=["part", "optimizer"],
)
def test_part_computed_by_torch_on_a_cpu_needs_triton_on_a_gpu(
    options: dict[str, Any], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_operators, "find_spec", lambda name: None)
    config = RunConfig(model=preset("tiny"), batch_size=2, seq_len=16, device="cuda", **options)
    with pytest.raises(Unavailable, match=rf"triton is not installed; run pip install triton \(Linux\), or {remedy}"):
        TrainStep.preflight(Cell(config), resolve("cpu"))
    TrainStep.preflight(Cell(replace(config, device="cpu")), resolve("cpu"))


def test_two_parts_that_replace_the_same_module_are_refused_before_anything_runs() -> None:
    names = ("fused_weight_update", "update_in_backward")
    message = "parts fused_weight_update and update_in_backward both replace the update; leave out one of them"
    with pytest.raises(ConfigError, match=message):
        parts.chosen(names)
    with pytest.raises(ConfigError, match=message):
        check([RunConfig(parts=names)])


OWN_PART = """
from cs_systems.model.transformer import RMSNorm
from cs_systems.model.training.parts import Part

class MyNorm(RMSNorm):
    pass

PART = Part({replaces}, classes={{RMSNorm: MyNorm}})
"""


def test_part_of_a_users_file_runs_and_is_recorded_with_its_code(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN_PART.format(replaces='replaces="norm"'))
    config = RunConfig(model=preset("tiny"), parts=(f"{file}:PART",), device="cpu", warmup=1, steps=1)
    (record,) = sweep([config])
    ran = record.results["ran"][0]
    assert (record.status, ran["parts_path"]) == ("ok", str(file))
    assert ran["parts_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    file.write_text(OWN_PART.format(replaces='replaces="norm"') + "# changed")
    assert make_key(config, 0, record.environment) != record.key


@pytest.mark.parametrize("replaces", ['replaces="norm"', '"norm"'], ids=["before anything runs", "once it is imported"])
def test_users_part_that_replaces_the_same_thing_is_refused(replaces: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN_PART.format(replaces=replaces))
    names = (f"{tmp_path}/mine.py:PART", "fused_rmsnorm")
    early = replaces.startswith("replaces")
    with pytest.raises(ConfigError, match="both replace the norm; leave out one of them"):
        check([RunConfig(parts=names)]) if early else parts.chosen(names)


@pytest.mark.parametrize(
    "text", [b"PART = Part(replaces=", b'PART = Part(replaces="\xff")'], ids=["syntax", "encoding"]
)
def test_own_part_that_cannot_be_read_is_an_error_of_its_cell(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_bytes(text)
    (record,) = sweep([RunConfig(model=preset("tiny"), parts=(f"{tmp_path}/mine.py:PART",), device="cpu", steps=1)])
    assert record.status == "error"
    assert "SyntaxError" in (record.reason or "")


def test_own_part_that_was_edited_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    names = (f"{file}:PART", "fused_rmsnorm")
    file.write_text(OWN_PART.format(replaces='replaces="norm"'))
    with pytest.raises(ConfigError, match="both replace the norm"):
        check([RunConfig(parts=names)])
    file.write_text(OWN_PART.format(replaces='replaces="something else"'))
    os.utime(file, ns=(1, 1))
    check([RunConfig(parts=names)])


def test_users_object_other_than_a_part_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("PART = 3")
    with pytest.raises(ConfigError, match="is of type int; make it a Part of "):
        parts.chosen([f"{tmp_path}/mine.py:PART"])


@pytest.mark.parametrize("name", plugins.names(parts.PACKAGE))
def test_literals_of_a_part_are_read_without_its_module(name: str) -> None:
    declared = plugins.declared(parts.PACKAGE, name)
    assert (declared["replaces"], declared.get("computes_in")) == (part(name).replaces, part(name).computes_in)
    assert RunConfig(parts=(name,)).computes_in == (part(name).computes_in or Precision.FP32)


def test_part_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="parts names fused_rotary twice; name each part once"):
        RunConfig(parts=("fused_rotary", "joined_projections", "fused_rotary"))


@pytest.mark.parametrize("options", [{"graph": "step"}, {"parts": ("joined_projections",)}], ids=str)
def test_options_of_the_built_in_model_are_refused_for_others(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="applies only to train_step and training_curve, and the workload is att"):
        RunConfig(workload="attention", mode="forward", **options)  # type: ignore[arg-type]


def test_block_scope_without_compile_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="compile_scope block has no effect while compile is none; set compile, or leave out"
    ):
        RunConfig(compile_scope="block")
