"""Default columns of the tables of cells, in their order, with the headings. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from cs_systems.record import UNTIMED_WORKLOADS, measured_by


@dataclass(frozen=True)
class Layout:
    """Default columns of a workload's table.

    identity: columns that distinguish the cells, in this order; constant ones move to the caption.
    measured: columns after the phases' times. leaves: columns dropped first if the terminal is too narrow.
    has_times: True if a row shows the times of the step and its phases.
    """

    identity: tuple[str, ...]
    measured: tuple[str, ...]
    leaves: tuple[str, ...]
    has_times: bool = True


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Conditions of the measurement.
ENDING = _names("memory_limit_bytes allocator device_name torch code_version seed repeat")
LAYOUTS = {
    "train_step": Layout(
        identity=(
            *_names(
                "size context_length seq_len batch_size attention precision mode compile compile_scope graph parts"
            ),
            *_names("checkpoint optimizer strategy bucket_size_mb tp_degree world_size keep_graph"),
            *ENDING,
        ),
        measured=_names("spread tokens_per_s model_flops_per_s mfu peak_allocated_bytes note"),
        leaves=_names(
            "loss.median_s model_flops_per_s spread optimizer.median_s tokens_per_s peak_allocated_bytes mfu"
        ),
    ),
    "attention": Layout(
        identity=(
            *_names(
                "attention mode batch heads heads_kv seq seq_k d_head executed_d_head causal align window precision"
            ),
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
        *_names(
            "workload_args size context_length seq_len batch_size batch heads seq d_head causal attention precision"
        ),
        "mode",
        *_names("compile checkpoint optimizer strategy bucket_size_mb tp_degree world_size"),
        *ENDING,
    ),
    measured=_names("range_s tokens_per_s samples_per_s model_flops_per_s mfu peak_allocated_bytes note"),
    leaves=_names("model_flops_per_s samples_per_s tokens_per_s range_s mfu peak_allocated_bytes"),
)
ESSENTIAL = _names("forward.median_s backward.median_s")  # phases that a narrow terminal keeps

UNTIMED = ("memory", "values")  # where a profiler measures these, the step's time has no meaning
MEMORY_COLUMNS = _names("peak_allocated_bytes peak_reserved_bytes predicted_peak_bytes note")
# Caveats that also concern records that are not timings.
MEMORY_CAVEATS = frozenset({"nan-loss", "no-tables", "shared-gpu"})


def is_timed(workload: str, profiler: str) -> bool:
    return workload not in UNTIMED_WORKLOADS and measured_by(profiler) not in UNTIMED


# A column that only repeats the other one is left out.
ECHOES = {"seq_len": "context_length", "heads_kv": "heads", "seq_k": "seq", "executed_d_head": "d_head"}
# Constants that a caption omits, and values that mean "nothing special".
SILENT_COLUMNS = frozenset({"device_name", "code_version", "seed", "repeat", "keep_graph", "align"})
SILENT_VALUES = frozenset({"none", "default", "single", "model"})
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
    "compile_scope": "compiled",
    "executed_d_head": "padded d_head",
    "ran_optimizer": "optimizer",
    "median_s": "median",
    "range_s": "p10 … p90",
    "ci_low_s": "CI low",
    "ci_high_s": "CI high",
    "submit_median_s": "submit",
    "lag_median_s": "lag",
    "wall_minus_phases_s": "outside phases",
    "tokens_per_s": "tokens/s",
    "samples_per_s": "samples/s",
    "model_flops_per_s": "model",
    "hardware_flops_per_s": "executed",
    "ceiling_flops_per_s": "ceiling",
    "mfu": "MFU",
    "hfu": "HFU",
    "bucket_size_mb": "bucket MB",
    "workload_args": "set",
    "world_size": "ranks",
    "size_bytes": "size",
    "call_s": "per call",
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
    "skew.median_s": "skew: longest time that a rank waited for the others before the calls",
    "spread": "spread: (p90 − p10) / median",
    "ci_low_s": "CI: 95% confidence interval of the median; it is computed from the medians of the rounds, or from the "
    "samples, assumed independent, if there are fewer than 3 rounds",
    "submit_median_s": "submit: time the CPU took to submit the work",
    "lag_median_s": "lag: delay of the device behind the CPU at the end of the phase; near 0, the device waited",
    "wall_minus_phases_s": "outside phases: time of the step minus that of its phases",
    "model_flops_per_s": "model FLOP/s: FLOPs by formula / time; causal attention counts half",
    "hardware_flops_per_s": "executed FLOP/s: computed FLOPs / time, with padding, masked tiles and recomputation",
    "mfu": "MFU: model FLOP/s as a share of the device's peak at that precision",
    "call_s": "per call: median time of one call on the slowest rank, after all ranks are ready",
    "algbw_bytes_per_s": "algbw: message size / time; busbw: algbw × 2(n−1)/n for all_reduce, × 1 for broadcast, "
    "× (n−1)/n for the others",
    "link_share": "of the link: busbw as a share of the peak bandwidth of a GPU's links in one direction",
    "hfu": "HFU: executed FLOP/s as a share of the device's peak at that precision",
}

# Replacements of a legend for workloads from outside the package.
COUNTED = {
    "model_flops_per_s": "model FLOP/s: FLOPs as counted or declared / time; causal attention counts half",
    "hardware_flops_per_s": "executed FLOP/s: all FLOPs, with recomputation, / time",
}
OF_RANKS = {  # additions to a legend if a step has several ranks
    "tokens_per_s": "tokens/s: sum over all ranks",
    "samples_per_s": "samples/s: sum over all ranks",
    "model_flops_per_s": "; for one rank",
    "hardware_flops_per_s": "; for one rank",
}


def layout(workload: str) -> Layout:
    return LAYOUTS.get(workload, OTHER)


def title(column: str) -> str:
    """Return the heading of `column`, without its unit."""
    from cs_systems.core import units

    if column in TITLES:
        return TITLES[column]
    return (column.removesuffix(units.base_suffix(column) or "") or column).replace("_", " ")
