"""Error of logits, loss and gradients in low precision against float64, over one step; not a timing.

Table `precision_error` compares a step in low precision with a reference from the same fp32 parameters, batch and loss.
The reference uses naive attention in float64, or in fp32 where float64 would not fit in memory (column `reference`).

- Relative errors ‖x − x₆₄‖ / ‖x₆₄‖ of the logits and of all gradients together, and the parameter whose gradient has
the largest error.
- The relative error |l − l₆₄| / l₆₄ of the loss.
- `underflow_share`: the share of gradient elements that are 0 where the reference's are not.
- `nonfinite_share`: the share that is inf or NaN.

bf16-pure rounds the parameters themselves, which is part of its error. fp16 has two rows: without a loss scale, and
with the largest power of 2, from GradScaler's initial scale downwards, at which no gradient overflows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cs_systems.analysis.comparison.precision import PRECISION_ERROR, PrecisionErrorRow
from cs_systems.config import Mode, Precision, RunConfig
from cs_systems.core.fields import Subject
from cs_systems.core.tables import Tables
from cs_systems.formulas.cost import parameter_count
from cs_systems.machine import device as devices
from cs_systems.machine.device import Device
from cs_systems.measure.workloads import Cell, Unavailable, Workload
from cs_systems.measure.workloads.train_step import TrainStep
from cs_systems.record import Ran

FIRST_LOSS_SCALE = 2.0**16  # the initial scale of torch.amp.GradScaler
# share of the whole gradient below which a parameter's gradient is roundoff; that of a key's bias is exactly 0 in
# theory
ROUNDOFF = 1e-6
SHARE_FOR_FLOAT64 = 0.8  # share of the memory; the rest is for allocations that no formula predicts
BYTES_OF_FLOAT64 = 8


class PrecisionError(Workload):
    """Workload that compares one step in the config's precision with its reference."""

    def __init__(self, cell: Cell, device: Device) -> None:
        self.cell = _step_of(cell)
        self.device = device
        self.preflight(cell, device)
        self._begin(_reference_dtype(self.cell, device))
        self.tokens: int | None = cell.config.batch_size * cell.config.tokens_per_sequence

    def _begin(self, reference_dtype: torch.dtype) -> None:
        self.reference_dtype = reference_dtype
        self.logits = self.loss = torch.empty(0)
        self.gradients: dict[str, Tensor] = {}
        self.rows: list[PrecisionErrorRow] = []
        self.low_loss: float | None = None

    @staticmethod
    def preflight(cell: Cell, device: Device) -> int | None:
        """Return the predicted peak of device memory in bytes, or None.

        Raises Unavailable where the cell cannot run, and where fp32 would be compared with itself.
        """
        cell = _step_of(cell)
        low = TrainStep.preflight(cell, device)
        dtype = _reference_dtype(cell, device)
        if dtype is torch.float32 and cell.config.precision is Precision.FP32:
            raise Unavailable(
                "the float64 reference for fp32 does not fit in memory; use a smaller batch, context or model"
            )
        return None if low is None else max(low + _kept_bytes(cell.config), _reference_bytes(cell, device, dtype))

    def prepare(self) -> None:
        self.rows = []

    def step(self) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "reference", self._reference
        yield self.cell.config.precision.value, self._low

    def _reference(self) -> None:
        devices.set_float32_matmul(Precision.FP32)  # a tf32 cell would otherwise compute an fp32 reference in tf32
        exact = self._make(_exact(self.cell))
        exact.model.to(self.reference_dtype)
        run_parts(exact)
        assert exact.loss is not None
        self.logits, self.loss = self._outputs(exact), exact.loss.detach()
        self.gradients = {n: p.grad for n, p in exact.model.named_parameters() if p.grad is not None}
        devices.set_float32_matmul(self.cell.config.precision)

    def _low(self) -> None:
        low = self._make(self.cell)
        if self.cell.config.precision is not Precision.FP16:
            self.rows = [self._errors(low, None)]
            return
        self.rows, scale = [self._errors(low, 1.0)], FIRST_LOSS_SCALE
        while (row := self._errors(low, scale))["nonfinite_share"] and scale > 1:
            scale /= 2  # as GradScaler does one step later
        self.rows.append(row)

    def _make(self, cell: Cell) -> Any:
        return TrainStep(cell, self.device)

    def _outputs(self, step: Any) -> Tensor:
        """Return the model's output in the last step, without its graph."""
        logits: Tensor = step.output.detach()
        return logits

    def _errors(self, low: Any, scale: float | None) -> PrecisionErrorRow:
        """Return the table row of one step.

        scale: the factor on the loss before backward, by which the gradients are divided afterwards; None for no
        scaling.
        """
        if scale is not None:
            low.scaler = torch.amp.GradScaler(self.device.torch.type, init_scale=scale)
        run_parts(low)
        assert low.loss is not None
        self.low_loss = float(low.loss.detach())
        found = {n: p.grad for n, p in low.model.named_parameters() if p.grad is not None}
        distances, norms = {}, {}
        lost = exact = nonfinite = elements = 0
        for name, reference in self.gradients.items():
            gradient = found[name].to(reference.dtype) / (scale or 1.0)
            distances[name], norms[name] = _norm(gradient - reference), _norm(reference)
            lost += int(((gradient == 0) & (reference != 0)).sum())
            exact += int((reference != 0).sum())
            nonfinite += int((~gradient.isfinite()).sum())
            elements += reference.numel()
        whole = _whole(norms.values())
        of_each = {name: distances[name] / norms[name] for name in norms if not norms[name] <= ROUNDOFF * whole}
        worst = farthest(of_each)
        return {
            "reference": str(self.reference_dtype).removeprefix("torch."),
            "loss_scale": scale,
            "logits_error": _known(_norm(self._outputs(low).to(self.logits.dtype) - self.logits), _norm(self.logits)),
            "loss_error": _known(abs(self.low_loss - float(self.loss)), float(self.loss)),
            "gradient_error": _known(_whole(distances.values()), whole),
            "worst_parameter": worst,
            "worst_parameter_error": _known(of_each[worst], 1.0) if worst else None,
            "underflow_share": lost / exact if exact else None,
            "nonfinite_share": nonfinite / elements if elements else None,
        }

    def tables(self) -> Tables:
        return PRECISION_ERROR.filled(self.rows)

    def describe(self) -> Ran:
        return {"tokens": self.tokens, "loss": self.low_loss}


