"""Traces of other people's programs: without marks, of other steps, libraries and versions of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cs_systems.analysis.attribution import tables
from cs_systems.analysis.attribution.profile import Profile, find_steps, profile
from cs_systems.analysis.attribution.range_tree import range_tree
from cs_systems.cli import main
from cs_systems.config import ConfigError
from cs_systems.core.range_names import general, is_operator
from cs_systems.readers import read

Event = dict[str, Any]
WriteTrace = Callable[[Sequence[Event]], Path]
MAIN, AUTOGRAD, PROCESS = 1, 2, 100


def event(category: str, name: str, start: float, end: float, thread: int = MAIN, **args: object) -> Event:
    """Return a complete event of the host; times are in µs."""
    where = {"ph": "X", "cat": category, "name": name, "pid": PROCESS, "tid": thread}
    return {**where, "ts": start, "dur": end - start, "args": args}


def marked(name: str, start: float, end: float, thread: int = MAIN) -> Event:
    return event("user_annotation", name, start, end, thread)


def kernel(
    name: str, start: float, end: float, launched: float | None = None, thread: int = MAIN, stream: int = 7
) -> list[Event]:
    """Return a kernel and the call that launched it; None: the call was not recorded."""
    number = int(start * 1000 + stream)
    run = event("kernel", name, start, end, device=0, stream=stream, correlation=number)
    call = [] if launched is None else [event("cuda_runtime", "cudaLaunchKernel", launched, launched + 1, thread)]
    return [run, *(one | {"args": {"correlation": number}} for one in call)]


def totals(made: Profile) -> tuple[int, float]:
    """Return (calls, time in µs) of the kernels in the steps."""
    sums = made.groups.values()
    return sum(one.calls for one in sums), pytest.approx(sum(one.time_s for one in sums) * 1e6)  # type: ignore[return-value]


def test_kernels_launched_before_the_recording_are_left_out(write_trace: WriteTrace) -> None:
    """The stream still runs the step before; a later kernel without a launch has lost its call."""
    path = write_trace(
        [
            marked("ProfilerStep#5", 0, 100),
            *kernel("tail", 5, 15),
            *kernel("tail", 8, 10, stream=8),
            *kernel("gemm", 20, 30, launched=1),
            *kernel("lost", 40, 45),
        ]
    )
    made = profile(read(path))
    assert totals(made) == (2, 15)
    assert made.notes == (
        "2 kernels (0.012 ms) before the first step are left out",
        "1 kernels have no recorded launch and are unattributed",
    )


def test_adjacent_steps_are_all_found(write_trace: WriteTrace) -> None:
    """The end of one, its start plus its duration, can be rounded to a later time than the start of the next."""
    events = [marked(f"ProfilerStep#{i}", i * 100, i * 100 + 100) for i in range(30)]
    made = profile(read(write_trace([*events, *kernel("gemm", 2950, 2960, launched=2910)])), "ProfilerStep#*")
    assert [step.name for step in find_steps(made.trace, None)[0]] == [f"ProfilerStep#{i}" for i in range(30)]


def test_a_recording_without_steps_has_the_kernels_launched_before_it(write_trace: WriteTrace) -> None:
    events = [*kernel("tail", 5, 15), *kernel("gemm", 20, 30, launched=1), *kernel("gemm", 90, 95, launched=80)]
    trace = read(write_trace(events))
    assert totals(profile(trace)) == (3, 25)
    assert totals(profile(trace, between=(0, 50e-6))) == (2, 20)
    later = profile(trace, between=(40e-6, 1))
    assert totals(later) == (1, 5)
    assert "2 kernels (0.02 ms) before the first step are left out" in later.notes


def steps_of_two_kinds() -> list[Event]:
    training = [
        marked("ProfilerStep#1", 0, 100), marked("forward", 0, 30), marked("backward", 30, 90),
        *kernel("gemm", 110, 120, launched=10), *kernel("gemm", 130, 160, launched=40),
    ]  # fmt: skip
    return [*training, marked("ProfilerStep#2", 200, 300), marked("forward", 200, 260), *kernel("gemm", 300, 350, 210)]


def test_backward_to_forward_ratio_uses_only_steps_with_both_phases(write_trace: WriteTrace) -> None:
    made = profile(read(write_trace(steps_of_two_kinds())))
    rows = tables.ratio(made)
    assert [(row["measure"], row["backward_to_forward"]) for row in rows] == [
        ("kernel time", pytest.approx(3)),
        ("wall time", pytest.approx(2)),
    ]
    assert rows[0]["forward_s"] == pytest.approx(10e-6)
    note = "steps of different kinds: 1 with forward, backward; 1 with forward; the ratio"
    assert tables.notes("ratio", made, rows)[0].startswith(note)


def test_step_without_kernel_does_not_count(write_trace: WriteTrace) -> None:
    made = profile(read(write_trace([marked("ProfilerStep#9", -50, -1), *steps_of_two_kinds()])))
    assert [row["calls_per_step"] for row in tables.families(made)] == [1.5]
    assert "1 of 3 steps launched no kernel and are left out" in made.notes


def test_step_lasts_until_its_kernels_end(write_trace: WriteTrace) -> None:
    """A range of an inference engine holds the launches alone; what is launched after it is no part of the step."""
    first, second = marked("step", 0, 10), marked("step", 70, 80)
    runs = [*kernel("gemm", 20, 60, launched=5), *kernel("sample", 50, 55, launched=40), *kernel("gemm", 90, 130, 75)]
    made = profile(read(write_trace([first, second, *runs])))
    assert [round(row["wall_s"] * 1e6) for row in tables.steps(made)] == [40, 60]
    assert totals(made) == (2, 80)
    assert "2 of 2 steps last until their kernels end, after their ranges" in made.notes


def test_step_that_overlaps_with_the_one_before_keeps_its_end(write_trace: WriteTrace) -> None:
    ranges = [marked("step", 0, 100), marked("step", 100, 200)]
    runs = [*kernel("gemm", 50, 140, launched=5), *kernel("gemm", 150, 240, launched=105)]
    made = profile(read(write_trace([*ranges, *runs])))
    assert [round(row["wall_s"] * 1e6) for row in tables.steps(made)] == [100, 100]


@pytest.mark.parametrize(
    ("name", "common"),
    [
        ("ProfilerStep#551", "ProfilerStep#*"),
        ("aten::view, op_id = 314290", "aten::view"),
        ("aten::add, seq = 3, op_id = 12", "aten::add"),
        ("Optimizer.step#SGD.step", "Optimizer.step#SGD.step"),
        ("block 3", "block 3"),
    ],
)
def test_occurrences_share_one_name(name: str, common: str) -> None:
    assert general(name) == common


@pytest.mark.parametrize(
    ("name", "expected"),
    [("detach_", True), ("aten::mm, op_id = 3", True), ("MmBackward0, seq = 3", True), ("detached head", False)],
)
def test_operators_and_ranges_are_distinguished(name: str, expected: bool) -> None:
    assert is_operator(name) is expected


def test_numbered_steps_are_one_range(write_trace: WriteTrace) -> None:
    (step, *_) = tables.ranges(profile(read(write_trace(steps_of_two_kinds()))))
    assert (step["range"], step["calls_per_step"]) == ("ProfilerStep#*", 1)


def test_innermost_phase_counts_in_a_closure(write_trace: WriteTrace) -> None:
    """`optimizer.step(closure)` runs forward and backward; what backward computes again stays backward."""
    path = write_trace(
        [
            marked("Optimizer.step#SGD.step", 0, 100), marked("forward", 10, 30), marked("backward", 40, 80),
            marked("forward", 50, 60),
            *kernel("gemm", 110, 111, 15), *kernel("gemm", 120, 122, 55), *kernel("multi_tensor_apply", 130, 134, 90),
            marked("Optimizer.step#SGD.step", 200, 300), marked("forward", 210, 230), *kernel("gemm", 310, 318, 215),
        ]
    )  # fmt: skip
    made = profile(read(path))
    assert len(made.steps) == 2
    assert [place.phase for place in made.places] == ["forward", "backward", "optimizer", "forward"]


def test_collective_in_a_module_is_communication(write_trace: WriteTrace) -> None:
    path = write_trace(
        [
            marked("step", 0, 100), marked("backward", 0, 90), marked("layers.0.attn", 0, 60),
            *kernel("ncclDevKernel_AllReduce_Sum_f32", 110, 150, 10), *kernel("gemm", 150, 170, 20),
        ]
    )  # fmt: skip
    made = profile(read(path))
    assert [row["family"] for row in tables.attention(made)] == ["matmul"]
    assert [row["layer"] for row in tables.layers(made)] == ["block 0", "communication"]


def ddp_step(*around: Event) -> list[Event]:
    """Return a step of DDP or FSDP: collectives before forward, in modules of both passes, and after backward."""
    reduce, gather = "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "ncclDevKernel_AllGather_RING_LL"
    return [
        marked("ProfilerStep#1", 0, 100), *around,
        *kernel(gather, 100, 110, launched=5, stream=9),
        *kernel("gemm", 110, 120, launched=15), *kernel(gather, 120, 125, launched=20, stream=9),
        *kernel("gemm", 130, 150, launched=45, thread=AUTOGRAD),
        *kernel(reduce, 150, 170, launched=50, thread=AUTOGRAD, stream=9),
        *kernel(reduce, 170, 180, launched=75, stream=9), *kernel("multi_tensor_apply", 190, 200, launched=85),
    ]  # fmt: skip


PHASES_OF_DDP_STEP = [
    "communication", "forward", "forward", "backward", "backward", "communication", "optimizer",
]  # fmt: skip


def test_collective_outside_of_phases_is_a_phase_of_its_own(write_trace: WriteTrace) -> None:
    around = [
        marked("forward", 10, 40), marked("layers.0.attn", 12, 30), marked("backward", 40, 70),
        marked("layers.0.attn", 42, 60, AUTOGRAD), marked("optimizer", 80, 95),
    ]  # fmt: skip
    made = profile(read(write_trace(ddp_step(*around))))
    assert [place.phase for place in made.places] == PHASES_OF_DDP_STEP
    assert {row["phase"]: row["time_s"] for row in tables.phases(made) if row["family"] == "all"} == {
        "forward": pytest.approx(15e-6),
        "backward": pytest.approx(40e-6),
        "optimizer": pytest.approx(10e-6),
        "communication": pytest.approx(20e-6),
    }
    assert {(row["part"], row["family"]) for row in tables.attention(made)} == {("attention", "matmul")}
    assert made.phase_coverage == 1
    assert made.layer_coverage == 1  # the collectives, which have no layer, do not count
    assert "100.0% of the kernel time belongs to a phase, and 100.0% of the computation to a layer" in made.coverage
    assert {row["measure"]: row["backward_to_forward"] for row in tables.ratio(made)} == {
        "kernel time": pytest.approx(40 / 15),
        "wall time": pytest.approx(1),
        "computation": pytest.approx(20 / 10),  # without what ranks wait for each other
    }


def test_collective_after_backward_is_not_inferred_as_forward(write_trace: WriteTrace) -> None:
    numbers = {"Sequence number": 1, "Fwd thread id": 1}
    backward = event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 41, 70, AUTOGRAD, **numbers)
    made = profile(read(write_trace(ddp_step(backward))))
    assert [place.phase for place in made.places] == PHASES_OF_DDP_STEP
    (ratio, *_) = tables.ratio(made)
    assert (ratio["forward_s"], ratio["backward_s"]) == (pytest.approx(15e-6), pytest.approx(40e-6))
    assert made.layer_coverage == pytest.approx(10 / 40)  # the optimizer, beside two products


@pytest.mark.parametrize("name", ["synchronize", "communication"])
def test_marked_communication_phase_has_the_kernels_launched_inside_it(write_trace: WriteTrace, name: str) -> None:
    events = [
        marked("step", 0, 100), marked("forward", 0, 20), marked("backward", 20, 50), marked(name, 50, 70),
        *kernel("gemm", 110, 120, 10), *kernel("ncclDevKernel_AllReduce", 130, 140, 55), *kernel("div", 140, 150, 60),
    ]  # fmt: skip
    made = profile(read(write_trace(events)))
    assert [place.phase for place in made.places] == ["forward", name, name]


def without_marks() -> list[Event]:
    return [
        *kernel("gemm", 100, 150, 10), *kernel("relu_elementwise_kernel", 200, 230, 20),
        event("cuda_runtime", "cudaDeviceSynchronize", 160, 190, correlation=9),
        *kernel("ncclDevKernel_AllGather", 240, 250, 30),
    ]  # fmt: skip


def test_recording_without_ranges_is_one_step(write_trace: WriteTrace) -> None:
    made = profile(read(write_trace(without_marks())))
    assert totals(made) == (3, 90)
    assert made.notes[0].startswith("no range marks steps or phases: the whole recording counts as one step")
    (step,) = tables.steps(made)
    assert step["wall_s"] == pytest.approx(240e-6)  # from the first launch to the end of the last kernel
    idle = {row["cause"]: round(row["time_s"] * 1e6) for row in tables.gaps(made)}
    assert sum(idle.values()) == 150
    assert {row["family"] for row in tables.families(made)} == {"matmul", "elementwise", "collective"}


def test_hint_suggests_between_if_the_trace_has_no_ranges(write_trace: WriteTrace) -> None:
    found = profile(read(write_trace(without_marks()))).notes[0]
    assert found.endswith("the whole recording counts as one step; choose a time with --between")


@pytest.mark.parametrize(("between", "kernels"), [(("0", "5e-6"), 1), (("5e-6", "1"), 2)])
def test_between_narrows_the_recording(
    write_trace: WriteTrace, between: tuple[str, str], kernels: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", str(write_trace(without_marks())), "--between", *between]) == 0
    assert f"1 step of {kernels} kernels" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--between", "1", "2"], "was recorded between 1 and 2 s; choose times from 0 to "),
        (["--between", "1"], "--between takes two times, got 1; write --between T0 T1, such as --between 0 1.5"),
        (["--between", "12.345678", "1"], "--between 12.345678 1 ends before it begins; swap the two times"),
        (["--between", "1", "1"], "--between 1 1 is empty, because both times are equal; give a later second time"),
        (
            ["--between", "0", "1", "--range", "step"],
            "--between 0 1 and --range step both choose the steps to analyze; leave out one of them",
        ),
    ],
)
def test_unusable_between_is_refused(
    write_trace: WriteTrace, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", str(write_trace(without_marks())), *options]) == 2
    assert message in capsys.readouterr().err


def test_range_takes_a_name_with_brackets(write_trace: WriteTrace) -> None:
    """A name copied from a message is no pattern."""
    name = "[param|add|0]"
    path = write_trace([marked(name, 0, 12), marked("p", 15, 35), *without_marks()])
    assert totals(profile(read(path), name)) == (1, 50)
    with pytest.raises(ConfigError, match=r"no range is named '\[other\]'; choose among '\[param"):
        profile(read(path), "[other]")


def test_ranges_of_one_other_process_count_by_time(write_trace: WriteTrace) -> None:
    """A program in a container may have one process number in its ranges and another in its launches."""
    marks = [marked("ProfilerStep#1", 0, 25), marked("forward", 0, 15), marked("backward", 15, 25)]
    made = profile(read(write_trace([*(mark | {"pid": 7, "tid": 7} for mark in marks), *without_marks()])))
    assert (
        "process 100 launched the kernels and has no range: those of process 7 (3 ranges) count, by time alone"
        in made.notes
    )
    assert totals(made) == (2, 80)
    assert [place.phase for place in made.places] == ["forward", "backward", "communication"]


def test_ranges_of_several_other_processes_do_not_count(write_trace: WriteTrace) -> None:
    marks = [marked("ProfilerStep#1", 0, 25) | {"pid": pid, "tid": pid} for pid in (8, 7)]
    made = profile(read(write_trace([*marks, *without_marks()])))
    assert (
        "process 100 launched the kernels and has no range; those of the processes 7 (1 range), 8 (1 range) do "
        "not count, as it is unknown which belong to it"
    ) in made.notes
    assert totals(made) == (3, 90)


OLD = {
    "kernel": "Kernel", "gpu_memcpy": "Memcpy", "cuda_runtime": "Runtime", "user_annotation": "Operator",
    "cpu_op": "Operator",
}  # fmt: skip


def test_categories_of_old_versions_are_read(write_trace: WriteTrace) -> None:
    """PyTorch 1.8 files ranges and operators under one category, with numbers as texts."""
    events = [
        *steps_of_two_kinds(),
        event("cpu_op", "aten::mm", 5, 15, **{"Sequence number": 1}),
        event("cpu_op", "MmBackward", 40, 50, **{"Sequence number": 1, "Fwd thread id": 1}),
        event("gpu_memcpy", "Memcpy HtoD", 1, 2, device=0, stream=7, bytes=64),
    ]
    old = [e | {"cat": OLD[e["cat"]], "tid": str(e["tid"])} for e in events]
    new_trace, old_trace = read(write_trace(events)), read(write_trace(old))
    assert list(old_trace.kernels) == list(new_trace.kernels)
    assert list(old_trace.ranges) == list(new_trace.ranges)
    assert list(old_trace.ops or ()) == list(new_trace.ops or ()) != []
    assert list(old_trace.copies) == list(new_trace.copies)


def test_steps_as_operators_are_ranges(write_trace: WriteTrace) -> None:
    """PyTorch 1.12 has the new categories, and steps among the operators."""
    events = [e | {"cat": "cpu_op"} if "#" in e["name"] else e for e in steps_of_two_kinds()]
    assert [step.name for step in profile(read(write_trace(events))).steps] == ["ProfilerStep#1", "ProfilerStep#2"]


def unmarked_training() -> list[Event]:
    """Return a step without marks: forward, backward in autograd's thread with a kernel of a hook, optimizer."""
    numbers = {"Sequence number": 5}
    return [
        marked("ProfilerStep#1", 0, 200),
        event("cpu_op", "aten::mm", 10, 30, **numbers),
        *kernel("gemm", 210, 220, 20),
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 60, 90, AUTOGRAD)
        | {"args": {**numbers, "Fwd thread id": 1}},
        *kernel("gemm", 230, 260, 70, AUTOGRAD),
        *kernel("elementwise_kernel", 270, 275, 95, AUTOGRAD),
        *kernel("multi_tensor_apply_kernel<Adam>", 280, 290, 120),
        marked("Optimizer.step#SGD.step", 140, 160),
        *kernel("elementwise_kernel", 300, 302, 150),
    ]


