"""Rules about kernels of a trace: each names its planted cause first, up to its threshold, and is silent below it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cs_systems.analysis.diagnosis import Answer
from cs_systems.analysis.diagnosis.precision_casts import KERNEL as CAST_KERNEL
from tests.analysis.diagnosis.test_recordings import answer, codes, steps
from tests.programs import ELEMENTWISE, PRODUCT, Program

# Rules with faults that are planted, and left out, in this file.
TRIED = ("autotuning", "cpu-offload", "precision-casts")

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
    [(250.0, "33%", []), (240.0, "20%", [])],
    ids=["as large as the scores", "smaller"],
)
def test_elementwise_kernels_over_the_scores_belong_to_attention_alone(
    tmp_path: Path, mask_us: float, share: str, others: list[str]
) -> None:
    mask = (ELEMENTWISE, mask_us)
    attention = found(tmp_path, (PRODUCT, 1500.0), mask, (SOFTMAX, 1000.0), mask, mask, (PRODUCT, 1500.0))
    assert codes(attention)[0] == "unfused-attention"
    assert codes(attention)[1:] == others


def test_one_elementwise_kernel_alone_has_nothing_to_be_fused_with(tmp_path: Path) -> None:
    assert codes(found(tmp_path, (ELEMENTWISE, 900.0))) == []
    assert codes(found(tmp_path, (ELEMENTWISE, 900.0), (PRODUCT, 100.0))) == []
    assert codes(found(tmp_path, *[(ELEMENTWISE, 450.0)] * 2, (PRODUCT, 100.0))) == ["unfused-elementwise"]


@pytest.mark.parametrize(("product_us", "named"), [(850.0, []), (830.0, ["unfused-elementwise"])])
def test_elementwise_kernels_are_named_if_their_runs_would_save_8_percent(
    tmp_path: Path, product_us: float, named: list[str]
) -> None:
    assert codes(found(tmp_path, (ELEMENTWISE, 80.0), (ELEMENTWISE, 80.0), (PRODUCT, product_us))) == named


def test_softmax_of_a_loss_between_two_products_is_not_attention(tmp_path: Path) -> None:
    loss = found(tmp_path, (PRODUCT, 1000.0), (LOG_SOFTMAX, 1000.0), ("nll_loss_forward_reduce", 9.0), (PRODUCT, 900.0))
    assert codes(loss) == []


@pytest.mark.parametrize("is_notable", [True, False])
def test_casts_are_named_from_their_threshold_on(tmp_path: Path, is_notable: bool) -> None:
    rest_us = 10_000 * (1 / 0.15 - 1) * (0.98 if is_notable else 1.02)
    casts = found(tmp_path, (CAST, 10_000.0), (PRODUCT, rest_us / 2), (PRODUCT, rest_us / 2), times=1)
    assert codes(casts) == (["precision-casts"] if is_notable else [])
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
def test_casts_and_copies_are_distinguished_by_name(name: str, is_cast: bool) -> None:
    assert bool(CAST_KERNEL.search(name)) == is_cast


MISALIGNED = "cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align1>(Params)"
BF16_S = 2 * 4096**3 / 500e12 * 1e6  # of a product of 4096³ at 500 TFLOP/s, in µs


def product(program: Program, lasts: float, name: str, sizes: tuple[int, int, int] | None) -> None:
    """Launch a matrix product, in an operator with the shapes of its inputs if they are known."""
    start, (m, k, n) = program.now, sizes or (0, 0, 0)
    program.launch(lasts, name)
    if sizes:
        program.event("cpu_op", "aten::mm", start, program.now - start, **{"Input Dims": [[m, k], [k, n]]})


def multiplied(folder: Path, *products: tuple[float, str, tuple[int, int, int] | None]) -> Answer:
    program = Program("NVIDIA H100 80GB HBM3")

    def body(_: int) -> None:
        for one in products * 10:
            product(program, *one)

    return answer(steps(program, 4, body), folder)


LARGE = (BF16_S, PRODUCT, (4096, 4096, 4096))


@pytest.mark.parametrize(("times", "is_slow"), [(4.2, True), (3.9, False)])
def test_product_far_below_the_rate_of_the_others_is_slow(tmp_path: Path, times: float, is_slow: bool) -> None:
    found = multiplied(tmp_path, LARGE, (times * BF16_S, MISALIGNED, (4096, 4096, 4097)))
    assert codes(found) == (["slow-products"] if is_slow else [])
    if is_slow:
        assert found.causes[0].startswith(
            "81% of the step is matrix products that take 4 times as long as their FLOPs and bytes need (4096×4096 by "
            "4096×4097; 4097 is no multiple of 8): pad these sizes to multiples of 64"
        )


def test_small_products_are_to_be_merged(tmp_path: Path) -> None:
    found = multiplied(tmp_path, LARGE, (300.0, MISALIGNED, (8192, 1024, 3)))
    assert codes(found) == ["slow-products"]
    assert "(8192×1024 by 1024×3; 3 is no multiple of 8): compute several of these products as one" in found.causes[0]


def test_product_that_the_memory_limits_is_not_slow(tmp_path: Path) -> None:
    """A product with a vector moves 268 MB, for which 80 µs are the least at 3.35 TB/s."""
    assert codes(multiplied(tmp_path, LARGE, (110.0, PRODUCT, (1, 8192, 16384)))) == []


@pytest.mark.parametrize(("share", "is_named"), [(0.11, True), (0.09, False)])
def test_without_shapes_kernel_names_show_unaligned_sizes(tmp_path: Path, share: float, is_named: bool) -> None:
    found = multiplied(tmp_path, (1000 * (1 - share), PRODUCT, None), (1000 * share, MISALIGNED, None))
    assert codes(found) == (["slow-products"] if is_named else [])
    if is_named:
        assert found.causes[0].startswith("11% of the step is 16-bit matrix products of sizes that are no multiples of")


def loading(folder: Path, number: int, load_us: float, call: str = "cuModuleLoadData") -> Answer:
    """Return the answer about eight steps of 30 ms, of which one loads a module in its middle."""
    program = Program()

    def body(step: int) -> None:
        for kernel in range(30):
            if (step, kernel) == (number, 15):
                start = program.now
                program.now += load_us
                program.event("cuda_driver", call, start, load_us, correlation=10**6 + step)
            program.launch(1000.0)

    return answer(steps(program, 8, body), folder)


def test_module_that_a_later_step_loads_is_start_up(tmp_path: Path) -> None:
    found = loading(tmp_path, 3, 400e3)
    assert codes(found) == ["start-up"]
    assert found.causes[0].startswith("step 3 takes")
    assert "is start-up (" in found.causes[0]
    assert "in cuModuleLoadData): run each branch of the program once before" in found.causes[0]
    assert found.nothing == "nothing found that would save more than 5% of 7 usual of 8 steps"


def test_slow_step_without_a_known_first_use_is_not_start_up(tmp_path: Path) -> None:
    assert codes(loading(tmp_path, 3, 400e3, call="cuStreamGetCtx")) == []


def with_slow_steps(folder: Path, slow: Callable[[Program], None], every: int = 4) -> Answer:
    """Return the answer about twelve training steps of 30 ms, of which each fourth does more."""
    program = Program()

    def body(step: int) -> None:
        for name in ("forward", "backward"):
            start = program.now
            for _ in range(15):
                program.launch(1000.0)
            program.during(name, start)
        if step % every == every - 1:
            slow(program)

    return answer(steps(program, 12, body), folder)


def passes(count: int, name: str = "", kernel: str = PRODUCT, phase: str = "forward") -> Callable[[Program], None]:
    def run(program: Program) -> None:
        begun = program.now
        for _ in range(count):
            start = program.now
            program.launch(1000.0, kernel)
            program.during(phase, start)
        if name:
            program.during(name, begun)

    return run


def test_evaluation_in_each_fourth_step_is_named_by_its_range(tmp_path: Path) -> None:
    found = with_slow_steps(tmp_path, passes(90, "validation"))
    assert codes(found) == ["periodic-steps"]
    assert found.causes[0].startswith(
        "43% of the recording is in every fourth step: validation, forward passes without backward: evaluate less often"
    )


def test_forward_passes_without_a_name_are_distinguished_from_training(tmp_path: Path) -> None:
    found = with_slow_steps(tmp_path, passes(90))
    assert "every fourth step: forward passes without backward: evaluate" in found.causes[0]


def test_update_of_accumulated_gradients_does_not_count_as_a_slow_step(tmp_path: Path) -> None:
    assert codes(with_slow_steps(tmp_path, passes(90, "Optimizer.step#AdamW.step", phase="optimizer"))) == []


def test_host_work_of_slow_steps_has_its_remedy(tmp_path: Path) -> None:
    def save(program: Program) -> None:
        program.wait()
        start = program.now
        program.now += 200e3
        program.during("save_checkpoint", start)
        program.launch(1000.0)

    found = with_slow_steps(tmp_path, save)
    assert "every fourth step: save_checkpoint: save less often" in found.causes[0]


CAT = "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>, unsigned int, 4>(int)"
FLASH = "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128> >(Params)"


@pytest.mark.parametrize(
    ("kernel", "per_step_us", "count", "named"),
    [
        (CAT, 20.0, 10, True),
        (CAT, 16.0, 12, True),
        (CAT, 10.0, 12, False),
        (CAT, 20.0, 9, False),
        (FLASH, 40.0, 12, False),
    ],
    ids=["ten steps", "by 1.4 times", "by 1.2 times", "too few steps", "attention"],
)
def test_growing_step_is_named_with_its_growing_kernel(
    tmp_path: Path, kernel: str, per_step_us: float, count: int, named: bool
) -> None:
    def body(step: int) -> None:
        program.launch(400.0, PRODUCT)
        program.launch(50 + per_step_us * step, kernel)

    program = Program()
    found = answer(steps(program, count, body), tmp_path)
    assert ("growth" in codes(found)) == named
    if named:
        assert found.diagnoses[0].code == "growth"
        assert ", most of it in CatArrayBatchedCopy: write into a buffer of the final size" in found.causes[0]


def tried(folder: Path, algorithms: int, *, waits: bool = True, has_operators: bool = True) -> Answer:
    """Return the answer about steps of ten convolutions, each of which tries algorithms before it runs the first."""
    program = Program()

    def body(_: int) -> None:
        for _ in range(10):
            start = program.now
            if waits:
                program.wait()
            for algorithm in range(algorithms):
                program.launch(300.0, f"sm90_xmma_fprop_implicit_gemm_bf16_tilesize{32 * (algorithm + 1)}x128x64")
                if waits:
                    program.wait("cudaEventSynchronize")
            program.launch(300.0, "sm90_xmma_fprop_implicit_gemm_bf16_tilesize32x128x64")
            if has_operators:
                program.event("cpu_op", "aten::cudnn_convolution", start, program.now - start)
            program.launch(100.0, ELEMENTWISE)

    return answer(steps(program, 4, body), folder)


@pytest.mark.parametrize("has_operators", [True, False])
@pytest.mark.parametrize(("algorithms", "waits", "named"), [(3, True, True), (2, True, False), (3, False, False)])
def test_trials_of_kernels_in_each_step_are_autotuning(
    tmp_path: Path, algorithms: int, waits: bool, named: bool, has_operators: bool
) -> None:
    found = tried(tmp_path, algorithms, waits=waits, has_operators=has_operators)
    assert ("autotuning" in codes(found)) == named
    if named:
        of = " of aten::cudnn_convolution" if has_operators else ""
        assert f"of the step tries kernels: 3 in each of 10 calls{of}, with a wait after each" in found.causes[0]


def checkpointed(folder: Path, how: str) -> Answer:
    """Return the answer about steps of six layers with a backward that runs some operators of forward again."""
    program = Program()

    def op(name: str, start: float, sequence: int, forward: int) -> None:
        numbers = {"Sequence number": sequence, "Fwd thread id": forward}
        program.event("cpu_op", name, start, program.now - start, **numbers)

    def run(name: str, sequence: int, forward: int = 0) -> None:
        start = program.now
        program.launch(1000.0, PRODUCT)
        op(name, start, sequence, forward)
        program.now += 1.0

    def body(step: int) -> None:
        for layer in range(6):
            run("aten::addmm", 100 * step + layer)
        for layer in reversed(range(6)):
            start, number = program.now, 100 * step + layer
            if how == "reentrant":
                run("aten::addmm", number + 50)
                op("CheckpointFunctionBackward", start, number, 1)
                start = program.now
            elif how in ("not reentrant", "backward of backward"):
                run("aten::addmm" if how == "not reentrant" else "aten::gelu_backward", number + 50)
            program.launch(2000.0, PRODUCT)
            op("AddmmBackward0", start, number, 1)

    return answer(steps(program, 3, body), folder)


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "backward of backward", "plain"])
def test_forward_inside_backward_is_recomputation(tmp_path: Path, how: str) -> None:
    found = checkpointed(tmp_path, how)
    assert ("recomputation" in codes(found)) == ("reentrant" in how)
    if "reentrant" in how:
        assert found.causes[0].startswith(
            "25% of the step is forward passes that backward computes again (activation checkpoints): where memory"
        )


@pytest.mark.parametrize(("again", "named"), [(6, True), (0, False)])
def test_forward_kernels_in_backward_are_recomputation_where_no_operators_are_known(
    tmp_path: Path, again: int, named: bool
) -> None:
    program = Program()

    def body(_: int) -> None:
        for name, count in (("forward", 6), ("backward", again)):
            start = program.now
            for _ in range(count):
                program.launch(1000.0, PRODUCT)
                program.launch(1000.0, "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>()")
            if name == "backward":
                for _ in range(12):
                    program.launch(1000.0, PRODUCT)
                    program.launch(1000.0, "void flash::flash_bwd_kernel<Flash_bwd_kernel_traits<128>>()")
            program.during(name, start)

    found = answer(steps(program, 3, body), tmp_path)
    assert codes(found) == (["recomputation"] if named else [])


@pytest.mark.parametrize(("of_optimizer", "first"), [(200, "unfused-optimizer"), (90, "launch-bound")])
def test_optimizer_of_most_launches_comes_before_the_launches(tmp_path: Path, of_optimizer: int, first: str) -> None:
    program = Program()

    def body(_: int) -> None:
        for _ in range(100):
            program.launch(3.0, PRODUCT, then=100.0)
        start = program.now
        for _ in range(of_optimizer):
            program.launch(3.0, ELEMENTWISE, then=100.0)
        program.during("Optimizer.step#AdamW.step", start)

    found = answer(steps(program, 4, body), tmp_path)
    assert codes(found)[0] == first
    if first == "unfused-optimizer":
        assert found.causes[0].startswith(
            "the optimizer's 200 kernels and the waits for their launches take 67% of the step: use a fused optimizer"
        )


def copied(program: Program, direction: str, lasts: float, size: int = 1 << 20) -> None:
    """Copy between host and device once all kernels have ended."""
    program.number += 1
    program.event("cuda_runtime", "cudaMemcpyAsync", program.now, 5.0, correlation=program.number)
    program.free = max(program.now + 5.0, program.free)
    ends = {"H": "Pageable", "D": "Device"}
    name = f"Memcpy {direction} ({ends[direction[0]]} -> {ends[direction[-1]]})"
    where = {"device": 0, "stream": 7, "correlation": program.number, "bytes": size, "thread": 7}
    program.event("gpu_memcpy", name, program.free, lasts, **where)
    program.free += lasts
    program.now = program.free


@pytest.mark.parametrize(
    ("copies", "update", "named"),
    [
        (("DtoH", "HtoD"), "Optimizer.step#DeepSpeedCPUAdam.step", True),
        (("DtoH", "HtoD"), "", True),
        (("HtoD", "DtoH"), "", False),
        (("DtoH", "DtoH"), "Optimizer.step#AdamW.step", False),
        (("DtoH", "HtoD"), "metrics and Optimizer", False),
        (("DtoH", "HtoD"), "Optimizer.step#Outputs", False),
        (("DtoH", "HtoD"), "Optimizer.step#SlowDown", True),
    ],
    ids=[
        "in the optimizer's range",
        "without an optimizer",
        "input and output",
        "logs",
        "with an optimizer's kernels",
        "less back",
        "as much back in a fifth of the time",
    ],
)
def test_update_on_the_cpu_is_found_by_its_copies(
    tmp_path: Path, copies: tuple[str, str], update: str, named: bool
) -> None:
    program = Program()

    def body(_: int) -> None:
        for name in ("forward", "backward"):
            start = program.now
            for _ in range(15):
                program.launch(1000.0)
            program.during(name, start)
        if update.startswith("metrics"):
            program.launch(1000.0, "multi_tensor_apply_kernel<FusedAdamMathFunctor>()")
        program.wait()
        start = program.now
        copied(program, copies[0], 5000.0)
        program.now += 30e3
        lasts = 1000.0 if update == "Optimizer.step#SlowDown" else 5000.0
        copied(program, copies[1], lasts, 1 << 17 if update == "Optimizer.step#Outputs" else 1 << 20)
        if update:
            program.during(update, start)
        program.launch(10.0)

    found = answer(steps(program, 4, body), tmp_path)
    assert ("cpu-offload" in codes(found)) == named
    if named:
        assert codes(found)[0] == "cpu-offload"
        cause, of_copies = found.causes[0], 17 if update == "Optimizer.step#SlowDown" else 25
        assert f"of the step the CPU updates the weights while the GPU computes nothing, {of_copies}% of it in" in cause


def test_slowdown_of_all_kernels_means_a_lower_clock_and_not_growing_work(tmp_path: Path) -> None:
    program = Program()

    def body(step: int) -> None:
        program.launch(400.0 + 20.0 * step, PRODUCT)
        program.launch(200.0 + 10.0 * step, ELEMENTWISE)

    assert "growth" not in codes(answer(steps(program, 20, body), tmp_path))
