"""Tests of predicted memory against the bytes that PyTorch keeps alive after each operation on the CPU."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cs_systems.config import AttentionShape, Mode, ModelConfig, Precision, RunConfig, preset
from cs_systems.formulas.cost import FULL_MATRIX, AttentionAlgorithm
from cs_systems.formulas.memory.allocator import CUBLAS_WORKSPACE_BYTES
from cs_systems.formulas.memory.attention import attention_memory
from cs_systems.formulas.memory.model import phase_memory, step_memory
from cs_systems.machine.device import Device
from cs_systems.measure.workloads import Cell
from cs_systems.measure.workloads.train_step import TrainStep
from cs_systems.model import BasicTransformerLM
from cs_systems.model.attention import naive, sdpa_flash
from cs_systems.model.training.checkpointing import apply_checkpointing
from cs_systems.model.training.losses import cross_entropy
from cs_systems.model.training.optimizers import make_optimizer

MIB = 2**20
TILED = AttentionAlgorithm(block_q=32, block_k=32, backward_matmuls=5)
ALGORITHMS = {"naive": FULL_MATRIX, "sdpa_flash": TILED}
BACKENDS = {"naive": naive.BACKEND, "sdpa_flash": sdpa_flash.BACKEND}
# "short" has more gradients than activations, and "long" has more attention scores than everything else.
SIZES = {
    "wide": (ModelConfig("wide", 64, 192, 3, 4, 500, 64), 4, 48),
    "long": (ModelConfig("long", 60, 160, 4, 2, 300, 200), 2, 199),
    "short": (ModelConfig("short", 96, 320, 2, 3, 1300, 48), 1, 7),
}


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts the live bytes of storages made under it, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, int] = {}  # address → bytes
        self.now = self.peak = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard costs as much as an operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(tensor, Tensor):
                self.add(tensor)
        self.peak = max(self.peak, self.now)
        return out

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.storages:
            self.storages[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            weakref.finalize(storage, self.freed, storage._cdata).atexit = False

    def freed(self, key: int) -> None:
        self.now -= self.storages.pop(key)


def measured_step(
    config: RunConfig, attention: Callable[..., Tensor], loss_of: Callable[[Tensor, Tensor], Tensor] = cross_entropy
) -> int:
    """Return the peak of one step; a train-step is the second one, when the optimizer has state."""
    model = BasicTransformerLM(config.model, attention)
    apply_checkpointing(model, config.checkpoint)
    with LiveBytes() as live:
        for tensor in (*model.parameters(), *model.buffers()):
            live.add(tensor)
        tokens = torch.zeros(config.batch_size, config.tokens_per_sequence, dtype=torch.int64)
        targets = tokens.clone()
        if config.precision is Precision.BF16_PURE:
            for parameter in model.parameters():
                parameter.data = parameter.data.bfloat16()
        trains = config.mode is Mode.TRAIN_STEP
        optimizer = make_optimizer("adamw_fused", model.parameters()) if trains else None
        logits = loss = None
        for _ in range(2 if optimizer else 1):
            logits = loss = None
            model.zero_grad(set_to_none=True)
            live.peak = 0
            autocast = torch.autocast("cpu", torch.bfloat16, enabled=config.precision is Precision.BF16)
            with torch.set_grad_enabled(config.keep_graph or config.mode is not Mode.FORWARD), autocast:
                logits = model(tokens)
            if config.mode is not Mode.FORWARD:
                with autocast:
                    loss = loss_of(logits, targets)
                loss.backward()
            if optimizer:
                optimizer.step()
        assert logits is not None
    return live.peak


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.FORWARD_BACKWARD, Mode.TRAIN_STEP])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16, Precision.BF16_PURE])
@pytest.mark.parametrize("attention", ALGORITHMS)
@pytest.mark.parametrize("size", SIZES)
def test_predicted_step_peak_matches_live_bytes(size: str, attention: str, precision: Precision, mode: Mode) -> None:
    model, batch, seq = SIZES[size]
    config = RunConfig(
        model=model, batch_size=batch, seq_len=seq, precision=precision, mode=mode, attention=attention, device="cpu"
    )
    predicted = step_memory(config, ALGORITHMS[attention])
    assert predicted.peak_bytes == pytest.approx(measured_step(config, BACKENDS[attention]), rel=0.02)
    assert predicted.components == predicted.instants[predicted.peak_at]


DEEP = {
    "wide": (ModelConfig("wide", 64, 192, 6, 4, 500, 64), 4, 48),
    "long": (ModelConfig("long", 60, 160, 8, 2, 100, 200), 2, 199),
    "short": (ModelConfig("short", 96, 320, 5, 3, 300, 48), 1, 7),
}


# Every form with each algorithm for one size and for bf16, one form of each kind for the other sizes.
SHORT_FORMS = [*((name, form) for name in ALGORITHMS for form in ("every:3", "selective:matmul"))]
FORMS = [
    *SHORT_FORMS,
    *((name, form) for name in ALGORITHMS for form in ("every:1", "blocks:0,2-4", "nested:4:2")),
    ("sdpa_flash", "selective:attention"),
    ("sdpa_flash", "selective:products"),
]


@pytest.mark.parametrize(
    ("size", "precision", "attention", "checkpoint"),
    [
        *(("wide", Precision.FP32, *form) for form in FORMS),
        *(("wide", Precision.BF16, *form) for form in FORMS),
        *((size, Precision.FP32, *form) for size in ("long", "short") for form in SHORT_FORMS),
    ],
)
def test_predicted_step_peak_matches_live_bytes_under_checkpoints(
    size: str, precision: Precision, attention: str, checkpoint: str
) -> None:
    model, batch, seq = DEEP[size]
    config = RunConfig(
        model=model, batch_size=batch, seq_len=seq, precision=precision, checkpoint=checkpoint, device="cpu"
    )
    predicted = step_memory(config, ALGORITHMS[attention])
    assert predicted.peak_bytes == pytest.approx(measured_step(config, BACKENDS[attention]), rel=0.02)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize(
    ("mode", "checkpoint"), [(Mode.FORWARD, "none"), (Mode.TRAIN_STEP, "none"), (Mode.TRAIN_STEP, "every:2")]
)
def test_predicted_phase_memory_matches_live_bytes(mode: Mode, checkpoint: str, precision: Precision) -> None:
    model, batch, seq = DEEP["wide"]
    config = RunConfig(
        model=model, batch_size=batch, seq_len=seq, mode=mode, precision=precision, checkpoint=checkpoint, device="cpu"
    )
    with LiveBytes() as live:
        workload = TrainStep(Cell(config), Device(torch.device("cpu")))
        found = [(live.now, live.now)]
        for _ in range(2):
            workload.prepare()
            for _, run in workload.step():
                live.peak = 0
                run()
                found.append((live.now, live.peak))
    for phase, (alive, peak) in zip(phase_memory(config, FULL_MATRIX), found, strict=True):
        assert phase.allocated_bytes == pytest.approx(alive, rel=0.03), (phase.step, phase.phase)
        assert phase.peak_bytes == pytest.approx(peak, rel=0.03), (phase.step, phase.phase)


def test_predicted_forward_peak_matches_live_bytes_with_kept_graph() -> None:
    model, batch, seq = SIZES["long"]
    config = RunConfig(model=model, batch_size=batch, seq_len=seq, mode=Mode.FORWARD, keep_graph=True, device="cpu")
    assert step_memory(config, FULL_MATRIX).peak_bytes == pytest.approx(measured_step(config, naive.BACKEND), rel=0.02)


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.FORWARD_BACKWARD])
@pytest.mark.parametrize("size", SIZES)
def test_predicted_peak_includes_fp32_softmax_of_cuda_autocast(size: str, mode: Mode) -> None:
    """CUDA's autocast runs softmax and nll_loss in fp32, and log_softmax in bf16; the CPU's does the opposite.

    The casts are explicit here, so that the CPU keeps the same tensors as CUDA.
    """

    def attention(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        weights = torch.softmax(scores.float(), dim=-1)
        return weights @ v

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        log_softmax = torch.log_softmax(logits.flatten(0, -2), -1, dtype=torch.bfloat16)
        return torch.nn.functional.nll_loss(log_softmax.float(), targets.flatten())

    model, batch, seq = SIZES[size]
    config = RunConfig(model=model, batch_size=batch, seq_len=seq, precision=Precision.BF16, mode=mode, device="cuda")
    predicted = step_memory(config, FULL_MATRIX)
    tensors = predicted.peak_bytes - predicted.components["cublas_workspaces"] - predicted.components["rounding"]
    assert tensors == pytest.approx(measured_step(config, attention, loss_of), rel=0.02)


def test_predicted_activations_match_tensors_saved_for_backward() -> None:
    """At the end of forward, autograd holds activations, scores, weight copies and log-softmax."""
    model, batch, seq = SIZES["wide"]
    for precision in (Precision.FP32, Precision.BF16):
        config = RunConfig(model=model, batch_size=batch, seq_len=seq, precision=precision, device="cpu")
        net = BasicTransformerLM(model, naive.BACKEND)
        model_storages = {t.untyped_storage()._cdata for t in (*net.parameters(), *net.buffers())}
        saved: dict[int, Any] = {}

        def keep(tensor: Tensor, saved: dict[int, Any] = saved, model_storages: set[int] = model_storages) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in model_storages:
                saved[storage._cdata] = storage
            return tensor

        autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision is Precision.BF16)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), autocast:
            net(torch.zeros(batch, seq, dtype=torch.int64)).sum()
        at_end = step_memory(config, FULL_MATRIX).instants["forward: head"]
        expected = at_end["activations"] + at_end["attention_scores"] + at_end["weight_copies"]
        assert sum(s.nbytes() for s in saved.values()) == pytest.approx(expected, rel=0.02)


def test_predicted_peak_is_just_above_parameters_gradients_and_moments() -> None:
    config = RunConfig(model=preset("large"), batch_size=1, seq_len=16, device="cuda")
    predicted = step_memory(config, FULL_MATRIX)
    floor = 4 * 4 * sum(p.numel() for p in _meta_model(config.model).parameters())
    assert floor < predicted.peak_bytes < 1.05 * floor
    assert predicted.largest_allocation == ("token_embeddings.weight", 10_000 * 1280 * 4)


@pytest.mark.parametrize(("precision", "element"), [(Precision.FP32, 4), (Precision.BF16, 4), (Precision.BF16_PURE, 2)])
def test_largest_allocation_of_long_context_is_attention_scores(precision: Precision, element: int) -> None:
    config = RunConfig(model=preset("small", context_length=4096), precision=precision, device="cuda")
    assert step_memory(config, FULL_MATRIX).largest_allocation == ("attention scores", 4 * 12 * 4096**2 * element)
    assert step_memory(config, TILED).largest_allocation[0] == "logits"


def _meta_model(model: ModelConfig) -> torch.nn.Module:
    with torch.device("meta"):
        return BasicTransformerLM(model, naive.BACKEND)


def measured_attention(shape: AttentionShape, mode: Mode, attention: Callable[..., Tensor], packed: bool) -> int:
    batch, heads, d = shape.batch, shape.heads, shape.d_head
    device = "meta" if attention is naive.BACKEND else "cpu"

    def new(*size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.float16, device=device).requires_grad_()

    with LiveBytes() as live:
        if packed:
            inputs = [new(batch, shape.seq, 3, heads, d)]
            q, k, v = (t.transpose(1, 2) for t in inputs[0].unbind(2))
        else:
            keys = (batch, shape.kv_heads, shape.key_length, d)
            q, k, v = inputs = [new(batch, heads, shape.seq, d), new(*keys), new(*keys)]
        with torch.set_grad_enabled(mode is not Mode.FORWARD):
            out = attention(q, k, v, causal=shape.causal)
        if mode is not Mode.FORWARD:
            torch.autograd.grad(out, inputs, torch.zeros_like(out), retain_graph=mode is Mode.BACKWARD)
    return live.peak


@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.BACKWARD, Mode.FORWARD_BACKWARD])
@pytest.mark.parametrize(
    ("attention", "shape"),
    [
        ("naive", AttentionShape(32, 32, 1024, 64)),
        ("naive", AttentionShape(2, 3, 200, 16, causal=True)),
        ("sdpa_flash", AttentionShape(4, 4, 192, 64)),
        ("sdpa_flash", AttentionShape(2, 3, 199, 16, causal=True)),
    ],
)
def test_predicted_attention_peak_matches_live_bytes(
    attention: str, shape: AttentionShape, mode: Mode, packed: bool
) -> None:
    predicted = attention_memory(shape, mode, 2, ALGORITHMS[attention], packed=packed)
    assert predicted.peak_bytes == pytest.approx(measured_attention(shape, mode, BACKENDS[attention], packed), rel=0.02)


def test_cublas_workspaces_count_only_for_full_matrix_on_cuda() -> None:
    shape = AttentionShape(8, 1, 1024, 16)

    def peak(algorithm: AttentionAlgorithm, mode: Mode, *, cuda: bool) -> int:
        return attention_memory(shape, mode, 4, algorithm, cuda=cuda).peak_bytes

    for mode, threads in ((Mode.FORWARD, 1), (Mode.BACKWARD, 2), (Mode.FORWARD_BACKWARD, 2)):
        beside = peak(FULL_MATRIX, mode, cuda=True) - peak(FULL_MATRIX, mode, cuda=False)
        assert beside == threads * CUBLAS_WORKSPACE_BYTES
        assert peak(TILED, mode, cuda=True) == peak(TILED, mode, cuda=False)


@pytest.mark.parametrize("shape", [AttentionShape(2, 4, 100, 16, seq_k=60), AttentionShape(2, 4, 200, 16, heads_kv=2)])
def test_predicted_attention_peak_matches_live_bytes_with_other_keys(shape: AttentionShape) -> None:
    predicted = attention_memory(shape, Mode.FORWARD_BACKWARD, 2, FULL_MATRIX)
    assert predicted.peak_bytes == pytest.approx(
        measured_attention(shape, Mode.FORWARD_BACKWARD, naive.BACKEND, packed=False), rel=0.02
    )


def test_attention_peak_matches_published_sample_run() -> None:
    """B32 S1024 H32 E2048 fp16 took 1288.0 MB with FlashAttention-2; a full matrix takes 2 GiB."""
    shape = AttentionShape(32, 32, 1024, 64)
    flash = AttentionAlgorithm(128, 128, backward_matmuls=5, dq_accumulator_bytes=4)
    assert attention_memory(shape, Mode.FORWARD_BACKWARD, 2, flash).peak_bytes == 1288 * MIB
    full = attention_memory(shape, Mode.FORWARD_BACKWARD, 2, FULL_MATRIX, packed=True)
    assert full.peak_bytes == (3 * 2048 + 1024) * MIB
    assert full.largest_allocation == ("attention scores", 2048 * MIB)


def test_flash_peak_grows_linearly_and_full_matrix_peak_quadratically() -> None:
    def peak(seq: int, algorithm: AttentionAlgorithm) -> int:
        return attention_memory(AttentionShape(1, 16, seq, 64), Mode.FORWARD_BACKWARD, 2, algorithm).peak_bytes

    assert peak(65_536, TILED) == 16 * peak(4096, TILED)
    assert peak(65_536, FULL_MATRIX) > 200 * peak(4096, FULL_MATRIX)
