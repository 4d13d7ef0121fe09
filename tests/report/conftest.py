"""Records like those of a real sweep, built from the package's dataclasses."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest

from cs_systems.config import AttentionShape, Mode, Precision, RunConfig, preset
from cs_systems.core.caveats import Caveat
from cs_systems.record import Environment, Measurement, RunRecord, Sample


@pytest.fixture(params=["page", "evil_page"])
def any_page(request: pytest.FixtureRequest) -> str:
    """Return a module's page, and its page with names that are HTML."""
    text: str = request.getfixturevalue(request.param)
    return text


H200 = Environment(
    cs_systems="0.1.0",
    code_version="3f2a9c51d0e7",
    git_commit="8af7d50",
    python="3.12.3",
    torch="2.11.0+cu130",
    triton="3.6.0",
    cuda="13.0",
    cudnn="9.15.1",
    platform="Linux-6.8 x86_64",
    cpu="Intel Xeon Platinum 8480C",
    cpu_threads=16,
    device="cuda:0",
    device_name="NVIDIA H200",
    compute_capability="9.0",
    driver="580.95.05",
    device_memory_bytes=150_000_000_000,
    sm_clock_hz=1.98e9,
    sm_clock_max_hz=1.98e9,
    power_w=412.0,
    temperature_c=47.0,
    throttle_reasons=(),
    other_processes=0,
    float32_matmul="ieee",
)
CEILINGS = {
    precision: {
        "peak_flops_per_s": tera * 1e12,
        "peak_bytes_per_s": None,
        "source": "NVIDIA H200 data sheet, SXM, dense",
    }
    for precision, tera in {
        Precision.FP32: 67.0,
        Precision.TF32: 494.5,
        Precision.BF16: 989.5,
        Precision.FP8: 1979.0,
    }.items()
}
MISSING = "flash_attn: the package is not installed: pip install cs-systems[flash-attn]"
UNSTABLE = Caveat("unstable", "p90 is 1.31 × p10 of the step", "raise --steps, or lock the clocks with nvidia-smi -lgc")
LAUNCH_BOUND = Caveat("launch-bound", "the device waited for the host in: forward", "try --compile reduce-overhead")
Build = Callable[..., RunRecord]
OVERHEAD_S = 20e-6
_SHARES = {"forward": 0.30, "loss": 0.01, "backward": 0.60, "optimizer": 0.09}


def samples(phases_s: dict[str, float], config: RunConfig) -> tuple[Sample, ...]:
    """Return steps with 1% noise; in warm-up the first one compiles and allocates, and the clock is low."""
    steps, rounds, warmup = config.steps, config.rounds, config.warmup
    rng = random.Random(repr((config.key(), phases_s)))
    made = []
    for index in range(warmup + steps):
        slow = {0: 9.0, 1: 1.6}.get(index, 1.0) if index < warmup else 1.0
        phases = {p: s * slow * rng.lognormvariate(0, 0.01) for p, s in phases_s.items()}
        made.append(
            Sample(
                round=0 if index < warmup else (index - warmup) * rounds // steps,
                warmup=index < warmup,
                wall_s=sum(phases.values()) + OVERHEAD_S,
                phases_s=phases,
                submit_s={p: 0.2 * s for p, s in phases_s.items()},
                lag_s={p: 0.7 * s for p, s in phases_s.items()},
                held_s=1e-3 if config.workload == "attention" else None,
                device_mallocs=40 if index == 0 and warmup else 0,
                compile_s=5 * sum(phases_s.values()) if index == 0 and warmup else 0.0,
                compiles=3 if index == 0 and warmup else 0,
                sm_clock_hz=1.2e9 if index < warmup - 3 else 1.98e9,
            )
        )
    return tuple(made)


def ok(config: RunConfig, step_s: float, flops: float, peak_bytes: int, **fields: Any) -> RunRecord:
    """Return a measured record with phases that divide `step_s` and the cost as in a training step."""
    names = {
        Mode.FORWARD: ["forward"],
        Mode.BACKWARD: ["backward"],
        Mode.FORWARD_BACKWARD: ["forward", "loss", "backward"],
        Mode.TRAIN_STEP: ["forward", "loss", "backward", "optimizer"],
    }[config.mode]
    if config.workload == "attention":
        names = [n for n in names if n != "loss"]
    whole = reduce(operator.add, (_SHARES[n] for n in names))  # `sum` rounds differently since Python 3.12
    phases = {n: step_s * _SHARES[n] / whole for n in names}
    credited = {"forward": flops / 3, "backward": flops * 2 / 3, "step": flops}
    tokens = config.batch_size * config.tokens_per_sequence if config.workload == "train_step" else None
    optimizer = "adamw_fused" if config.mode is Mode.TRAIN_STEP else None
    key = f"{config.key()}-{fields.get('repeat', 0)}"
    taken = samples(phases, config)
    return RunRecord(
        key=key,
        config=config.to_dict(),
        status="ok",
        environment=H200,
        measurement=Measurement("cuda_event", taken, 0.8, peak_bytes, int(peak_bytes * 1.1)),
        results={
            "cost": [
                {"phase": p, "model_flops": f, "hardware_flops": f * 1.1, "bytes": f / 200}
                for p, f in credited.items()
                if p in (*phases, "step")
            ],
            "ceiling": [{"precision": config.precision.value, **CEILINGS[config.precision]}],
            "ran": [
                {"attention": config.attention, "attention_version": None, "optimizer": optimizer, "tokens": tokens}
            ],
            "memory": [{"predicted_peak_bytes": int(peak_bytes * 0.95)}],
        },
        **fields,
    )


