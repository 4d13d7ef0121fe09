"""CUDA's autocast on a CPU, against torch's list of its operations and against a step that a GPU recorded."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cs_systems.config import PRESETS, Precision, RunConfig
from cs_systems.instrument.cuda_autocast import cuda_autocast, fp32_operations
from cs_systems.measure.runtime.sweep import run
from cs_systems.record import read_records

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
ON_A_GPU = Path(__file__).parents[2] / "profiles" / "autocast_dtypes"
OPERATIONS: list[Callable[[Tensor], Tensor]] = [
    lambda x: F.layer_norm(x, (4,)), lambda x: F.rms_norm(x, (4,)), lambda x: x.softmax(-1), lambda x: F.softmax(x, -1),
    lambda x: x**2, lambda x: 2**x, lambda x: x.pow(2), lambda x: x.exp(), lambda x: x.sum(), lambda x: x.rsqrt(),
    lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long)), lambda x: torch.cumsum(x, 0), nn.LayerNorm(4),
]  # fmt: skip


def test_operations_in_fp32_match_torch_s_list() -> None:
    text = HEADER.read_text()
    lists = re.findall(r"#define AT_FORALL_FP32(?:_SET_OPT_DTYPE)?\(_\)(.*?)\n\n", text, re.DOTALL)
    assert {"norm", *re.findall(r"_\((\w+)", "".join(lists))} == fp32_operations()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_an_operation_of_the_list_gives_fp32_and_its_gradient_is_cast_back(
    operation: Callable[[Tensor], Tensor], low: torch.dtype
) -> None:
    x = torch.rand(4, 4, dtype=low, requires_grad=True)
    with cuda_autocast(), torch.autocast("cpu", low):
        out = operation(x)
    out.sum().backward()
    assert out.dtype is torch.float32
    assert x.grad is not None
    assert x.grad.dtype is low


def test_products_and_activations_keep_the_low_precision_and_outside_of_autocast_nothing_changes() -> None:
    x = torch.rand(4, 4, dtype=torch.bfloat16)
    with cuda_autocast():
        assert F.layer_norm(x, (4,)).dtype is torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            assert {F.linear(x.float(), x.float()).dtype, F.relu(x).dtype, (x + x).dtype} == {torch.bfloat16}
    with torch.autocast("cpu", torch.bfloat16):
        assert F.layer_norm(x, (4,)).dtype is torch.bfloat16


@pytest.mark.parametrize("workload", ["toy", "train_step"])
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
def test_dtypes_predicted_on_a_cpu_equal_those_recorded_on_a_gpu(workload: str, precision: Precision) -> None:
    options = {"workload": workload, "precision": precision, "profiler": "dtypes", "warmup": 0, "steps": 1}
    model = PRESETS["tiny"] if workload == "train_step" else RunConfig().model
    config = RunConfig(model=model, **options)  # type: ignore[arg-type]
    recorded = [r for r in read_records(ON_A_GPU)[0] if r.run_config == config]
    if not recorded:
        pytest.skip("no GPU recorded this cell")
    made = run(RunConfig(model=model, device="cpu", **options))  # type: ignore[arg-type]
    predicted = {row["what"]: row["on_cuda"] for row in made.results["dtypes"]}
    assert predicted == {row["what"]: row["outputs"] for row in recorded[-1].results["dtypes"]}


@pytest.mark.gpu
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_a_gpu_gives_the_same_dtype(operation: Callable[[Tensor], Tensor], low: torch.dtype) -> None:
    """Compare with the installed torch: 2.11 runs rms_norm in low precision, and 2.13 in fp32."""
    with cuda_autocast(), torch.autocast("cpu", low):
        predicted = operation(torch.rand(4, 4, dtype=low)).dtype
    with torch.device("cuda"), torch.autocast("cuda", low):
        operation = copy.deepcopy(operation).to("cuda") if isinstance(operation, nn.Module) else operation
        assert operation(torch.rand(4, 4, dtype=low)).dtype is predicted
