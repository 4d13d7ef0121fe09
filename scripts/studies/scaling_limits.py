"""Number of GPUs at which communication binds data, fully sharded, tensor and 2-D parallelism.

Question: to how many GPUs can one batch be spread, by each strategy, before the step waits for the network?
Method: a step is computed in closed form and simulated (computing, data-parallel and tensor-parallel collectives, each
    on a stream of its own, one block gathered ahead; see _simulated_step.py), nodes of 8 GPUs, 1,048,576
    tokens in all, whatever the number of GPUs. Gradients are averaged in fp32, shards and activations sent in bf16; a
    column has the limit with gradients in bf16, as exercises assume. The optimizer is left out. The rate of one GPU and
    the link come from records where there are any, else from data sheets, and the text says which. Where several ranks
    were measured, their step stands next to the simulated one. One feed-forward layer has limits by formula alone.
Output: by model, network and strategy the most GPUs that are 90% and 50% efficient, where sending takes as long as
    computing, and where the state begins to fit; simulated and measured steps of 2 ranks; efficiency against GPUs as a
    figure.
Why: A strategy's limit shows before the cluster is rented.

    python scripts/studies/scaling_limits.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from _cells import Cell
from _scaling import (
    DEVICE,
    GPUS_PER_NODE,
    LATENCY_S,
    LINK_BYTES_PER_S,
    LINK_SOURCE,
    MOST_RANKS,
    NETWORKS,
    PEAK_SHARE,
    SIZES,
    STRATEGIES,
    Inputs,
    Point,
    binds_at,
    farthest,
    fits_from,
    layouts,
    points,
    whole_rows,
)
from _simulated_step import Cluster, Layout, Sharing, forward_flops, one_gpu_s, step
from _study import Study, row_table, run

from cs_systems.config import Precision, RunConfig, grid, preset
from cs_systems.core.units import human
from cs_systems.formulas.cost import COMPUTE_BYTES, PARAMETER_BYTES
from cs_systems.formulas.peaks import peak_flops
from cs_systems.formulas.scaling import LOW_BYTES, TOKENS, layer_limits
from cs_systems.record import Row
from cs_systems.report import collectives
from cs_systems.report.tables.records import render
from cs_systems.report.tables.rows import render_table

SIMULATED_AS = {"ddp_bucketed": "ddp", "ddp_overlap": "ddp", "torch_ddp": "ddp", "fsdp": "fsdp", "torch_fsdp2": "fsdp"}
SIMULATED_AS |= {"tp": "tp", "fsdp+tp": "fsdp+tp"}

BASE = RunConfig(precision=Precision.BF16, warmup=3)
MEASURED = ("ddp_bucketed", "fsdp", "tp")


def cells_of(base: RunConfig, sizes: Sequence[str]) -> list[RunConfig]:
    alone = grid(base, size=sizes)
    return alone + grid(replace(base, strategy="tp", world_size=2), size=sizes, strategy=MEASURED)


def full() -> list[RunConfig]:
    return cells_of(BASE, ("medium", "2.7B"))


def small() -> list[RunConfig]:
    return cells_of(replace(BASE, steps=3), ("tiny",))


def inputs(cells: Sequence[Cell]) -> Inputs:
    """Return the inputs from records of GPUs; a CPU's records say nothing about a cluster's limits."""
    cells = [cell for cell in cells if cell.record.environment and cell.record.environment.compute_capability]
    best = max(filter(_is_alone, cells), key=rate, default=None)
    peak = peak_flops(DEVICE, Precision.BF16)
    assert peak is not None
    flops_per_s, source = PEAK_SHARE * peak.per_s, f"{PEAK_SHARE:.0%} of the peak ({peak.source})"
    if best is not None:
        flops_per_s, source = rate(best), f"measured, {best.record.environment.device_name}, {best.label()}"
    rows = [row for row in collectives.fits(c.record for c in cells) if row["collective"] == "all_reduce"]
    rows = [row for row in rows if row["world_size"] == 2 and row["busbw_bytes_per_s"]]
    if not rows:
        return Inputs(flops_per_s, source, LINK_BYTES_PER_S, LATENCY_S, f"{LINK_SOURCE}; latency assumed")
    row = max(rows, key=lambda row: row["busbw_bytes_per_s"])
    link = f"measured, fitted to {row['sizes']} sizes of all-reduce on 2 ranks"
    return Inputs(flops_per_s, source, row["busbw_bytes_per_s"], row["latency_s"], link)


def _is_training(cell: Cell) -> Any:
    config = cell.record.run_config
    return cell.measured and not cell.profiled and config.workload == "train_step" and cell["backward.median_s"]


def _is_alone(cell: Cell) -> Any:
    config = cell.record.run_config
    return _is_training(cell) and not config.is_distributed and config.precision is Precision.BF16


def computing_s(cell: Cell) -> float:
    """Return the seconds of forward, loss and backward."""
    return sum(cell[f"{phase}.median_s"] or 0.0 for phase in ("forward", "loss", "backward"))


def rate(cell: Cell) -> float:
    """Return the model FLOP/s of forward and backward."""
    config = cell.record.run_config
    return one_gpu_s(config.model, config.batch_size, config.tokens_per_sequence, Cluster(1, 1, 1, 0)) / computing_s(
        cell
    )


def limits(network: str, given: Inputs) -> list[Row]:
    rows = []
    for size in SIZES:
        for strategy in STRATEGIES:
            model, found = preset(size), points(size, strategy, network, given)
            most = max((point.layout.ranks for point in found), default=None)
            cluster = given.cluster(NETWORKS[network])
            binds, narrow = binds_at(model, strategy, cluster), binds_at(model, strategy, cluster, LOW_BYTES)
            rows.append(
                {
                    "size": size,
                    "strategy": strategy,
                    "90%": _limit_text(farthest(found, 0.9), most),
                    "50%": _limit_text(farthest(found, 0.5), most),
                    "sending = computing": "–" if binds is None else f"{binds:,.0f}",
                    "with gradients in bf16": "–" if narrow is None else f"{narrow:,.0f}",
                    "state fits from": fits_from(model, strategy) or "–",
                }
            )
    return rows


def _limit_text(point: Point | None, most: int | None) -> str:
    if point is None:
        return "–"
    layout = point.layout
    shape = f" ({layout.dp} × {layout.tp})" if layout.dp > 1 and layout.tp > 1 else ""
    return f"{layout.ranks:,}{shape}{', all' if layout.ranks == most else ''}"


# Comparison with measurements


def compared(cells: Sequence[Cell], given: Inputs) -> list[Row]:
    """Return each step on several ranks, simulated at its model's rate on one GPU, next to the measured step."""
    alone = {_alike(cell.record.run_config): cell for cell in cells if _is_alone(cell)}
    ran = {cell.record.run_config: cell for cell in cells if _is_training(cell)}
    planned = [config for config in (*full(), *ran) if SIMULATED_AS.get(config.strategy) and config.world_size > 1]
    rows = []
    for config in dict.fromkeys(planned):
        one, cell = alone.get(_alike(config)), ran.get(config)
        simulated = _simulated_s(config, one, given)
        measured = cell and cell["median_s"]
        if simulated is None and measured is None:
            continue
        rows.append(
            {
                "size": config.model.label,
                "strategy": config.strategy,
                "ranks": config.world_size,
                "one_gpu_s": one["median_s"] if one else None,
                "simulated_s": simulated,
                "measured_s": measured,
                "off": f"{simulated / measured - 1:+.1%}" if measured and simulated else "–",
            }
        )
    return rows


