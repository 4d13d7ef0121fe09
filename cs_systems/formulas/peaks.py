"""Peak rates and memory bandwidths of known devices, from their data sheets.

Data sheets often state tensor-core rates with structured sparsity; half of those values is used here. Rates of GeForce
cards are for fp32 accumulation, as in training. `fp32` is the rate outside the tensor cores (TF32 off).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypedDict

from cs_systems.config import Precision
from cs_systems.core.tables import Table

TERA = 1e12


class CeilingRow(TypedDict):
    """Peak rates of the device, in `ceiling`; `source` names where they are from."""

    precision: str
    peak_flops_per_s: float
    peak_bytes_per_s: float | None
    source: str


@dataclass(frozen=True)
class Peak:
    """Upper limit in FLOP/s or bytes/s, with its source."""

    per_s: float
    source: str


@dataclass(frozen=True)
class DataSheet:
    """Data sheet of one kind of device.

    tflops: TFLOP/s by precision (dense); a precision that the chip lacks is absent.
    bandwidth: memory bandwidth in TB/s.
    nvlink: TB/s of a GPU's NVLinks, both directions together, as in data sheets, if each GPU reaches every other of the
        board. None if there is no NVLink, or only an optional bridge between some GPUs.
    """

    names: tuple[str, ...]  # as printed by torch and nvidia-smi, without "NVIDIA ", "GeForce " and "Tesla "
    source: str
    bandwidth: float
    tflops: dict[str, float]
    nvlink: float | None = None


def _rates(
    fp32: float, tf32: float | None, bf16: float | None, fp16: float, fp8: float | None = None
) -> dict[str, float]:
    rates = {"fp32": fp32, "tf32": tf32, "bf16": bf16, "fp16": fp16, "fp8": fp8}
    return {name: rate for name, rate in rates.items() if rate is not None}


_AMPERE = _rates(19.5, 156, 312, 312)
_HOPPER_SXM = _rates(67, 494.5, 989.5, 989.5, 1979)
_HOPPER_NVL = _rates(60, 417.5, 835.5, 835.5, 1670.5)
_VOLTA_SXM = _rates(15.7, None, None, 125)
_VOLTA_PCIE = _rates(14, None, None, 112)

DATA_SHEETS = (
    DataSheet(("T4",), "NVIDIA T4 data sheet", 0.32, _rates(8.1, None, None, 65)),
    DataSheet(("V100-SXM2-16GB", "V100-SXM2-32GB"), "NVIDIA V100 data sheet, SXM2", 0.9, _VOLTA_SXM, 0.3),
    DataSheet(("V100-PCIE-16GB", "V100-PCIE-32GB"), "NVIDIA V100 data sheet, PCIe", 0.9, _VOLTA_PCIE),
    DataSheet(("V100S-PCIE-32GB",), "NVIDIA V100 data sheet, V100S", 1.134, _rates(16.4, None, None, 130)),
    DataSheet(("A100-SXM4-40GB",), "NVIDIA A100 data sheet, 40 GB SXM, dense", 1.555, _AMPERE, 0.6),
    DataSheet(("A100-SXM4-80GB",), "NVIDIA A100 data sheet, 80 GB SXM, dense", 2.039, _AMPERE, 0.6),
    DataSheet(("A100-PCIE-40GB",), "NVIDIA A100 data sheet, 40 GB PCIe, dense", 1.555, _AMPERE),
    DataSheet(("A100 80GB PCIe",), "NVIDIA A100 data sheet, 80 GB PCIe, dense", 1.935, _AMPERE),
    DataSheet(("A10",), "NVIDIA A10 data sheet, dense", 0.6, _rates(31.2, 62.5, 125, 125)),
    DataSheet(("H100 80GB HBM3",), "NVIDIA H100 data sheet, SXM, dense", 3.35, _HOPPER_SXM, 0.9),
    DataSheet(("H100 PCIe",), "NVIDIA H100 data sheet, PCIe, dense", 2.0, _rates(51, 378, 756, 756, 1513)),
    DataSheet(("H100 NVL",), "NVIDIA H100 data sheet, NVL, dense", 3.9, _HOPPER_NVL),
    DataSheet(("H200",), "NVIDIA H200 data sheet, SXM, dense", 4.8, _HOPPER_SXM, 0.9),
    DataSheet(("H200 NVL",), "NVIDIA H200 data sheet, NVL, dense", 4.8, _HOPPER_NVL),
    DataSheet(("B200",), "NVIDIA HGX B200 data sheet, dense, an eighth", 7.7, _rates(75, 1125, 2250, 2250, 4500), 1.8),
    DataSheet(
        ("GB200",), "NVIDIA GB200 data sheet, dense, half a superchip", 8.0, _rates(80, 1250, 2500, 2500, 5000), 1.8
    ),
    DataSheet(("L4",), "NVIDIA L4 data sheet, dense", 0.3, _rates(30.3, 60, 121, 121, 242.5)),
    DataSheet(("L40S",), "NVIDIA L40S data sheet, dense", 0.864, _rates(91.6, 183, 362.05, 362.05, 733)),
    DataSheet(("RTX 3090",), "NVIDIA GA102 white paper, dense, fp32 accumulate", 0.936, _rates(35.6, 35.6, 71, 71)),
    DataSheet(
        ("RTX 4090",), "NVIDIA Ada white paper, dense, fp32 accumulate", 1.008, _rates(82.6, 82.6, 165.2, 165.2, 330.3)
    ),
    DataSheet(
        ("RTX 5090",),
        "NVIDIA RTX Blackwell white paper, dense, fp32 accumulate",
        1.792,
        _rates(104.8, 104.8, 209.5, 209.5, 419),
    ),
)


_TURING = re.compile(r"\bRTX 20\d\d|\b(Quadro|TITAN) RTX\b|\bTITAN V\b")


def peak_flops(device_name: str, precision: Precision | str) -> Peak | None:
    """Return the dense FLOP/s of `precision` ("fp8" too); None for an unknown device or a missing precision."""
    sheet = _find(device_name)
    rate = sheet.tflops.get(str(precision).removesuffix("-pure")) if sheet else None
    return Peak(rate * TERA, sheet.source) if sheet and rate else None


def has_tensor_cores(device_name: str) -> bool:
    """Return whether a device is known to have tensor cores: by its data sheet, or because it is an RTX card."""
    return peak_flops(device_name, Precision.FP16) is not None or "RTX" in device_name.split()


def lacks_bf16(device_name: str) -> bool:
    """Return whether a device's tensor cores are known to lack bf16, as Volta's and Turing's do."""
    if peak_flops(device_name, Precision.FP16) is not None:
        return peak_flops(device_name, Precision.BF16) is None
    return _TURING.search(device_name) is not None


def peak_bandwidth(device_name: str) -> Peak | None:
    """Return the memory bandwidth of the device in bytes/s; None for an unknown device."""
    sheet = _find(device_name)
    return Peak(sheet.bandwidth * TERA, sheet.source) if sheet else None


def peak_link(device_name: str) -> Peak | None:
    """Return the bytes/s that a GPU can send to the other GPUs of its board: its NVLinks in one direction.

    None if unknown.
    """
    sheet = _find(device_name)
    if sheet is None or sheet.nvlink is None:
        return None
    return Peak(sheet.nvlink / 2 * TERA, f"{sheet.source.removesuffix(', dense')}: NVLink, one direction")


def _find(device_name: str) -> DataSheet | None:
    """Return the data sheet of the device by its full name.

    A laptop's RTX 4090, an A10G or a MIG slice is another device, and therefore unknown.
    """
    name = device_name.strip()
    for brand in ("NVIDIA ", "GeForce ", "Tesla "):
        name = name.removeprefix(brand)
    return next((sheet for sheet in DATA_SHEETS if name in sheet.names), None)


CEILING = Table("ceiling", CeilingRow, "peak rates of the device")
