"""First sentences about recordings, against the truth that is known by construction."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cs_systems.analysis.attribution.profile import profile
from cs_systems.analysis.attribution.usual_steps import usual_steps
from cs_systems.analysis.diagnosis import Answer, apply_rules
from cs_systems.analysis.diagnosis._evidence import of_profile
from cs_systems.analysis.diagnosis._plan import planned
from cs_systems.analysis.replay import LaunchesFree
from cs_systems.readers import read
from cs_systems.report.diagnoses import sentences, text
from tests.programs import ELEMENTWISE, PRODUCT, Program
from tests.recorded import MAIN

# Rules with faults that are planted, and left out, in this file.
TRIED = ("blocking-launches", "pinned-allocation")


def answer(program: Program, folder: Path) -> Answer:
    return apply_rules(of_profile(profile(read(program.write(folder / "trace.json")))))


def codes(found: Answer) -> list[str]:
    return [diagnosis.code for diagnosis in found.diagnoses]


def steps(program: Program, count: int, body: Callable[[int], None]) -> Program:
    for number in range(count):
        start = program.now
        body(number)
        program.wait()
        program.during(f"ProfilerStep#{number}", start)
    return program


def busy(program: Program, kernels: int = 30) -> None:
    for _ in range(kernels):
        program.launch(1000.0)


def test_long_first_launch_is_start_up_and_the_rest_has_no_cause(tmp_path: Path) -> None:
    program = Program()
    program.launch(1000.0, call=1e6)
    busy(program, 100)
    found = answer(program, tmp_path)
    assert codes(found) == ["start-up"]
    assert found.causes[0].startswith("91% of the recording is start-up, before the usual work begins (1.00 s in first")
    assert found.nothing == "nothing found that would save more than 5% of the time after the start-up"


@pytest.mark.parametrize(("after_s", "share"), [(0.0, "95%"), (2.2, "48%")])
def test_start_up_names_time_without_calls_and_is_a_share_of_the_whole_process(
    tmp_path: Path, after_s: float, share: str
) -> None:
    """The host computes for 2 s before its only kernel, and frees memory after it."""
    program = Program()
    program.event("cuda_runtime", "cudaMalloc", program.now, 100e3)
    program.now += 2.1e6
    program.launch(120e3)
    program.wait()
    if after_s:
        program.event("cuda_runtime", "cudaFree", program.now, after_s * 1e6)
    trace = replace(read(program.write(tmp_path / "trace.json")), profiler="nsys")
    found = apply_rules(of_profile(profile(trace)))
    start_up = next(one for one in found.diagnoses if one.code == "start-up")
    assert start_up.cause == (
        f"{share} of the recording is start-up, before the usual work begins (2.00 s in stretches without a CUDA call, "
        "100 ms in cudaMalloc)"
    )


@pytest.mark.parametrize("cold", [1, 2])
def test_slow_first_steps_are_start_up_and_the_others_are_the_subject(tmp_path: Path, cold: int) -> None:
    program = Program()

    def body(number: int) -> None:
        program.launch(1000.0, call=200e3 if number < cold else 4.0)
        busy(program)

    found = answer(steps(program, 12, body), tmp_path)
    assert codes(found) == ["start-up"]
    which = "step 0 takes 231 ms" if cold == 1 else "each of the first 2 steps takes 231 ms"
    assert f"{which} where the usual ones take 31.0 ms" in found.causes[0]
    assert found.nothing.endswith(f"of steps {cold}–11 of 12")


def test_cause_in_the_usual_steps_comes_before_the_start_up(tmp_path: Path) -> None:
    program = Program()

    def body(number: int) -> None:
        for place in range(100):
            program.launch(3.0, call=50e3 if number == place == 0 else 4.0, then=100.0)

    found = answer(steps(program, 10, body), tmp_path)
    assert codes(found) == ["launch-bound", "start-up"]
    assert "(steps 1–9 of 10)" in found.causes[0]
    assert "expected: 0.34 ms instead of about 8.4 ms, recorded 10.4 ms" in found.causes[0]


def test_range_with_the_kernels_is_the_subject_and_earlier_work_is_named(tmp_path: Path) -> None:
    program = Program()
    start = program.now
    program.now += 20e6
    program.during("init_model", start)
    start = program.now
    for _ in range(200):
        program.launch(1000.0, "ampere_sgemm_128x64_tn")
    program.wait()
    program.during("benchmark_loop", start)
    found = answer(program, tmp_path)
    assert codes(found) == ["unused-tensor-cores", "start-up"]
    assert "100% of the step is matrix products in fp32" in found.causes[0]
    assert "(range 'benchmark_loop')" in found.causes[0]
    assert "(20.0 s in range 'init_model')" in found.causes[1]


def test_softmax_belongs_to_attention_only_between_two_products(tmp_path: Path) -> None:
    alone, attention = Program(), Program()
    for _ in range(20):
        alone.launch(1000.0, "softmax_rows(float const*, float*, int)")
        attention.launch(1000.0)
        attention.launch(10.0, ELEMENTWISE)
        attention.launch(1000.0, "softmax_warp_forward<float, float, float, 10, false>")
        attention.launch(1000.0, PRODUCT)
    assert codes(answer(alone, tmp_path)) == []
    assert codes(answer(attention, tmp_path)) == ["unfused-attention"]


def test_graph_recorded_as_a_whole_cannot_be_judged(export: Callable[..., Path]) -> None:
    path = export(kernels=(("gemm", 900, 910, 1),))
    database = sqlite3.connect(path)
    columns = "start, end, deviceId, streamId, correlationId, globalPid, graphId"
    database.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE ({columns})")
    row = (120, 880, 0, 7, 1, 7 << 24, 5)
    database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    database.commit()
    database.close()
    found = apply_rules(of_profile(profile(read(path))))
    assert found.causes == []
    assert found.others[0] == (
        "cannot be told: 99% of the kernels' time is in CUDA graphs recorded as a whole; record with "
        "--cuda-graph-trace=node"
    )


def test_host_without_cuda_calls_is_named_by_its_range(tmp_path: Path) -> None:
    program = Program()

    def body(number: int) -> None:
        busy(program, 10)
        program.wait("cudaStreamSynchronize")
        start = program.now
        program.now += 20e3
        program.during("augment", start)

    found = answer(steps(program, 5, body), tmp_path)
    assert codes(found)[0] == "host-time"
    assert "67% of the step the GPU is idle while the host makes no CUDA call, for up to 20.0 ms" in found.causes[0]
    assert "(100% in augment)" in found.causes[0]


def test_host_time_is_named_by_the_users_python_function_where_stacks_are_recorded(tmp_path: Path) -> None:
    program = Program()

    def body(number: int) -> None:
        busy(program, 10)
        program.wait("cudaStreamSynchronize")
        start = program.now
        program.now += 20e3
        program.during("/home/me/train.py(88): augment", start, "python_function")
        program.during("/usr/lib/python3.11/random.py(7): shuffle", start + 1.0, "python_function")

    found = answer(steps(program, 5, body), tmp_path)
    assert codes(found)[0] == "host-time"
    assert "(100% in augment() at train.py:88)" in found.causes[0]


def test_waits_explained_by_the_profiler_are_not_a_cause(tmp_path: Path) -> None:
    """The GPU waits 20% of the recorded step; without the profiler the host would be faster than the GPU."""
    program = Program()

    def body(number: int) -> None:
        for _ in range(200):
            program.launch(20.0, then=21.0)

    found = answer(steps(program, 5, body), tmp_path)
    assert found.causes == []
    assert found.others[0].startswith("cannot be told: whether the GPU waits for kernel launches: ")


def test_one_pass_with_hardly_a_kernel_is_not_judged(tmp_path: Path) -> None:
    program = Program()
    for _ in range(6):
        program.launch(3.0, then=900.0)
    found = answer(program, tmp_path)
    assert found.causes == []
    assert (
        "cannot be told: what limits a step: 6 kernels in 4.53 ms (18.0 µs of kernels), and nothing repeats"
        in found.others[0]
    )


@pytest.mark.parametrize(
    ("pauses_us", "subject"),
    [
        ([30e3] * 6, "repetitions of 1 kernel"),
        ([5e3, 40e3, 7e3, 90e3, 11e3, 60e3], ""),
    ],
)
def test_pauses_of_the_host_between_few_kernels_are_named(tmp_path: Path, pauses_us: list[float], subject: str) -> None:
    program = Program()
    for pause_us in pauses_us:
        program.launch(3.0, then=pause_us)
    found = answer(program, tmp_path)
    assert codes(found)[0] == "host-time"
    assert "of the step the GPU is idle while the host makes no CUDA call" in found.causes[0]
    assert found.diagnoses[0].subject == subject


def test_recording_without_steps_is_divided_by_its_repetition(tmp_path: Path) -> None:
    program = Program()
    for _ in range(8):
        for name in ("first", "second", "third", "fourth"):
            program.launch(100.0, f"{name}_kernel")
        program.wait()
    usual = usual_steps(profile(read(program.write(tmp_path / "trace.json"))))
    assert usual.name == "repetitions of 4 kernels"
    assert len(usual.profile.steps) == 8
    assert usual.step_s == pytest.approx(417e-6, rel=0.02)


def test_host_that_runs_ahead_has_steps_of_the_gpus_pace(tmp_path: Path) -> None:
    program = Program()
    for number in range(6):
        start = program.now
        busy(program, 5)
        if number == 5:
            program.wait()
        program.during(f"ProfilerStep#{number}", start)
    usual = usual_steps(profile(read(program.write(tmp_path / "trace.json"))))
    assert (usual.name, usual.apart) == ("", ())
    assert usual.step_s == pytest.approx(5005e-6, rel=0.01)


def test_step_is_never_expected_below_the_time_of_its_kernels(tmp_path: Path) -> None:
    program = Program()

    def body(number: int) -> None:
        for _ in range(100):
            program.launch(3.0, then=100.0)

    evidence = of_profile(profile(read(steps(program, 5, body).write(tmp_path / "trace.json"))))
    (found,) = apply_rules(replace(evidence, usual=None)).diagnoses
    found = replace(found, change=LaunchesFree())
    assert evidence.replay is not None
    (told,) = planned([found], evidence.replay, busy_s=0.3e-3)
    assert told.expected is not None
    assert planned([found], evidence.replay, busy_s=1e-3) == [found]


def without_kernels(program: Program, kept: int) -> Program:
    """Leave out all kernels but the first ones, as a profiler does that drops them."""
    numbers = [place for place, event in enumerate(program.events) if event["cat"] == "kernel"]
    for place in reversed(numbers[kept:]):
        del program.events[place]
    return program


def test_launches_after_the_last_recorded_kernel_make_the_trace_incomplete(tmp_path: Path) -> None:
    program = Program()
    for _ in range(1000):
        program.launch(3.0, then=20.0)
    program.wait()
    found = profile(read(without_kernels(program, 40).write(tmp_path / "trace.json")))
    assert found.incomplete is not None
    assert "960 of 1,000 launched kernels (96.0%) are missing" in found.incomplete
    assert apply_rules(of_profile(found)).causes == []


def test_launches_without_a_kernel_show_that_there_was_a_gpu(tmp_path: Path) -> None:
    program = Program()
    busy(program, 40)
    program.during("aten::mm", 1000.0, "cpu_op")
    found = answer(without_kernels(program, 0), tmp_path)
    assert found.nothing.startswith("nothing was judged: the profiler recorded 40 launches and no kernel")


def test_start_up_comes_first_if_a_range_has_hardly_any_other_work(tmp_path: Path) -> None:
    """The range holds a compilation, which its name does not tell, and 50 short kernels after it."""
    program = Program()
    program.launch(3.0, call=3e6)
    for _ in range(50):
        program.launch(3.0, then=100.0)
    program.wait()
    program.during("compile", 1000.0)
    found = answer(program, tmp_path)
    assert codes(found) == ["start-up", "launch-bound"]
    assert "(range 'compile' after the start-up)" in found.causes[1]


def process(export: Callable[..., Path], passes: int) -> Answer:
    """Judge a process that opens its context for 500 ms and then launches four kernels again and again."""
    launches, kernels = [], []
    for number in range(4 * passes):
        start = 500_000_000 + 100_000 * number
        launches.append((start, start + 4_000, MAIN, number + 1))
        kernels.append((f"kernel_{number % 4}", start + 8_000, start + 106_000, number + 1))
    opened = ("cudaMalloc", 0, 499_000_000, MAIN)
    return apply_rules(of_profile(profile(read(export((), launches, kernels, [opened])))))


@pytest.mark.parametrize(("passes", "comes_first"), [(400, False), (8, True)])
def test_start_of_a_process_comes_first_only_before_a_trial(
    export: Callable[..., Path], passes: int, comes_first: bool
) -> None:
    found = process(export, passes)
    assert codes(found) == ["start-up"]
    assert "499 ms in cudaMalloc" in found.causes[0]
    assert found.diagnoses[0].comes_last != comes_first
    assert bool(found.verdict) != comes_first


@pytest.mark.parametrize("call", [4.0, 9e3])
def test_few_kernels_that_fill_a_pass_are_judged(tmp_path: Path, call: float) -> None:
    """A first launch that loads code is no start-up of a kernel that then takes nearly all the time."""
    program = Program()
    program.launch(3e6, "monte_carlo", call=call)
    program.launch(20.0, "reduce")
    program.wait()
    found = answer(program, tmp_path)
    assert codes(found) == []
    assert found.nothing == "nothing found that would save more than 5% of the step"


def copied(program: Program, lasts: float, memory: str) -> None:
    """Copy memory to the device, and wait for it."""
    program.number += 1
    call = {"correlation": program.number}
    program.event("cuda_runtime", "cudaMemcpyAsync", program.now, 4.0, **call)
    name, where = f"Memcpy HtoD ({memory} -> Device)", {"device": 0, "stream": 7, "bytes": 1 << 20, "thread": 7}
    start = max(program.now, program.free) + 4.0
    program.event("gpu_memcpy", name, start, lasts, **where, **call)
    program.now = program.free = start + lasts


@pytest.mark.parametrize(("memory", "remedy"), [("Pageable", "pin the host's memory"), ("Pinned", "copy less")])
def test_copies_from_pinned_memory_get_no_advice_to_pin_it(tmp_path: Path, memory: str, remedy: str) -> None:
    program = Program()

    def body(number: int) -> None:
        copied(program, 1000.0, memory)
        program.launch(100.0, ELEMENTWISE)

    found = answer(steps(program, 1, body), tmp_path)
    assert codes(found)[0] == "blocking-copies"
    assert f": {remedy}" in found.causes[0]


@pytest.mark.parametrize(("gpu", "found"), [("NVIDIA GeForce RTX 3060", True), ("NVIDIA GeForce GTX 1660", False)])
def test_rtx_card_without_a_known_data_sheet_has_tensor_cores(tmp_path: Path, gpu: str, found: bool) -> None:
    program = Program(gpu)
    for _ in range(100):
        program.launch(1000.0, "ampere_sgemm_128x64_tn")
    assert codes(answer(program, tmp_path)) == ["unused-tensor-cores"] * found


def test_host_work_between_two_waits_does_not_count_as_synchronisation(tmp_path: Path) -> None:
    """Without the waits the host would run ahead, but what the GPU waits for is the host's own work."""
    program = Program()

    def body(number: int) -> None:
        for _ in range(8):
            program.launch(10e3)
        program.wait("cudaStreamSynchronize")
        program.now += 20e3

    found = answer(steps(program, 8, body), tmp_path)
    assert codes(found) == ["host-time"]
    assert found.causes[0].startswith("20% of the step the GPU is idle while the host makes no CUDA call")