def _alike(config: RunConfig) -> tuple[Any, ...]:
    """Return the options that a step on one GPU must share with a step on several to be its base."""
    size = (config.model.label, config.tokens_per_sequence, config.batch_size)
    return (*size, config.precision, config.attention, config.mode, config.compile, config.checkpoint)


def _simulated_s(config: RunConfig, one: Cell | None, given: Inputs) -> float | None:
    """Return the simulated step; None if no step of this model was measured on one GPU."""
    if one is None:
        return None
    sharing, _, divides = STRATEGIES[SIMULATED_AS[config.strategy]]
    narrow = sharing is Sharing.SHARDED and config.precision.is_autocast
    if narrow or {"compute_dtype", "comm_dtype"} & config.strategy_options.keys():
        sent = 2
    else:
        sent = PARAMETER_BYTES[config.precision]
    tp = (config.tp_degree or config.world_size) if divides else 1
    layout = Layout(sharing, config.world_size // tp, tp)
    it = step(
        config.model,
        layout,
        config.batch_size,
        config.tokens_per_sequence,
        given.cluster(flops_per_s=rate(one)),
        parameter_bytes=sent,
        activation_bytes=COMPUTE_BYTES[config.precision],
        optimizer_s=one["optimizer.median_s"] or 0.0,
    )
    return it.simulate().makespan_s


def tables(cells: list[Cell], format: str) -> list[str]:
    given = inputs(cells)
    training = [c for c in cells if c.record.run_config.workload == "train_step" and not c.profiled]
    of_this = {
        _alike(c)
        for c in (*full(), *small(), *(c.record.run_config for c in training if c.record.run_config.is_distributed))
    }
    shown = [cell.record for cell in training if _alike(cell.record.run_config) in of_this]
    return [
        *([render(shown, format)] if shown else []),
        *row_table(compared(cells, given), "a step of 2 ranks: simulated from one GPU's, and measured", format),
        *(
            table
            for network in NETWORKS
            for table in row_table(limits(network, given), f"{network}: most GPUs at that efficiency", format)
        ),
        render_table(layer_limits, layer_limits(), format),
    ]


def explain(cells: list[Cell]) -> list[str]:
    given = inputs(cells)
    notes = [
        f"one GPU computes forward and backward at {human(given.flops_per_s, '_flops_per_s')}: {given.rate_source}",
        f"the link carries {human(given.link_bytes_per_s, '_bytes_per_s')} of busbw, a collective of two ranks takes "
        f"{human(given.latency_s, '_s')} at least: {given.link_source}",
        f"the batch has {TOKENS:,} tokens in all: {whole_rows(preset('2.7B')):,} rows of 512, of 8B "
        f"{whole_rows(preset('8B'))} of 32,768; 'all' are as many GPUs as rows, heads and d_ff can be spread over",
    ]
    for network in NETWORKS:
        ends = {name: farthest(points("2.7B", name, network, given), 0.9) for name in STRATEGIES}
        words = [f"{name} to {point.layout.ranks:,}" if point else f"{name} not at all" for name, point in ends.items()]
        notes.append(f"{network}, 2.7B stays 90% efficient: {', '.join(words)} GPUs")
        alone, divided = (
            binds_at(preset("2.7B"), name, given.cluster(NETWORKS[network])) for name in ("fsdp", "fsdp+tp")
        )
        if alone and divided and math.isclose(alone, divided):
            notes.append(
                f"{network}: dividing blocks within a node does not move where sending binds, because a node sends "
                "the whole model to the others either way; it goes on where there are no more rows"
            )
    notes += [*_undivided(), *_indivisible()]
    for row in compared(cells, given):
        if row["measured_s"] and row["simulated_s"]:
            notes.append(
                f"{row['size']}, {row['strategy']} on {row['ranks']}: simulated {human(row['simulated_s'], '_s')}, "
                f"measured {human(row['measured_s'], '_s')} ({row['off']})"
            )
    return notes


def _undivided() -> Iterator[str]:
    for size in SIZES:
        model = preset(size)
        block, head = forward_flops(model, 1, model.context_length)
        share = head / (model.num_layers * block + head)
        if share > 0.05:
            left = (share + (1 - share) / GPUS_PER_NODE) * GPUS_PER_NODE
            yield (
                f"{size}: tp does not divide the head, {share:.0%} of the FLOPs, so that each of {GPUS_PER_NODE} ranks "
                f"computes {left:.2f} times its share before anything is sent"
            )


def _indivisible() -> Iterator[str]:
    for size in SIZES:
        if not any(True for _ in layouts(preset(size), "fsdp+tp")):
            heads = preset(size).num_heads
            yield f"{size} has {heads} heads: no number of ranks divides them and a node of {GPUS_PER_NODE}"


def draw(cells: list[Cell]) -> Any:
    """Draw efficiency by number of GPUs, a panel per model; dotted: the closed form's limit of communication."""
    from matplotlib.figure import Figure

    from cs_systems.report.figures.drawing import COLORS, MARKERS, WIDTH, with_legend

    given, shown = inputs(cells), [name for name in NETWORKS if name != "50 GB/s a GPU"]
    drawn = Figure(figsize=(WIDTH, 5.2), layout="constrained")
    panels = drawn.subplots(len(shown), len(SIZES), sharex=True, sharey=True)
    for row, network in zip(panels, shown, strict=True):
        cluster = given.cluster(NETWORKS[network])
        for axes, size in zip(row, SIZES, strict=True):
            for strategy, color, marker in zip(STRATEGIES, COLORS, MARKERS, strict=False):
                found = points(size, strategy, network, given)
                ranks, share = [p.layout.ranks for p in found], [100 * p.efficiency for p in found]
                axes.plot(ranks, share, color=color, marker=marker, markersize=3, linewidth=1.2, label=strategy)
                if (binds := binds_at(preset(size), strategy, cluster)) and 1 <= binds <= MOST_RANKS:
                    axes.axvline(binds, color=color, linestyle=":", linewidth=1)
            axes.set_xscale("log", base=2)
            axes.set_ylim(0, 103)
            axes.set_xticks([1, 2**4, 2**8, 2**12, 2**16], ["1", "16", "256", "4k", "64k"])
            axes.minorticks_off()
            axes.grid()
            axes.set_title(size, fontsize=10)
        row[0].set_ylabel(f"% efficient\n{network}")
    title = f"Efficiency of a step of {TOKENS:,} tokens; dotted: sending takes as long as computing"
    drawn.suptitle(title, x=0.01, ha="left", fontsize=11)
    for axes in panels[-1]:
        axes.set_xlabel("GPUs")
    return with_legend(drawn, panels[0][0])


def answer(cells: list[Cell]) -> str:
    given, network = inputs(cells), "50 GB/s a GPU"
    ends = {name: farthest(points("2.7B", name, network, given), 0.9) for name in STRATEGIES}
    words = [f"{point.layout.ranks:,} GPUs with {name}" for name, point in ends.items() if point]
    return (
        f"By formula, 2.7B stays 90% efficient up to {', '.join(words)}, on a network of {network}. A GPU's rate is "
        f"{human(given.flops_per_s, '_flops_per_s')}: {given.rate_source}."
    )


STUDY = Study(
    __file__,
    __doc__,
    "How far do data, fully sharded, tensor and 2-D parallelism scale before communication binds?",
    full,
    small,
    tables,
    explain,
    answer,
    figure="phases",
    draw=draw,
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