def _step_of(cell: Cell) -> Cell:
    """Return the cell of the training step that is compared."""
    return Cell(replace(cell.config, workload=Subject.STEP, mode=Mode.FORWARD_BACKWARD))


def farthest(errors: Mapping[str, float]) -> str | None:
    """Return the name of the largest error, a NaN before any number; None if there are no errors."""
    return max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]), default=None)


def run_parts(step: Workload) -> None:
    """Run one whole step, untimed."""
    step.prepare()
    for _, part in step.step():
        part()


def _exact(cell: Cell) -> Cell:
    config = replace(cell.config, precision=Precision.FP32, attention="naive", compile="none", checkpoint="none")
    return Cell(config)


def _kept_bytes(config: RunConfig) -> int:
    """Return an upper bound in bytes for the reference's gradients and logits."""
    logits = config.batch_size * config.tokens_per_sequence * config.model.vocab_size
    return BYTES_OF_FLOAT64 * (parameter_count(config.model) + logits)


def _reference_bytes(cell: Cell, device: Device, dtype: torch.dtype) -> int:
    """Return the predicted peak of a step in float64, where every tensor takes twice the bytes of fp32."""
    built_in = replace(cell.config, loss_function=RunConfig.loss_function)  # the user's own loss declares no memory
    predicted = TrainStep.preflight(_exact(Cell(built_in)), device)
    assert predicted is not None, "naive declares its memory"
    return predicted * (2 if dtype is torch.float64 else 1)


def _reference_dtype(cell: Cell, device: Device) -> torch.dtype:
    limit = cell.config.memory_limit_bytes or device.total_memory_bytes() or devices.host_memory_bytes()
    if limit is None or _reference_bytes(cell, device, torch.float64) <= SHARE_FOR_FLOAT64 * limit:
        return torch.float64
    return torch.float32


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x))


def _whole(norms: Iterable[float]) -> float:
    return math.hypot(*norms)


def _known(error: float, size: float) -> float | None:
    """Return the relative error, or None if an overflow made it infinite or NaN."""
    ratio = error / size if size else error
    return ratio if ratio < float("inf") else None


WORKLOAD = PrecisionError