def test_replay_that_also_removes_other_causes_gives_no_expectation(tmp_path: Path) -> None:
    """In the range the host first works for 10 ms and then allocates for 40 ms; without the range both are gone."""
    program = Program()

    def body(number: int) -> None:
        start = program.now
        program.now += 10e3
        program.event("cuda_runtime", "cudaMalloc", program.now, 40e3)
        program.now += 40e3
        program.during("generation", start)
        for _ in range(10):
            program.launch(5e3)

    found = answer(steps(program, 8, body), tmp_path)
    assert codes(found) == ["device-allocation", "host-time"]
    assert "(100% in generation)" in found.causes[1]
    assert "not below 90 ms, now 100 ms" in found.causes[1]


def test_answer_begins_by_saying_that_the_usual_steps_have_no_cause(tmp_path: Path) -> None:
    program = Program()

    def body(number: int) -> None:
        program.launch(1000.0, call=50e3 if not number else 4.0)
        busy(program)

    found = answer(steps(program, 12, body), tmp_path)
    first, second = sentences(found)
    assert first == "nothing found that would save more than 5% of steps 1–11 of 12"
    assert second.startswith("step 0 takes 81.0 ms")
    assert text(found).startswith(first)


@pytest.mark.parametrize("blocking", [True, False])
def test_launches_that_last_until_their_kernel_ends_are_named(tmp_path: Path, blocking: bool) -> None:
    program = Program()

    def body(_: int) -> None:
        for _ in range(30):
            start = program.now
            program.launch(200.0, then=100.0)
            if blocking:
                launched, kernel = program.events[-2:]
                launched["dur"] = kernel["ts"] + kernel["dur"] + 1.0 - start
                program.now = start + launched["dur"] + 100.0

    found = answer(steps(program, 6, body), tmp_path)
    assert ("blocking-launches" in codes(found)[:1]) == blocking
    told = "100% of the launches return only when their kernel has ended (CUDA_LAUNCH_BLOCKING)"
    assert any(told in cause for cause in found.causes) == blocking