def failed(config: RunConfig, status: str, reason: str, predicted: int | None = None, **fields: Any) -> RunRecord:
    memory = {"memory": [{"predicted_peak_bytes": predicted}]} if predicted else {}
    return RunRecord(config.key(), config.to_dict(), status, reason=reason, environment=H200, results=memory, **fields)


def train_config(size: str, attention: str = "naive", context: int = 512, **fields: Any) -> RunConfig:
    return RunConfig(model=preset(size, context_length=context), attention=attention, **{"rounds": 5, **fields})


def attention_config(attention: str, seq: int, **fields: Any) -> RunConfig:
    shape = AttentionShape(4, 16, seq, 64, causal=True)
    return RunConfig(
        workload="attention",
        shape=shape,
        attention=attention,
        precision=Precision.BF16,
        **{"mode": Mode.FORWARD, **fields},
    )


@pytest.fixture(scope="session")
def train_records() -> list[RunRecord]:
    """Return records of sizes × contexts × backends of a training step; the largest does not fit."""
    made = []
    scale = {"small": 1.0, "medium": 3.2, "large": 7.5}
    for size, times in scale.items():
        for context in (256, 1024):
            for attention, speed in (("naive", 1.0), ("sdpa_flash", 0.8)):
                config = train_config(size, attention, context)
                if (size, context, attention) == ("large", 1024, "naive"):
                    reason = "CUDA out of memory: tried to allocate 3.91 GiB for the scores"
                    made.append(failed(config, "oom", reason, predicted=162_349_764_813))
                    continue
                step = 0.02 * times * context / 256 * speed
                record = ok(config, step, 0.5e12 * times * context / 256, int(3e9 * times * context / 256))
                doubts = (LAUNCH_BOUND,) if size == "small" and context == 256 else ()
                made.append(replace(record, warnings=doubts + ((UNSTABLE,) if size == "medium" else ())))
    return made


@pytest.fixture(scope="session")
def attention_records() -> list[RunRecord]:
    """Return records of backends over sequence lengths; naive runs out of memory and flash_attn is unavailable."""
    made = []
    for seq in (256, 1024, 4096, 16384):
        flops = 2 * 4 * 16 * seq * seq * 64
        for attention, rate in (("naive", 40e12), ("sdpa_flash", 450e12)):
            config = attention_config(attention, seq)
            if attention == "naive" and seq == 16384:
                made.append(
                    failed(config, "oom", "CUDA out of memory: tried to allocate 32 GiB", predicted=103_079_215_104)
                )
                continue
            peak = 4 * 16 * seq * 64 * 2 * 4 + (4 * 16 * seq * seq * 2 * 2 if attention == "naive" else 0)
            made.append(ok(config, 6e-6 + flops / rate, flops, peak))
        made.append(
            failed(
                attention_config("flash_attn", seq),
                "unavailable",
                MISSING,
            )
        )
    return made


@pytest.fixture(scope="session")
def broken_records() -> list[RunRecord]:
    """Return records of cells that failed in different ways, and one with a NaN sample."""
    config = train_config("small")
    poisoned = ok(train_config("medium"), 0.05, 1e13, 10**9)
    assert poisoned.measurement is not None
    first, *rest = poisoned.measurement.samples[-10:]
    nan = replace(first, wall_s=math.nan, phases_s=dict.fromkeys(first.phases_s, math.nan))
    return [
        failed(config, "error", "RuntimeError: <script>alert(1)</script> & | $x_1^2$ #set \\\n\x1b[31mred"),
        failed(train_config("large"), "timeout", "no step ended within 60 s: raise --timeout"),
        failed(train_config("xl"), "killed", "the worker was killed by SIGKILL: is the host out of memory?"),
        failed(train_config("2.7B"), "unavailable", "sdpa_flash needs fp16 or bf16: use --precision bf16"),
        replace(poisoned, measurement=replace(poisoned.measurement, samples=(nan, *rest))),
    ]


@pytest.fixture(scope="session")
def build() -> Build:
    """Return `build(config, step_s, flops, peak_bytes)`, which makes one measured record."""
    return ok
