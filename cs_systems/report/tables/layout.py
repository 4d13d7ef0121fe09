"""Default columns of tables and their headings. Data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Default columns of a workload's table.

    identity: columns that distinguish the cells, in this order; constant ones move to the caption.
    measured: columns after the phases' times. leaves: columns dropped first if the terminal is too narrow.
    has_times: whether a row shows the times of the step and its phases.
    """

    identity: tuple[str, ...]
    measured: tuple[str, ...]
    leaves: tuple[str, ...]
    has_times: bool = True


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Conditions of the measurement.
ENDING = _names("memory_limit_bytes device_name torch code_version seed repeat")
LAYOUTS = {
    "train_step": Layout(
        identity=(
            *_names("size context_length seq_len batch_size attention precision mode compile checkpoint optimizer"),
            *_names("strategy bucket_size_mb tp_degree world_size keep_graph"),
            *ENDING,
        ),
        measured=_names("spread tokens_per_s model_flops_per_s mfu peak_allocated_bytes note"),
        leaves=_names(
            "loss.median_s model_flops_per_s peak_allocated_bytes tokens_per_s mfu spread optimizer.median_s"
        ),
    ),
    "attention": Layout(
        identity=(
            *_names("attention mode batch heads heads_kv seq seq_k d_head executed_d_head causal align precision"),
            *("compile", "l2", *ENDING),
        ),
        measured=_names("range_s model_flops_per_s hardware_flops_per_s mfu peak_allocated_bytes note"),
        leaves=_names(
            "forward.median_s backward.median_s hardware_flops_per_s mfu range_s peak_allocated_bytes model_flops_per_s"
        ),
    ),
    "collective": Layout(
        identity=(*_names("collective dtype world_size size_bytes calls"), *ENDING),
        measured=_names("call_s algbw_bytes_per_s busbw_bytes_per_s link_share skew.median_s note"),
        leaves=_names("calls dtype skew.median_s algbw_bytes_per_s"),
        has_times=False,  # a step is a synchronisation and several calls
    ),
}
OTHER = Layout(
    identity=(
        *_names("size context_length seq_len batch_size batch heads seq d_head causal attention precision mode"),
        *("compile", "checkpoint", "optimizer", *ENDING),
    ),
    measured=_names("range_s tokens_per_s model_flops_per_s mfu peak_allocated_bytes note"),
    leaves=_names("model_flops_per_s tokens_per_s mfu peak_allocated_bytes"),
)

# These profilers measure a step's memory; its time includes a synchronisation at each boundary.
WATCH_MEMORY = frozenset({"memory", "memory_snapshot", "nsys_memory", "rank_memory", "residuals"})
# The step time has no meaning under these profilers, nor for these workloads, whose results are their tables.
UNTIMED_PROFILERS = WATCH_MEMORY | {"dtypes"}
UNTIMED_WORKLOADS = frozenset({"precision_error", "training_curve", "accumulation", "normalization"})
OF_MEMORY = _names("peak_allocated_bytes peak_reserved_bytes predicted_peak_bytes note")
# Caveats that also concern records that are not timings.
DOUBTS_OF_MEMORY = frozenset({"nan-loss", "no-tables", "shared-gpu"})


def is_timed(workload: str, profiler: str) -> bool:
    return workload not in UNTIMED_WORKLOADS and profiler not in UNTIMED_PROFILERS


# A column that only repeats the other one is left out.
ECHOES = {"seq_len": "context_length", "heads_kv": "heads", "seq_k": "seq", "executed_d_head": "d_head"}
# Constants that a caption omits, and values that mean "nothing special".
SILENT_COLUMNS = frozenset({"device_name", "code_version", "seed", "repeat", "keep_graph", "align"})
SILENT_VALUES = frozenset({"none", "default", "single"})
ONE_RANK = {"world_size": 1}

TITLES = {
    "context_length": "ctx",
    "seq_len": "seq",
    "batch_size": "batch",
    "num_layers": "layers",
    "d_model": "d_model",
    "d_ff": "d_ff",
    "d_head": "d_head",
    "device_name": "device",
    "memory_limit_bytes": "memory limit",
    "code_version": "code",
    "executed_d_head": "padded to",
    "ran_optimizer": "optimizer",
    "median_s": "median",
    "range_s": "p10 … p90",
    "ci_low_s": "CI low",
    "ci_high_s": "CI high",
    "submit_median_s": "submit",
    "lag_median_s": "lag",
    "wall_minus_phases_s": "outside phases",
    "tokens_per_s": "tokens/s",
    "model_flops_per_s": "model",
    "hardware_flops_per_s": "executed",
    "ceiling_flops_per_s": "ceiling",
    "mfu": "MFU",
    "hfu": "HFU",
    "bucket_size_mb": "buckets of MB",
    "world_size": "ranks",
    "size_bytes": "size",
    "call_s": "a call",
    "algbw_bytes_per_s": "algbw",
    "busbw_bytes_per_s": "busbw",
    "link_share": "of the link",
    "skew.median_s": "skew",
    "peak_allocated_bytes": "peak",
    "peak_reserved_bytes": "reserved",
    "predicted_peak_bytes": "predicted",
}
# Legends of the columns whose names need an explanation; a table includes those of its columns.
LEGENDS = {
    "skew.median_s": "skew: how long the rank that waits longest took to meet the others before the calls",
    "spread": "spread: p10 to p90 over the median",
    "ci_low_s": "CI: of the median, 95%; from the rounds' medians, below 3 rounds from samples taken as independent",
    "model_flops_per_s": "model FLOP/s: credited by formula, causal halved",
    "hardware_flops_per_s": "executed FLOP/s: what tiles, padding and recomputation really compute",
    "mfu": "MFU: model FLOP/s over the device's peak at that precision",
    "call_s": "a call: the median of the samples, of several calls in a row, on the slowest rank, after all ranks met",
    "algbw_bytes_per_s": "algbw: size over time; busbw: algbw × 2(n−1)/n for all_reduce, 1 for broadcast, else (n−1)/n",
    "link_share": "of the link: busbw over what a GPU's links carry in one direction",
    "hfu": "HFU: executed FLOP/s over the device's peak at that precision",
}

OF_RANKS = {  # additions to a legend if a step has several ranks
    "tokens_per_s": "tokens/s: of all ranks together",
    "model_flops_per_s": ", of one rank",
    "hardware_flops_per_s": ", of one rank",
}


def layout(workload: str) -> Layout:
    return LAYOUTS.get(workload, OTHER)


def title(column: str) -> str:
    """Return the heading of `column`, without its unit."""
    from cs_systems.core import units

    if column in TITLES:
        return TITLES[column]
    return (column.removesuffix(units.base_suffix(column) or "") or column).replace("_", " ")
