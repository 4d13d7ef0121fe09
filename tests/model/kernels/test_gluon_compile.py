"""Tests that the flash_gluon kernels compile for Hopper without a GPU and fit a multiprocessor.

Compiling needs a supported triton and a process without TRITON_INTERPRET. That process runs this file, which prints a
JSON object, kernel → resources.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from cs_systems.model.attention.flash_gluon import _wrong_triton
from cs_systems.model.kernels.compile import SHARED_LIMIT_BYTES, compile_for, compiled_for
from cs_systems.model.kernels.driver import parameter_bytes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(_wrong_triton() is not None, reason=_wrong_triton() or ""),
    pytest.mark.timeout(300),  # a kernel takes a few seconds, or twenty on a busy machine
]

CASES = [(d_head, causal, kernel) for d_head in (64, 128) for causal in (False, True) for kernel in ("forward", "main")]
KNOWN_SPILLS = {(64, "main"): 89, (128, "main"): 56}
"""Limits of local-memory instructions, the larger of triton 3.6 and 3.7; they reload loop-invariant addresses."""


def compile_all() -> dict[str, dict[str, Any]]:
    from cs_systems.model.kernels.gluon.launch import Problem
    from cs_systems.model.kernels.layout import padded_rows
    from cs_systems.model.kernels.triton.launch import parameters_of

    found = {}
    for d_head in (64, 128):
        for causal in (False, True):
            q, k, v, o, do, dk, dv = (
                torch.empty(4, 16, 4096, d_head, dtype=torch.bfloat16, device="meta") for _ in range(7)
            )
            lse, summed = torch.empty(4, 16, 4096, device="meta"), torch.empty(64, 4096, d_head, device="meta")
            lse_log2, delta = (torch.empty(64, padded_rows(4096), device="meta") for _ in range(2))
            problem = Problem(q, k, v, causal, 0, d_head**-0.5, 132)
            launches = {
                "forward": problem.forward(o, lse),
                "prepare": problem.prepare(o, lse, do, lse_log2, delta, summed),
                "main": problem.backward(do, lse_log2, delta, summed, dk, dv),
                "finish": problem.finish(summed, o),
            }
            for name, launch in launches.items():
                call = (90, launch.kernel, launch.arguments, launch.options)
                prepared = [*map(parameter_bytes, parameters_of(compiled_for(*call), launch.arguments))]
                found[f"{d_head} {causal} {name}"] = {**vars(compile_for(*call)), "prepared_bytes": prepared}
    return found


@functools.cache
def compiled() -> dict[str, dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("d_head", "causal", "kernel"), CASES)
def test_kernel_fits_multiprocessor_and_uses_hopper_instructions(d_head: int, causal: bool, kernel: str) -> None:
    resources = compiled()[f"{d_head} {causal} {kernel}"]
    assert 0 < resources["shared_bytes"] <= SHARED_LIMIT_BYTES[90]
    assert resources["spills"] <= KNOWN_SPILLS.get((d_head, kernel), 0)
    opcodes = resources["instructions"]
    assert opcodes["HGMMA"] > 0
    assert opcodes["UTMALDG"] > 0
    # If the compiler cannot track a product in flight, it waits for each of its instructions.
    assert opcodes["WARPGROUP"] < opcodes["HGMMA"]
    if kernel == "main":
        assert opcodes["UTMAREDG"] > 0


@pytest.mark.parametrize("kernel", ["forward", "prepare", "main", "finish"])
@pytest.mark.parametrize("d_head", [64, 128])
def test_prepared_parameters_have_sizes_of_compiled_kernel(d_head: int, kernel: str) -> None:
    resources = compiled()[f"{d_head} True {kernel}"]
    assert resources["prepared_bytes"] == resources["parameter_bytes"]


@pytest.mark.parametrize("kernel", ["prepare", "finish"])
def test_kernels_around_backward_do_not_spill(kernel: str) -> None:
    assert compiled()[f"128 True {kernel}"]["spills"] == 0


if __name__ == "__main__":
    json.dump(compile_all(), sys.stdout)
