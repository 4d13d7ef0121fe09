"""Rules about kernels of a trace: each names its planted cause first, up to its threshold, and is silent below it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cs_systems.analysis.diagnosis import Answer
from cs_systems.analysis.diagnosis.precision_casts import KERNEL as CAST_KERNEL
from cs_systems.analysis.diagnosis.precision_casts import NOTABLE as NOTABLE_CASTS
from tests.analysis.diagnosis.test_recordings import answer, codes, steps
from tests.programs import ELEMENTWISE, PRODUCT, Program

# Rules whose faults are planted, and left out, in this file.
TRIED = ("precision-casts",)

SOFTMAX = "void softmax_warp_forward<float, float, float, 10, false>(float*)"
LOG_SOFTMAX = "void cunn_SoftMaxForward<8, float, float, LogSoftMaxForwardEpilogue>(float*)"
CAST = "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(TensorIteratorBase&)>()"


def found(folder: Path, *kernels: tuple[str, float], times: int = 5) -> Answer:
    """Return the answer about four steps of these kernels, by name and µs."""
    program = Program()

    def body(_: int) -> None:
        for name, lasts in kernels * times:
            program.launch(lasts, name)

    return answer(steps(program, 4, body), folder)


@pytest.mark.parametrize(
    ("mask_us", "share", "others"),
    [(250.0, "33%", []), (240.0, "20%", ["unfused-elementwise"])],
    ids=["as large as the scores", "smaller"],
)
def test_elementwise_kernels_over_the_scores_belong_to_attention_alone(
    tmp_path: Path, mask_us: float, share: str, others: list[str]
) -> None:
    mask = (ELEMENTWISE, mask_us)
    attention = found(tmp_path, (PRODUCT, 1500.0), mask, (SOFTMAX, 1000.0), mask, mask, (PRODUCT, 1500.0))
    assert codes(attention)[0] == "unfused-attention"
    assert codes(attention)[1:] == others


def test_softmax_of_a_loss_between_two_products_is_not_attention(tmp_path: Path) -> None:
    loss = found(tmp_path, (PRODUCT, 1000.0), (LOG_SOFTMAX, 1000.0), ("nll_loss_forward_reduce", 9.0), (PRODUCT, 900.0))
    assert codes(loss) == []


@pytest.mark.parametrize("is_notable", [True, False])
def test_casts_come_before_the_elementwise_kernels_from_their_threshold_on(tmp_path: Path, is_notable: bool) -> None:
    rest_us = 10_000 * (1 / NOTABLE_CASTS - 1) * (0.98 if is_notable else 1.02)
    casts = found(tmp_path, (CAST, 10_000.0), (PRODUCT, rest_us / 2), (PRODUCT, rest_us / 2), times=1)
    assert codes(casts) == (["precision-casts"] if is_notable else ["unfused-elementwise"])
    if is_notable:
        assert casts.causes[0].startswith("15% of the step is casts between precisions (1 kernel): hold the weights")


@pytest.mark.parametrize(
    ("name", "is_cast"),
    [
        ("vectorized_elementwise_kernel<4, at::native::float16_copy_kernel_cuda(TensorIteratorBase&)>", True),
        ("vectorized_elementwise_kernel<8, at::native::bfloat16tofloat32_copy_kernel_cuda(TensorIteratorBase&)>", True),
        ("unrolled_elementwise_kernel<direct_copy_kernel_cuda(), LoadWithCast<1>, StoreWithCast<1>>", True),
        ("elementwise_kernel<128, 2, gpu_kernel_impl_nocast<direct_copy_kernel_cuda()>>", False),
        ("triton_poi_fused__to_copy_3", True),
    ],
)
def test_casts_are_told_from_copies_by_name(name: str, is_cast: bool) -> None:
    assert bool(CAST_KERNEL.search(name)) == is_cast
