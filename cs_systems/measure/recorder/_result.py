"""Records of a loop: the same `RunRecord` as a sweep's, with the workload `loop NAME`.

A loop reads no RunConfig. Its record holds one nevertheless, because records are joined by it. Only device, steps,
ranks and profiler are set; reports omit the other fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from cs_systems.analysis.comparison.loop_findings import ITERATORS, REPEATED_FORWARD, WAITING, IteratorsRow
from cs_systems.analysis.timing_caveats import timing_caveats
from cs_systems.config import RunConfig
from cs_systems.core import caveats
from cs_systems.core.caveats import GRAPH_BREAKS, LOOP_REMEDIES, Caveat, beyond
from cs_systems.core.statistics import total
from cs_systems.core.units import counted
from cs_systems.instrument.probes import compiled_graphs, graph_break_rows, graph_breaks
from cs_systems.machine import device as devices
from cs_systems.machine.device import Device
from cs_systems.machine.environment import environment
from cs_systems.measure.recorder.inputs import StepInputs, are_different, batches_of, size_of
from cs_systems.measure.recorder.observers import Found
from cs_systems.measure.recorder.phases import BACKWARD, FORWARD, in_order
from cs_systems.measure.recorder.product_types import NAMES
from cs_systems.measure.recorder.subject import Subject
from cs_systems.record import Environment, Measurement, Ran, Row, RunRecord, Sample


def aligned(samples: Sequence[Sample], phases: Iterable[str] | None = None) -> tuple[Sample, ...]:
    """Return samples that all have the same phases, with 0 s where one did not occur in a step."""
    names = in_order([*(phases or ()), *(name for sample in samples for name in sample.phases_s)])
    empty = dict.fromkeys(names, 0.0)

    def filled(times: dict[str, float]) -> dict[str, float]:
        return empty | times

    return tuple(
        replace(s, phases_s=filled(s.phases_s), submit_s=filled(s.submit_s), lag_s=s.lag_s and filled(s.lag_s))
        for s in samples
    )


def success(
    subject: Subject,
    config: RunConfig,
    samples: Sequence[Sample],
    inputs: Sequence[StepInputs],
    before: Environment,
    *,
    repeat: int,
    setup_s: float,
    seen: Iterable[str],
    recomputed_s: float,
    precision: str | None,
    ended: str | None,
    missing: Sequence[str],
    mallocs: int | None,
    shown: Found,
) -> RunRecord:
    """Return the record of a stage with at least one timed step.

    inputs: the inputs of the timed steps. recomputed_s: seconds of the timed steps in which backward repeated forward.
    ended: how the loop ended before all steps were timed. missing: the profilers that then saw no step. mallocs:
    cudaMalloc calls during the timed steps. shown: the findings of the observers.
    """
    device, after = subject.device, environment(subject.device)
    samples = aligned(samples)
    measurement = Measurement(
        device.clock, samples, setup_s, device.peak_allocated_bytes(), device.peak_reserved_bytes()
    )
    noted = graph_breaks()
    breaks = graph_break_rows(noted)
    found = timing_caveats(
        _of_computing(measurement), before, after, profiler=config.profiler, graph_breaks=breaks, of_loop=True
    )
    found = (
        *found,
        *shown.caveats,
        *_own_caveats(config, measurement, subject, set(seen), ended, missing, mallocs),
    )
    repeated: dict[str, Sequence[Row]] = {}
    if recomputed_s > 0:
        share = recomputed_s / sum(measurement.durations_s(BACKWARD))
        found = (*found, caveats.recomputed(share))
        repeated = REPEATED_FORWARD.filled([{"backward_share": share}])
    counts, differ = _counts(subject.tokens, inputs)
    if differ:
        found = (*found, caveats.mixed_batches(differ))
    begun, collated = sum(each.iterators > 0 for each in inputs), sum(each.collates_rows for each in inputs)
    started = sum(each.starts_workers for each in inputs)
    row: IteratorsRow = {"steps": len(inputs), "with_new": begun, "started": started, "collated": collated}
    iterators = ITERATORS.filled([row]) if begun or collated else {}
    ran_steps = config.warmup, config.steps, len(measurement.timed)
    remedies = (beyond(LOOP_REMEDIES.get(each.code, each.remedy), *ran_steps) for each in found)
    found = tuple(replace(each, remedy=remedy) for each, remedy in zip(found, remedies, strict=True))
    known = {"precision": precision, "graph_breaks": len(noted) or None, "compiled_graphs": compiled_graphs()[0]}
    ran = cast(Ran, {**subject.ran(), **counts, **{name: value for name, value in known.items() if value}})
    broken = GRAPH_BREAKS.filled(breaks) if breaks else {}
    warnings = tuple({caveat.code: caveat for caveat in found}.values())
    results = {"ran": [ran], **broken, **repeated, **iterators, **shown.tables}
    return RunRecord.of(config, repeat, after, "ok", measurement=measurement, warnings=warnings, results=results)


def _counts(tokens: int | None, inputs: Sequence[StepInputs]) -> tuple[Ran, str]:
    """Return the tokens of the timed steps, and a text for a caveat if their batches differ in shape, else "".

    tokens: tokens per step as given by the user. If the inputs differ in shape, they are used only if they equal the
    number of rows, because each step then has that many samples.
    """
    given = [each.tokens for each in inputs]
    batches = batches_of(inputs)
    differ = are_different(batches) if any(map(size_of, batches)) else len({*given}) > 1
    if tokens is not None and differ:
        if {size_of(batch)[0] for batch in batches} != {tokens}:
            return {"tokens": None}, f"tokens={tokens} does not hold for each of them, so that tokens/s is unknown"
        given = [tokens] * len(inputs)
    if len({*given}) == 1 and not differ:
        return {"tokens": given[0] if tokens is None else tokens}, ""
    together = total(given)
    of_each = given[0] if len({*given}) == 1 else None
    what = "the median mixes sizes" if together is None else "tokens/s is for all of them together"
    return {"tokens": of_each, "timed_tokens": together}, what if differ else ""


def status_of(error: BaseException) -> str:
    return "oom" if devices.is_out_of_memory(error) else "error"


def precision_of(device: Device, models: Sequence[nn.Module]) -> str | None:
    """Return the precision in effect now as a value of `Precision`; None if there is no such value."""
    if torch.is_autocast_enabled(device.torch.type):
        return NAMES.get(torch.get_autocast_dtype(device.torch.type))
    dtypes = {p.dtype for model in models for p in model.parameters() if p.is_floating_point()}
    if dtypes == {torch.float32}:
        return "tf32" if device.is_cuda and devices.float32_matmul() == "tf32" else "fp32"
    return "bf16-pure" if dtypes == {torch.bfloat16} else None


def _of_computing(measurement: Measurement) -> Measurement:
    """Return the measurement without phases in which the device must wait, because these are not launch-bound."""
    samples = tuple(
        replace(
            s,
            phases_s={n: t for n, t in s.phases_s.items() if n not in WAITING},
            lag_s=s.lag_s and {n: t for n, t in s.lag_s.items() if n not in WAITING},
        )
        for s in measurement.samples
    )
    return replace(measurement, samples=samples)


def _own_caveats(
    config: RunConfig,
    measurement: Measurement,
    subject: Subject,
    seen: set[str],
    ended: str | None,
    missing: Sequence[str],
    mallocs: int | None,
) -> Iterable[Caveat]:
    timed = len(measurement.timed)
    if ended is not None:
        done = len(measurement.samples) if not config.is_profiled else None
        yield caveats.cut_short(timed, config.steps, done, ended, missing)
    if mallocs:
        calls = counted(mallocs, "cudaMalloc call")
        yield Caveat("cudaMalloc", f"{calls} during timed steps", LOOP_REMEDIES["cudaMalloc"])
    if FORWARD not in seen and BACKWARD in seen:
        if subject.models:
            names = ", ".join(type(model).__name__ for model in subject.models)
            yield Caveat("no-forward", f"the call of {names} was not seen", LOOP_REMEDIES["no-forward"])
        else:
            remedy = "call the module itself, not its forward(); what a compiled function calls cannot be seen"
            yield Caveat("no-forward", "no call of a module with parameters was seen", remedy)
