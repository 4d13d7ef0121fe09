"""Outcome of a loop: its losses, and the optimizer steps that a GradScaler skipped.

Nothing is read while the loop runs, because reading waits for the device: scalars are kept until the end of a stage.
A scalar in the memory of CUDA graphs of torch.compile is copied on the device, because the next step overwrites it.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from cs_systems.analysis.comparison.loop_findings import OUTCOME, OutcomeRow
from cs_systems.core import caveats
from cs_systems.core.caveats import Caveat
from cs_systems.instrument.compiler import Observation, Undo, passed_through, replaced, untraced
from cs_systems.measure.recorder.inputs import StepInputs
from cs_systems.measure.recorder.observers import UNTIMED, Found, Observer, Period

MOST_LOSSES = 1000
FEWEST_LOSSES = 8  # with at least this many losses, the first and the last quarter are compared
_IN_C: dict[torch.dtype, Any] = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}
_SMALL_BYTES = 512  # a scalar in a larger storage shares it with other tensors, and would keep these alive


class _Scalar(NamedTuple):
    """Place of a scalar in memory; `Tensor.detach` would add an operator that the loop itself does not run."""

    storage: torch.UntypedStorage
    offset: int
    dtype: torch.dtype

    def read(self) -> float:
        scalar: Any = torch.empty(0, dtype=self.dtype, device=self.storage.device)
        return float(scalar.set_(self.storage, self.offset, ()))


class _Number(NamedTuple):
    """Value in host memory, which can be read without waiting and without an operator."""

    value: float

    def read(self) -> float:
        return self.value


class Outcome(Observer):
    """Scalars of the steps of a stage; `row` reads them at its end.

    at_skip: called with the optimizer if a GradScaler has skipped its step.
    """

    runs_operators = False

    def __init__(self, at_skip: Callable[[Optimizer], object] = lambda _: None) -> None:
        super().__init__()
        self._at_skip = at_skip
        self._losses: list[_Scalar | _Number] = []
        self._series: list[_Scalar | _Number] = []
        self._is_skipped: bool | Tensor = False
        self._start()

    def begins(self, period: Period) -> None:
        """Begin a stage. A step that a GradScaler has already begun still belongs to the previous stage."""
        if period not in UNTIMED:
            self._start()

    def end(self) -> None:
        self._start()

    def _start(self) -> None:
        self._skipped: list[bool | Tensor] = []  # one per step of a GradScaler
        self._scaler: GradScaler | None = None

    def backward_begins(self, roots: Any) -> None:
        """Keep the scalars among the roots of a backward pass."""
        every = (roots,) if isinstance(roots, Tensor) else roots
        kept = [value for root in every if (value := _kept(root)) is not None]
        self._losses = kept or self._losses
        if kept and len(self._series) < MOST_LOSSES:
            self._series.append(self._losses[0])

    def restart(self) -> None:
        self._start()
        self._series = []

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
            if self._is_skipped is True:
                self._at_skip(optimizer)

    @untraced
    def _stepped(self, optimizer: Any, *_: Any) -> None:
        # a fused optimizer skips the step itself, on the device
        self._is_skipped = getattr(optimizer, "found_inf", False)

    def results(self, inputs: Sequence[StepInputs], is_timed: bool) -> Found:
        row = self.row()
        return Found(OUTCOME.filled([row]), tuple(caveats_of(row)))

    def row(self) -> OutcomeRow:
        """Return the outcome of the stage; the device must have finished its work."""
        skipped = [_read(functools.partial(bool, flag)) for flag in self._skipped]
        scaler = self._scaler
        losses = [loss for each in self._losses if (loss := _read(each.read)) is not None]
        if scaler is not None:  # a scaled loss may be infinite although the loss is finite
            losses = [loss for loss in losses if math.isnan(loss)]
        wrong = next((loss for loss in losses if not math.isfinite(loss)), None)
        series = self._read_series() if scaler is None else []
        quarter = len(series) // 4
        return {
            "loss": losses[0] if losses and wrong is None else None,
            "fault": None if wrong is None else "NaN" if math.isnan(wrong) else "infinite",
            "skipped_steps": None if scaler is None else skipped.count(True),
            "optimizer_steps": None if scaler is None else len(skipped),
            "first_scale": None if scaler is None else scaler._init_scale,
            "last_scale": None if scaler is None else _read(scaler.get_scale),
            "losses": len(series),
            "early_loss": max(series[:quarter], default=None),
            "late_loss": min(series[-quarter:]) if quarter else None,
        }

    def _read_series(self) -> list[float]:
        """Return the losses of all backward passes since the last reading; [] if one is unknown or not finite."""
        scalars, self._series = self._series, []
        series = [_read(each.read) for each in scalars]
        is_known = all(loss is not None and math.isfinite(loss) for loss in series)
        return series if is_known and len(series) >= FEWEST_LOSSES else []


def caveats_of(row: OutcomeRow) -> Iterator[Caveat]:
    """Yield the caveats of an outcome."""
    if row["skipped_steps"] and row["optimizer_steps"] and row["first_scale"] is not None:
        scales = row["first_scale"], row["last_scale"]
        yield caveats.skipped_steps(row["skipped_steps"], row["optimizer_steps"], *scales)
    yield from caveats.no_number({"NaN": math.nan, "infinite": math.inf}.get(row["fault"] or ""))


def _kept(root: Any) -> _Scalar | _Number | None:
    """Return the value of a root of a backward pass, to be read later.

    None if it is not a scalar, or cannot be kept.
    """
    if (
        type(root) is not Tensor
        or root.numel() != 1
        or not root.is_floating_point()
        or torch._C._functorch.is_functorch_wrapped_tensor(root)
    ):
        return None
    storage = root.untyped_storage()
    if storage.nbytes() <= _SMALL_BYTES:
        if _is_of_graphs(root.device):
            if torch._C._autograd._profiler_enabled():
                return None  # the copy would be an operator of the profile
            storage = storage.clone()
        return _Scalar(storage, int(root.storage_offset()), root.dtype)
    kind = _IN_C.get(root.dtype)  # mse_loss returns a part of the memory that it used
    if kind is None or root.device.type != "cpu" or not root.data_ptr():
        return None
    return _Number(kind.from_address(root.data_ptr()).value)


def _is_of_graphs(device: torch.device) -> bool:
    """Return whether torch.compile may have made a tensor of this device in the memory of its CUDA graphs."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees") if device.type == "cuda" else None
    return trees is not None and trees.get_manager(device.index, create_if_none_exists=False) is not None


def _read(value: Callable[[], Any]) -> Any:
    """Return a value from the device; None if it is lost, for example after a device error."""
    try:
        return value()
    except RuntimeError:
        return None
