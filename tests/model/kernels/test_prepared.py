"""Tests of passes prepared by layout, without a GPU; tests/model/attention/test_prepared.py runs real kernels."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cs_systems.model.kernels import driver
from cs_systems.model.kernels.driver import Address, CallSequence, KernelCall, TensorMap
from cs_systems.model.kernels.prepared import PreparedPass, stand_in


@dataclass
class Doubling:
    """Launch that an interpreter runs: out = 2 x."""

    x: Tensor
    out: Tensor

    def run(self) -> None:
        assert self.x.is_contiguous()
        assert self.out.is_contiguous()
        self.out.copy_(2 * self.x)


def doubling(checked: list[Tensor]) -> PreparedPass:
    return PreparedPass(
        ("x",), ("out",), lambda device, x, out: ([Doubling(x, out)], {}), Tensor.is_contiguous, checked.append
    )


def test_rejected_layouts_are_copied_and_written_back() -> None:
    x = torch.randn(3, 5)
    for given, out in ((x, torch.empty(3, 5)), (x.T, torch.empty(3, 5).T), (x.T, torch.empty(5, 3))):
        doubling([]).run((given,), (out,))
        assert torch.equal(out, 2 * given)


def test_each_layout_is_checked_once() -> None:
    checked: list[Tensor] = []
    double = doubling(checked)
    for x in (torch.ones(4), torch.zeros(4), torch.ones(8), torch.ones(4, dtype=torch.float64), torch.ones(8)):
        double.run((x,), (torch.empty_like(x),))
    assert [(x.shape[0], x.dtype) for x in checked] == [(4, torch.float32), (8, torch.float32), (4, torch.float64)]


def test_rejected_input_is_checked_at_every_call() -> None:
    def refuse(x: Tensor) -> None:
        raise ValueError("no")

    double = PreparedPass(("x",), ("out",), lambda *_: ([], {}), Tensor.is_contiguous, refuse)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            double.run((torch.ones(1),), (torch.ones(1),))


@pytest.mark.parametrize(
    "x",
    [
        torch.empty(2, 3, 4, 8).transpose(1, 2),
        torch.empty(2, 3, 4, 8)[1:, :, 1:, ::2],
        torch.empty(100, dtype=torch.bfloat16)[3:].view(97),
        torch.empty(1).expand(2, 3),
        torch.empty(2, 0, 4),
    ],
    ids=["transposed", "sliced", "not aligned", "expanded", "empty"],
)
def test_stand_in_tensor_has_layout_and_alignment_but_no_memory(x: Tensor) -> None:
    made = stand_in(x)
    assert made.device.type == "meta"
    assert (made.shape, made.stride(), made.dtype) == (x.shape, x.stride(), x.dtype)
    assert not x.numel() or made.data_ptr() % 16 == x.data_ptr() % 16


class Launched:
    """Driver that keeps the parameters of each launch, as the GPU would read them."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.encoded: list[int] = []

    def cuTensorMapEncodeTiled(self, made: Any, dtype: int, rank: int, address: Any, *rest: Any) -> int:
        assert ctypes.addressof(made) % 64 == 0
        self.encoded.append(address.value)
        made[0] = address.value
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, pointers: Any, extra: None) -> int:
        values = tuple(ctypes.c_uint64.from_address(pointers[i]).value for i in range(3))
        scalar = ctypes.c_int32.from_address(pointers[3]).value
        self.launches.append((function.value, config._obj.stream, config._obj.grid_x, *values, scalar))
        return 0


def test_call_sequence_changes_only_addresses_and_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU reads parameters through pointers, so the test reads them where a launch points."""
    launched, streams = Launched(), iter((11, 12, 12, 12))
    monkeypatch.setattr(driver, "driver", lambda: launched)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: next(streams), raising=False)
    mapped = TensorMap("q", 9, (64, 8), (128,), (64, 8), 3, 2)
    parameters = (mapped, Address("o"), Address("q"), ctypes.c_int32(42))
    empty = KernelCall(8, (0, 1), 32, 0, parameters)
    calls = CallSequence(0, ("q", "o"), [KernelCall(7, (5, 1), 128, 0, parameters), empty])
    for addresses in ([1024, 2048], [1024, 4096], [512, 2048], [1024, 2048]):
        calls.run(addresses)
    assert launched.launches == [
        (7, 11, 5, 1024, 2048, 1024, 42),
        (7, 12, 5, 1024, 4096, 1024, 42),
        (7, 12, 5, 512, 2048, 512, 42),
        (7, 12, 5, 1024, 2048, 1024, 42),
    ]
    assert launched.encoded == [1024, 512]


def test_parameters_that_differ_from_kernel_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (8, 128)

    def query(function: Any, index: Any, offset: Any, size: Any) -> int:
        if index.value >= len(sizes):
            return 1
        size._obj.value = sizes[index.value]
        return 0

    monkeypatch.setattr(driver, "driver", lambda: SimpleNamespace(cuFuncGetParamInfo=query, cuLaunchKernelEx=None))
    with pytest.raises(RuntimeError, match=r"takes parameters of \[8, 128\] bytes, but \[8, 4\] bytes were prepared"):
        CallSequence(0, ("q",), [KernelCall(7, (1, 1), 32, 0, (Address("q"), ctypes.c_int32(1)))])
