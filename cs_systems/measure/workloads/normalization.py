"""Error of LayerNorm, RMSNorm and softmax with one step at a time in low precision, against float64.

`config.precision` is the low one. Each operation is a chain of steps in float64. Where a step is low, its result is
rounded to the low dtype, and a low sum is really accumulated in it, sequentially or pairwise. Inputs are ROWS rows of D
normal numbers that are already in the low dtype, so their own rounding does not count. The error is the median over the
rows of |y − y64| / |y64| (2-norm). Two further entries are torch's kernel on low inputs, and fp32 with the result
rounded.

Table `normalization`: {operation, case, step, error, finite, unit_roundoff}; `finite` is the share of rows without inf
or NaN.

Table `normalization_range`: {operation, step, breaks_from, breaks_up_to, overflows}, of inputs with mean 0 and standard
deviation 2^k, k from SMALLEST to LARGEST or as far as the dtype reaches. With one low step alone, at least one of
RANGE_ROWS rows has an error above TOO_MUCH, for all sizes from `breaks_from` on and for all sizes up to `breaks_up_to`;
None if this never happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from cs_systems.config import Precision
from cs_systems.core.tables import Row, Tables
from cs_systems.formulas.rounding import (
    NORMALIZATION,
    NORMALIZATION_RANGE,
    NormalizationError,
    NormalizationLimits,
    NormalizationRangeRow,
    NormalizationRow,
)
from cs_systems.machine.device import Device
from cs_systems.measure.workloads import Cell, Unavailable, Workload
from cs_systems.measure.workloads._sums import DTYPES, pairwise, sequential
from cs_systems.record import Ran

ROWS, RANGE_ROWS, D = 32, 8, 1024
EPS = 1e-5
SMALLEST, LARGEST = -24, 16
TOO_MUCH = 0.5
TORCH = "as torch does it"
ORDERS = ("sequential", "pairwise")
# operation → (mean, standard deviation) of its inputs, by the name of the case
CASES = {
    "LayerNorm": {"mean 0": (0.0, 1.0), "mean 16 σ": (16.0, 1.0)},
    "RMSNorm": {"mean 0": (0.0, 1.0)},
    "softmax": {"σ 1": (0.0, 1.0), "σ 8": (0.0, 8.0)},
    "softmax without max": {"σ 1": (0.0, 1.0), "σ 8": (0.0, 8.0)},
}


class Chain:
    """Arithmetic in float64 with the steps in `low` rounded to `dtype`. Tensors are (rows, d).

    overflowed: the result of a low step, or a term of a low sum, was too large for the dtype.
    """

    def __init__(self, dtype: torch.dtype, low: frozenset[str]) -> None:
        self.dtype, self.low, self.overflowed = dtype, low, False

    def step(self, name: str, value: Tensor) -> Tensor:
        return self._checked(value.to(self.dtype).double()) if name in self.low else value

    def _checked(self, value: Tensor) -> Tensor:
        self.overflowed = self.overflowed or bool(value.isinf().any())
        return value

    def sum(self, name: str, x: Tensor) -> Tensor:
        """Sum each row: (rows, d) → (rows, 1)."""
        for order, add in zip(ORDERS, (lambda t: sequential(t)[len(t)], pairwise), strict=True):
            if f"{name}, {order}" in self.low:
                total: Tensor = add(x.to(self.dtype).T.contiguous())
                return self._checked(total.double()[:, None])
        return x.sum(-1, keepdim=True)


def layer_norm(x: Tensor, at: Chain) -> Tensor:
    """Compute (x − mean) / sqrt(var + eps) (Ba et al. 2016), without weights."""
    mean = at.step("mean", at.sum("sum", x) / D)
    return _scaled(at.step("x − mean", x - mean), at)


def rms_norm(x: Tensor, at: Chain) -> Tensor:
    """Compute x / sqrt(mean(x²) + eps) (Zhang & Sennrich 2019), without weights."""
    return _scaled(x, at)


def _scaled(x: Tensor, at: Chain) -> Tensor:
    squares = at.step("square", x * x)
    mean = at.step("mean of squares", at.sum("sum of squares", squares) / D)
    return at.step("scaling", x * at.step("1/sqrt", torch.rsqrt(mean + EPS)))


def softmax(x: Tensor, at: Chain) -> Tensor:
    return _exponentials(at.step("x − max", x - x.max(-1, keepdim=True).values), at)


def softmax_without_max(x: Tensor, at: Chain) -> Tensor:
    return _exponentials(x, at)


def _exponentials(x: Tensor, at: Chain) -> Tensor:
    e = at.step("exp", x.exp())
    return at.step("division", e / at.sum("sum", e))


OPERATIONS: dict[str, Callable[[Tensor, Chain], Tensor]] = {
    "LayerNorm": layer_norm,
    "RMSNorm": rms_norm,
    "softmax": softmax,
    "softmax without max": softmax_without_max,
}
KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "LayerNorm": lambda x: nn.functional.layer_norm(x, (D,), eps=EPS),
    "RMSNorm": lambda x: nn.functional.rms_norm(x, (D,), eps=EPS),
    "softmax": lambda x: x.softmax(-1),
}


def steps_of(operation: str) -> list[str]:
    """Return the names of an operation's steps in order; a sum has one name for each order of summation."""
    seen: list[str] = []

    class Names(Chain):
        def step(self, name: str, value: Tensor) -> Tensor:
            seen.append(name)
            return value

        def sum(self, name: str, x: Tensor) -> Tensor:
            seen.extend(f"{name}, {order}" for order in ORDERS)
            return x.sum(-1, keepdim=True)

    OPERATIONS[operation](torch.ones(1, D, dtype=torch.float64), Names(torch.float64, frozenset()))
    return seen


