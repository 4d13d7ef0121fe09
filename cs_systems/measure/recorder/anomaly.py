"""Backward passes under autograd's anomaly detection, counted in the timed steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cs_systems.analysis.comparison.loop_findings import ANOMALY
from cs_systems.measure.recorder.observers import Observer, Period


class Anomaly(Observer):
    """Counter of the backward passes, and of those with detection."""

    runs_operators = False
    _passes = _with_detection = 0

    def begins(self, period: Period) -> None:
        if period is Period.TIMED:
            self.restart()

    def restart(self) -> None:
        self._passes = self._with_detection = 0

    def backward_begins(self, roots: Any) -> None:
        self._passes += 1
        self._with_detection += torch.is_anomaly_enabled()

    def timing_ended(self, shapes: Sequence[tuple[int, ...]]) -> None:
        if self._with_detection:
            self.keep(ANOMALY, [{"passes": self._passes, "with_detection": self._with_detection}])
