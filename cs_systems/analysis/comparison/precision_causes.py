"""Causes of a lower precision's speed-up: traces of the same step in fp32 and in a lower one, by kernel family."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from cs_systems.analysis.attribution.gaps import LAUNCH, idle_by_cause
from cs_systems.analysis.attribution.tables import families, steps
from cs_systems.analysis.comparison.precision import BASELINE, Speedup, interval, speedup
from cs_systems.config import FIELDS, ConfigError, RunConfig, describe
from cs_systems.record import RunRecord, computation, median_s

PRODUCTS = ("matmul", "attention")  # kernel families that run on tensor cores
CASTS = "copy"  # a cast is a copy into another dtype
UNCHANGED = 0.05  # kernel times that differ by less than this fraction count as equal


class CausesRow(Speedup):
    """Changes to step A made by the precision of step B; both were profiled."""

    cell: str
    precision: str
    kernel_speedup: float
    launch_bound_share: float
    products: str  # which products, as text
    a_products_s: float
    b_products_s: float
    casts_s: float  # additional time of copies in B
    a_rest_s: float  # all kernels that are neither products nor copies
    b_rest_s: float
    a_kernel_s: float
    b_kernel_s: float
    differs: list[str]  # other fields in which the two cells differ


def pairs(records: Iterable[RunRecord]) -> list[tuple[RunRecord, RunRecord]]:
    """Return (fp32, another precision) of the same profiled cell, for all records with kernel tables."""
    found = [r for r in records if families.of(r.results) and steps.of(r.results)]
    baselines = {_apart(r): r for r in found if r.config["precision"] == BASELINE}
    return [(baselines[_apart(r)], r) for r in found if r.config["precision"] != BASELINE and _apart(r) in baselines]


def _apart(record: RunRecord) -> RunConfig:
    return replace(record.run_config, precision=BASELINE)


def clean_twins(record: RunRecord, records: Iterable[RunRecord]) -> list[RunRecord]:
    """Return the records of the same cell that were timed without a profiler, one per repeat."""
    return [r for r in records if r.is_timing and not r.is_profiled and computation(r) == computation(record)]


def causes(
    a: RunRecord, b: RunRecord, clean_a: Sequence[RunRecord] = (), clean_b: Sequence[RunRecord] = ()
) -> CausesRow:
    """Return the changes that B's precision makes to a step of A, both profiled.

    With the clean twins of both, the speed-up is the measured one, and the launch-bound share is relative to B's clean
    step: the time without a kernel, times the launch-bound share of the gaps in the trace. Without them the speed-up is
    None, because a profiler slows the host down, and the share is relative to the profiled step.

    Raises:
        ConfigError: a record has no table of kernels.
    """
    times_a, times_b = _families(a), _families(b)
    whole_a, whole_b = sum(times_a.values()), sum(times_b.values())
    config_a, config_b = a.run_config, b.run_config
    differs = [
        name
        for name, each in FIELDS.items()
        if each.field.identity and not each.field.is_measurement and name != "precision"
        if getattr(config_a, name) != getattr(config_b, name)
    ]
    return {
        "cell": describe(config_b, {"precision", "profiler", *differs}),
        "precision": config_b.precision.value,
        **speedup(clean_a, clean_b),
        "kernel_speedup": whole_a / whole_b,
        "launch_bound_share": _launch_bound(b, median_s(clean_b) if clean_a else None),
        "products": "matrix products" + (" and fused attention" if "attention" in {*times_a, *times_b} else ""),
        "a_products_s": _of(times_a, PRODUCTS),
        "b_products_s": _of(times_b, PRODUCTS),
        "casts_s": times_b.get(CASTS, 0.0) - times_a.get(CASTS, 0.0),
        "a_rest_s": whole_a - _of(times_a, (*PRODUCTS, CASTS)),
        "b_rest_s": whole_b - _of(times_b, (*PRODUCTS, CASTS)),
        "a_kernel_s": whole_a,
        "b_kernel_s": whole_b,
        "differs": differs,
    }


def _families(record: RunRecord) -> dict[str, float]:
    rows = families.of(record.results)
    if not rows or not steps.of(record.results):
        raise ConfigError(
            f"{describe(record.run_config)} has no table of kernels; profile it on a GPU with "
            "cs-systems precision --explain"
        )
    return {row["family"]: row["time_s"] for row in rows}


def _of(times: dict[str, float], families: Sequence[str]) -> float:
    return sum(times.get(family, 0.0) for family in families)


def _launch_bound(record: RunRecord, clean_s: float | None) -> float:
    launch_s = idle_by_cause(record.results, clean_s).get(LAUNCH, 0.0)
    return launch_s / (clean_s or median(row["wall_s"] for row in steps.of(record.results) if row["device"] == 0))


def sentence(row: CausesRow) -> str:
    """Format one row of `causes` as text for a report."""
    share = f"{row['launch_bound_share']:.0%} of the step"
    if row["speedup"] is not None:
        gain = f"{row['speedup']:.2f}× fp32's speed ({interval(row)}): {share} is launch-bound"
    else:
        gain = f"kernels {row['kernel_speedup']:.2f}× as fast as fp32's: {share} under the profiler is "
        gain += "launch-bound"
    products_a, products_b, casts = row["a_products_s"], row["b_products_s"], row["casts_s"]
    rest = "all other kernels" + (" (those for fp8's scales included)" if row["precision"] == "fp8" else "")
    rest += f" take {_ms(row['b_rest_s'])}"
    same = math.isclose(row["a_rest_s"], row["b_rest_s"], rel_tol=UNCHANGED)
    rest += " as in fp32" if same else f" instead of {_ms(row['a_rest_s'])}"
    clauses = [
        gain,
        f"{row['products']} take {_ms(products_b)} instead of {_ms(products_a)}"
        + (f" ({products_a / products_b:.1f}×)" if products_b else ""),
        f"casts and other copies {'add' if casts >= 0 else 'save'} {_ms(abs(casts))}",
        rest,
        *([f"not only the precision differs, but also: {', '.join(row['differs'])}"] if row["differs"] else []),
    ]
    return f"{row['cell']}, {row['precision']}: {'; '.join(clauses)}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2g} ms" if seconds < 0.0995 else f"{1e3 * seconds:.0f} ms"


def explained(records: Sequence[RunRecord]) -> list[CausesRow]:
    """Return `causes` of every pair among the records, with measured speed-ups if both were also timed."""
    return [causes(a, b, clean_twins(a, records), clean_twins(b, records)) for a, b in pairs(records)]