def test_phases_without_marks_are_inferred(write_trace: WriteTrace) -> None:
    made = profile(read(write_trace(unmarked_training())))
    assert [place.phase for place in made.places] == ["forward", "backward", "backward", "optimizer", "optimizer"]
    assert "no range marks forward or backward: phases are inferred" in made.notes[-1]
    assert "(confidence: high)" in made.notes[-1]


def test_marked_phases_are_not_inferred(write_trace: WriteTrace) -> None:
    made = profile(read(write_trace([*unmarked_training(), marked("forward", 5, 25)])))
    assert [place.phase for place in made.places] == ["forward", *["unattributed"] * 3, "optimizer"]
    assert not any("inferred" in note for note in made.notes)


def test_backward_is_inferred_from_names_of_ranges(write_trace: WriteTrace) -> None:
    """Ranges of `torch.autograd.profiler.emit_nvtx` are named so."""
    events = [
        marked("aten::mm, op_id = 3", 0, 50), *kernel("gemm", 100, 110, 10),
        marked("MmBackward0, seq = 3", 60, 90), *kernel("gemm", 120, 130, 70),
    ]  # fmt: skip
    made = profile(read(write_trace(events)))
    assert [place.phase for place in made.places] == ["forward", "backward"]
    assert "backward from the names of operators or ranges (confidence: medium)" in made.notes[-1]


