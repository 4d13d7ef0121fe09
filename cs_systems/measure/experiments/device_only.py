"""Experiment: the step's time on the device alone; the device begins each piece only when all of it is launched.

A sleeping kernel holds the device while the host launches. If the device was still held when a piece was launched
completely, its kernels followed each other as in a CUDA graph. Otherwise the host waited: for the device, or because
the launch queue was full (about a thousand launches). Such a phase is divided into pieces of fewer operators.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cs_systems.config import Phase
from cs_systems.core.experiments import ExperimentRow
from cs_systems.machine.device import Device
from cs_systems.measure.runtime.experimenting import STEPS, Experiment, Skipped, Spread, Step, row

LEAST_SUBMIT = 0.3  # share of the step in which the host launches; below it, the device hardly waits for the host
TRIES = 4  # steps for finding the length of a hold and the division into pieces
OPERATORS = 200  # operators of a piece; their few launches fit into the queue
HOLD_MARGIN = 2.0
FIRST_HOLD_S, LONGEST_HOLD_S = 2e-3, 0.5
STANDS_FOR = "the kernels and copies of the step, each launched before the device was ready for it, as in a CUDA graph"
# operators that read a value of the device, so that the host waits
WAITS = frozenset({"aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero", "aten::nonzero"})


class _Holds:
    """Device that is held while a piece is launched.

    Attributes:
        is_ahead: every piece so far was launched completely before the device began it.
        busy_s: time of all pieces on the device.
        hold_s: seconds for which the device is held for the next piece.
    """

    def __init__(self, device: Device, hold_s: float) -> None:
        self._device, self.hold_s = device, hold_s
        self.is_ahead, self.busy_s = True, 0.0

    def begin(self) -> None:
        self._device.synchronize()
        self._device.occupy(self.hold_s)
        self._start, self._began_s = self._device.mark(), time.perf_counter()

    def end(self) -> None:
        submit_s = time.perf_counter() - self._began_s
        self.is_ahead &= not self._device.has_reached(self._start)
        end = self._device.mark()
        self._device.synchronize()
        self.busy_s += self._device.between_s(self._start, end)
        if HOLD_MARGIN * submit_s > self.hold_s:
            self.hold_s = min(HOLD_MARGIN * submit_s, LONGEST_HOLD_S)


class _Pieces(TorchDispatchMode):
    """Mode that ends a piece after some operators, and before and after each operator for which the host waits."""

    def __init__(self, holds: _Holds) -> None:
        super().__init__()
        self._holds, self._count = holds, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _waits(function, args, kwargs or {}):
            self._holds.end()
            result = function(*args, **(kwargs or {}))
            self._again()
            return result
        if self._count == OPERATORS:
            self._holds.end()
            self._again()
        self._count += 1
        return function(*args, **(kwargs or {}))

    def _again(self) -> None:
        self._count = 0
        self._holds.begin()


def _waits(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the host waits for the device in this operator."""
    name = function.name().partition(".")[0]
    if name == "aten::_to_copy":
        device = kwargs.get("device")
        return args[0].is_cuda and device is not None and torch.device(device).type == "cpu"
    if name == "aten::copy_":
        return bool(args[1].is_cuda and not args[0].is_cuda)
    return name in WAITS


def _concerns(step: Step) -> bool:
    launched_s = sum(_submit_s(step, name) for name in step.clean.phase_names() if name != Phase.INPUT)
    return step.device.is_cuda and launched_s > LEAST_SUBMIT * step.step_s


def _submit_s(step: Step, phase: str) -> float:
    times_s = [sample.submit_s.get(phase, 0.0) for sample in step.clean.samples]
    return sum(times_s) / len(times_s)


def _run(step: Step) -> list[ExperimentRow]:
    found: list[float] = []
    held, divided = dict[str, float](), set[str]()
    late = ""
    for _ in range(TRIES + STEPS):
        step_s, late = _device_s(step, held, divided)
        if not late:
            found.append(step_s)
        if len(found) == STEPS:
            return [row("", "step", Spread.of(found), step.step_s, STANDS_FOR)]
    what = "the host waits for the device, or launches more than its queue takes, in"
    raise Skipped(f"{what} {late or 'some steps'}")


def _device_s(step: Step, held: dict[str, float], divided: set[str]) -> tuple[float, str]:
    """Run one step; return its time on the device, and a phase in which the device was not held to the end, or "".

    held: phase → seconds for which the device is held; updated here. divided: phases that are launched in pieces;
    updated here.
    """
    step.prepare()
    busy_s, late = 0.0, ""
    for name, run in step.again(without=(Phase.INPUT,)):
        first_s = min(max(FIRST_HOLD_S, HOLD_MARGIN * _submit_s(step, name)), LONGEST_HOLD_S)
        holds = _Holds(step.device, held.get(name, first_s))
        _hold(run, holds, is_divided=name in divided)
        busy_s += holds.busy_s
        if not holds.is_ahead:
            late = name
            if name in held and step.is_eager and name not in divided:  # a longer hold did not help
                divided.add(name)
                held[name] = FIRST_HOLD_S
                continue
        held[name] = holds.hold_s
    return busy_s, late


def _hold(run: Callable[[], Any], holds: _Holds, *, is_divided: bool) -> None:
    holds.begin()
    if is_divided:
        with _Pieces(holds):
            run()
    else:
        run()
    holds.end()


EXPERIMENT = Experiment(_concerns, lambda step: (TRIES + STEPS) * (1 + HOLD_MARGIN) * step.step_s, _run)
