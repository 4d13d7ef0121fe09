"""Outcome of a loop: its last loss, and the optimizer steps that a GradScaler skipped.

Nothing is read while the loop runs, because reading waits for the device: scalars are kept until the end of a stage.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import register_optimizer_step_post_hook

from cs_systems.analysis.comparison.loop_findings import OutcomeRow
from cs_systems.core import caveats
from cs_systems.core.caveats import Caveat
from cs_systems.instrument.compiler import Observation, Undo, passed_through, replaced, untraced

_SMALL_BYTES = 512  # a scalar in a larger storage shares it with other tensors, and would keep them alive


class _Scalar(NamedTuple):
    """Value in memory outside the graph; `Tensor.detach` would add an operator that the loop itself does not run."""

    storage: torch.UntypedStorage
    offset: int
    dtype: torch.dtype

    def read(self) -> float:
        scalar: Any = torch.empty(0, dtype=self.dtype, device=self.storage.device)
        return float(scalar.set_(self.storage, self.offset, ()))


class Outcome:
    """Scalars of the steps of a stage; `row` reads them at its end."""

    def __init__(self) -> None:
        self._losses: list[_Scalar] = []
        self._is_skipped: bool | Tensor = False
        self.start()

    def start(self) -> None:
        """Begin a stage. A step that a GradScaler has already begun still belongs to the previous stage."""
        self._skipped: list[bool | Tensor] = []  # one for each step of a GradScaler
        self._scaler: GradScaler | None = None

    def keep_loss(self, roots: Any) -> None:
        """Keep the scalars among the roots of a backward pass."""
        tensors = [root for root in ((roots,) if isinstance(roots, Tensor) else roots) if _is_scalar(root)]
        self._losses = [_Scalar(t.untyped_storage(), int(t.storage_offset()), t.dtype) for t in tensors] or self._losses

    def observe(self, observation: Observation) -> None:
        """Watch the steps of every GradScaler until the observation is closed."""
        observation.add(self._watch_scalers)
        observation.add(lambda: register_optimizer_step_post_hook(self._stepped).remove, is_guarded=True)

    def _watch_scalers(self) -> Undo:
        step = GradScaler.step

        @passed_through
        @functools.wraps(step)
        def watched(scaler: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            found, self._is_skipped = self._skipped, True
            result = step(scaler, optimizer, *args, **kwargs)
            self._scaler_stepped(scaler, optimizer, found)
            return result

        return replaced(GradScaler, "step", watched)

    @untraced
    def _scaler_stepped(self, scaler: GradScaler, optimizer: Any, found: list[bool | Tensor]) -> None:
        if scaler.is_enabled() and hasattr(type(optimizer).step, "hooked"):
            self._scaler = scaler
            found.append(self._is_skipped)

    @untraced
    def _stepped(self, optimizer: Any, *_: Any) -> None:
        self._is_skipped = getattr(optimizer, "found_inf", False)  # a fused optimizer itself skips on the device

    def row(self) -> OutcomeRow:
        """Return the outcome of the stage; the device must have finished its work."""
        skipped = [_read(functools.partial(bool, flag)) for flag in self._skipped]
        scaler = self._scaler
        losses = [loss for each in self._losses if (loss := _read(each.read)) is not None]
        if scaler is not None:  # a scaled loss may be infinite, and is not the loss
            losses = [loss for loss in losses if math.isnan(loss)]
        wrong = next((loss for loss in losses if not math.isfinite(loss)), None)
        return {
            "loss": losses[0] if losses and wrong is None else None,
            "fault": None if wrong is None else "NaN" if math.isnan(wrong) else "infinite",
            "skipped_steps": None if scaler is None else skipped.count(True),
            "optimizer_steps": None if scaler is None else len(skipped),
            "first_scale": None if scaler is None else scaler._init_scale,
            "last_scale": None if scaler is None else _read(scaler.get_scale),
        }


def caveats_of(row: OutcomeRow) -> Iterator[Caveat]:
    """Yield the caveats of an outcome."""
    if row["skipped_steps"] and row["optimizer_steps"] and row["first_scale"] is not None:
        scales = row["first_scale"], row["last_scale"]
        yield caveats.skipped_steps(row["skipped_steps"], row["optimizer_steps"], *scales)
    yield from caveats.no_number({"NaN": math.nan, "infinite": math.inf}.get(row["fault"] or ""))


def _is_scalar(root: Any) -> bool:
    return (
        type(root) is Tensor
        and root.numel() == 1
        and root.is_floating_point()
        and not torch._C._functorch.is_functorch_wrapped_tensor(root)
        and root.untyped_storage().nbytes() <= _SMALL_BYTES
    )


def _read(value: Callable[[], Any]) -> Any:
    """Return a value from the device; None if it is lost, for example after a device error."""
    try:
        return value()
    except RuntimeError:
        return None
