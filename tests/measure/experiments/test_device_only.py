"""Division of a step into pieces that fit into the queue of launches, on a queue that counts operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cs_systems.measure.experiments import device_only
from cs_systems.measure.experiments.device_only import OPERATORS, STEPS
from cs_systems.measure.runtime.experimenting import Skipped, Step
from cs_systems.record import Measurement, Sample

FITS = 1000
OPERATOR_S = 1e-6


class Queue(TorchDispatchMode):
    """Device with a queue: each operator lasts 1 µs; it has begun a piece if more was launched than fits."""

    is_cuda = True

    def __init__(self) -> None:
        super().__init__()
        self.done, self.queued, self.longest = 0, 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.done, self.queued = self.done + 1, self.queued + 1
        if function is torch.ops.aten._local_scalar_dense.default:
            self.queued = 2 * FITS  # the device has begun, because the host waits for it
        return function(*args, **(kwargs or {}))

    def synchronize(self) -> None:
        self.queued = 0

    def occupy(self, seconds: float) -> None:
        self.queued = 0

    def mark(self) -> int:
        return self.done

    def has_reached(self, mark: int) -> bool:
        self.longest = max(self.longest, self.queued)
        return self.queued > FITS

    def between_s(self, start: int, end: int) -> float:
        return (end - start) * OPERATOR_S


def step_of(phases: dict[str, Callable[[], Any]], device: Any, *, is_eager: bool = True) -> Step:
    times = dict.fromkeys(phases, 1e-3)
    clean = Measurement("cuda_event", (Sample(0, False, 2e-3, times, times),) * 3, 0.0)
    return Step(device, clean, lambda: phases.items(), is_eager=is_eager)


def operators(count: int) -> Callable[[], None]:
    def run() -> None:
        x = torch.ones(1)
        for _ in range(count - 1):
            x.add_(1)

    return run


def test_phase_that_fits_is_launched_as_a_whole() -> None:
    with Queue() as queue:
        (row,) = device_only.EXPERIMENT.run(step_of({"forward": operators(900), "optimizer": operators(50)}, queue))
    assert row["rounds"] == STEPS
    assert row["time_s"] == pytest.approx(950 * OPERATOR_S)
    assert queue.longest == 900
    assert queue.done == STEPS * 950


def test_phase_with_more_launches_than_fit_is_divided_and_all_of_it_is_timed() -> None:
    with Queue() as queue:
        step = step_of({"forward": operators(3001), "optimizer": operators(50)}, queue)
        (row,) = device_only.EXPERIMENT.run(step)
        assert row["time_s"] == pytest.approx(3051 * OPERATOR_S)
        queue.longest = 0
        device_only._device_s(step, {"forward": 1e-3}, {"forward"})
    assert queue.longest == OPERATORS


def test_phase_in_which_the_host_waits_is_divided_there() -> None:
    def run() -> None:
        operators(10)()
        torch.ones(1).item()
        operators(10)()

    with Queue() as queue:
        (row,) = device_only.EXPERIMENT.run(step_of({"forward": run}, queue))
    assert row["time_s"] == pytest.approx(21 * OPERATOR_S)  # without the operator for which the host waits


def test_phase_that_cannot_be_divided_is_named() -> None:
    with Queue() as queue, pytest.raises(Skipped, match=r"launches more than its queue takes, in forward$"):
        device_only.EXPERIMENT.run(step_of({"forward": operators(2000)}, queue, is_eager=False))


def test_wait_for_the_next_batch_is_left_out() -> None:
    with Queue() as queue:
        (row,) = device_only.EXPERIMENT.run(step_of({"input": operators(7), "forward": operators(5)}, queue))
    assert row["time_s"] == pytest.approx(5 * OPERATOR_S)


@pytest.mark.parametrize(("submit_s", "concerns"), [(1e-3, True), (2e-4, False)])
def test_experiment_runs_only_if_launches_take_long(submit_s: float, concerns: bool) -> None:
    sample = Sample(0, False, 2e-3, {"forward": 2e-3}, {"forward": submit_s})
    step = Step(Queue(), Measurement("cuda_event", (sample,) * 3, 0.0), None)  # type: ignore[arg-type]
    assert device_only.EXPERIMENT.concerns(step) is concerns
