"""CUDA graph of a whole step: captured once, then replayed as one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from cs_systems.config import CAPTURED_COMPILE_MODES, RunConfig
from cs_systems.core.optimizers import USUAL, optimizer
from cs_systems.machine.device import Device

EAGER_STEPS = 3  # steps that run uncaptured first, to compile, tune, and allocate the optimizer's state


def unavailable(config: RunConfig, device: Device) -> str | None:
    """Return why the step of this cell cannot be captured, with the remedy; None if it can."""
    if config.graph == "none":
        return None
    if not device.is_cuda:
        return "a CUDA graph needs a GPU; use graph none"
    if config.is_distributed:
        return "a CUDA graph cannot hold the collectives of several ranks; use graph none, or use one process"
    if config.compile in CAPTURED_COMPILE_MODES:
        return f"compile {config.compile} captures CUDA graphs itself; use compile default, or graph none"
    if config.data != "fixed":
        return f"a CUDA graph repeats one batch, and data is {config.data}; use data fixed, or graph none"
    if own := next((item for item in config.own_code.items() if item[0] != "attention"), None):
        return f"a CUDA graph may not hold {own[0]} {own[1][0]}; use a built-in one, or graph none"
    if not optimizer(config.optimizer).is_fused:
        return (
            f"optimizer {config.optimizer} counts its steps on the CPU, where a CUDA graph does not "
            f"repeat it; use optimizer {USUAL}, or graph none"
        )
    if config.warmup <= EAGER_STEPS:
        return (
            f"graph step requires more than {EAGER_STEPS} warm-up steps, and warmup is {config.warmup}; use warmup "
            f"{EAGER_STEPS + 1} or more"
        )
    if config.is_profiled:
        return f"{config.profiler} does not see the phases of a CUDA graph; use graph none to profile the step"
    return None


class StepGraph:
    """Step that runs EAGER_STEPS times uncaptured, is captured in the next step, and from then on is replayed.

    Each call is one step: capturing runs nothing, so the step is replayed once right after it. The captured tensors,
    gradients included, keep their addresses.

    Args:
        phases: returns the functions of a step, in order.
    """

    def __init__(self, phases: Callable[[], Iterable[tuple[str, Callable[[], Any]]]]) -> None:
        self.phases = phases
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream = torch.cuda.Stream(priority=-1)  # higher priority than the stream of an update in backward

    @property
    def captured(self) -> bool:
        return self.graph is not None

    def __call__(self) -> None:
        if self.graph is None and self.calls < EAGER_STEPS:
            self.calls += 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):  # backward runs on the stream of forward, as it will during capture
                self._run()
            torch.cuda.current_stream().wait_stream(self.stream)
            return
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                self._run()
            self.graph = graph
        self.graph.replay()

    def _run(self) -> None:
        for _, run in self.phases():
            run()
