"""Tests of the formulas for FLOPs and bytes, against direct counts and torch's counters."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cs_systems.config import PRESETS, AttentionShape, Mode, ModelConfig, Precision, preset
from cs_systems.formulas import cost
from cs_systems.formulas.cost import FULL_MATRIX, AttentionAlgorithm
from cs_systems.formulas.peaks import DATA_SHEETS, peak_bandwidth, peak_flops, peak_link
from cs_systems.measure.workloads import Cell

ODD = ModelConfig(d_model=48, d_ff=100, num_layers=3, num_heads=3, vocab_size=77, context_length=64)
TILED = AttentionAlgorithm(block_q=16, block_k=16, backward_matmuls=5)
MODES = (Mode.FORWARD, Mode.FORWARD_BACKWARD, Mode.TRAIN_STEP)


@pytest.mark.parametrize("name", ["tiny", "small", "2.7B", "8B"])
def test_parameter_count_matches_model(name: str) -> None:
    torch = pytest.importorskip("torch")
    from cs_systems.model import BasicTransformerLM

    config = PRESETS[name]
    with torch.device("meta"):
        model = BasicTransformerLM(config, attention=lambda q, k, v, **_: v)
    assert cost.parameter_count(config) == sum(p.numel() for p in model.parameters())
    assert cost.block_parameter_count(config) == sum(p.numel() for p in model.layers[0].parameters())


def test_parameters_by_component_sum_to_parameter_count() -> None:
    parts = cost.parameters_by_component(ODD)
    assert sum(parts.values()) == cost.parameter_count(ODD)
    assert parts["token_embeddings"] == parts["lm_head"] == 77 * 48
    assert parts["q_proj"] == 3 * 48 * 48
    assert parts["w2"] == 3 * 48 * 100
    assert parts["norms"] == 7 * 48


def test_attention_is_credited_with_twice_its_forward_in_backward_and_half_when_causal() -> None:
    """Forward has 4·B·S²·H·d, as in flash-attention's benchmark, which credits the fifth product of backward too."""
    shape = AttentionShape(batch=32, heads=32, seq=1024, d_head=64)
    full = cost.attention_cost(shape, Mode.FORWARD_BACKWARD, FULL_MATRIX, 2)
    assert full["forward"].model_flops == 4 * 32 * 1024**2 * 32 * 64
    assert full["backward"].model_flops == 2 * 4 * 32 * 1024**2 * 32 * 64
    causal = cost.attention_cost(replace(shape, causal=True), Mode.FORWARD_BACKWARD, FULL_MATRIX, 2)
    assert causal["forward"].model_flops == 4 * 32 * 1024**2 * 32 * 64 // 2
    assert causal["forward"].hardware_flops == full["forward"].hardware_flops, (
        "a full matrix computes masked scores too"
    )


@pytest.mark.parametrize(
    ("mode", "phases"),
    [
        (Mode.FORWARD, ["forward"]),
        (Mode.FORWARD_BACKWARD, ["forward", "loss", "backward"]),
        (Mode.TRAIN_STEP, ["forward", "loss", "backward", "optimizer"]),
    ],
)
def test_step_cost_has_phases_of_mode(mode: Mode, phases: list[str]) -> None:
    assert list(cost.step_cost(ODD, 2, 32, mode, FULL_MATRIX, Precision.FP32)) == phases


def test_model_flops_are_six_per_weight_and_token_plus_attention() -> None:
    """The rule of thumb is 6·N·T, plus 6·L·B·H·S²·d for causal attention."""
    config, batch, seq = preset("small"), 4, 512
    step = cost.step_cost(config, batch, seq, Mode.TRAIN_STEP, FULL_MATRIX, Precision.BF16)
    total = sum(phase.model_flops or 0 for phase in step.values())
    attention = 6 * config.num_layers * batch * config.num_heads * seq**2 * config.d_head
    assert total == 6 * cost.matmul_weights(config) * batch * seq + attention