def _row_errors(exact: Tensor, low: Tensor) -> Tensor:
    """Return the relative error of each row: (rows, d), (rows, d) → (rows,); inf for a row with an inf or NaN."""
    errors = (low - exact).norm(dim=-1) / exact.norm(dim=-1)
    return torch.where(low.isfinite().all(-1), errors, torch.inf)


class Normalization(Workload):
    """Workload that fills the tables `normalization` and `normalization_range`."""

    def __init__(self, cell: Cell, device: Device) -> None:
        config = cell.config
        if config.precision not in (Precision.BF16, Precision.FP16):
            raise Unavailable(f"normalization requires a low precision, got {config.precision.value}; use bf16 or fp16")
        self.config, self.device = config, device
        self.dtype = DTYPES[config.precision]
        generator = torch.Generator().manual_seed(config.seed)
        self.normal = torch.randn(ROWS, D, generator=generator, dtype=torch.float64).to(device.torch)
        self._tables: dict[str, Sequence[Row]] = {}

    def step(self) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "error", self._error
        yield "range", self._range

    def _error(self) -> None:
        rows: list[NormalizationRow] = [
            {"operation": operation, "case": case, "step": name, **found}
            for operation, cases in CASES.items()
            for case, (mean, std) in cases.items()
            for name, found in self.errors(operation, mean, std)
        ]
        self._tables |= NORMALIZATION.filled(rows)

    def _range(self) -> None:
        rows: list[NormalizationRangeRow] = []
        for operation in OPERATIONS:
            for name in [*steps_of(operation), TORCH]:
                if name != TORCH or operation in KERNELS:
                    rows.append({"operation": operation, "step": name, **self.limits(operation, name)})
        self._tables |= NORMALIZATION_RANGE.filled(rows)

    def inputs(self, mean: float, std: float, rows: int = ROWS) -> Tensor:
        return (mean + std * self.normal[:rows]).to(self.dtype)

    def errors(self, operation: str, mean: float, std: float) -> Iterator[tuple[str, NormalizationError]]:
        """Yield (name of what is low, its error).

        First each step alone is low, then all steps; torch's own versions come last.
        """
        x = self.inputs(mean, std)
        exact = self.apply(operation, x, frozenset())
        steps = steps_of(operation)
        for name in steps:
            yield name, self._against(exact, self.apply(operation, x, frozenset({name})))
        for order in ORDERS:
            all_low = frozenset(s for s in steps if not s.endswith(ORDERS) or s.endswith(order))
            yield f"all steps, sums {order}", self._against(exact, self.apply(operation, x, all_low))
        if operation in KERNELS:
            yield TORCH, self._against(exact, KERNELS[operation](x))
            yield "fp32, result rounded", self._against(exact, KERNELS[operation](x.float()).to(self.dtype))

    def apply(self, operation: str, x: Tensor, low: frozenset[str]) -> Tensor:
        return OPERATIONS[operation](x.double(), Chain(self.dtype, low))

    def limits(self, operation: str, name: str) -> NormalizationLimits:
        """Return the sizes from which on, and up to which, the low step `name` alone gives a wrong result.

        The first range extends to the largest size, the second starts at the smallest.
        """
        sizes, broken, overflows = [], [], False
        for k in range(SMALLEST, LARGEST + 1):
            x = self.inputs(0.0, 2.0**k, RANGE_ROWS)
            exact = self.apply(operation, x, frozenset())
            if not bool(x.isfinite().all() and exact.isfinite().all()) or bool((x == 0).all(-1).any()):
                continue  # the dtype cannot hold the input, or float64 gives no finite result
            chain = Chain(self.dtype, frozenset({name}))
            low = KERNELS[operation](x) if name == TORCH else OPERATIONS[operation](x.double(), chain)
            sizes.append(2.0**k)
            broken.append(bool((_row_errors(exact, low.double()) > TOO_MUCH).any()))
            overflows |= broken[-1] and (chain.overflowed or not bool(low.isfinite().all()))
        from_ = next((i for i in range(len(sizes)) if all(broken[i:])), None)
        up_to = next((i for i in reversed(range(len(sizes))) if all(broken[: i + 1])), None)
        return {
            "breaks_from": None if from_ is None else sizes[from_],
            "breaks_up_to": None if up_to is None else sizes[up_to],
            "overflows": overflows,
        }

    def _against(self, exact: Tensor, low: Tensor) -> NormalizationError:
        errors = _row_errors(exact, low.double())
        finite = errors.isfinite()
        return {
            "error": float(errors[finite].median()) if bool(finite.any()) else None,
            "finite": float(finite.double().mean()),
            "unit_roundoff": torch.finfo(self.dtype).eps / 2,
        }

    def tables(self) -> Tables:
        return self._tables

    def describe(self) -> Ran:
        return {"tokens": None, "precision": self.config.precision.value}


WORKLOAD = Normalization
