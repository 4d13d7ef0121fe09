"""The flash_cuda kernels compile for Hopper without a GPU: no value leaves its register in a loop, no product waits for
another for want of one. Needs cuda-core with NVRTC, and triton for NVIDIA's disassembler.
"""

from __future__ import annotations

import ctypes
import importlib.util

import pytest
import torch

from cs_systems.attention.flash_cuda import _missing
from cs_systems.kernels.compile import read_machine_code
from cs_systems.kernels.cuda import driver as hopper
from cs_systems.kernels.cuda import launch_forward as flash_cuda_forward
from cs_systems.kernels.cuda.launch import BACKWARD_TILES

pytestmark = [
    pytest.mark.skipif(_missing() is not None, reason=_missing() or ""),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton: pip install triton"),
]
A_FEW_WORDS = 6
"""Loads and stores of what is needed between tiles only; more of them would be in the loop."""


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("depth", [64, 128])
def test_forward_stays_in_registers(depth: int, causal: bool) -> None:
    macros = flash_cuda_forward.OPTIONS[depth].macros(depth, causal, 4096, fp16=False)
    _, opcodes = read_machine_code(hopper.machine_code("forward", macros))
    assert opcodes["STL"] + opcodes["LDL"] <= A_FEW_WORDS
    assert min(opcodes[name] for name in ("HGMMA", "UTMALDG", "UTMASTG")) > 0


# Every mask by default; deterministic and in fp16, which changes the products' type alone, the one with most code.
BACKWARDS = [*((causal, 0, tail, 0) for causal in (0, 1) for tail in (0, 1)), (0, 1, 1, 0), (1, 1, 1, 0), (1, 1, 1, 1)]


SPILLS = {64: 0, 128: 16}
"""Of the backward. At 128 without any, by statistics that are loaded later, it was 3 to 4% slower on one H200."""


@pytest.mark.parametrize(("causal", "deterministic", "tail", "fp16"), BACKWARDS)
@pytest.mark.parametrize("depth", [64, 128])
def test_backward_stays_in_registers(depth: int, causal: int, deterministic: int, tail: int, fp16: int) -> None:
    flags = {"D": depth, "FP16": fp16, "CAUSAL": causal, "TAIL": tail, "DETERMINISTIC": deterministic}
    macros = (*flags.items(), *BACKWARD_TILES[depth].macros)
    _, opcodes = read_machine_code(hopper.machine_code("backward", macros))
    assert opcodes["STL"] + opcodes["LDL"] <= SPILLS[depth]
    # ptxas that cannot follow a product in flight waits for each instruction of it.
    assert opcodes["WARPGROUP"] < opcodes["HGMMA"]
    assert min(opcodes[name] for name in ("HGMMA", "UTMALDG", "UBLKRED")) > 0


@pytest.mark.parametrize("depth", [64, 128])
def test_the_kernels_around_the_backward_do_not_spill(depth: int) -> None:
    _, opcodes = read_machine_code(
        hopper.machine_code("rows", (("D", depth), ("FP16", 0), *BACKWARD_TILES[depth].macros))
    )
    assert opcodes["STL"] + opcodes["LDL"] == 0


def test_a_description_lies_where_the_copy_engine_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a multiple of 64 bytes, which Python's objects are not; with strides in bytes, innermost first."""
    seen: dict[str, object] = {}

    class Driver:
        @staticmethod
        def cuTensorMapEncodeTiled(made, kind, dimensions, pointer, sizes, strides, box, *rest) -> int:  # type: ignore[no-untyped-def]
            seen.update(at=made, sizes=list(sizes)[:dimensions], strides=list(strides)[: dimensions - 1], box=list(box))
            return 0

    monkeypatch.setattr(hopper, "_driver", lambda: Driver)
    q = torch.zeros(2, 300, 3, 40, dtype=torch.bfloat16).transpose(1, 2)
    for _ in range(8):
        made = hopper.tensor_map(q, 16)
        assert ctypes.addressof(made) % 64 == 0
    assert seen["sizes"] == [40, 300, 3, 2]
    assert seen["strides"] == [2 * 120, 2 * 40, 2 * 36000]
    assert seen["box"] == [64, 16, 1, 1]