@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from([1, 3, 16, 32, 64, None]),
    st.sampled_from([1, 3, 16, 32, 64, None]),
    st.booleans(),
    st.sampled_from(["upper_left", "lower_right"]),
    st.sampled_from([None, 1, 5, 40]),
)
@example(seq=2, seq_k=1, block_q=1, block_k=3, causal=True, align="upper_left", window=1)  # the last sees no key
def test_computed_scores_count_tiles_with_visible_keys(
    seq: int, seq_k: int, block_q: int | None, block_k: int | None, causal: bool, align: str, window: int | None
) -> None:
    window = window if causal else None
    shape = AttentionShape(1, 1, seq, 8, causal=causal, seq_k=seq_k, align=align, window=window)
    offset = seq_k - seq if align == "lower_right" else 0
    rows, columns = block_q or seq, block_k or seq_k

    def is_seen(q: int, k: int) -> bool:
        return not causal or (k <= q + offset and (window is None or k > q + offset - window))

    visited = {(q // rows, k // columns) for q in range(seq) for k in range(seq_k) if is_seen(q, k)}
    algorithm = AttentionAlgorithm(block_q, block_k)
    assert cost.computed_scores(shape, algorithm) == len(visited) * rows * columns


def test_window_is_credited_with_its_visible_scores() -> None:
    for window in (1, 16, 100, 512):
        shape = AttentionShape(1, 1, 512, 8, causal=True, window=window)
        seen = sum(min(window, q + 1) for q in range(512))
        assert cost.credited_attention_flops(shape) == 4 * 8 * (2 * seen - window) // 2
    assert cost.credited_attention_flops(shape) == cost.credited_attention_flops(replace(shape, window=None))


@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.booleans(),
    st.sampled_from(["upper_left", "lower_right"]),
    st.sampled_from([None, 1, 5, 40]),
)
def test_credited_scores_are_the_visible_ones_with_half_of_the_diagonal(
    seq: int, seq_k: int, causal: bool, align: str, window: int | None
) -> None:
    """The area of the matrix that the mask shows, summed over quarters of each element, and at most what is shown."""
    window = window if causal else None
    shape = AttentionShape(1, 1, seq, 1, causal=causal, seq_k=seq_k, align=align, window=window)
    offset = seq_k - seq if align == "lower_right" else 0
    area, shown = 0.0, 0
    for q in range(seq):
        for k in range(seq_k) if causal else ():
            above, below = q + offset - k, window is None or k > q + offset - window
            shown += above >= 0 and below
            area += 1.0 if above > 0 else 0.5 if above == 0 else 0.0
            if window is not None:
                area -= 1.0 if above - window > 0 else 0.5 if above == window else 0.0
    area, shown = (area, shown) if causal else (seq * seq_k, seq * seq_k)
    assert cost.credited_attention_flops(shape) == 4 * area
    assert area <= shown


def test_hardware_flops_include_padding_and_skip_masked_tiles() -> None:
    shape = AttentionShape(batch=2, heads=4, seq=4096, d_head=80, causal=True)
    algorithm = AttentionAlgorithm(block_q=64, block_k=64, d_head=128, backward_matmuls=5)
    phases = cost.attention_cost(shape, Mode.FORWARD_BACKWARD, algorithm, 2)
    scores = 64 * 65 // 2 * 64 * 64
    assert phases["forward"].hardware_flops == 2 * 2 * 2 * 4 * scores * 128
    assert phases["backward"].hardware_flops == 5 * 2 * 2 * 4 * scores * 128


def test_bytes_count_each_operand_once_per_phase() -> None:
    shape = AttentionShape(batch=2, heads=8, seq=100, d_head=16, heads_kv=2, seq_k=50)
    q, k, scores = 2 * 8 * 100 * 16, 2 * 2 * 50 * 16, 2 * 8 * 100 * 50
    assert cost.attention_cost(shape, Mode.FORWARD, TILED, 2)["forward"].bytes == 2 * (2 * q + 2 * k)
    assert cost.attention_cost(shape, Mode.FORWARD, FULL_MATRIX, 2)["forward"].bytes == 2 * (2 * q + 2 * k + 2 * scores)
    optimizer = cost.step_cost(ODD, 2, 32, Mode.TRAIN_STEP, TILED, Precision.BF16)["optimizer"]
    assert optimizer.bytes == 4 * 7 * cost.parameter_count(ODD), "moments stay fp32 under autocast"
    assert (optimizer.model_flops, optimizer.hardware_flops) == (0, 0)


@pytest.mark.parametrize(
    "checkpoint", ["none", "every:1", "selective:attention", "selective:matmul", "selective:products"]
)
@pytest.mark.parametrize("algorithm", [FULL_MATRIX, TILED], ids=["full", "tiled"])
def test_score_flops_count_only_score_matrix_products(algorithm: AttentionAlgorithm, checkpoint: str) -> None:
    flat = replace(algorithm, block_q=32, block_k=32) if algorithm.block_q else algorithm  # one tile at either length
    args = (Mode.TRAIN_STEP, flat, Precision.FP32, checkpoint)
    once, twice = cost.step_cost(ODD, 2, 32, *args), cost.step_cost(ODD, 4, 32, *args)
    bare = cost.step_cost(ODD, 2, 32, Mode.TRAIN_STEP, replace(flat, backward_matmuls=0), Precision.FP32)
    product = ODD.num_layers * cost.score_product_flops(AttentionShape(2, 3, 32, 16, causal=True), flat)
    again = 0 if checkpoint in ("none", "selective:attention", "selective:products") else 2 * product
    assert once["forward"].score_flops == 2 * product
    assert once["backward"].score_flops == flat.backward_matmuls * product + again
    assert bare["backward"].score_flops == 0
    for phase, whole in once.items():
        assert 2 * (whole.score_flops or 0) == twice[phase].score_flops
        assert (whole.score_flops or 0) <= (whole.hardware_flops or 0)
        assert (whole.score_bytes or 0) <= (whole.bytes or 0)
    call = cost.attention_cost(AttentionShape(2, 3, 32, 16), Mode.FORWARD_BACKWARD, flat, 4)
    assert all((c.score_flops, c.score_bytes) == (c.hardware_flops, c.bytes) for c in call.values())


@pytest.mark.parametrize("config", [PRESETS["tiny"], ODD, PRESETS["8B"]], ids=["tiny", "odd", "8B"])
def test_hardware_flops_match_torch_flop_counter(config: ModelConfig) -> None:
    """FlopCounterMode counts the matrix products on the meta device, where nothing is computed."""
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    from cs_systems.model import BasicTransformerLM

    batch, seq = 2, 37
    with torch.device("meta"):
        model = BasicTransformerLM(config, attention=_full_matrix_attention)
        tokens = torch.zeros(batch, seq, dtype=torch.int64)
    expected = cost.step_cost(config, batch, seq, Mode.FORWARD_BACKWARD, FULL_MATRIX, Precision.FP32)
    with FlopCounterMode(display=False) as counter:
        logits = model(tokens)
    assert counter.get_total_flops() == expected["forward"].hardware_flops
    with FlopCounterMode(display=False) as counter:
        logits.sum().backward()
    assert counter.get_total_flops() == expected["backward"].hardware_flops


def test_flops_of_the_last_layer_lie_in_the_loss_with_fused_cross_entropy() -> None:
    pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    from cs_systems.config import RunConfig
    from cs_systems.machine.device import resolve
    from cs_systems.measure.workloads.train_step import TrainStep

    config = RunConfig(
        model=replace(PRESETS["tiny"], context_length=37), batch_size=2, device="cpu", mode="forward-backward",  # type: ignore[arg-type]
        parts=("fused_cross_entropy",),
    )  # fmt: skip
    workload = TrainStep(Cell(config), resolve("cpu"))
    predicted = workload.cost()
    assert predicted is not None
    counted = {}
    workload.prepare()
    for phase, run in workload.step():
        with FlopCounterMode(display=False) as counter:
            run()
        counted[phase] = counter.get_total_flops()
    assert counted == {phase: cost.hardware_flops for phase, cost in predicted.items()}
    plain = TrainStep(Cell(replace(config, parts=())), resolve("cpu")).cost()
    assert plain is not None
    assert cost.total(predicted.values()).model_flops == cost.total(plain.values()).model_flops


def _full_matrix_attention(q, k, v, **_):  # type: ignore[no-untyped-def]
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H200", Precision.BF16, 989.5),
        ("NVIDIA H200", Precision.BF16_PURE, 989.5),
        ("NVIDIA H200", Precision.TF32, 494.5),
        ("NVIDIA H200", Precision.FP32, 67),
        ("NVIDIA H200", "fp8", 1979),
        ("NVIDIA A100-SXM4-80GB", Precision.FP16, 312),
        ("NVIDIA GeForce RTX 4090", Precision.BF16, 165.2),
        ("Tesla T4", Precision.FP16, 65),
    ],
)
def test_peak_flops_are_dense_rates_of_data_sheets(name: str, precision: Precision, tflops: float) -> None:
    peak = peak_flops(name, precision)
    assert peak is not None
    assert peak.per_s == pytest.approx(tflops * 1e12)
    assert "NVIDIA" in peak.source


