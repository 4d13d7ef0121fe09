"""Dtypes of parameters, of each module's inputs and outputs, of logits, loss and gradients.

It also checks that the step ran in the requested precision. It works for every step that calls modules, including a
user's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from cs_systems.analysis.comparison.dtypes import contradiction, dtypes
from cs_systems.formulas.rounding import AUTOCAST_CONTEXTS, AutocastContext, ModuleDtypes
from cs_systems.measure.profilers import Collected, ProfileLost, Profiler
from cs_systems.measure.profilers._readings import leave, take
from cs_systems.record import RunRecord

if TYPE_CHECKING:
    from cs_systems.machine.device import Device


class Readings(TypedDict):
    """Readings of the recorded steps."""

    modules: list[ModuleDtypes]
    loss: list[str]
    contexts: list[AutocastContext]
    # of the step as CUDA's autocast would run it; empty if this machine has CUDA
    on_cuda: list[ModuleDtypes]
    loss_on_cuda: list[str]


@contextmanager
def region(out: Path, device: Device, model: Any) -> Iterator[None]:
    from cs_systems.instrument.dtype_readings import DtypeReadings, reading

    readings = DtypeReadings()
    with reading(readings):
        yield
    found = Readings(modules=readings.rows, loss=readings.loss, contexts=readings.contexts, on_cuda=[], loss_on_cuda=[])
    leave(out, found)


def again(out: Path, device: Device, workload: Any) -> None:
    """Run the step once more with the dtypes of CUDA's autocast, if the CPU's autocast was on."""
    from cs_systems.instrument.cuda_autocast import cuda_autocast
    from cs_systems.instrument.dtype_readings import DtypeReadings, reading

    found: Readings = take(out, "the dtypes were not written")
    if not device.is_cuda and any(context["enabled"] for context in found["contexts"]):
        readings = DtypeReadings()
        # if this step fails, the dtypes on CUDA are unknown
        with suppress(Exception), reading(readings), cuda_autocast():
            workload.prepare()
            for _, run in workload.step():
                run()
            found["on_cuda"], found["loss_on_cuda"] = readings.rows, readings.loss
    leave(out, found)


def collect(out: Path, record: RunRecord) -> Collected:
    found: Readings = take(out, "the dtypes were not written")
    if not found["modules"]:
        raise ProfileLost(
            "no dtype was read, because the step called no nn.Module; call the model as a module, and do not compile it"
        )
    results = {
        **dtypes.filled(dtypes(found["modules"], found["loss"], found["on_cuda"], found["loss_on_cuda"])),
        **AUTOCAST_CONTEXTS.filled(found["contexts"]),
    }
    cause = contradiction(record.run_config.precision, found["modules"], found["contexts"])
    return Collected({}, results, contradiction=cause)


PROFILER = Profiler(region=region, again=again, collect=collect, measures="values", checks=frozenset({"precision"}))
