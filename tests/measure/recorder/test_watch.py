"""Parts of the watch over a loop: padding, containers that grow, and the record that is written again."""

from __future__ import annotations

import dis
import functools
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn

from cs_systems.analysis.comparison.loop_findings import SLOW_STEPS, WHOLE_LOOP
from cs_systems.analysis.comparison.loop_growth import follows_inputs, varies
from cs_systems.core.step_kinds import StepKind
from cs_systems.machine.device import resolve
from cs_systems.measure.recorder import kept, stacks
from cs_systems.measure.recorder.memory import Memory
from cs_systems.measure.recorder.observers import Period, Timing
from cs_systems.measure.recorder.other_programs import OtherPrograms, Reading, times_in
from cs_systems.measure.recorder.padding import Padding, filled_share
from cs_systems.measure.recorder.stacks import (
    Sample,
    Sampler,
    holds_locals,
    line_of,
    method_of,
    names_read,
    source_of,
    uses_no_tensor,
)
from cs_systems.measure.recorder.unedited import ScriptRecorder
from cs_systems.measure.recorder.watch import Watch, _clearest
from cs_systems.record import append_record, read_records
from tests.measure.recorder.loops import train


def padded(lengths: list[int], width: int = 40, filler: int = 0, left: bool = False) -> torch.Tensor:
    rows = torch.full((len(lengths), width), filler)
    for row, length in zip(rows, lengths, strict=True):
        row[(width - length) if left else 0 : width if left else length] = torch.randint(5, 99, (length,))
    return rows


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("filler", [0, 50256])
def test_equal_values_at_the_ends_of_rows_are_padding(left: bool, filler: int) -> None:
    torch.manual_seed(0)
    found = filled_share(padded([40, 10, 10, 20], filler=filler, left=left))
    assert found == (pytest.approx(0.5), filler)


def test_vectors_of_zeros_are_padding_but_a_border_is_not() -> None:
    vectors = torch.randn(2, 10, 3)
    vectors[0, 4:] = 0
    assert filled_share(vectors) == (pytest.approx(0.3), None)
    vectors[:, 4:] = 0
    assert filled_share(vectors) == (0.0, None)


def test_time_steps_without_any_input_are_no_padding() -> None:
    """Rows may be time steps, as in a task that has to be answered after its input."""
    steps = torch.rand(12, 4, 3) + 1
    steps[6:] = 0
    assert filled_share(steps) == (0.0, None)
    steps[3:, :2] = 0
    assert filled_share(steps) == (pytest.approx(30 / 48), None), "two samples are shorter than the others"
    samples = torch.rand(4, 12, 3) + 1
    samples[0], samples[1, 6:] = 0, 0
    share = filled_share(samples)
    assert share is not None
    assert 6 / 48 <= share[0] <= 18 / 48, "a sample without anything is next to one with padding"


@pytest.mark.parametrize("silent", [(3,), (0, 1), (6, 7)])
def test_samples_without_any_event_make_sparse_data_no_padding(silent: tuple[int, ...]) -> None:
    events = (torch.rand(8, 200, 1, generator=torch.Generator().manual_seed(0)) > 0.7).float().repeat(1, 1, 16)
    before = filled_share(events)
    events[[*silent]] = 0
    share = filled_share(events)
    assert before is not None
    assert share is not None
    assert share[0] <= before[0] + 0.01


@pytest.mark.parametrize(
    "tensor", [torch.randn(8, 40), torch.randint(9, (40,)), torch.ones(8, 40, dtype=torch.bool),
               torch.ones(8, 40, dtype=torch.long).tril(), torch.randint(9, (1, 40))]
)  # fmt: skip
def test_other_tensors_are_not_judged(tensor: torch.Tensor) -> None:
    assert filled_share(tensor) is None


def test_samples_do_not_count_as_tokens() -> None:
    """`tokens=` may count samples, of which a batch has as many as rows."""
    assert Padding().rows([(8, 250)] * 2, [8, 8]) == []
    assert Padding().rows([(8, 250)] * 2, [2000, 2000]) == []
    (row,) = Padding().rows([(8, 250)] * 2, [400, 600])
    assert (row["share"], row["basis"], row["shape"]) == (0.75, "tokens", "8 × 250")


def test_container_that_grows_is_named() -> None:
    outputs: list[Any] = []
    constant = [1, 2, 3]
    before = kept.sizes(sys._getframe())
    outputs.extend(torch.ones(2, requires_grad=True) * 2 for _ in range(10))
    found = kept.grown(sys._getframe(), before, 10)
    assert found is not None
    assert (found.name, found.what) == ("outputs", "tensors with their graphs")
    assert str(found.place).startswith("test_watch.py:")
    assert kept.grown(sys._getframe(), kept.sizes(sys._getframe()), 10) is None
    assert len(constant) == 3


