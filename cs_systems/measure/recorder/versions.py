"""Detection of parameter updates that no hook shows."""

from __future__ import annotations

from collections.abc import Iterable

from torch.optim import Optimizer


class Updates:
    """Detector of parameter updates by version counters, because an optimizer in a compiled function runs no hooks."""

    def __init__(self) -> None:
        self._before: int | None = None

    def are_new(self, optimizers: Iterable[Optimizer]) -> bool:
        """Return whether a parameter has changed since the last call without an observed step."""
        now = sum(p._version for each in optimizers for group in each.param_groups for p in group["params"])
        before, self._before = self._before, now
        return before is not None and before != now

    def seen(self) -> None:
        """Reset the counters, because a step of an optimizer was observed."""
        self._before = None
