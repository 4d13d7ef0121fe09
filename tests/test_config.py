"""Configs: presets, validation, keys, JSON and descriptions."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_systems.config import (
    PRESETS,
    AttentionShape,
    ConfigError,
    Mode,
    ModelConfig,
    Precision,
    RunConfig,
    describe,
    edition,
    grid,
    preset,
)

PUBLISHED = {  # d_model, d_ff, num_layers, num_heads
    "small": (768, 3072, 12, 12),
    "medium": (1024, 4096, 24, 16),
    "large": (1280, 5120, 36, 20),
    "xl": (1600, 6400, 48, 25),
    "xl-2025": (1600, 6400, 48, 25),
    "xl-2026": (2560, 10240, 32, 32),
    "2.7B": (2560, 10240, 32, 32),
    "10B": (4608, 12288, 50, 36),
    "8B": (4096, 11008, 34, 32),
}

configs = st.builds(
    RunConfig,
    model=st.sampled_from(sorted(PRESETS)).map(PRESETS.__getitem__),
    batch_size=st.integers(1, 64),
    mode=st.sampled_from([Mode.FORWARD, Mode.FORWARD_BACKWARD, Mode.TRAIN_STEP]),
    precision=st.sampled_from(Precision),
    steps=st.integers(3, 50),
    rounds=st.integers(1, 3),
    seed=st.integers(0, 5),
) | st.builds(
    RunConfig,
    workload=st.just("attention"),
    mode=st.sampled_from([Mode.FORWARD, Mode.BACKWARD]),
    shape=st.builds(AttentionShape, batch=st.integers(1, 9), seq=st.integers(1, 99), causal=st.booleans()),
)


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_are_the_published_sizes(name: str) -> None:
    p = PRESETS[name]
    assert (p.d_model, p.d_ff, p.num_layers, p.num_heads) == PUBLISHED[name]


def test_presets_have_published_vocabulary_and_context() -> None:
    assert (PRESETS["small"].vocab_size, PRESETS["small"].context_length) == (10_000, 512)
    assert (PRESETS["8B"].vocab_size, PRESETS["8B"].context_length) == (151_936, 32_768)
    assert (RunConfig().batch_size, RunConfig().tokens_per_sequence) == (4, 512)


def test_a_size_keeps_the_name_that_was_typed() -> None:
    assert [cell.model.label for cell in grid(size=["xl", "xl-2025", "xl-2026", "2.7B"])] == [
        "xl", "xl-2025", "xl-2026", "2.7B",
    ]  # fmt: skip


def test_edition_names_both_shapes_of_an_ambiguous_size() -> None:
    assert edition("xl") == (
        "size xl means xl-2025 (d_model 1600, d_ff 6400, 48 layers, 25 heads); the later shape of that name is "
        "xl-2026 (d_model 2560, d_ff 10240, 32 layers, 32 heads)"
    )
    assert [edition(name) for name in PRESETS if name != "xl"] == [None] * (len(PRESETS) - 1)


@given(configs)
def test_config_round_trips_json(config: RunConfig) -> None:
    again = RunConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert again.key() == config.key()


@given(configs, configs)
def test_keys_are_equal_only_for_equal_configs(a: RunConfig, b: RunConfig) -> None:
    assert (a.key() == b.key()) == (a == b)


@pytest.mark.parametrize(
    ("whole", "same"),
    [
        (RunConfig(warmup_s=1), RunConfig(warmup_s=1.0)),
        (
            RunConfig(strategy="ddp_bucketed", bucket_size_mb=25),
            RunConfig(strategy="ddp_bucketed", bucket_size_mb=25.0),
        ),
        (RunConfig(model=preset("tiny", rope_theta=500_000)), RunConfig(model=preset("tiny", rope_theta=5e5))),
    ],
)
def test_whole_number_and_equal_float_have_the_same_key(whole: RunConfig, same: RunConfig) -> None:
    assert whole == same
    assert whole.key() == same.key()


def test_key_of_the_default_config_is_unchanged() -> None:
    """A changed key would make every recorded sweep start over."""
    assert RunConfig().key() == "44136fa355b3678a"


def test_label_names_overridden_fields() -> None:
    assert preset("large", num_layers=32).label == "large+num_layers=32"
    assert preset("large", context_length=128).label == "large"
    assert ModelConfig(d_model=64, num_heads=4).label == "custom"


def test_grid_covers_run_model_and_shape_fields() -> None:
    cells = grid(size=["small", "xl"], context_length=[128, 256], attention=["naive", "flex"])
    assert len(cells) == 8
    assert [c.attention for c in cells[:2]] == ["naive", "flex"]
    combinations = {(size, length) for size in ("small", "xl") for length in (128, 256)}
    assert {(c.model.name, c.model.context_length) for c in cells} == combinations
    shaped = grid(RunConfig(workload="attention", mode=Mode.FORWARD), seq=[8, 16], causal=[True])
    assert [(c.shape.seq, c.shape.causal) for c in shaped if c.shape] == [(8, True), (16, True)]


def test_grid_refuses_unknown_axis() -> None:
    with pytest.raises(ConfigError, match="unknown axis 'contxt_length'; did you mean context_length"):
        grid(contxt_length=[1])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: grid(lr=[1]), "unknown axis 'lr'; choose among"),
        (lambda: preset("smal"), "unknown size 'smal'; did you mean small"),
        (lambda: preset("small", num_heads=7), "768 is not divisible by num_heads 7; choose num_heads among 4, 6, 8"),
        (lambda: preset("xl-2026", d_model=2570), "is not divisible by num_heads 32 of the preset; choose"),
        (lambda: ModelConfig(d_model=100), r"is not divisible by num_heads 12 \(the default\); choose"),
        (lambda: preset("small", num_layers=0), "num_layers is 0; it must be at least 1"),
        (
            lambda: preset("small", d_model=12, num_heads=12),
            "of the preset gives 1, but rotary embeddings need an even",
        ),
        (lambda: RunConfig(model="tiny"), r"model is 'tiny'; it must be a ModelConfig, such as preset\('small'\)"),  # type: ignore[arg-type]
        (lambda: RunConfig(batch_size=-1), "batch_size is -1; it must be at least 1"),
        (lambda: RunConfig(warmup=-1), "warmup is -1; it must not be negative"),
        (lambda: RunConfig(precision="bf61"), "unknown precision 'bf61'; did you mean bf16"),  # type: ignore[arg-type]
        (lambda: RunConfig(mode="fwd"), "unknown mode 'fwd'"),  # type: ignore[arg-type]
        (lambda: RunConfig(seq_len=513), "seq_len is 513, more than context_length 512 of the ModelConfig; lower"),
        (lambda: RunConfig(steps=2, rounds=3), "steps is 2, less than rounds 3; give at least one step for each round"),
        (lambda: RunConfig(mode=Mode.BACKWARD), "mode backward requires workload attention"),
        (
            lambda: RunConfig(workload="attention"),
            "mode is train-step, which workload attention does not have; set mode",
        ),
        (lambda: RunConfig(device="tpu"), "unknown device 'tpu'; use auto, cpu, cuda or cuda:N"),
        (lambda: AttentionShape(heads=6, heads_kv=4), "not a multiple of heads_kv 4; choose heads_kv among 1, 2, 3, 6"),
        (lambda: AttentionShape(seq=0), "seq is 0"),
        (lambda: RunConfig(batch_size=2.5), r"batch_size is 2\.5; it must be a whole number"),  # type: ignore[arg-type]
        (lambda: RunConfig(steps=True), "steps is True; it must be a whole number"),
        (lambda: RunConfig(steps="9"), "steps is '9'; it must be a whole number"),  # type: ignore[arg-type]
        (lambda: RunConfig(warmup=1.5), r"warmup is 1\.5; it must be a whole number"),  # type: ignore[arg-type]
        (lambda: RunConfig(warmup_s="1"), "warmup_s is '1'; it must be a finite number"),  # type: ignore[arg-type]
        (lambda: RunConfig(seed=0.5), r"seed is 0\.5; it must be a whole number"),  # type: ignore[arg-type]
        (lambda: RunConfig(seq_len=64.0), r"seq_len is 64\.0; it must be a whole number"),  # type: ignore[arg-type]
        (lambda: ModelConfig(d_model=768.0), r"d_model is 768\.0; it must be a whole number"),  # type: ignore[arg-type]
        (lambda: ModelConfig(rope_theta="x"), "rope_theta is 'x'; it must be a finite number"),  # type: ignore[arg-type]
        (lambda: ModelConfig(rope_theta=-1.0), r"rope_theta is -1\.0; it must be above 0"),
        (lambda: AttentionShape(seq=10.5), r"seq is 10\.5; it must be a whole number"),  # type: ignore[arg-type]
        (lambda: AttentionShape(heads_kv=True), "heads_kv is True; it must be a whole number"),
        (lambda: AttentionShape(batch=np.int64(8)), r"batch is a numpy\.int64; it must be a whole number of type int"),
        (lambda: RunConfig(warmup_s=10**400), "warmup_s is an int; it must be a finite number"),
        (lambda: RunConfig(seed=-(1 << 63)), r"seed is -9223372036854775808; it must be above -2\^63 and below"),
        (
            lambda: RunConfig.from_dict({"warm_up": 1}),
            "no field 'warm_up'; did you mean warmup",
        ),
        (
            lambda: RunConfig.from_dict({"colour": 1}),
            "no field 'colour'; leave it out, or upgrade cs-systems if a newer version wrote this configuration",
        ),
    ],
)
def test_invalid_values_are_refused_with_remedy(make: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()  # type: ignore[operator]


LARGE = RunConfig(model=preset("large", num_layers=32))
CALL = RunConfig(workload="attention", mode=Mode.FORWARD, shape=AttentionShape(2, 4, 256, 64, causal=True))
USER_WORKLOAD = RunConfig(workload="mine:step")


@pytest.mark.parametrize(
    ("config", "without", "text"),
    [
        (RunConfig(model=PRESETS["xl"]), (), "xl ctx 512 batch 4 · naive · fp32 · train-step"),
        (LARGE, (), "large+num_layers=32 ctx 512 batch 4 · naive · fp32 · train-step"),
        (LARGE, ("attention", "mode"), "large+num_layers=32 ctx 512 batch 4 · fp32"),
        (LARGE, ("model.num_layers", "batch_size"), "large ctx 512 · naive · fp32 · train-step"),
        (LARGE, ("model.name", "model.d_model"), "num_layers=32 ctx 512 batch 4 · naive · fp32 · train-step"),
        (LARGE, ("model.context_length",), "large+num_layers=32 batch 4 · naive · fp32 · train-step"),
        (LARGE, ("seq_len",), "large+num_layers=32 batch 4 · naive · fp32 · train-step"),
        (
            replace(LARGE, seq_len=64),
            ("model.context_length", "precision"),
            "large+num_layers=32 ctx 64 batch 4 · naive · train-step",
        ),
        (
            replace(LARGE, compile="default"),
            ("compile", "mode", "attention"),
            "large+num_layers=32 ctx 512 batch 4 · fp32",
        ),
        (CALL, (), "2×4×256×64 causal · naive · fp32 · forward"),
        (CALL, ("shape.seq", "shape.causal"), "batch 2 heads 4 d_head 64 · naive · fp32 · forward"),
        (
            CALL,
            ("shape.batch", "shape.heads", "shape.seq", "shape.d_head", "shape.causal"),
            "naive · fp32 · forward",
        ),
        (USER_WORKLOAD, (), "mine:step"),
        (replace(USER_WORKLOAD, batch_size=8, precision=Precision.BF16), (), "mine:step · batch 8 · bf16"),
        (replace(USER_WORKLOAD, model=preset("tiny")), (), "mine:step · tiny ctx 64"),
        (replace(USER_WORKLOAD, model=preset("small", num_layers=3)), (), "mine:step · num_layers=3"),
        (replace(USER_WORKLOAD, seq_len=64), (), "mine:step · ctx 64"),
        (replace(USER_WORKLOAD, seq_len=64), ("seq_len",), "mine:step"),
        (replace(USER_WORKLOAD, attention="flex"), ("workload",), "flex"),
        (replace(USER_WORKLOAD, workload_args=("width=64", "lr=3e-4")), (), "mine:step · width=64 lr=3e-4"),
    ],
)
def test_describe_omits_the_given_fields(config: RunConfig, without: tuple[str, ...], text: str) -> None:
    assert describe(config, without) == text


@pytest.mark.parametrize(
    ("precision", "strategy_args", "computes_in"),
    [
        ("fp32", ("compute_dtype=bf16",), "bf16"),
        ("bf16-pure", ("compute_dtype=fp16",), "fp16"),
        ("bf16", ("compute_dtype=fp16",), "bf16"),  # autocast decides
        ("fp32", ("comm_dtype=bf16",), "fp32"),
        ("tf32", ("compute_dtype=fp8",), "tf32"),  # wrapping the model refuses it
        ("tf32", (), "tf32"),
    ],
)
def test_compute_dtype_of_a_strategy_sets_the_precision(
    precision: str, strategy_args: tuple[str, ...], computes_in: str
) -> None:
    config = RunConfig(precision=Precision(precision), strategy="fsdp", world_size=2, strategy_args=strategy_args)
    assert config.computes_in == computes_in


def test_strategy_args_are_parsed_by_type() -> None:
    strategy_args = ("max_ctas=16", "high_priority=true", "comm_dtype=bf16")
    config = RunConfig(strategy="ddp_bucketed", world_size=2, strategy_args=strategy_args)
    assert config.strategy_options == {"max_ctas": 16, "high_priority": True, "comm_dtype": "bf16"}
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert "ddp_bucketed:max_ctas=16:high_priority=true:comm_dtype=bf16 · 2 ranks" in describe(config)
    with pytest.raises(ConfigError, match="strategy_args sets max_ctas twice; set it once"):
        RunConfig(strategy="ddp_bucketed", strategy_args=("max_ctas=1", "max_ctas=2"))