def test_line_that_adds_to_a_container_is_no_comment_and_no_text(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        'note = "kept.append(1)"\n# kept.append(2)\ndef add(kept):\n    """kept.append(3)"""\n    kept.append(4)\n'
    )
    assert kept._place("kept", str(script)) == "script.py:5"
    script.with_name("broken.py").write_text("kept.append(1)\n(")
    assert kept._place("kept", str(script.with_name("broken.py"))) == "broken.py:1"


@pytest.mark.parametrize(
    ("is_packed", "width", "is_named"), [(True, 0, False), (False, 0, True), (True, 8, False), (True, 2048, True)]
)
def test_padding_that_a_packed_layer_skips_is_none(is_packed: bool, width: int, is_named: bool, tmp_path: Path) -> None:
    """Unless a layer `width` wide, which takes most of the time, gets all positions."""
    words, layer, head = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 4)
    wide = nn.Sequential(nn.Linear(8, width or 1), nn.Linear(width or 1, width or 1), nn.Linear(width or 1, 4))
    model = nn.ModuleList([words, layer, head, *([wide] if width else [])])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    lengths = torch.tensor([16, 8, 6, 4])
    recorder = ScriptRecorder("script", out=tmp_path, warmup=5, steps=3, profile="none")
    for _ in range(20):
        tokens = torch.randint(1, 20, (4, 16)) * (torch.arange(16) < lengths[:, None])
        vectors = words(tokens)
        given = nn.utils.rnn.pack_padded_sequence(vectors, lengths, batch_first=True) if is_packed else vectors
        optimizer.zero_grad()
        loss = head(layer(given)[1][-1]).sum()
        (loss + wide(vectors).sum() if width else loss).backward()
        optimizer.step()
    recorder.close()
    assert ("padding" in recorder.records[0].results) is is_named


def test_small_tensors_that_keep_a_large_storage_are_named() -> None:
    """On a CPU, the scalar that mse_loss returns holds the storage of all its terms."""
    losses: list[Any] = []
    before = kept.sizes(sys._getframe())
    losses.extend(torch.nn.functional.mse_loss(torch.ones(256, 256), torch.ones(256, 256)) for _ in range(3))
    found = kept.grown(sys._getframe(), before, 3)
    assert found is not None
    assert (found.name, found.what) == ("losses", "tensors in storages of 256 KiB")


def test_cache_of_a_function_that_grows_is_named() -> None:
    @functools.cache
    def squares(number: int) -> int:
        return number * number

    before = kept.sizes(sys._getframe())
    for number in range(10):
        squares(number)
    found = kept.grown(sys._getframe(), before, 10)
    assert found is not None
    assert (found.name, found.what) == ("squares", "results of calls")
    assert str(found.place).startswith("test_watch.py:")


def test_memory_in_use_grows_only_while_something_is_kept() -> None:
    memory, kept_tensors = Memory(resolve("cpu")), list[torch.Tensor]()
    if memory.held_bytes is None:
        pytest.skip("the C library does not tell the memory in use")
    for step in range(9):
        memory.read(float(step), step)
        torch.ones(1 << 18 + step % 3)
    assert not memory.grows_in_use(-1, 9e6)
    memory.clear()
    for step in range(9, 18):
        memory.read(float(step), step)
        kept_tensors.append(torch.ones(1 << 18))
    assert memory.grows_in_use(-1, 9e6)


@pytest.mark.parametrize(
    ("sizes", "is_readable", "grows"),
    [
        ((), False, True),
        ((), True, False),
        ((1e8,), True, False),
        ((1e8, 1.9e8), True, True),
        ((1e8, 1e8), True, False),
    ],
)
def test_growth_that_too_few_readings_of_the_memory_in_use_show_is_not_told(
    sizes: tuple[float, ...], is_readable: bool, grows: bool
) -> None:
    """After a slow reading a short loop had no other: an allocator's pieces were told as a leak of 1 GiB."""
    memory = Memory(resolve("cpu"))
    memory.held_bytes = (lambda: 1) if is_readable else None
    memory.held = [*enumerate(sizes, 6)]
    assert memory.grows_in_use(5, 9e7) == grows
    memory.close()


def test_longer_inputs_explain_slower_steps_unless_they_are_all_batches_so_far() -> None:
    steps = range(5, 25)
    assert follows_inputs([(n, 48 + 4 * n) for n in steps])
    assert not follows_inputs([(n, 64 * (n + 1)) for n in steps])
    assert not follows_inputs([(n, 64) for n in steps])


def test_dictionary_of_variables_that_a_function_keeps_is_left_alone() -> None:
    def keeps(rate: float) -> tuple[bool, dict[str, object]]:
        known = locals()
        assert "rate" not in kept.sizes(sys._getframe())
        return uses_no_tensor(frame := sys._getframe(), (frame.f_code, frame.f_lasti)), known

    assert keeps(0.1) == (False, {"rate": 0.1})


