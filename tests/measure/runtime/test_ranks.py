"""Tests of cells on N ranks: started by torch's launcher, measured together, one record each."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from cs_systems import run, sweep
from cs_systems.config import PRESETS, ConfigError, Mode, RunConfig
from cs_systems.measure.runtime.sweep import check
from cs_systems.record import RunRecord
from tests.measure.runtime.test_survival import WORKLOADS

TINY = RunConfig(model=PRESETS["tiny"], batch_size=1, device="cpu", warmup=1, steps=3)
CELLS = {
    "ddp_flat": replace(TINY, strategy="ddp_flat", world_size=2),
    "composed": replace(TINY, strategy="ddp_bucketed+zero1", world_size=2, bucket_size_mb=0.1, warmup_s=0.05),
    "tensor parallel": replace(TINY, strategy="tp", world_size=2),
    "two dimensions": replace(TINY, strategy="fsdp+tp", world_size=2, tp_degree=2),
    "sharded": replace(TINY, strategy="fsdp", world_size=2, precision="bf16"),
    "sharded, in fp8": replace(TINY, strategy="fsdp", world_size=2, precision="fp8", seq_len=16),  # slow on a CPU
    "given compute dtype": replace(TINY, strategy="fsdp", world_size=2, strategy_args=("compute_dtype=bf16",)),
    "narrowed gradients": replace(
        TINY, strategy="ddp_bucketed+zero1", world_size=2, strategy_args=("comm_dtype=bf16",)
    ),
    "sharded, loss scaled": replace(TINY, strategy="fsdp", world_size=2, precision="fp16"),
    "fp16 in shards": replace(TINY, strategy="zero1_flat", world_size=2, precision="fp16"),
    "any workload": RunConfig(workload=f"{WORKLOADS}:fine", device="cpu", warmup=1, steps=3, world_size=2),
    "no optimizer": replace(TINY, strategy="ddp_flat+zero1", world_size=2, mode=Mode.FORWARD_BACKWARD),
    "forward twice": replace(TINY, strategy="tp", world_size=2, checkpoint="every:1"),
    "one rank": replace(TINY, strategy="ddp_flat"),
}


@pytest.fixture(scope="module")
def records() -> dict[str, RunRecord]:
    found = list(sweep(list(CELLS.values())))
    return dict(zip(CELLS, found, strict=True))


@pytest.mark.parametrize("name", sorted(CELLS))
def test_each_distributed_cell_gives_one_record(records: dict[str, RunRecord], name: str) -> None:
    record = records[name]
    assert (record.status, record.reason) == ("ok", None)
    assert record.run_config == CELLS[name]
    if record.config["workload"] == "train_step":
        flops = {row["phase"]: row["model_flops"] for row in record.results["cost"]}
        assert flops["backward"] == 2 * flops["forward"]
        assert flops["step"] > 0, "otherwise MFU is unknown"
    assert record.measurement is not None
    assert len(record.measurement.timed) == 3


def test_gradient_synchronization_is_a_phase(records: dict[str, RunRecord]) -> None:
    phases = ("forward", "loss", "backward", "synchronize", "optimizer")
    assert [m.phase_names() for name in ("ddp_flat", "one rank") if (m := records[name].measurement)] == [phases] * 2


def test_record_has_rows_of_each_rank(records: dict[str, RunRecord]) -> None:
    record = records["ddp_flat"]
    phases = ["forward", "loss", "backward", "synchronize", "optimizer", "step"]
    rows = record.results["ranks"]
    assert [(row["rank"], row["phase"]) for row in rows] == [(rank, p) for rank in (0, 1) for p in phases]
    assert record.measurement is not None
    medians = [row["median_s"] for row in rows if row["phase"] == "step"]
    assert max(medians) <= 1.01 * max(record.measurement.durations_s("step"))
    (ran,), (divided,) = record.results["ran"], records["tensor parallel"].results["ran"]
    assert (ran["tokens"], ran["world_tokens"]) == (64, 128)
    assert (divided["tokens"], divided["world_tokens"]) == (64, 64)
    whole, part = (records[name].results["cost"][-1]["model_flops"] for name in ("ddp_flat", "tensor parallel"))
    assert whole == 2 * part


@pytest.mark.parametrize("name", ["ddp_flat", "composed", "sharded"])
def test_phases_of_a_sample_add_up_to_its_step(records: dict[str, RunRecord], name: str) -> None:
    """The process may lose its core between two phases of one sample, so the median of all counts."""
    measurement = records[name].measurement
    assert measurement is not None
    assert median(sum(s.phases_s.values()) / s.wall_s for s in measurement.samples) == pytest.approx(1, rel=0.01)


def test_sharded_parameters_are_sent_in_the_autocast_dtype(records: dict[str, RunRecord]) -> None:
    (sent,) = records["sharded"].results["sent"]
    assert sent["sent_bytes"] == pytest.approx(sent["formula_sent_bytes"], rel=0.03)
    (whole,) = records["ddp_flat"].results["sent"]
    (scaled,) = records["sharded, loss scaled"].results["sent"]
    assert scaled["collectives"] == sent["collectives"] + 1, "the ranks agree on which steps overflowed"
    (in_fp8,) = records["sharded, in fp8"].results["sent"]
    assert in_fp8 == sent, "fp8 is made of bf16 weights"
    # Sharding sends 3 Ψ elements of 2 bytes, less one all-gather; replication sends 2 Ψ elements of 4 bytes.
    assert sent["formula_sent_bytes"] < 3 / 4 * whole["formula_sent_bytes"]


def test_compute_dtype_of_strategy_counts_like_autocast(records: dict[str, RunRecord]) -> None:
    """Compare bytes moved and the predicted peak; a comm_dtype applies to its own strategy of a composition."""
    given, autocast = (records[name].results for name in ("given compute dtype", "sharded"))
    assert [row["bytes"] for row in given["cost"]] == [row["bytes"] for row in autocast["cost"]]
    assert given["memory"][0]["predicted_peak_bytes"] == autocast["memory"][0]["predicted_peak_bytes"]
    (sent,) = records["narrowed gradients"].results["sent"]
    assert sent["sent_bytes"] == pytest.approx(sent["formula_sent_bytes"], rel=0.01)


@pytest.mark.parametrize("name", ["no optimizer", "forward twice"])
def test_incomplete_or_recomputed_step_has_no_predicted_bytes(records: dict[str, RunRecord], name: str) -> None:
    """Without its optimizer zero1 sends no parameters; with checkpoints tp repeats its collectives."""
    (sent,) = records[name].results["sent"]
    assert sent["sent_bytes"] > 0
    assert sent["formula_sent_bytes"] is None


def test_more_ranks_than_devices_are_unavailable() -> None:
    record, harmless = sweep([replace(CELLS["ddp_flat"], device="cuda", world_size=999), TINY])
    assert record.status == "unavailable"
    assert record.reason is not None
    assert "999 ranks need one GPU each" in record.reason or "no CUDA" in record.reason
    assert harmless.status == "ok"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"strategy": "ddp_bucket"}, "unknown parallel strategy 'ddp_bucket'; did you mean ddp_bucketed"),
        ({"strategy": "ddp_flat+ddp_naive"}, "ddp_flat and ddp_naive both divide the batch; choose one"),
        ({"strategy": "zero1"}, "zero1 alone does not average gradients over the ranks; use ddp_bucketed\\+zero1"),
        (
            {"strategy": "ddp_flat", "bucket_size_mb": 2},
            "ddp_flat has no option 'bucket_size_mb'; leave out bucket_size_mb",
        ),
        ({"world_size": 1, "bucket_size_mb": 2}, "bucket_size_mb 2.0 has no effect while strategy is single"),
        ({"strategy": "ddp_flat", "bucket_size_mb": 0}, "bucket_size_mb is 0.0; it must be above 0"),
        ({"world_size": 0, "strategy": "ddp_flat"}, "world_size is 0; it must be at least 1"),
        ({}, "strategy single trains on one process, got world_size 2; use a strategy such as ddp_bucketed"),
        (
            {"strategy": "tp", "world_size": 3},
            "num_heads 4 is not divisible by world_size 3, over which tp divides each block; choose world_size "
            "among 1, 2, 4",
        ),
        ({"strategy": "ddp_flat+tp"}, "tp with another strategy requires tp_degree; set it to the number of ranks"),
        (
            {"strategy": "tp", "tp_degree": 1},
            "tp_degree 1 is not possible with tp alone, which divides each block over all 2 ranks",
        ),
        ({"strategy": "tp", "tp_degree": 3}, "tp_degree 3 is not possible with tp alone, which divides each block"),
        (
            {"strategy": "ddp_flat+tp", "tp_degree": 3},
            "tp_degree 3 does not divide 2 ranks; choose tp_degree among 1, 2, or a world size that is a multiple of 3",
        ),
        (
            {"strategy": "ddp_flat", "device": "cuda:1"},
            "device cuda:1 is a single GPU, but each rank needs its own; use",
        ),
        (
            {
                "strategy": "ddp_flat",
                "workload": "attention",
                "mode": "forward",
                "model": PRESETS["small"],
                "batch_size": RunConfig.batch_size,
                "seq_len": None,
            },
            "strategy applies only to train_step and a workload of your own, .* and the workload is attention",
        ),
    ],
)
def test_invalid_strategies_are_refused_before_any_process_starts(fields: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check([replace(TINY, **{"world_size": 2, **fields})])  # type: ignore[arg-type]


def test_ranks_in_process_are_refused() -> None:
    with pytest.raises(ConfigError, match="a distributed cell needs its own processes; leave out in_process=True"):
        run(CELLS["ddp_flat"], in_process=True)