@pytest.mark.parametrize(
    ("call", "code"), [("cudaHostAlloc", "pinned-allocation"), ("cudaMalloc", "device-allocation")]
)
def test_allocations_on_host_and_device_are_distinguished(tmp_path: Path, call: str, code: str) -> None:
    program = Program()

    def body(_: int) -> None:
        start = program.now
        program.now += 13e3
        program.event("cuda_runtime", call, start, 13e3)
        busy(program, 10)

    assert codes(answer(steps(program, 8, body), tmp_path))[0] == code


@pytest.mark.parametrize(
    ("called", "words"), [("<built-in function collect>", "collects garbage"), ("other", "makes no")]
)
def test_work_that_a_function_calls_is_named(tmp_path: Path, called: str, words: str) -> None:
    program = Program()

    def body(_: int) -> None:
        busy(program, 10)
        program.wait()
        start = program.now
        program.now += 20e3
        program.during(called, start, "python_function")
        program.during("train.py(61): cleanup", start, "python_function")

    found = answer(steps(program, 8, body), tmp_path)
    assert codes(found)[0] == "host-time"
    assert f"the host {words}" in found.causes[0]
    assert "cleanup() at train.py:61" in found.causes[0]


def test_iterations_that_a_program_numbers_are_its_steps(tmp_path: Path) -> None:
    program = Program()
    for number in range(8):
        start = program.now
        program.now += 20e3
        program.during("load_batch", start)
        busy(program, 10)
        program.wait()
        program.during(f"iteration {number}", start)
    found = answer(program, tmp_path)
    assert codes(found)[0] == "host-time"
    assert "64% of the step the GPU is idle while the host loads the next batch" in found.causes[0]


def test_short_start_up_with_a_long_copy_is_not_a_cause(tmp_path: Path) -> None:
    """A recording begins with a copy of 20 ms, a tenth of the work after it."""
    program = Program()
    program.event("cuda_runtime", "cudaMemcpyAsync", program.now, 20e3)
    program.now += 20e3
    busy(program, 300)
    found = answer(program, tmp_path)
    assert found.causes == []
    assert found.nothing.startswith("nothing found that would save more than 5% of ")