def test_method_or_attribute_named_like_locals_is_no_reason_to_leave_a_function_out() -> None:
    def calls(model: torch.nn.Module) -> bool:
        model.eval()
        return len(vars(model)) > 0

    def keeps() -> object:
        return vars()

    assert [holds_locals(function.__code__) for function in (calls, keeps)] == [False, True]


def test_method_of_a_call_is_found_behind_other_calls_and_over_several_lines() -> None:
    found = []

    def noted(*_: object) -> list[object]:
        frame = sys._getframe(1)
        found.append(method_of((frame.f_code, frame.f_lasti)))
        return []

    noted((len("a"), [str(1)]))
    noted(
        {"a": (1, 2)},
        3,
    )
    noted(noted()).copy()
    assert found == ["noted"] * 4


def test_line_uses_no_tensor_unless_one_of_its_names_or_else_of_its_function_does() -> None:
    def here(frame: FrameType) -> bool:
        return uses_no_tensor(frame, (frame.f_code, frame.f_lasti))

    def plain(count: int) -> bool:
        rows = [[number] for number in range(count)]
        return here(sys._getframe()) and bool(rows)

    def tensors(count: int) -> bool:
        rows = [torch.ones(1) for _ in range(count)]
        return here(sys._getframe()) and bool(rows)

    def both(x: torch.Tensor) -> tuple[bool, bool]:
        rows, look = x.tolist(), here
        of_rows = look(sys._getframe()) and bool(rows)
        of_tensor = look(sys._getframe()) and bool(x.any())
        return of_rows, of_tensor

    assert plain(3)
    assert not tensors(3)
    assert both(torch.ones(2)) == (True, False)


def test_line_that_runs_backward_uses_tensors_although_it_names_their_owner_alone() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.loss = torch.ones(1, requires_grad=True).sum()

        def backward_all(self) -> None:
            self.loss.backward()

    found: dict[str, bool] = {}

    def waits() -> None:
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            line = frame.f_code, frame.f_lasti
            found[frame.f_code.co_name] = uses_no_tensor(sys._getframe(), line)
            frame = frame.f_back if frame.f_code is not Trainer.backward_all.__code__ else None

    trainer = Trainer()
    trainer.loss.register_hook(lambda _: waits())
    trainer.backward_all()
    assert found["waits"]
    assert not found["backward_all"]


def test_line_that_reads_a_tensor_or_module_of_an_object_uses_tensors() -> None:
    def look(*_: object) -> bool:
        frame = sys._getframe(1)
        return uses_no_tensor(frame, (frame.f_code, frame.f_lasti))

    class Trainer:
        def __init__(self) -> None:
            self.x, self.net, self.count = torch.ones(2), torch.nn.Linear(2, 2), 3

        def reads(self) -> tuple[bool, bool, bool]:
            first = look(self.x)
            second = look(self.net)
            return first, second, look(self.count)

    class Model(torch.nn.Linear):
        def reads(self) -> tuple[bool, bool]:
            first = look(self.weight)
            return first, look(self.in_features)

    assert Trainer().reads() == (False, False, True)
    assert Model(2, 2).reads() == (False, True)