@pytest.mark.parametrize(
    ("name", "gb_per_s"),
    [("NVIDIA H200", 450), ("NVIDIA H100 80GB HBM3", 450), ("NVIDIA A100-SXM4-80GB", 300), ("NVIDIA B200", 900)],
)
def test_peak_link_is_half_of_bidirectional_data_sheet_rate(name: str, gb_per_s: float) -> None:
    link = peak_link(name)
    assert link is not None
    assert link.per_s == pytest.approx(gb_per_s * 1e9)
    assert link.source.endswith("NVLink, one direction")


@pytest.mark.parametrize("name", ["NVIDIA H200 NVL", "NVIDIA A100 80GB PCIe", "NVIDIA GeForce RTX 4090", "AMD EPYC"])
def test_peak_link_is_unknown_without_certain_nvlink(name: str) -> None:
    assert peak_link(name) is None


def test_peak_of_unlisted_device_or_precision_is_unknown() -> None:
    for name in ("AMD EPYC 7B13", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A10G", "NVIDIA H200 MIG 1g.18gb", ""):
        assert peak_flops(name, Precision.FP32) is None
        assert peak_bandwidth(name) is None
    assert peak_flops("Tesla T4", Precision.BF16) is None, "Turing has no bf16 tensor cores"
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp8") is None


def test_data_sheets_list_devices_once_with_faster_narrow_types() -> None:
    names = [name for sheet in DATA_SHEETS for name in sheet.names]
    assert len(names) == len(set(names))
    for name in names:
        rates = [peak_flops(name, p) for p in ("fp32", "tf32", "bf16", "fp8")]
        known = [rate.per_s for rate in rates if rate]
        assert known == sorted(known)
        bandwidth = peak_bandwidth(name)
        assert bandwidth is not None
        assert 1e11 < bandwidth.per_s < 1e13
