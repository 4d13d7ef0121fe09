"""Code of the user's own, `path.py:name`: optimizer, loss, clipping, data, attention, model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from cs_systems import run
from cs_systems.analysis.comparison.own_code import OWN_CODE, OwnCodeRow
from cs_systems.cli import main
from cs_systems.config import FIELDS, AttentionShape, RunConfig, preset
from cs_systems.core.tables import first_row
from cs_systems.formulas.memory.fit import known_by_formula
from cs_systems.record import RunRecord

# As students write it: the update of the course's text, with the decay after the step.
SOURCE = """
import numpy as np
import torch
from torch import nn

from cs_systems.config import ModelConfig
from cs_systems.model import BasicTransformerLM


class AdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, betas=(0.5, 0.5), eps=1e-8, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, grad = self.state[p], p.grad.data
                t = state["t"] = state.get("t", 0) + 1
                m = state["m"] = beta1 * state.get("m", torch.zeros_like(p)) + (1 - beta1) * grad
                v = state["v"] = beta2 * state.get("v", torch.zeros_like(p)) + (1 - beta2) * grad**2
                rate = group["lr"] * (1 - beta2**t) ** 0.5 / (1 - beta1**t)
                p.data -= rate * m / (v.sqrt() + group["eps"])
                p.data -= group["lr"] * group["weight_decay"] * p.data


class SGD(AdamW):  # a wrong one: the name is torch's, the update is not
    pass


class Mine(AdamW):
    pass


class Closed(AdamW):
    def step(self, closure):
        return super().step()


class Sharded(AdamW):
    def __init__(self, params, optimizer_cls, **options):
        super().__init__(params)


class Numbered(AdamW):
    def __init__(self, params, rank):
        super().__init__(params)


def nothing(params):
    return None


number = 3


def get_adamw_cls():
    return torch.optim.AdamW


def cross_entropy(inputs, targets):
    shifted = inputs - inputs.max(-1, keepdim=True).values
    return (shifted.exp().sum(-1).log() - shifted.gather(-1, targets[:, None])[:, 0]).mean()


def overflowing(inputs, targets):
    return (inputs.exp().sum(-1).log() - inputs.gather(-1, targets[:, None])[:, 0]).mean()


def of_each_token(inputs, targets):
    return inputs.sum(-1)


def clip_gradients(parameters, max_l2_norm):
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = sum((g**2).sum() for g in gradients) ** 0.5
    for p in parameters:
        if p.grad is not None and norm > max_l2_norm:
            p.grad *= max_l2_norm / (norm + 1e-6)


def clip_each(parameters, max_l2_norm):
    for p in parameters:
        clip_gradients([p], max_l2_norm)


def get_batch(dataset, batch_size, context_length, device):
    places = np.random.randint(0, len(dataset) - context_length, batch_size)
    inputs, targets = (np.stack([dataset[i + by : i + by + context_length] for i in places]) for by in (0, 1))
    return torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device)


def unshifted(*arguments):
    return (get_batch(*arguments)[0],) * 2


def transposed(*arguments):
    return tuple(x.T for x in get_batch(*arguments))


class Flash(torch.autograd.Function):
    factor = 1

    @classmethod
    def weights(cls, q, k, is_causal):
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        return scores.softmax(-1)

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        batch, queries, d_head = q.shape
        ctx.is_causal = is_causal
        ctx.save_for_backward(q, k, v)
        return Flash.weights(q, k, is_causal) @ v

    @classmethod
    def backward(cls, ctx, gradient):
        q, k, v = ctx.saved_tensors
        weights = cls.weights(q, k, ctx.is_causal)
        to_weights = gradient @ v.transpose(-1, -2)
        to_scores = weights * (to_weights - (weights * to_weights).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
        return cls.factor * to_scores @ k, to_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ gradient, None


class Unmasked(Flash):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        return Flash.forward(ctx, q, k, v, False)

class WrongFlash(Flash):
    factor = 2


class WithoutMask(Flash):
    @staticmethod
    def forward(ctx, q, k, v):
        return v


def get_flashattention_autograd_function_pytorch():
    return Flash


def run_scaled_dot_product_attention(Q, K, V, mask=None):
    scores = Q @ K.transpose(-1, -2) / Q.shape[-1] ** 0.5
    return (scores if mask is None else scores.masked_fill(~mask, float("-inf"))).softmax(-1) @ V


class Renamed(nn.Module):
    def __init__(self, vocab_size, context_length, d_model):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab_size, d_model), nn.Linear(d_model, vocab_size)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


