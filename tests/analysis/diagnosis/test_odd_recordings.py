"""First sentences about recordings that are cut short, cold, of several ranks, or of managed memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cs_systems.analysis.attribution import gaps
from cs_systems.analysis.attribution.profile import profile
from cs_systems.analysis.attribution.usual_steps import usual_steps
from cs_systems.analysis.diagnosis import Answer, apply_rules, exposed_communication
from cs_systems.analysis.diagnosis._evidence import of_profile
from cs_systems.analysis.diagnosis._without_kernels import _copies
from cs_systems.analysis.diagnosis.exposed_communication import _of_mpi
from cs_systems.cli import main
from cs_systems.readers import read
from cs_systems.readers.forms.columns import Categorical, Range
from cs_systems.readers.forms.trace import Copies, Copy, Step, Trace
from tests.analysis.attribution.made import Made
from tests.programs import ELEMENTWISE, Program
from tests.recorded import MAIN

# Rules with faults that are planted, and left out, in this file.
TRIED = ("after-kernels", "managed-memory")
SGEMM = "ampere_sgemm_128x64_tn"
MS, SECOND = 1e3, 1e6  # in µs


def trace_of(program: Program, folder: Path) -> Trace:
    return read(program.write(folder / "trace.json"))


def told(trace: Trace) -> Answer:
    return apply_rules(of_profile(profile(trace)))


def kernels_of(program: Program) -> list[dict[str, object]]:
    return [event for event in program.events if event["cat"] == "kernel"]


def moves(direction: str, count: int, from_s: float, to_s: float) -> list[Copy]:
    """Return moves of pages of managed memory, evenly between two times."""
    each = (to_s - from_s) / count
    begins = (from_s + each * number for number in range(count))
    return [Copy("memcpy", begin, begin + each / 9, 0, 7, 1 << 16, name=f"{direction} unified") for begin in begins]


def test_recording_without_its_last_kernels_is_judged_up_to_the_last_one(tmp_path: Path) -> None:
    program = Program()
    for _ in range(200):
        program.launch(1 * MS, SGEMM)
    program.wait()
    for lost in kernels_of(program)[-40:]:
        program.events.remove(lost)
    found = profile(trace_of(program, tmp_path))
    assert found.incomplete == (
        "incomplete trace: the last 40 of 200 launched kernels (20.0%) are missing; the time up to the last recorded "
        "kernel is judged"
    )
    assert apply_rules(of_profile(found)).causes[0].startswith("100% of the step is matrix products in fp32")


def test_pause_of_a_program_that_ran_before_the_recording_is_not_start_up(tmp_path: Path) -> None:
    program = Program()
    for _ in range(40):
        program.launch(1 * MS)
    program.events = kernels_of(program)  # launched before the recording began
    program.now = program.free + 2 * SECOND
    for _ in range(40):
        program.launch(1 * MS)
    first = told(trace_of(program, tmp_path)).causes[0]
    assert first.startswith("96% of the step the GPU is idle while the host makes no CUDA call, for up to 2.00 s")


def test_cold_recording_counts_short_first_uses_and_the_silence_between_them(tmp_path: Path) -> None:
    program = Program()
    for number in range(30):
        program.launch(0.1 * MS, f"kernel_{number}", call=(20 if number % 10 == 0 else 2) * MS)
        program.now += (40 if number == 10 else 0) * MS
    first = told(trace_of(program, tmp_path)).causes[0]
    assert first.startswith("98% of the recording is start-up (111 ms in first kernel launches, 40.0 ms in stretches")
    assert "no step is warm" in first


@pytest.mark.parametrize(
    ("grid", "block", "cause"),
    [
        (30, 1024, "kernels of few blocks, which leave most of the GPU idle (grid of 30 blocks on 108 multiprocessors"),
        (120, 32, "kernels of few blocks, which leave most of the GPU idle (grid of 120 blocks of 32 threads on 108"),
        (
            100_000,
            4,
            "kernels of small blocks, which leave most of each warp idle (grid of 100,000 blocks of 4 threads",
        ),
        (108, 128, ""),
    ],
)
def test_few_or_small_blocks_are_compared_with_the_number_of_multiprocessors(
    tmp_path: Path, grid: int, block: int, cause: str
) -> None:
    program = Program()
    for _ in range(30):
        program.launch(1 * MS, "solve(float*)")
    for event in kernels_of(program):
        event["args"] |= {"grid": [grid, 1, 1], "block": [block, 1, 1]}  # type: ignore[operator]
    found = told(replace(trace_of(program, tmp_path), multiprocessors={0: 108}))
    assert [one.code for one in found.diagnoses] == (["small-grids"] if cause else [])
    assert cause in " ".join(found.causes)


@pytest.mark.parametrize("hidden", [True, False])
def test_few_blocks_that_run_beside_other_kernels_cost_nothing(tmp_path: Path, hidden: bool) -> None:
    program = Program()
    for _ in range(30):
        program.launch(1 * MS)
        number, start = program.number, program.free - 0.9 * MS
        place = {"device": 0, "stream": 8 if hidden else 7, "correlation": number, "thread": 7}
        begin = start if hidden else program.free + 1
        program.event("kernel", "exchange(float*)", begin, 0.8 * MS, grid=[20, 1, 1], block=[1024, 1, 1], **place)
        program.free += 0.0 if hidden else 0.8 * MS + 1
    found = told(replace(trace_of(program, tmp_path), multiprocessors={0: 132}))
    assert [one.code for one in found.diagnoses] == ([] if hidden else ["small-grids"])


@pytest.mark.parametrize(("number", "is_named"), [(60, True), (1, False)])
def test_copies_to_the_host_after_the_last_kernel_are_named(tmp_path: Path, number: int, is_named: bool) -> None:
    program = Program()
    program.launch(100 * MS)
    program.wait()
    trace = replace(trace_of(program, tmp_path), profiler="nsys")
    end_s = float(trace.kernels.end_s.max())
    back = Copy("memcpy", end_s + 1e-3, end_s + 1e-3 * number, 0, 7, 512 << 20, name="DtoH pageable")
    found = told(replace(trace, copies=Copies.of([back])))
    causes = [one.cause for one in found.diagnoses if one.code == "blocking-copies"]
    assert causes == (
        ["37% of the recording is copies to the host after the last kernel (512 MiB in 59.0 ms)"] * is_named
    )


def test_copies_around_the_few_kernels_of_a_process_come_before_its_start_up(tmp_path: Path) -> None:
    program = Program()
    program.event("cuda_runtime", "cudaMalloc", program.now, 50 * MS)
    program.now += 600 * MS
    program.launch(20 * MS, "solve(float*)")
    program.now = program.free + 400 * MS
    program.launch(20 * MS, "solve(double*)")
    program.wait()
    trace = replace(trace_of(program, tmp_path), profiler="nsys")
    first_s, second_s = trace.kernels.start_s.tolist()
    times = [("HtoD", first_s - 0.5, first_s - 0.01), ("DtoH", second_s - 0.39, second_s - 0.01)]
    times.append(("DtoH", second_s + 0.03, second_s + 0.4))
    copies = Copies.of([Copy("memcpy", *when, 0, 7, 1 << 30, name=f"{way} pageable") for way, *when in times])
    answer = told(replace(trace, copies=copies))
    assert answer.causes[0].startswith(
        "87% of the recording is copies to the device before the first kernel, between kernels and to the host after "
        "the last kernel (3.00 GiB in 1.24 s): copy from and to pinned memory"
    )
    assert not any("is start-up" in cause for cause in answer.causes), "no time counts twice"


@pytest.mark.parametrize(("longest_ms", "is_once"), [(30.0, True), (10.0, False)])
def test_buffers_pinned_at_once_in_the_only_pass_are_no_cost_of_a_step(
    tmp_path: Path, longest_ms: float, is_once: bool
) -> None:
    program = Program()
    for lasted_ms in (longest_ms, 10.0, 10.0):
        program.launch(20 * MS, f"solve_{program.now:.0f}(float*)")
        program.wait()
        program.event("cuda_runtime", "cudaHostAlloc", program.now, lasted_ms * MS)
        program.now += lasted_ms * MS
    program.launch(20 * MS, "last(float*)")
    program.wait()
    (cause, *_) = told(replace(trace_of(program, tmp_path), profiler="nsys")).causes
    assert ("30.0 ms of it at once: pin the buffers before the part that is measured" in cause) == is_once
    assert ("(cudaHostAlloc): pin the buffers once" in cause) == (not is_once)


@pytest.mark.parametrize(
    ("gpu", "name", "is_named"),
    [
        ("NVIDIA GeForce RTX 3060", "diverge(int, double, bool *, double, ", True),
        ("NVIDIA GeForce RTX 3060", "diverge(int, float, bool *, double_rate, ", False),
        ("NVIDIA A100-SXM4-80GB", "diverge(int, double, bool *)", False),
    ],
)
def test_arguments_in_fp64_are_named_on_gpus_that_are_slow_at_it(
    tmp_path: Path, gpu: str, name: str, is_named: bool
) -> None:
    program = Program(gpu)
    for _ in range(30):
        program.launch(1 * MS, name)
    assert [one.code for one in told(trace_of(program, tmp_path)).diagnoses] == ["double-precision"] * is_named


def test_pause_between_two_runs_belongs_to_no_repetition(tmp_path: Path) -> None:
    program = Program()
    for number in range(20):
        program.now += (300 if number == 10 else 2) * MS
        for name in ("assign(float*)", "update(float*)", "move(float*)"):
            program.launch(1 * MS, name)
        program.wait()
    first = told(trace_of(program, tmp_path)).causes[0]
    assert first.startswith("37% of the step the GPU is idle while the host makes no CUDA call, for up to 2.0")


@pytest.mark.parametrize("count", [50, 1000])
def test_host_that_reads_managed_memory_page_by_page_is_named(tmp_path: Path, count: int) -> None:
    program = Program()
    program.launch(5 * MS)
    program.wait()
    end_s = program.now / SECOND
    program.event("cuda_runtime", "cudaFree", program.now + 4 * SECOND, 1 * MS)
    trace = replace(trace_of(program, tmp_path), profiler="nsys")
    start_s = float(trace.kernels.start_s[0]) - 1e-3
    back = moves("DtoH", count, start_s + end_s, start_s + end_s + 3.9)
    found = told(replace(trace, copies=Copies.of(back)))
    named = next((one.cause for one in found.diagnoses if one.code == "managed-memory"), "")
    assert bool(named) == (count == 1000)
    assert not named or "the host reads managed memory back page by page, after the last kernel (1,000 moves" in named


@pytest.mark.parametrize("count", [50, 1000])
def test_slow_steps_in_which_pages_of_managed_memory_move_are_named_first(tmp_path: Path, count: int) -> None:
    program = Program()
    for step in range(6):
        program.launch(1 * MS, "first_of_step")
        for _ in range(10):
            program.launch((400 if step < 2 else 10) * MS, SGEMM)
            program.launch(1 * MS)
    program.wait()
    trace = trace_of(program, tmp_path)
    start_s = float(trace.kernels.start_s[0])
    found = told(replace(trace, copies=Copies.of(moves("HtoD", count, start_s, start_s + 8.0))))
    named = [one.cause for one in found.diagnoses if one.code == "managed-memory"]
    assert bool(named) == (count == 1000)
    assert not named or found.causes[0].startswith(named[0])
    assert not named or "extra time of 2 steps in which pages of managed memory move (62.5 MiB)" in named[0]


@pytest.mark.parametrize(("lasts_ms", "is_first"), [(100.0, True), (900.0, False)])
def test_start_up_that_outweighs_a_single_marked_range_comes_first(
    tmp_path: Path, lasts_ms: float, is_first: bool
) -> None:
    program = Program()
    program.event("cuda_runtime", "cudaMalloc", program.now, 2 * SECOND)
    program.now += 2 * SECOND
    begin = program.now
    for _ in range(10):
        program.launch(lasts_ms / 10 * MS, SGEMM)
    program.wait()
    program.event("user_annotation", "Kernel Execution", begin, program.now - begin)
    first = told(replace(trace_of(program, tmp_path), profiler="nsys")).causes[0]
    assert ("is start-up" in first) == is_first


def test_filling_managed_memory_does_not_count_as_start_up(tmp_path: Path) -> None:
    program = Program()
    program.event("cuda_runtime", "cudaMallocManaged", program.now, 200 * MS)
    program.now += 3 * SECOND
    program.launch(100 * MS)
    program.wait()
    trace = replace(trace_of(program, tmp_path), profiler="nsys")
    assert told(trace).diagnoses[-1].cause == (
        "90% of the recording the host makes no CUDA call between allocating managed memory and its first use (2.80 s)"
    )


def test_norms_of_cudnn_are_pytorchs_where_its_own_kernels_run_beside_them(tmp_path: Path) -> None:
    program = Program()
    for _ in range(50):
        program.launch(1 * MS)
        program.launch(0.8 * MS, "void cudnn::bn_fw_inf_1C11_kernel_NCHW<float, float, true, 1>(float)")
        program.launch(0.5 * MS, ELEMENTWISE)
    assert told(trace_of(program, tmp_path)).causes[0].startswith("2 elementwise kernels, casts and norms take 56% of")


def test_processes_of_one_file_that_communicate_are_merged_as_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = []
    for rank in range(2):
        program = Program()
        program.number = 1000 * rank
        for number in range(3):
            begin = program.now
            program.now += 20 * MS * rank
            for _ in range(20):
                program.launch(0.1 * MS)
            program.launch(1 * MS if rank else 21 * MS, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(void*)")
            program.wait()
            program.during(f"ProfilerStep#{number}", begin)
        for event in program.events:
            event["pid"] = rank + 1
            if event["cat"] == "kernel":
                event["args"]["device"] = rank
        events += program.events
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert main(["analyze", str(path)]) == 0
    assert "2 ranks of one job" in capsys.readouterr().out
    assert main(["analyze", str(path), "--process", "1"]) == 0
    assert "2 ranks of one job" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("category", "name", "reason"),
    [
        (
            "gpu_memcpy",
            "Memcpy HtoD (Pinned -> Device)",
            "only copies: 95.4 MiB HtoD pinned at 10 GB/s; they take 100%",
        ),
        ("cpu_op", "aten::mkldnn_convolution", "it ran on the CPU, 100% of its operators' time in aten::mkldnn_convol"),
        (
            "cpu_op",
            "aten::cudnn_batch_norm",
            "though aten::cudnn_batch_norm ran on a GPU; record with ProfilerActivity",
        ),
        ("cpu_op", "aten::addmm", "the trace has no kernels; record on a machine with a GPU"),
    ],
)
def test_trace_without_kernels_lists_its_contents(tmp_path: Path, category: str, name: str, reason: str) -> None:
    program = Program()
    arguments = {"bytes": 100_000_000, "device": 0, "stream": 7} if category == "gpu_memcpy" else {}
    program.event(category, name, program.now, 10 * MS, **arguments)
    program.now += 10 * MS
    program.during("forward", 1000.0)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": program.events}))
    assert reason in told(read(path)).nothing


@pytest.mark.parametrize(("threads", "cause"), [(1, "unused-tensor-cores"), (32, "small-grids")])
def test_block_size_unknown_in_libraries_gives_no_small_grid(tmp_path: Path, threads: int, cause: str) -> None:
    """A converted file may have 1 for each extent that it does not know."""
    program = Program()
    for _ in range(30):
        program.launch(1 * MS, "ampere_sgemm_128x64_tn")
    for event in kernels_of(program):
        event["args"] |= {"grid": [1, 1, 1], "block": [threads, 1, 1]}  # type: ignore[operator]
    found = told(replace(trace_of(program, tmp_path), multiprocessors={0: 108}))
    assert found.diagnoses[0].code == cause


def test_copies_without_a_kernel_are_told_with_their_rate() -> None:
    made = Made()
    made.copy("HtoD pinned", 1.0, 1.5)
    made.copy("HtoD pinned", 2.0, 2.5)
    assert _copies(made.trace(), 10.0).endswith("HtoD pinned at 2e-09 GB/s; they take 10% of the time")


def exchanging(folder: Path, kernel: str, devices: int = 1) -> Trace:
    """Return 20 rounds of a kernel of 1 ms and an exchange of as long, on several devices one exchange at a time."""
    program = Program()
    for _ in range(20):
        program.launch(1 * MS, kernel)
        program.launch(1 * MS, "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)")
        program.launch(0.1 * MS, f"{kernel}_edge")
        for other in range(1, devices):
            place = {"device": other, "stream": 7, "correlation": program.number, "thread": 7}
            program.event(
                "kernel", kernel, program.free - 2 * MS, 1.5 * MS, grid=[132, 1, 1], block=[256, 1, 1], **place
            )
    program.wait()
    return trace_of(program, folder)


@pytest.mark.parametrize("devices", [1, 2])
def test_exchange_of_a_solver_is_communication_and_no_stage_of_a_pipeline(tmp_path: Path, devices: int) -> None:
    found = told(exchanging(tmp_path, "solve(float*)", devices))
    assert [one.code for one in found.diagnoses] == ["exposed-communication"]
    assert found.causes[0].startswith("48% of the traced step (")
    assert "send what other ranks need first, from a stream of its own" in found.causes[0]
    assert told(exchanging(tmp_path, ELEMENTWISE)).diagnoses[0].code == "pipeline-bubbles"


@pytest.mark.parametrize("rounds", [30, 1])
def test_calls_of_mpi_come_before_the_launches_and_copies_inside_them(tmp_path: Path, rounds: int) -> None:
    program = Program()
    for _ in range(rounds):
        program.launch(1 * MS, "solve(float*)")
        program.wait()
        program.launch(0.5 * MS if rounds > 1 else 3.0, "norm(float*)")
        start = program.now
        for _ in range(3 if rounds > 1 else 300):
            program.now += 0.3 * MS
            program.wait("cudaStreamSynchronize")
        program.during("MPI_Sendrecv", start)
    found = told(trace_of(program, tmp_path))
    assert [one.code for one in found.diagnoses][:1] == ["exposed-communication"] * (rounds > 1)
    assert rounds == 1 or found.causes[0].startswith(
        "28% of the step no kernel runs during 1 call of MPI (MPI_Sendrecv), waiting for"
    )


def test_calls_of_mpi_count_once_and_only_on_threads_that_compute() -> None:
    made = Made()
    for step in range(4):
        start = 10.0 * step
        made.range("step", start, start + 9.75)
        for number in range(20):
            made.kernel("solve(float*)", start + number / 16, start + (number + 1) / 16, start + number / 32)
        made.range("MPI_exchange", start + 2, start + 6)
        made.range("MPI_Waitall", start + 3, start + 6)
        made.kernel("ncclDevKernel_AllReduce", start + 8, start + 8.125, thread=2)
        made.ranges.append(Range("MPI_Bcast", start, start + 8, 2))  # a library's own thread waits all the time
    of_steps = made.profile(step="step")
    found = _of_mpi(of_steps, 10.0)
    assert found is not None
    assert found.cause == (
        "40% of the step no kernel runs during 1 call of MPI (MPI_Waitall), waiting for other ranks included"
    )


def test_many_calls_of_mpi_are_judged_by_one_sum_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made()
    for number in range(64):
        made.kernel("solve(float*)", number / 64, number / 64 + 1 / 128)
        made.range("MPI_Send", number / 64 + 1 / 128, (number + 1) / 64)
    sums: list[int] = []
    monkeypatch.setattr(
        exposed_communication, "idle_during", lambda *given: [sums.append(1), gaps.idle_during(*given)][1]
    )
    of_pass = replace(made.profile(), steps=(Step("step", 0.0, 1.0),))
    found = _of_mpi(of_pass, 1.0)
    assert found is not None
    assert (found.share, len(sums)) == (0.5, 1)


@pytest.mark.parametrize(
    ("kernel", "remedy"),
    [
        ("triton_poi_fused_add_3", "analyze the traces of all ranks together"),
        ("loop_add_fusion_3", "meanwhile; analyze the traces of all ranks together"),
    ],
)
def test_remedy_of_one_rank_asks_for_all_traces_where_it_reduces(kernel: str, remedy: str) -> None:
    made = Made()
    for number in range(40):
        made.kernel(kernel, number / 4, number / 4 + 1 / 8)
        made.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", number / 4 + 1 / 8, (number + 1) / 4)
    answer = told(made.trace(profiler="nsys"))
    (found,) = (one for one in answer.diagnoses if one.code == "exposed-communication")
    assert remedy in found.remedy
    assert found.remedy.startswith("analyze") is kernel.startswith("triton")


def test_range_of_another_process_does_not_lengthen_the_time_after_the_last_kernel(
    export: Callable[..., Path],
) -> None:
    launches, kernels = [(1_000_000, 1_004_000, MAIN, 1)], [("solve", 1_008_000, 400_000_000, 1)]
    calls = [("cudaMalloc", 0, 900_000, MAIN), ("cudaFree", 400_100_000, 400_200_000, MAIN)]
    launcher = [("launch", 0, 3_000_000_000, 99 << 24)]
    found = apply_rules(of_profile(profile(read(export(launcher, launches, kernels, calls)))))
    assert "after-kernels" not in [one.code for one in found.diagnoses]


@pytest.mark.parametrize(
    ("lasts_ms", "after_ms", "first"),
    [(100, 3_000, "after-kernels"), (400, 300, "start-up"), (400, 30, "start-up"), (4_000, 30, "")],
)
def test_time_before_and_after_the_only_kernel_of_a_process_comes_first_if_it_is_longer(
    export: Callable[..., Path], lasts_ms: int, after_ms: int, first: str
) -> None:
    opened_ns, lasts_ns, after_ns = 500_000_000, lasts_ms * 1_000_000, after_ms * 1_000_000
    launches, end = [(opened_ns, opened_ns + 4_000, MAIN, 1)], opened_ns + lasts_ns
    kernels = [("solve", opened_ns + 8_000, end, 1)]
    calls = [("cudaMalloc", 0, opened_ns - 1_000, MAIN), ("cudaFree", end + after_ns, end + after_ns + 1_000, MAIN)]
    found = apply_rules(of_profile(profile(read(export((), launches, kernels, calls)))))
    assert ("" if found.verdict or not found.diagnoses else found.diagnoses[0].code) == first
    if first == "after-kernels":
        assert found.causes[0].startswith("83% of the recording follows the last kernel without a CUDA call (3.00 s): ")


def test_repetitions_begin_with_the_kernel_that_runs_first(tmp_path: Path) -> None:
    program = Program()
    for _ in range(10):
        program.launch(100 * MS, "move(float*)")
        program.launch(1 * MS, "count(float*)")
        program.wait()
    trace = trace_of(program, tmp_path)
    of_count = [name for name in trace.kernels.function.values if name.name.startswith("count")]
    others = [name for name in trace.kernels.function.values if name not in of_count]
    codes = np.array([(of_count + others).index(one) for one in trace.kernels.function])
    reordered = replace(trace, kernels=replace(trace.kernels, function=Categorical(of_count + others, codes)))
    assert usual_steps(profile(reordered)).start_up_s < 1e-3


def test_pause_between_operators_is_named_where_no_kernel_is(tmp_path: Path) -> None:
    program = Program()
    program.now += 1 * MS
    program.during("aten::empty", 1000.0, "cpu_op")
    program.now = start = 20 * SECOND
    program.now += 1 * MS
    program.during("enumerate(DataLoader)#_Iter.__next__", start)
    start = program.now
    program.now += 4 * MS
    program.during("aten::mkldnn_convolution", start, "cpu_op")
    assert told(trace_of(program, tmp_path)).nothing.startswith(
        "nothing was judged: 100% of the recording passes without an operator (20.0 s, before "
        "'enumerate(DataLoader)#_Iter.__next__'), and the trace has no kernels; record on a machine with a GPU"
    )


@pytest.mark.parametrize(
    ("other", "remedy"),
    [
        (ELEMENTWISE, "compute in bf16 (torch.autocast)"),
        ("stencil(float*)", "compute these products in bf16, or in TF32"),
    ],
)
def test_remedy_of_products_names_torch_only_where_the_program_uses_it(other: str, remedy: str, tmp_path: Path) -> None:
    program = Program()
    for _ in range(50):
        program.launch(1 * MS, SGEMM)
        program.launch(0.1 * MS, other)
    program.wait()
    (found,) = (one for one in told(trace_of(program, tmp_path)).diagnoses if one.code == "unused-tensor-cores")
    assert found.remedy.startswith(remedy)