def test_names_of_all_lines_are_found_in_one_pass_over_their_function(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {}
    exec("def long(a):\n" + 150 * "    b = [a + 1, a + 2]\n" + "    return b", names)
    code, passes, instructions = names["long"].__code__, list[object](), dis.get_instructions

    def counted(code: CodeType) -> Iterator[dis.Instruction]:
        passes.append(code)
        return instructions(code)

    monkeypatch.setattr(dis, "get_instructions", counted)
    read = {n: {*stacks._names_by_line(code)[n][0]} for n in range(2, 153)}
    assert read == {n: {"a"} for n in range(2, 152)} | {152: {"b"}}
    assert passes == [code]


def test_instruction_may_read_two_variables_or_store_one_and_read_one() -> None:
    assert names_read("LOAD_FAST_LOAD_FAST", ("a", "b")) == ("a", "b")
    assert names_read("STORE_FAST_LOAD_FAST", ("a", "b")) == ("b",)
    assert names_read("LOAD_GLOBAL", "torch") == ("torch",)
    assert names_read("STORE_FAST", "a") == ()


def test_jump_at_the_end_of_a_loop_belongs_to_its_last_line_with_a_number() -> None:
    def loop(rows: list[int]) -> int:
        most = 0
        for row in rows:
            if row > most:
                most = row
        return most

    first = loop.__code__.co_firstlineno
    jumps = [each.offset for each in dis.get_instructions(loop) if each.opname == "JUMP_BACKWARD"]
    assert jumps
    assert all(line_of((loop.__code__, at)) in (first + 3, first + 4) for at in jumps)


def test_record_of_a_loop_is_read_in_its_latest_form(tmp_path: Path) -> None:
    (record,) = train(tmp_path)[0].records
    assert len((tmp_path / "records.jsonl").read_bytes().splitlines()) == 2, "after the timing, and at the end"
    (read,) = read_records(tmp_path)[0]
    assert read.results["unsampled"] == [{"reason": "stacks is False", "remedy": "leave out stacks=False"}]
    assert record.origin is not None
    append_record(tmp_path, replace(record, origin=replace(record.origin, recorded_unix_s=1.0)))
    assert len(read_records(tmp_path)[0]) == 2, "another run of the same loop is another record"


@pytest.mark.parametrize(
    ("steps", "step_s", "looks", "is_enough"),
    [(20, 0.02, 99, False), (20, 0.02, 100, True), (100, 0.0201, 0, True), (199, 1e-4, 0, False), (200, 1e-4, 0, True)],
)
def test_stack_is_sampled_until_there_are_enough_samples_or_it_takes_too_long(
    steps: int, step_s: float, looks: int, is_enough: bool
) -> None:
    watch = Watch(resolve("cpu"), lambda: None)
    try:
        watch.durations_s += [5.0] * 3  # before the sampled steps
        watch.sample_all(True)
        watch.durations_s += [0.5, *[step_s] * steps]
        watch._sampler.samples += [Sample(3, None, (), None, 0.5)] * 100  # of the step in which it began
        watch._sampler.samples += [Sample(4 + at % steps, None, (), None, 1e-3) for at in range(looks)]
        before = watch.samples_enough()
    finally:
        watch.close()
    assert before is is_enough


def test_stack_is_sampled_until_the_sampler_is_closed() -> None:
    """A look may come before the call that asked for it returns, as threads are switched often meanwhile."""
    sampler = Sampler(lambda: None, lambda: 0.0)
    sampler.sample_all(True)
    sampler.step_begins(0, 0.0)
    end_s = time.perf_counter() + 20
    try:
        while len(sampler.samples) < 60 and time.perf_counter() < end_s:
            pass
    finally:
        sampler.close()
    assert len(sampler.samples) >= 60


def test_time_of_an_operator_that_is_no_call_belongs_to_its_own_line() -> None:
    """Python takes a requested sample at the next call of a function, here some lines after the division."""
    numbers, rest = torch.ones(4_000_000), list[int]()
    sampler = Sampler(lambda: None, lambda: 0.0)
    sampler.sample_all(True)
    sampler.step_begins(0, 0.0)
    begin_s = time.perf_counter()
    try:
        while time.perf_counter() < begin_s + 0.5:
            numbers / 255
            rest[:] = (1,)
            rest += rest
            torch.no_grad()
    finally:
        sampler.close()
    times = by_source(sampler)
    assert times["numbers / 255"] > 0.5 * sum(times.values())


def by_source(sampler: Sampler) -> Counter[str]:
    """Return the time of the samples by the text of their line."""
    times: Counter[str] = Counter()
    for sample in sampler.samples:
        if sample.leaf is not None:
            times[source_of(sample.leaf)] += sample.time_s  # type: ignore[assignment]
    return times


def test_time_of_a_call_that_keeps_the_lock_does_not_belong_to_the_operator_before_it() -> None:
    numbers, values = torch.ones(1_000_000), [*range(400_000)]
    sampler = Sampler(lambda: None, lambda: 0.0)
    sampler.sample_all(True)
    sampler.step_begins(0, 0.0)
    begin_s = time.perf_counter()
    try:
        while time.perf_counter() < begin_s + 0.5:
            numbers / 255
            values[::-1].sort()
    finally:
        sampler.close()
    times = by_source(sampler)
    assert times["values[::-1].sort()"] > times["numbers / 255"]


def test_steps_under_a_tracer_in_python_are_not_sampled() -> None:
    """The tracer would observe each look, and Python writes the variables that a look reads back to the program."""
    sampler = Sampler(lambda: None, lambda: 0.0)
    sampler.sample_all(True)
    before, begin_s = sys.gettrace(), time.perf_counter()
    sys.settrace(lambda *_: None)
    sampler.step_begins(0, 0.0)
    try:
        while time.perf_counter() < begin_s + 0.1:
            pass
    finally:
        sampler.close()
        sys.settrace(before)
    assert not sampler.samples


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux limits a process to one core")
def test_rest_of_a_call_is_not_shortened_by_waits_for_a_core() -> None:
    """A request for a sample often comes while the main thread waits for the core, and the scheduler counts later."""
    cores, matrix = os.sched_getaffinity(0), torch.ones(600, 600)
    sampler = Sampler(lambda: None, lambda: 0.0)
    sampler.sample_all(True)
    busy = []
    try:
        os.sched_setaffinity(0, {min(cores)})
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
        time.sleep(0.1)
        sampler.step_begins(0, 0.0)
        begin_s, calls = time.thread_time(), 0
        while time.thread_time() < begin_s + 0.4:
            matrix @ matrix
            calls += 1
        each_s = (time.thread_time() - begin_s) / calls
    finally:
        os.sched_setaffinity(0, cores)
        for process in busy:
            process.kill()
            process.wait()
        sampler.close()
    assert median(sample.late_s for sample in sampler.samples) > each_s / 10


@pytest.mark.parametrize(
    ("durations_s", "expected"),
    [([0.01] * 10 + [0.01] * 5, 5), ([0.01] * 10 + [0.01] * 4 + [0.2], 4), ([0.01] * 10 + [0.2] * 5, 5)],
)
def test_sampled_steps_count_as_usual_even_if_the_machine_became_busy(durations_s: list[float], expected: int) -> None:
    watch = Watch(resolve("cpu"), lambda: None)
    try:
        watch.durations_s += durations_s[:9]
        watch.sample_all(True)
        watch.durations_s += durations_s[9:]
        watch.sample_all(False)
        assert len(watch._usual_sampled(watch._kinds())) == expected
    finally:
        watch.close()


def test_steps_after_the_sampling_are_not_sampled_when_the_watch_is_closed() -> None:
    watch = Watch(resolve("cpu"), lambda: None)
    watch.durations_s = [0.01] * 5
    watch.sample_all(True)
    watch.durations_s += [0.01] * 4
    watch.end()
    watch.durations_s += [0.01] * 10
    watch.close()
    assert watch.all_sampled == range(6, 9)


def test_growth_is_found_beside_sampling_that_makes_steps_longer() -> None:
    watch = Watch(resolve("cpu"), lambda: None)
    try:
        watch.durations_s = [0.03 if 25 <= n < 70 else 0.004 + 0.0001 * n for n in range(100)]
        watch.all_sampled = range(25, 70)
        usual = StepKind(tuple(range(100)), 0.01, 1.0, None)
        (row,) = watch._time_growth(usual, {})
        assert row["per_step"] == pytest.approx(0.0001, rel=0.05)
        watch.all_sampled = range(0)
        assert [*watch._time_growth(usual, {})] == []
    finally:
        watch.close()


@pytest.mark.parametrize(("per_step_s", "is_growth"), [(0.0, False), (5e-6, True)])
def test_sampling_that_makes_short_steps_longer_and_longer_is_no_growth(per_step_s: float, is_growth: bool) -> None:
    """A loop of 100 short steps ends while it is sampled, so that few steps before show how long a step takes."""
    watch = Watch(resolve("cpu"), lambda: None)
    try:
        alone = [0.0008 + per_step_s * n for n in range(100)]
        watch.durations_s = [t if n < 25 else t * (1.6 + 0.004 * (n - 25)) for n, t in enumerate(alone)]
        watch.all_sampled = range(25, 100)
        found = [*watch._time_growth(StepKind(tuple(range(100)), 0.001, 0.1, None), {})]
        assert bool(found) == is_growth
    finally:
        watch.close()


@pytest.mark.parametrize(
    ("phase", "steps", "has_workers", "is_growth"),
    [("input", 30, True, False), ("input", 80, True, True), ("input", 30, False, True), ("loss", 30, True, True)],
)
def test_few_steps_with_workers_show_no_growth_of_the_input(
    phase: str, steps: int, has_workers: bool, is_growth: bool
) -> None:
    """Workers of a data loader have the first batches ready, so that later steps wait longer."""
    watch = Watch(resolve("cpu"), lambda: None)
    try:
        watch.durations_s = [0.01 + 0.001 * n for n in range(steps)]
        phases = {phase: [0.001 * n for n in range(steps)], "forward": [0.01] * steps}
        found = [*watch._time_growth(StepKind(tuple(range(steps)), 0.03, 1.0, None), phases, has_workers)]
        assert bool(found) == is_growth
    finally:
        watch.close()


@pytest.mark.parametrize(
    ("times_s", "sampled", "steps"),
    [
        ([0.002] * 25 + [0.004] * 20 + [0.002] * 15, range(25, 45), 20),
        ([0.002] * 25 + [0.004] * 35, range(25, 60), 35),
        ([0.002] * 25 + [0.004] * 35, range(25, 45), 0),  # longer batches from this step on
        ([0.05] * 25 + [0.1] * 35, range(25, 60), 0),
        ([0.2 if n % 2 else 0.35 for n in range(34)], range(24, 27), 0),
    ],
)
def test_only_short_steps_are_longer_by_sampling(times_s: list[float], sampled: range, steps: int) -> None:
    """Longer steps, or steps that stay longer afterwards, have another reason, such as the lengths of batches."""
    watch = Watch(resolve("cpu"), lambda: None)
    try:
        watch.durations_s, watch._cpu_s, watch.all_sampled = times_s, times_s, sampled
        rows = WHOLE_LOOP.of(watch.tables(Timing({}, {}, None), {}))
        assert [row["steps"] for row in rows if row["kind"] == "sampled"] == [steps] * bool(steps)
    finally:
        watch.close()


@pytest.mark.parametrize("phase", ["input", "forward"])
def test_phase_of_slow_steps_that_were_not_sampled_is_known_from_timed_steps(phase: str) -> None:
    """With --stop the loop ends before its stack is sampled; here workers have their batches at the same time."""
    watch = Watch(resolve("cpu"), lambda: None)
    try:
        watch._sized_at, watch._cpu_s = 5, [0.0] * 35
        watch.durations_s = [0.01 if n % 3 else 0.05 for n in range(35)]
        times_s = [0.001 if n % 3 else 0.041 for n in range(5, 35)]
        others = {name: [0.004] * 30 for name in ("forward", "input") if name != phase}
        timing = Timing({phase: 0.02, **dict.fromkeys(others, 0.004)}, {phase: times_s, **others}, None)
        (row,) = watch.tables(timing, {})["slow_steps"]
        assert (row["phase"], row["waits_for_batch"], row["place"]) == (phase, phase == "input", None)
    finally:
        watch.close()


@pytest.mark.parametrize(
    ("rises", "slower", "is_growth"),
    [
        ("forward backward optimizer", 2, False),
        ("forward backward", 2, True),
        ("forward backward optimizer", 10, True),  # after the timed steps, more than a slower machine makes of them
    ],
)
def test_steps_of_which_each_phase_takes_longer_do_not_grow(rises: str, slower: float, is_growth: bool) -> None:
    watch = Watch(resolve("cpu"), lambda: None)
    try:
        watch.durations_s = [0.03 * (1 + (slower - 1) * n / 30) for n in range(30)]
        names = ("forward", "backward", "optimizer")
        phases = {name: [0.01 * (1 + n / 30 * (name in rises)) for n in range(30)] for name in names}
        found = [*watch._time_growth(StepKind(tuple(range(30)), 0.1, 6.0, None), phases)]
        assert bool(found) == is_growth
    finally:
        watch.close()


@pytest.mark.parametrize(
    ("later_s", "count", "is_slower"), [(0.1875, 40, True), (0.187, 40, False), (0.1875, 19, False), (0.05, 40, False)]
)
def test_later_steps_that_take_half_as_long_again_are_told(later_s: float, count: int, is_slower: bool) -> None:
    watch = Watch(resolve("cpu"), lambda: None)
    try:
        watch._sized_at, watch.all_sampled = 5, range(25, 30)
        watch.durations_s = [0.9] * 5 + [0.125] * 20 + [0.9] * 5 + [later_s] * count
        found = watch._later_steps(StepKind(tuple(range(30 + count)), 0.125, 6.0, None), 20)
        row = {"steps": 30 + count, "timed": 20, "timed_s": 0.125, "later_s": later_s}
        assert found == ([row] if is_slower else [])
        of_later = StepKind(tuple(range(30, 30 + count)), later_s, 6.0, None)  # the timed steps are fast ones
        assert watch._later_steps(of_later, 20) == found
    finally:
        watch.close()


@pytest.mark.parametrize(("slower", "late_share", "is_growth"), [(1.7, 0.6, False), (1.7, 0.3, True), (6.0, 0.6, True)])
def test_steps_that_other_programs_make_longer_do_not_grow(slower: float, late_share: float, is_growth: bool) -> None:
    """Beside other programs a core is slower, which may double the time of a step."""
    watch = Watch(resolve("cpu"), lambda: None)
    try:
        watch.durations_s = [0.1 + 0.1 * (slower - 1) * n / 59 for n in range(60)]
        busy_s = [sum(0.2 * (late_share if n > 30 else 0.3) for n in range(step)) for step in range(60)]
        watch._others.readings = [Reading(n, busy_s[n], 0.2 * n) for n in range(60)]
        found = [*watch._time_growth(StepKind(tuple(range(60)), 0.1, 6.0, None), {})]
        assert bool(found) == is_growth
    finally:
        watch.close()


@pytest.mark.parametrize(
    ("threads", "times", "is_told"), [(2, 10, False), (2, 40, True), (1, 10, True), (1, 2.4, False)]
)
def test_slow_start_beside_other_programs_is_much_slower(
    threads: int, times: float, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of an operator wait for each other without a pause: steps took ten times as long beside others."""
    monkeypatch.setattr("cs_systems.measure.recorder.watch.get_num_threads", lambda: threads)
    watch = Watch(resolve("cpu"), lambda: None)
    try:
        watch.durations_s = [0.01 * times] * 10 + [0.01] * 50
        busy_s = [0.2 * 0.6 * min(step, 10) for step in range(60)]
        watch._others.readings = [Reading(n, busy_s[n], 0.2 * n) for n in range(60)]
        steps, rows = watch._slow_start({}, has_workers=False)
        assert (len(steps), len(rows)) == ((10, 1) if is_told else (0, 0))
    finally:
        watch.close()


def test_wait_for_a_core_of_a_thread_that_has_ended_stays_as_it_was() -> None:
    found: list[stacks.CoreQueue] = []
    thread = threading.Thread(target=lambda: found.append(stacks.CoreQueue()))
    thread.start()
    thread.join()
    (queue,) = found
    assert queue.total_s() == queue.total_s() >= 0.0
    queue.close()


def test_busy_time_of_the_machine_has_neither_idle_time_nor_that_of_its_guests() -> None:
    assert times_in("cpu  100 20 30 400 50 6 7 8 90 10\ncpu0 1 2 3\n", 0.01) == pytest.approx((1.71, 6.21))


@pytest.mark.parametrize(("others_s", "expected"), [(0.0, 0.0), (0.4, 0.4)])
def test_own_work_does_not_count_as_that_of_other_programs(others_s: float, expected: float, tmp_path: Path) -> None:
    """A second has 100 ticks on this core, of which this process takes 50 after the third second."""
    stat, own_s, busy_s = tmp_path / "stat", 0.0, 0.0
    stat.touch()
    others = OtherPrograms(str(stat))
    for second in range(1, 10):
        own_s += 0.5 if second > 3 else 0.0
        busy_s += others_s if second > 6 else 0.0
        ticks = round((own_s + busy_s) / others._tick_s), round((second - own_s - busy_s) / others._tick_s)
        stat.write_text(f"cpu  {ticks[0]} 0 0 {ticks[1]} 0 0 0 0 0 0\n")
        others.read(float(second), own_s, second)
    assert others.rise(0) == pytest.approx(expected)
    assert others.fall_after(7) == pytest.approx(-expected)
    assert others.fall_after(2) == 0.0, "one reading shows no share"
    assert others.share_before(2) == 0.0, "one reading shows no share"
    assert others.share_before(10) == pytest.approx(expected * 3 / 8)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [([], False), ([1] * 20, False), ([1, 1, 1, 9] * 5, False), ([2, 4] * 10, False), ([*range(1, 21)], False),
     ([9, 14, 31, 12, 22, 10, 17, 13, 28, 16, 11, 45, 19, 15, 8, 33, 20, 27, 18, 21], True)],
)  # fmt: skip
def test_numbers_of_calls_vary_with_episodes_but_not_with_evaluations_or_a_growing_list(
    calls: list[int], expected: bool
) -> None:
    assert varies(calls) == expected


@pytest.mark.parametrize(
    ("calls", "sizes", "expected"),
    [([5, 25, 5] * 6, [*range(9, 0, -1), *range(9, 0, -1)], True), ([5, 25, 5] * 6, [64, 80, 64] * 6, False),
     ([1] * 18, [*range(9, 0, -1), *range(9, 0, -1)], False), ([5, 25, 5] * 6, [*range(18)], False),
     ([1, 1, 1, 1, 1, 9] * 3, [*range(9, 0, -1), *range(9, 0, -1)], False)],
)  # fmt: skip
def test_updates_after_rollouts_vary_if_their_batches_do(calls: list[int], sizes: list[int], expected: bool) -> None:
    assert varies(calls, sizes) == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux tells how long a thread waits for a core")
def test_steps_that_wait_for_a_core_do_not_count_as_slow() -> None:
    cores = os.sched_getaffinity(0)
    watch, busy = Watch(resolve("cpu"), lambda: None), []
    try:
        os.sched_setaffinity(0, {min(cores)})
        for number in range(27):
            if number == 20:  # they share the core
                with watch.own_time():
                    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
                    time.sleep(0.1)
            watch.step_ended()
            end_s = time.thread_time() + 0.005
            while time.thread_time() < end_s:
                pass
    finally:
        os.sched_setaffinity(0, cores)
        for process in busy:
            process.kill()
            process.wait()
        watch.close()
    assert sum(watch.durations_s[20:]) > 2 * sum(watch._worked_s()[20:])
    watch.durations_s = [*[0.01] * 20, *[0.05] * 6]
    watch._queued_s = dict.fromkeys(range(20, 26), 0.04)
    assert [len(kind.positions) for kind in watch._kinds()] == [26]


@pytest.mark.parametrize(
    ("rises", "phase"),
    [({}, None), ({"other": 1.0}, "other"), ({"other": 2.0, "backward": 1.0}, "other"),
     ({"other": 1.9, "backward": 1.0}, None), ({"other": 0.1, "forward": -1.0}, "other"),
     ({"other": 0.01}, "other"), ({"other": 0.009}, None), ({"other": 0.009, "forward": -1.0}, None)],
)  # fmt: skip
def test_growing_phase_is_named_only_if_no_other_rises_nearly_as_much(
    rises: dict[str, float], phase: str | None
) -> None:
    assert _clearest(rises, 0.01) == phase


def test_steps_under_our_own_profiler_are_no_steps_of_the_loop() -> None:
    watch = Watch(resolve("cpu"), lambda: None)
    for number in range(12):
        if number in (5, 8):
            watch.begins(Period.PROFILED if number == 5 else Period.SAMPLED)
        watch.step_ended()
        time.sleep(0.5 if 5 <= number < 8 else 0.001)
    watch.close()
    rows = WHOLE_LOOP.of(watch.tables(Timing({}, {}, None), {}))
    assert sum(row["steps"] for row in rows) == 7
    assert sum(row["total_s"] for row in rows) < 0.5


@pytest.mark.parametrize("is_work", [True, False])
def test_cpu_time_tells_work_from_waiting_in_a_slow_step(is_work: bool) -> None:
    watch = Watch(resolve("cpu"), lambda: None)
    watch.begins(Period.SAMPLED)
    for number in range(20):
        watch.step_ended()
        end_s = time.thread_time() + 0.3
        while number == 12 and is_work and time.thread_time() < end_s:
            pass
        time.sleep(0.3 if number == 12 and not is_work else 0.002)
    watch.step_ended()
    watch.close()
    (row,) = SLOW_STEPS.of(watch.tables(Timing({}, {}, None), {}))
    assert row["steps"] == 1
    assert row["worked_share"] is not None
    assert row["worked_share"] > 0.5 if is_work else row["worked_share"] < 0.25
    assert not is_work or row["looks"] >= 3


def test_period_of_slow_steps_goes_on_across_a_profile() -> None:
    watch = Watch(resolve("cpu"), lambda: None)
    watch.durations_s = [0.2 if step % 10 == 9 else 0.5 if 23 <= step < 26 else 0.01 for step in range(60)]
    watch._profiled = {23, 24, 25}
    usual, slow = watch._kinds()
    watch.close()
    assert (len(usual.positions), usual.median_s) == (51, 0.01)
    assert (slow.every, slow.positions) == (10, (9, 19, 29, 39, 49, 59))


def test_recordings_own_work_is_not_sampled() -> None:
    def works(seconds: float) -> None:
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            pass

    watch = Watch(resolve("cpu"), lambda: None)
    watch.step_ended()
    watch.sample_all(True)
    watch.step_ended()
    for _ in range(20):
        works(0.01)
        with watch.own_time():
            works(0.05)
    watch.step_ended()
    samples = watch._sampler.samples
    watch.close()
    assert samples
    # 0.2 s are the program's on an idle machine, and 1 s is not
    assert sum(each.time_s for each in samples) < watch.durations_s[-1] + 0.1


def test_program_runs_most_of_the_time_even_if_a_look_at_its_stack_lasts_long() -> None:
    looks_s: list[float] = []

    def phase_of() -> None:
        begin_s = time.perf_counter()
        while time.perf_counter() < begin_s + 0.02:  # as under a tracer of the program
            pass
        looks_s.append(time.perf_counter() - begin_s)

    sampler = Sampler(phase_of, lambda: 0.0)
    sampler.sample_all(True)
    begin_s = time.perf_counter()
    sampler.step_begins(0, 0.0)
    while time.perf_counter() < begin_s + 1.0:
        pass
    lasted_s = time.perf_counter() - begin_s
    sampler.close()
    assert looks_s
    assert sum(looks_s) < 0.4 * lasted_s


def test_steps_that_only_waited_for_a_core_do_not_begin_a_growth() -> None:
    watch = Watch(resolve("cpu"), lambda: None)
    try:
        watch.durations_s = [0.01] * 6 + [0.001 * n for n in range(6, 60)]
        watch._queued_s = dict.fromkeys(range(6), 0.01)
        (row,) = watch._time_growth(StepKind(tuple(range(60)), 0.03, 1.8, None), {})
        assert row["first"] > 0.001
    finally:
        watch.close()


def test_memory_in_use_is_read_less_often_where_a_reading_lasts_long() -> None:
    memory = Memory(resolve("cpu"))
    memory.held_bytes = lambda: time.sleep(0.01) or 1
    began_s = time.perf_counter()
    while (now_s := time.perf_counter()) < began_s + 0.5:
        memory.read(now_s, 1)
        time.sleep(0.005)
    memory.close()
    assert 2 <= len(memory.held) <= 3, "each rests for 20 times as long as it took"
    assert len(memory.host) > len(memory.held)