class TransformerLM(BasicTransformerLM):
    def __init__(self, vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta):
        sizes = dict(d_model=d_model, d_ff=d_ff, num_layers=num_layers, num_heads=num_heads)
        super().__init__(ModelConfig("mine", vocab_size=vocab_size, context_length=context_length, **sizes))


class WithRanges(TransformerLM):
    def forward(self, tokens):
        with torch.cuda.nvtx.range("forward"):
            torch.cuda.nvtx.mark("begun")
            handle = torch.cuda.nvtx.range_start("model")
            torch.cuda.nvtx.range_end(handle)
            return super().forward(tokens)
class WithLosses(TransformerLM):
    def forward(self, tokens):
        return super().forward(tokens), []
class Headless(TransformerLM):
    def forward(self, tokens):
        return 2 * super().forward(tokens)
"""
TINY = RunConfig(model=preset("tiny"), batch_size=1, seq_len=8, warmup=0, steps=1, device="cpu")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    return file


def measured(source: Path, name: str, **options: Any) -> RunRecord:
    return run(TINY, optimizer=f"{source}:{name}", in_process=True, **options)


def test_own_optimizer_steps_and_is_recorded_with_its_hash(source: Path) -> None:
    record = measured(source, "AdamW")
    ran = first_row(record.results, "ran")
    assert (record.status, ran["optimizer"]) == ("ok", f"{source}:AdamW")
    assert ran["optimizer_sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert {*record.frame()["phase"]} == {"forward", "loss", "backward", "optimizer", "step"}


def test_own_optimizer_leaves_flops_known_and_its_bytes_and_memory_unknown(source: Path) -> None:
    record = measured(source, "AdamW")
    costs = {row["phase"]: row for row in record.results["cost"]}
    assert costs["forward"]["model_flops"]
    assert costs["optimizer"]["bytes"] is None
    assert known_by_formula(record) is None


@pytest.mark.parametrize(("name", "least", "most"), [("AdamW", 0.0, 1e-3), ("SGD", 0.5, 100.0)])
def test_own_optimizer_has_a_row_next_to_torch_s_of_the_same_name(
    source: Path, name: str, least: float, most: float
) -> None:
    """Given the hyperparameters that the signature takes, not those that it has as defaults."""
    (row,) = OWN_CODE.of(measured(source, name).results)
    assert row["reference"] == f"torch.optim.{name}"
    assert least <= (row["error"] or 0.0) <= most


def test_optimizer_unknown_to_torch_has_no_comparison_row(source: Path) -> None:
    assert not OWN_CODE.of(measured(source, "Mine").results)


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("Closed", "unavailable", "Closed requires an argument of step()"),
        ("Sharded", "error", "wraps the class of another optimizer; name it as strategy, such as ddp_bucketed+"),
        ("Numbered", "error", "Numbered(params, rank) requires rank; name a class such as AdamW(params, lr=1e-3"),
        ("nothing", "error", "optimizer returned None, which is not an optimizer; give a class"),
        ("number", "error", "number is 3; name a class such as"),
    ],
)
def test_object_other_than_an_optimizer_is_refused_with_the_form(
    source: Path, name: str, status: str, reason: str
) -> None:
    record = measured(source, name)
    assert record.status == status
    assert reason in (record.reason or "")


def test_own_optimizer_replaces_the_optimizer_of_an_own_model(source: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text("import torch\n\n\ndef make():\n    return torch.nn.Linear(2, 2), torch.randn(3, 2)\n")
    config = RunConfig(workload=f"{model}:make", optimizer=f"{source}:AdamW", warmup=0, steps=1, device="cpu")
    record = run(config, in_process=True)
    assert first_row(record.results, "ran")["optimizer"] == f"{source}:AdamW", record.reason


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("mine.py", "'mine.py' names a file, but no object in it; write mine.py:name"),
        ("mine.py:AdamV", "mine.py has no 'AdamV'; did you mean AdamW?"),
        ("other.py:AdamW", "file 'other.py' (from 'other.py:AdamW') does not exist"),
        ("adamx", "unknown optimizer 'adamx'; did you mean adamw"),
    ],
)
def test_unknown_optimizer_is_refused_before_anything_runs(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], optimizer: str, message: str
) -> None:
    monkeypatch.chdir(source.parent)
    assert main(["time", "--optimizer", optimizer]) == 2
    assert message in capsys.readouterr().err


def test_time_compares_optimizers_in_one_table(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(source.parent)
    options = ["--size", "tiny", "--context-length", "8", "--batch-size", "1", "--steps", "2", "--warmup", "1"]
    assert main(["time", *options, "--optimizer", "adamw", "mine.py:AdamW", "--out", "run", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert text.index("adamw ") < text.index("mine.py:AdamW ")
    assert "torch.optim.AdamW" in text


ATTENTION_CALL = RunConfig(workload="attention", mode="forward-backward", warmup=0, steps=1, device="cpu")


def compared(config: RunConfig, **options: Any) -> tuple[RunRecord, list[OwnCodeRow]]:
    record = run(config, in_process=True, **options)
    return record, OWN_CODE.of(record.results)


@pytest.mark.parametrize(
    ("field", "name", "same", "note"),
    [
        ("optimizer", "get_adamw_cls", "yes", ""),
        ("loss_function", "cross_entropy", "yes", ""),
        ("loss_function", "overflowing", "no", "inf or NaN where the reference is finite"),
        ("clip_function", "clip_gradients", "yes", ""),
        ("clip_function", "clip_each", "no", ""),
        ("data", "get_batch", "yes", ""),
        ("data", "unshifted", "no", ""),
        ("attention", "Flash", "yes", ""),
        ("attention", "WrongFlash", "no", ""),
        ("attention", "get_flashattention_autograd_function_pytorch", "yes", ""),
        ("attention", "run_scaled_dot_product_attention", "yes", ""),
    ],
)
def test_code_of_the_built_in_step_is_a_row_with_the_difference(
    source: Path, field: str, name: str, same: str, note: str
) -> None:
    options = {field: f"{source}:{name}", **({"clip": 1.0} if field == "clip_function" else {})}
    record, (row,) = compared(TINY, **options)
    assert (record.status, row["same"], row["note"]) == ("ok", same, note), (record.reason, row)
    assert row["option"] == FIELDS[field].option
    assert first_row(record.results, "ran")[f"{field}_sha256"]  # type: ignore[literal-required]
    assert (row["error"] is None) == bool(note)


@pytest.mark.parametrize("name", ["Flash", "run_scaled_dot_product_attention"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_call_takes_a_function_class_and_one_with_a_mask(source: Path, name: str, causal: bool) -> None:
    shape = AttentionShape(batch=1, heads=2, seq=32, d_head=16, causal=causal)
    _, (row,) = compared(ATTENTION_CALL, attention=f"{source}:{name}", shape=shape)
    assert row["same"] == "yes", row


def test_attention_that_ignores_the_mask_has_a_note(source: Path) -> None:
    shape = AttentionShape(batch=1, heads=2, seq=32, d_head=16, causal=True)
    _, (row,) = compared(ATTENTION_CALL, attention=f"{source}:Unmasked", shape=shape)
    assert (row["same"], row["reference"], row["note"]) == (
        "no", "causal naive in float64", "is_causal has no effect",
    )  # fmt: skip


def test_own_model_runs_with_other_own_code_and_is_compared_with_the_built_in(source: Path) -> None:
    own = {"loss_function": "cross_entropy", "clip_function": "clip_gradients", "data": "get_batch"}
    names = {field: f"{source}:{name}" for field, name in own.items()}
    record, rows = compared(TINY, workload=f"{source}:TransformerLM", clip=1.0, **names)
    assert record.status == "ok", record.reason
    assert {row["option"]: row["same"] for row in rows} == dict.fromkeys(
        (FIELDS[field].option for field in ("workload", *own)), "yes"
    )
    assert record.frame()["phase"].tolist()[:4] == ["input", "forward", "loss", "backward"]


def test_ranges_of_torch_for_a_gpu_work_in_a_cell_alone(source: Path) -> None:
    record, (row,) = compared(TINY, workload=f"{source}:WithRanges", warmup=0, steps=1)
    assert (record.status, row["same"]) == ("ok", "yes"), record.reason
    if torch.version.cuda is None:
        with pytest.raises(RuntimeError, match="NVTX functions not installed"):
            torch.cuda.nvtx.range_push("after the cell")


def test_own_model_may_return_losses_of_its_layers_after_the_logits(source: Path) -> None:
    record, (row,) = compared(TINY, workload=f"{source}:WithLosses", warmup=0, steps=1)
    assert (record.status, row["same"]) == ("ok", "yes"), record.reason


@pytest.mark.parametrize(
    ("name", "same", "note"), [("Headless", "no", ""), ("Renamed", "failed", "no parameter token_embeddings.weight")]
)
def test_model_that_differs_or_cannot_be_compared_is_a_row(source: Path, name: str, same: str, note: str) -> None:
    record, (row,) = compared(TINY.of_any_measurement, workload=f"{source}:{name}", warmup=0, steps=1)
    assert (record.status, row["same"]) == ("ok", same), record.reason
    assert note in row["note"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"loss_function": "of_each_token"}, "of_each_token returned a tensor of shape (8,); return a scalar tensor"),
        ({"loss_function": "number"}, "number is 3; name a function (logits, targets) that returns a scalar"),
        ({"clip_function": "number", "clip": 1.0}, "number is 3; name a function (parameters, max_norm)"),
        ({"data": "clip_each"}, "cannot be called with (dataset, batch_size, context_length, device); name a function"),
        ({"data": "transposed"}, "returned a tensor of shape (8, 1); return two of shape (1, 8)"),
        ({"attention": "WithoutMask"}, "define forward(ctx, q, k, v, is_causal=False)"),
        (
            {"loss_function": "cross_entropy", "parts": ("fused_cross_entropy",)},
            "part fused_cross_entropy computes the loss itself",
        ),
        ({"loss_function": "cross_entropy", "workload": "nothing_read"}, "does not use loss"),
    ],
)
def test_code_with_a_wrong_signature_is_refused_with_the_right_one(
    source: Path, options: dict[str, Any], reason: str
) -> None:
    with source.open("a") as file:
        file.write("\n\ndef nothing_read(config, device):\n    return nn.Linear(2, 2), torch.randn(3, 2)\n")
    named = {k: f"{source}:{v}" if isinstance(v, str) else v for k, v in options.items()}
    record, _ = compared(TINY if "workload" not in options else RunConfig(device="cpu", steps=1), **named)
    assert reason in (record.reason or ""), (record.status, record.reason)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--clip-function mine.py:clip_gradients", "--clip-function mine.py:clip_gradients has no effect while --clip"),
        ("--loss mine.py:cross_entropy --mode forward", "--loss has no effect in mode forward"),
        ("--data window", "unknown data 'window'; did you mean windows?"),
        ("--loss mine.py:cross_entropi", "mine.py has no 'cross_entropi'; did you mean cross_entropy?"),
        ("--clip mine.py:clip_gradients", "write --clip 1.0 --clip-function mine.py:clip_gradients"),
        ("--model mine.py:TransformerLM", "write --workload mine.py:TransformerLM"),
    ],
)
def test_option_without_effect_or_name_is_refused_before_anything_runs(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    monkeypatch.chdir(source.parent)
    assert main(["time", *words.split()]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.gpu
def test_step_of_own_code_only_runs_and_is_compared_on_a_gpu(source: Path) -> None:
    own = {
        "optimizer": "AdamW", "loss_function": "cross_entropy", "clip_function": "clip_gradients", "data": "get_batch",
        "attention": "Flash",
    }  # fmt: skip
    names = {field: f"{source}:{name}" for field, name in own.items()}
    for precision in ("fp32", "bf16"):
        record, rows = compared(TINY, device="cuda", precision=precision, clip=1.0, **names)
        assert record.status == "ok", record.reason
        same = {row["option"]: row["same"] for row in rows}
        assert same.pop(FIELDS["attention"].option) in ("yes", "in low precision"), rows
        assert same == {FIELDS[field].option: "yes" for field in own if field != "attention"}, rows
