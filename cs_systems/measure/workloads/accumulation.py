"""Rounding error of sums in low precision: one number added many times, and random numbers by several methods.

`config.precision` is the low one. Sums end in the low dtype. The data are the same on every device.

Table `accumulation`: VALUE added COUNTS times, the accumulator in one dtype and the addend in another.

Table `summation`: the relative error against float64 of sums of 16 to LONGEST uniform numbers in [0, 1), the median and
the maximum over LANES sums. Methods: sequential, pairwise, Kahan, sequential in an fp32 accumulator, and `torch.sum`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from cs_systems.config import Precision
from cs_systems.core.tables import Row, Tables
from cs_systems.formulas.rounding import ACCUMULATION, SUMMATION, AccumulationRow, SummationRow
from cs_systems.machine.device import Device
from cs_systems.measure.workloads import Cell, Unavailable, Workload
from cs_systems.measure.workloads._sums import DTYPES, kahan, pairwise, sequential
from cs_systems.record import Ran

VALUE = 0.01
COUNTS = (1_000, 10_000, 100_000)
LONGEST = 2**16
LANES = 64


class Accumulation(Workload):
    """Workload that fills the tables `accumulation` and `summation`."""

    def __init__(self, cell: Cell, device: Device) -> None:
        config = cell.config
        if config.precision not in DTYPES:
            raise Unavailable(
                f"accumulation does not support precision {config.precision.value}; use fp32, bf16 or fp16"
            )
        self.config, self.device = config, device
        self._tables: dict[str, Sequence[Row]] = {}

    def step(self) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "repeated", self._repeated
        yield "random", self._random

    def _repeated(self) -> None:
        self._tables |= ACCUMULATION.filled(repeated(self.config.precision, self.device.torch))

    def _random(self) -> None:
        rows = summation(self.config.precision, self.device.torch, self.config.seed, LONGEST)
        self._tables |= SUMMATION.filled(rows)

    def tables(self) -> Tables:
        return self._tables

    def describe(self) -> Ran:
        return {"tokens": None, "precision": self.config.precision.value}


def variants(precision: Precision) -> list[tuple[str, Precision, Precision, bool]]:
    """Return the variants of the repeated addition.

    Each is (name, accumulator's dtype, addend's dtype, whether the addend is converted to fp32 before the addition).
    """
    low, fp32 = precision, Precision.FP32
    if low is fp32:
        return [("fp32 + fp32", fp32, fp32, False)]
    return [
        (f"{low} + {low}", low, low, False),
        (f"fp32 + {low}", fp32, low, False),
        (f"fp32 + ({low} → fp32)", fp32, low, True),
    ]


def repeated(precision: Precision, device: torch.device) -> list[AccumulationRow]:
    """Add VALUE to 0 repeatedly and return the sums after COUNTS additions."""
    rows: list[AccumulationRow] = []
    for name, accumulator, addend, widened in variants(precision):
        total = torch.zeros((), dtype=DTYPES[accumulator], device=device)
        term = torch.tensor(VALUE, dtype=DTYPES[addend], device=device)
        term = term.float() if widened else term
        for n in range(1, max(COUNTS) + 1):
            total += term
            if n in COUNTS:
                exact = n * VALUE
                rows.append(
                    {
                        "variant": name,
                        "accumulator": accumulator.value,
                        "addend": addend.value,
                        "count": n,
                        "exact": exact,
                        "sum": float(total),
                        "error": float(total) - exact,
                    }
                )
    return rows


def summation(precision: Precision, device: torch.device, seed: int, longest: int) -> list[SummationRow]:
    """Return the errors of random sums, method by method."""
    low = DTYPES[precision]
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(longest, LANES, generator=generator).to(low).to(device)
    lengths = [2**k for k in range(4, longest.bit_length())]
    exact = x.double().cumsum(0)
    found: dict[str, dict[int, Tensor]] = {
        "sequential": sequential(x, lengths),
        "pairwise": {n: pairwise(x[:n]) for n in lengths},
        "Kahan": kahan(x, lengths),
        "torch.sum": {n: x[:n].sum(0) for n in lengths},
    }
    if precision is not Precision.FP32:
        found["fp32 accumulator"] = {n: s.to(low) for n, s in sequential(x.float(), lengths).items()}
    rows: list[SummationRow] = []
    for method, sums in found.items():
        for n in lengths:
            error = ((sums[n].double() - exact[n - 1]) / exact[n - 1]).abs()
            rows.append(
                {
                    "method": method,
                    "length": n,
                    "median_relative_error": float(error.median()),
                    "largest_relative_error": float(error.max()),
                    "unit_roundoff": torch.finfo(low).eps / 2,
                }
            )
    return rows


WORKLOAD = Accumulation
