"""Tests of steps on a device that lags behind the host, with a simulated device that has a queue and a clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cs_systems.machine.device import Device
from cs_systems.measure.recorder.phases import Clocks, Timeline


@dataclass
class Simulation:
    """Simulation of host and device: the device works in order, on each piece only after the host has submitted it.

    fast: seconds of the device's clock per second of the host's.
    """

    fast: float = 1.0
    now_s: float = 0.0
    free_at_s: float = 0.0

    def clock(self) -> float:
        return self.now_s

    def launch(self, work_s: float, submit_s: float = 0.0) -> None:
        self.now_s += submit_s
        self.free_at_s = max(self.free_at_s, self.now_s) + work_s

    def mark(self) -> float:
        return self.fast * max(self.free_at_s, self.now_s) + 1000

    def wait(self) -> None:
        self.now_s = max(self.now_s, self.free_at_s)


@dataclass(frozen=True)
class SimulatedDevice(Device):
    simulation: Simulation = field(default_factory=Simulation)

    @property
    def is_cuda(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.simulation.wait()

    def mark(self) -> float:
        return self.simulation.mark()

    def between_s(self, start: float, end: float) -> float:
        return end - start


def steps(simulation: Simulation, *, wait_s: float, submit_s: float, work_s: float) -> tuple[Clocks, list[Timeline]]:
    """Run ten steps: the host waits for input, then submits the work of one forward pass."""
    clocks, timelines = Clocks(SimulatedDevice(torch.device("cuda"), simulation), simulation.clock), []
    for _ in range(10):
        timeline = Timeline(clocks, "input")
        simulation.now_s += wait_s
        timeline.begin("forward")
        simulation.launch(work_s, submit_s)
        timeline.end()
        timelines.append(timeline)
    clocks.end()
    return clocks, timelines


def test_input_hidden_behind_the_device_takes_no_time() -> None:
    _, timelines = steps(Simulation(), wait_s=0.3, submit_s=0.2, work_s=1.0)
    for timeline in timelines[1:]:
        sample = timeline.sample(warmup=False)
        assert sample.wall_s == pytest.approx(1.0)
        assert sample.phases_s == pytest.approx({"input": 0.0, "forward": 1.0})
        assert sample.submit_s == pytest.approx({"input": 0.3, "forward": 0.2})
    assert sample.lag_s is not None
    assert sample.lag_s["forward"] == pytest.approx(0.5 + 10 * 0.5), "the host runs ahead by 0.5 s a step"


def test_device_that_waits_for_the_host_has_no_lag() -> None:
    _, timelines = steps(Simulation(), wait_s=0.0, submit_s=1.0, work_s=0.01)
    sample = timelines[-1].sample(warmup=False)
    assert sample.wall_s == pytest.approx(1.0)
    assert sample.lag_s is not None
    assert sample.lag_s["forward"] == pytest.approx(0.01)


@given(fast=st.floats(0.999, 1.001), submit_s=st.floats(0.001, 1), work_s=st.floats(0.001, 1))
def test_lag_does_not_depend_on_the_rate_of_the_devices_clock(fast: float, submit_s: float, work_s: float) -> None:
    exact, drifting = (
        steps(Simulation(rate), wait_s=0.0, submit_s=submit_s, work_s=work_s)[1][-1].sample(warmup=False)
        for rate in (1.0, fast)
    )
    assert exact.lag_s is not None
    assert drifting.lag_s == pytest.approx(exact.lag_s, abs=1e-6)