def test_backward_is_inferred_from_names_of_operators(write_trace: WriteTrace) -> None:
    """PyTorch 1.8 recorded no sequence numbers; its autograd accumulates gradients outside of a backward operator."""
    events = [
        event("Operator", "aten::mm", 0, 50), *kernel("gemm", 100, 110, 10),
        event("Operator", "detach", 50, 55), *kernel("relu", 112, 115, 52),
        event("Operator", "MmBackward", 60, 90, AUTOGRAD), event("Operator", "aten::mm", 65, 85, AUTOGRAD),
        *kernel("gemm", 120, 130, 70, AUTOGRAD),
        event("Operator", "torch::autograd::AccumulateGrad", 92, 99, AUTOGRAD),
        *kernel("elementwise_kernel", 140, 145, 95, AUTOGRAD),
    ]  # fmt: skip
    made = profile(read(write_trace(events)))
    assert [place.phase for place in made.places] == ["forward", "forward", "backward", "backward"]
    assert not made.trace.ranges
    assert "backward from the names of operators or ranges (confidence: medium)" in made.notes[-1]


def test_range_tree_nests_the_programs_own_ranges(write_trace: WriteTrace) -> None:
    """A range of autograd's thread is inside the one that the main thread waits in."""
    path = write_trace(
        [
            marked("ProfilerStep#1", 0, 100), marked("fetch", 1, 9), marked("rollout", 10, 60),
            marked("policy", 12, 30), marked("my_hook", 65, 80, AUTOGRAD), marked("update", 61, 90),
            *kernel("a", 110, 111, 15), *kernel("b", 120, 122, 40), *kernel("c", 130, 134, 70, AUTOGRAD),
            marked("ProfilerStep#2", 200, 300), *kernel("d", 310, 318, 210),
        ]
    )  # fmt: skip
    rows = range_tree(profile(read(path)))
    found = [[row[c] for c in ("range", "calls_per_step", "time_s", "self_s")] for row in rows]
    assert [(name, calls, round(time_s * 2e6), round(self_s * 2e6)) for name, calls, time_s, self_s in found] == [
        ("ProfilerStep#*", 2, 15, 8),
        ("· update", 0.5, 4, 0),
        ("· · my_hook", 0.5, 4, 4),
        ("· rollout", 1, 3, 2),
        ("· · policy", 0.5, 1, 1),
    ]
    assert rows[2]["path"] == "ProfilerStep#* / update / my_hook"
