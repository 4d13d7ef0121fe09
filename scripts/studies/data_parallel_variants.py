"""Step time of the variants of data parallelism, and their best bucket size.

Question: of a step on two ranks, what is communication, what of it hides behind backward, and what is only waiting?
Method: medium in bf16 on 2 ranks, batch 4 and context 512 each: one all-reduce per parameter after backward, one
    flat all-reduce, one per parameter as gradients become ready, buckets of 1, 10, 100 and 1000 MB, and PyTorch's DDP
    by default and with buckets of 100 MB that gradients are views of; beside them one rank alone. Apart from the timing
    five of them are recorded on both ranks. All-reduces of 1 MiB to 1 GiB give latency and bandwidth.
Output: steps, exposed and hidden communication by the recording and by the difference to one rank, why the two differ,
    waiting apart from transfer; for each bucket size what the formula predicts to be exposed and what was.
Why: On two ranks of which one waits for the other, waiting is easily counted as communication. Waiting has a column
    of its own, and the best bucket size comes from latency, bandwidth and the time of backward.

    python scripts/studies/data_parallel_variants.py
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from _bucket_size import Link, best_count, best_size_bytes, buckets_of, exposed_s, parameter_sizes
from _cells import Cell, place
from _numerics import not_measured
from _parallel import (
    STEP_TABLES,
    Told,
    best_and_torchs,
    cells,
    fastest,
    groups,
    has_streams,
    on_a_cpu,
    reconciled,
    tables,
    under,
    waiting,
)
from _study import Study, row_table, run

from cs_systems.analysis.comparison import strategies as parallel
from cs_systems.config import Precision, RunConfig, preset
from cs_systems.core.collectives import CollectiveShape, calls_for
from cs_systems.core.units import human
from cs_systems.record import Row, RunRecord
from cs_systems.report import collectives

MB = 2**20
BUCKETS = (1.0, 10.0, 100.0, 1000.0)
VIEWS = ("gradient_as_bucket_view=true",)
RECORDED = (
    "single",
    "ddp_naive",
    "ddp_overlap",
    "ddp_bucketed 100 MB",
    "torch_ddp:gradient_as_bucket_view=true 100 MB",
)
FULL = RunConfig(
    model=preset("medium", context_length=512), precision=Precision.BF16, attention="sdpa_flash", warmup=5, steps=20
)
SMALL = RunConfig(model=preset("tiny"), device="cpu", warmup=2, steps=5)


def strategies(buckets: Sequence[float]) -> list[Told]:
    return [
        ("ddp_naive", {}),
        ("ddp_flat", {}),
        ("ddp_overlap", {}),
        *(("ddp_bucketed", {"bucket_size_mb": size}) for size in buckets),
        ("torch_ddp", {}),
        ("torch_ddp", {"bucket_size_mb": buckets[-2], "strategy_args": VIEWS}),
    ]


def all_reduces(sizes: Sequence[int], device: str) -> list[RunConfig]:
    return [
        RunConfig(
            workload="collective",
            collective=CollectiveShape("all_reduce", size, "fp32", calls_for(size)),
            world_size=2,
            device=device,
            warmup=3,
            steps=10,
        )
        for size in sizes
    ]


def full() -> list[RunConfig]:
    timed = cells(FULL, strategies(BUCKETS), [2])
    chosen = [cell for cell in timed if parallel.name(cell) in RECORDED]
    return [*timed, *all_reduces([4**k * MB for k in range(6)], "auto"), *under("overlap", chosen)]


def small() -> list[RunConfig]:
    timed = cells(SMALL, strategies((0.02, 0.1, 1.0)), [2])
    chosen = [cell for cell in timed if parallel.name(cell) in ("single", "ddp_naive", "ddp_bucketed 0.1 MB")]
    return [*timed, *all_reduces([4**k * 2**14 for k in range(4)], "cpu"), *under("overlap", chosen)]


def link(found: Sequence[Cell]) -> Link | None:
    """Return the link by the measured all-reduces; None without a latency and a bandwidth."""
    of_links = collective_records(found)
    known = [row for row in collectives.fits(of_links) if row["latency_s"] and row["algbw_bytes_per_s"]]
    if not known:
        return None
    alone = parallel.baseline([cell.record for cell in found])
    launch_bound = alone is not None and any(caveat.code == "launch-bound" for caveat in alone.warnings)
    return Link(known[0]["latency_s"], known[0]["algbw_bytes_per_s"], _start_s(of_links) if launch_bound else 0.0)


def collective_records(found: Sequence[Cell]) -> list[RunRecord]:
    return [cell.record for cell in found if cell.record.config.get("collective")]


def _start_s(all_reduces: Sequence[RunRecord]) -> float:
    """Return the host's time to start a collective, on devices that then run it without the host."""
    times = [
        sample.submit_s["transfer"] / record.run_config.collective.calls
        for record in all_reduces
        if record.measurement and record.run_config.collective
        for sample in record.measurement.samples
        if sample.submit_s and not sample.warmup
    ]
    return median(times) if times else 0.0


