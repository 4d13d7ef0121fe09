"""Which columns a table has when nobody names any, and what they are called. Data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """identity: what tells the cells apart, in this order; constant ones move to the caption.
    measured: what follows the phases' times. leaves: what goes first where the terminal is too narrow.
    """

    identity: tuple[str, ...]
    measured: tuple[str, ...]
    leaves: tuple[str, ...]


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# How it was measured and where.
ENDING = _names("memory_limit_bytes device_name torch code_version seed repeat")
LAYOUTS = {
    "train_step": Layout(
        identity=(
            *_names("size context_length seq_len batch_size attention precision mode compile checkpoint optimizer"),
            *("keep_graph", *ENDING),
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
}
OTHER = Layout(
    identity=(
        *_names("size context_length seq_len batch_size batch heads seq d_head causal attention precision mode"),
        *("compile", "checkpoint", "optimizer", *ENDING),
    ),
    measured=_names("range_s tokens_per_s model_flops_per_s mfu peak_allocated_bytes note"),
    leaves=_names("model_flops_per_s tokens_per_s mfu peak_allocated_bytes"),
)

# A column that only repeats another says nothing.
ECHOES = {"seq_len": "context_length", "heads_kv": "heads", "seq_k": "seq", "executed_d_head": "d_head"}
# Constants that a caption need not say, and values that mean "nothing special".
SILENT_COLUMNS = frozenset({"device_name", "code_version", "seed", "repeat", "keep_graph", "align"})
SILENT_VALUES = frozenset({"none", "default"})

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
    "peak_allocated_bytes": "peak",
    "peak_reserved_bytes": "reserved",
    "predicted_peak_bytes": "predicted",
}
# Legends of the columns whose names do not explain themselves; a table says those it needs.
LEGENDS = {
    "spread": "spread: p10 to p90 over the median",
    "ci_low_s": "CI: of the median, 95%; from the rounds' medians, below 3 rounds from samples taken as independent",
    "model_flops_per_s": "model FLOP/s: credited by formula, causal halved",
    "hardware_flops_per_s": "executed FLOP/s: what tiles, padding and recomputation really compute",
    "mfu": "MFU: model FLOP/s over the device's peak at that precision",
    "hfu": "HFU: executed FLOP/s over the device's peak at that precision",
}


def layout(workload: str) -> Layout:
    return LAYOUTS.get(workload, OTHER)


def title(column: str) -> str:
    """What `column` is called in a heading, without its unit."""
    from cs_systems.report import units

    if column in TITLES:
        return TITLES[column]
    return (column.removesuffix(units.base_suffix(column) or "") or column).replace("_", " ")
