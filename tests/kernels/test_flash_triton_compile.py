"""The flash_triton kernels compile, without a GPU, for the architectures they are meant for, and fit a multiprocessor.

Compiling needs a process without TRITON_INTERPRET: each architecture's kernels are compiled in one of their own, in
which this file is the program; it prints a JSON object, kernel → resources.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from cs_systems.kernels.compile import SHARED_LIMIT_BYTES, compile_for
from cs_systems.kernels.flash_triton_configs import tiles_for

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: pip install triton")

# capability → (dtype, d_head): the sizes of the presets, a padded one, the largest.
SIZES = {
    80: [("bfloat16", 64), ("bfloat16", 128), ("float32", 64)],
    90: [("bfloat16", 64), ("bfloat16", 80), ("bfloat16", 128), ("bfloat16", 256), ("float32", 64)],
    100: [("bfloat16", 64), ("bfloat16", 128)],
}
KERNELS = ("forward", "dq", "dkdv")
CASES = [(c, dtype, d, kernel) for c, sizes in SIZES.items() for dtype, d in sizes for kernel in KERNELS]
KNOWN_SPILLS = {
    (90, "bfloat16", 256, "dkdv"): 10,  # 2 × 64 × 256 accumulators on 256 threads take half of the registers
    (100, "bfloat16", 64, "forward"): 6,  # triton 3.6 holds it to 128 registers; 3.7 does not spill
}
"""Local-memory instructions that may not grow, the larger number of triton 3.6 and 3.7. All others have none."""
MINUTES = pytest.mark.timeout(300)  # a kernel takes a second or two, on a busy machine ten


def compile_all(capability: int) -> dict[str, dict[str, Any]]:
    from cs_systems.kernels.flash_triton import Problem

    found = {}
    for dtype, d_head in SIZES[capability]:
        q, k, v, o, do, *gradients = (
            torch.empty(4, 16, 4096, d_head, dtype=getattr(torch, dtype), device="meta") for _ in range(8)
        )
        lse, lse_log2, delta = (torch.empty(4, 16, 4096, device="meta") for _ in range(3))
        tiles = tiles_for((capability // 10, capability % 10), q.element_size(), d_head)
        problem = Problem(q, k, v, True, 0, d_head**-0.5, tiles)
        launches = {
            "forward": problem.forward(o, lse),
            "dq": problem.dq(o, lse, do, lse_log2, delta, gradients[0]),
            "dkdv": problem.dkdv(do, lse_log2, delta, *gradients[1:]),
        }
        for name, launch in launches.items():
            resources = compile_for(capability, launch.kernel, launch.arguments, launch.options)
            found[f"{dtype} {d_head} {name}"] = vars(resources)
    return found


@functools.cache
def compiled(capability: int) -> dict[str, dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__, str(capability)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@MINUTES
@pytest.mark.parametrize(("capability", "dtype", "d_head", "kernel"), CASES)
def test_it_fits_the_multiprocessor(capability: int, dtype: str, d_head: int, kernel: str) -> None:
    resources = compiled(capability)[f"{dtype} {d_head} {kernel}"]
    assert 0 < resources["shared_bytes"] <= SHARED_LIMIT_BYTES[capability]
    assert resources["registers"] * 32 * resources["num_warps"] <= 65_536
    assert resources["spills"] <= KNOWN_SPILLS.get((capability, dtype, d_head, kernel), 0)


@MINUTES
@pytest.mark.parametrize(
    ("capability", "product"), [(80, "HMMA"), (90, "HGMMA"), (100, "UTCHMMA")], ids=["mma", "wgmma", "tcgen05"]
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_bf16_runs_on_the_tensor_cores_of_its_generation(capability: int, product: str, kernel: str) -> None:
    assert compiled(capability)[f"bfloat16 64 {kernel}"]["instructions"].get(product, 0) > 0


@MINUTES
@pytest.mark.parametrize("kernel", KERNELS)
def test_float32_is_not_rounded_to_tf32(kernel: str) -> None:
    instructions = compiled(90)[f"float32 64 {kernel}"]["instructions"]
    assert instructions["FFMA"] > 0
    assert not {"HMMA", "HGMMA"} & instructions.keys()


def test_an_interpreted_kernel_cannot_be_compiled() -> None:
    program = (
        "from cs_systems.kernels.compile import compile_for\n"
        "from cs_systems.kernels.flash_triton_forward import flash_forward_kernel\n"
        "compile_for(90, flash_forward_kernel, {}, {})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"}
    )
    assert "TRITON_INTERPRET was set" in done.stderr
    assert "compile in a process without it" in done.stderr


if __name__ == "__main__":
    json.dump(compile_all(int(sys.argv[1])), sys.stdout)