def bucket_rows(group: Sequence[RunRecord], found: Link) -> list[Row]:
    """Return for each bucket size the number of buckets, the predicted and the measured exposed time."""
    alone, backward_s = parallel.baseline(group), backward_of(group)
    if alone is None or backward_s is None:
        return []
    sizes = parameter_sizes(alone.run_config.model)
    rows = []
    for row, record in zip(parallel.communication(group), parallel.on_ranks(group), strict=True):
        mb = record.run_config.bucket_size_mb
        if mb is not None and record.run_config.strategy == "ddp_bucketed":
            buckets = buckets_of(sizes, mb * MB)
            rows.append(
                {
                    "bucket": f"{mb:g} MB",
                    "buckets": len(buckets),
                    "predicted_longer_s": exposed_s(buckets, backward_s, found),
                    "step_s": record.measurement.median_s() if record.measurement else None,
                    "longer_than_alone_s": row["by_difference_s"],
                    "exposed_in_trace_s": row["in_trace_s"],
                }
            )
    return rows


def best_buckets(group: Sequence[RunRecord], line: Link | None) -> str:
    """Return a sentence with the best bucket size as predicted and as measured; "" if one of them is unknown."""
    rows = [row for row in bucket_rows(group, line) if row["step_s"] is not None] if line else []
    if not rows:
        return ""
    predicted = min(rows, key=lambda row: float(row["predicted_longer_s"]))
    measured = min(rows, key=lambda row: float(row["step_s"]))
    return f"of the measured sizes, {predicted['bucket']} is the best as predicted, {measured['bucket']} as measured"


def backward_of(group: Sequence[RunRecord]) -> float | None:
    alone = parallel.baseline(group)
    return alone.measurement.median_s("backward") if alone and alone.measurement else None


def explain(found: list[Cell]) -> list[str]:
    notes = []
    for group in groups(found):
        notes += [*best_and_torchs(group), *reconciled(group), *waiting(group)]
        if (line := link(found)) and (backward_s := backward_of(group)):
            notes += _buckets(group, line, backward_s)
    return [*notes, *on_a_cpu(found)]


def _buckets(group: Sequence[RunRecord], line: Link, backward_s: float) -> list[str]:
    model = group[0].run_config.model
    gradients = sum(parameter_sizes(model))
    best = best_size_bytes(gradients, backward_s, line)
    notes = [
        f"{human(gradients, 'bytes')} of gradients over α {human(line.latency_s, 's')}, β "
        f"{human(line.algorithm_bytes_per_s, 'bytes_per_s')}{_of_host(line)} against {human(backward_s, 's')} of "
        f"backward: the best of equal buckets is {human(best, 'bytes')}, "
        f"{best_count(gradients, backward_s, line):,.0f} of them"
    ]
    if sizes := best_buckets(group, line):
        notes.append(f"{sizes}; the formula ignores that communication slows computation down")
    return notes


def _of_host(line: Link) -> str:
    return f" and {human(line.start_s, 's')} of the host to start each" if line.start_s else ""


def study_tables(found: list[Cell], format: str) -> list[str]:
    line = link(found)
    buckets = [("buckets", lambda group: bucket_rows(group, line))] if line else []
    fits = collectives.fits(collective_records(found))
    return [
        *not_measured(found, format),
        *tables(found, format, *STEP_TABLES, *buckets),
        *row_table(fits, "all-reduces: t(n) = α + n/β", format),
    ]


def answer(found: list[Cell]) -> str:
    notes = [best for group in groups(found) for best in [fastest(group)] if best]
    if not notes:
        return ""
    times = f"{'; '.join(notes)}, in the best of our variants and of PyTorch's on two ranks, and alone"
    sizes = [size for group in groups(found) for size in [best_buckets(group, link(found))] if size]
    return f"{place(found)}: {'; '.join([times, *sizes])}."


STUDY = Study(
    __file__,
    __doc__,
    "What do the variants of data parallelism gain, and how large should a bucket be?",
    full,
    small,
    study_tables,
    explain,
    answer,
    figure="streams",
    drawn=has_streams,
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
