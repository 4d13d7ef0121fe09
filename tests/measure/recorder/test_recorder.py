"""Tests of a recorder's life: its stages and records, loops that end early or fail, and removal of its hooks."""

from __future__ import annotations

import copy
import gc
import io
import socket
import subprocess
import sys
import textwrap
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import dataloader

import cs_systems
from cs_systems import Recorder
from cs_systems.analysis.comparison.runs import compare
from cs_systems.config import ConfigError
from cs_systems.core import origin
from cs_systems.measure.profilers import Profiler, _nsys
from cs_systems.measure.recorder import hooks
from cs_systems.record import RunRecord, read_records
from cs_systems.report.pages.records import render as render_page
from cs_systems.report.reading import some_records
from cs_systems.report.tables.records import render
from tests import forks
from tests.measure.recorder import loops
from tests.measure.recorder.loops import CLEAN, batches, loader, loss_of, net, train


def codes(record: RunRecord) -> list[str]:
    return [caveat.code for caveat in record.warnings]


def observable() -> list[Any]:
    """Return the attributes of torch that a recorder replaces."""
    patched = [vars(owner).get(name) for owner, name, _ in hooks._PATCHES]
    module = sys.modules["torch.optim.optimizer"]
    return [
        *patched,
        dict(vars(module)["_global_optimizer_pre_hooks"]),
        dict(vars(module)["_global_optimizer_post_hooks"]),
    ]


def test_hooks_are_removed_when_the_recording_is_done(tmp_path: Path) -> None:
    before, model = observable(), net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    during, after = [], []
    with Recorder(model, optimizer, out=tmp_path, **CLEAN) as recorder:
        for batch in batches(8):
            (after if recorder.done else during).append((observable() == before, len(model._forward_hooks)))
            with recorder.step(), recorder.phase("all"):
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
    assert during == [(False, 1)] * 4
    assert after == [(True, 0)] * 4
    assert len(recorder.records) == 1


def test_repr_shows_the_state_and_the_records(tmp_path: Path) -> None:
    model, seen = net(), []
    recorder = Recorder(model, out=tmp_path, **CLEAN)
    seen.append(repr(recorder))
    with recorder:
        for batch in batches(8):
            with recorder.step():
                loss_of(model, batch).backward()
            seen.append(repr(recorder))
    assert list(dict.fromkeys(seen)) == [
        "<Recorder: not begun; records: none>",
        "<Recorder: recording; records: none>",
        "<Recorder: over; records: timing ok>",
    ]


def test_loop_computes_the_same_bits_under_a_recorder(tmp_path: Path) -> None:
    def bare() -> list[float]:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        losses = []
        for batch in loader(10):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    state = torch.random.get_rng_state()
    expected, rng = bare(), torch.random.get_rng_state()
    torch.random.set_rng_state(state)
    assert train(tmp_path, profile="kineto", profile_steps=1)[1] == expected
    assert torch.equal(torch.random.get_rng_state(), rng)


def test_model_can_be_copied_and_saved_while_it_is_recorded(tmp_path: Path) -> None:
    model = net()
    with Recorder(model, out=tmp_path, **CLEAN) as recorder:
        for batch in batches(5):
            with recorder.step():
                loss_of(model, batch).backward()
                if not recorder.done:
                    average = copy.deepcopy(model)
                    torch.save(model, io.BytesIO())
    assert average(torch.zeros(1, 4)).shape == (1, 2)


def test_record_is_read_by_reports_pages_and_compare(tmp_path: Path) -> None:
    for side in ("a", "b"):
        train(tmp_path / side, name="mine", tokens=12, profile="none", steps=4)
    records, problems = some_records(tmp_path / "a")
    assert problems == []
    table = render(records, width=200)
    assert table.startswith("loop mine on ")
    for words in ("optimizer AdamW", "fp32", "medians of 4 steps", "input", "clip", "tokens/s"):
        assert words in table
    for words in ("seed", "batch", "size", "attention", "ctx", "mode"):
        assert f" {words} " not in table.partition("\n──")[0]
    assert "loop mine" in render_page(records)
    frame = cs_systems.load(tmp_path / "a")
    unused = ["size", "batch_size", "seq_len", "attention", "mode", "compile", "checkpoint", "seed", "strategy"]
    assert frame[unused].isna().all(axis=None)
    found = compare(records, read_records(tmp_path / "b")[0], ("step", "forward", "clip"))
    assert [(row["cell"], row["phase"]) for row in found.rows] == [
        *(("loop mine", phase) for phase in ("step", "forward", "clip")),
    ]


def test_profile_is_a_record_of_its_own_beside_the_clean_one(tmp_path: Path) -> None:
    with origin.by("python mine.py"):
        recorder, _ = train(tmp_path, profile="kineto", profile_steps=2, snapshot=True, count=12, record_host=True)
    clean, profiled, snapshot = recorder.records
    assert [r.config["profiler"] for r in read_records(tmp_path)[0]] == ["none", "kineto", "memory_snapshot"]
    assert "profiled" not in codes(clean)
    assert {"profiled", "no-tables"} <= {*codes(profiled)}  # a CPU has no kernels
    assert profiled.measurement is not None
    assert [s.warmup for s in profiled.measurement.samples] == [True, True, True, False, False]
    (overhead,) = profiled.results["overhead"]
    assert overhead["recorded_to_not_recorded"] is not None
    ranges = {row["range"]: row["calls_per_step"] for row in profiled.results["ranges"]}
    assert {ranges[name] for name in ("step", "forward", "loss", "backward", "optimizer", "input")} == {1}
    assert {row["phase"] for row in profiled.results["ranges"]} >= {"forward", "backward", "clip", "input"}
    assert (tmp_path / profiled.artifacts["trace"]).is_file()
    page = (tmp_path / profiled.artifacts["page"]).read_text()
    assert "input" in page
    assert f"UTC on {socket.gethostname()} by: python mine.py" in page
    assert [record.origin and record.origin.host for record in read_records(tmp_path)[0]] == [socket.gethostname()] * 3
    assert (snapshot.status, snapshot.reason) == (
        "unavailable",
        "a memory snapshot requires a CUDA device; leave it out or run on a GPU",
    )
    assert "loop Sequential on" in render(recorder.records)


def test_profile_of_nsys_refers_to_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nvtx")
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    recorder, _ = train(tmp_path, profile="nsys", profile_steps=1)
    assert "below-nsys" in codes(recorder.records[0])
    caveat = recorder.records[1].warnings[-1]
    assert (caveat.code, caveat.remedy) == ("no-tables", "cs-systems analyze REPORT.nsys-rep")


def test_profile_of_nsys_is_refused_in_a_process_that_nsys_did_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NSYS_PROFILING_SESSION_ID", "LD_PRELOAD", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError) as refused:
        Recorder(net(), out=tmp_path, profile="nsys")
    assert str(refused.value) == (
        "profile is 'nsys', but nsys did not start this process; start it by nsys profile --trace=nvtx,osrt "
        "--capture-range=nvtx '--nvtx-capture=timed steps' --env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0 "
        "--capture-range-end=stop python train.py, or pass profile='kineto'"
    )
    on_cuda = _nsys.not_started(on_cuda=True)
    assert "--trace=cuda,nvtx --cuda-graph-trace=node --capture-range=cudaProfilerApi" in on_cuda
    monkeypatch.setenv("LD_PRELOAD", "/opt/nsight-systems/target-linux-x64/libToolsInjectionProxy64.so")
    assert Recorder(net(), out=tmp_path, profile="nsys").records == []


def test_shorter_loop_has_a_caveat(tmp_path: Path) -> None:
    recorder, _ = train(tmp_path, 7, steps=20, profile="kineto")
    (record,) = recorder.records
    assert record.measurement is not None
    assert len(record.measurement.timed) == 6
    (caveat,) = (c for c in record.warnings if c.code == "few-samples")
    assert caveat.message == (
        "6 of 20 steps were timed, because the loop ended after 7; no profile by kineto was recorded"
    )
    assert caveat.remedy == "let the loop run longer"


def test_loop_shorter_than_its_warm_up_and_steps_gets_advice_to_shorten_the_warm_up(tmp_path: Path) -> None:
    recorder, _ = train(tmp_path, 12, warmup=5, steps=20, snapshot=True)
    (caveat,) = (c for c in recorder.records[0].warnings if c.code == "few-samples")
    assert (
        caveat.message == "7 of 20 steps were timed, because the loop ended after 12; no memory snapshot was recorded"
    )
    remedy = (
        "let the loop run longer, or time earlier steps: cs-systems run --steps 2:12, or Recorder(warmup=2, steps=10)"
    )
    assert caveat.remedy == remedy
    assert remedy in " ".join(render(recorder.records).split())


def test_loop_that_ends_before_the_profile_keeps_its_timing(tmp_path: Path) -> None:
    recorder, _ = train(tmp_path, 4, profile="kineto")
    assert [(r.status, r.reason) for r in recorder.records] == [
        ("ok", None),
        (
            "unavailable",
            "the loop ended before the profile by kineto was recorded; "
            "let it run for at least 7 steps, or pass profile='none'",
        ),
    ]
    assert {file.name for file in tmp_path.iterdir()} == {"records.jsonl"}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("oops"), "the loop ended with ValueError: oops before {what} was recorded; correct the script"),
        (
            KeyboardInterrupt(),
            "the loop was interrupted before {what} was recorded; let it run for at least 7 steps, or {without}",
        ),
        (
            SystemExit(0),
            "the loop ended before {what} was recorded; let it run for at least 7 steps, or {without}",
        ),
    ],
    ids=["error", "interrupt", "exit"],
)
@pytest.mark.parametrize(
    ("options", "what", "without"),
    [
        ({"profile": "kineto"}, "the profile by kineto", "pass profile='none'"),
        ({"snapshot": True}, "the memory snapshot", "leave out snapshot"),
    ],
    ids=["kineto", "snapshot"],
)
def test_reason_of_a_missing_profile_fits_how_the_loop_ended(
    options: dict[str, Any],
    what: str,
    without: str,
    error: BaseException,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cs_systems.measure.profilers.memory_snapshot.PROFILER", Profiler(result="memory snapshot"))
    recorder = Recorder(net(), out=tmp_path, **CLEAN | options)

    def loop() -> None:
        with recorder:
            for _ in range(4):
                with recorder.step():
                    pass
            raise error

    with pytest.raises(type(error)):
        loop()
    assert [(r.status, r.reason) for r in recorder.records] == [
        ("ok", None),
        ("unavailable", reason.format(what=what, without=without)),
    ]


def test_loop_that_ends_in_the_warm_up_is_an_error(tmp_path: Path) -> None:
    reason = (
        "the loop ended after 2 of 5 warm-up steps; let it run for at least 25 steps, "
        "or time fewer steps: warmup=1, steps=1"
    )
    with pytest.warns(RuntimeWarning) as given:
        recorder, _ = train(tmp_path, 2, warmup=5, steps=20)
    assert [str(warning.message) for warning in given] == [f"no step was timed: {reason}"]
    assert given[0].filename == loops.__file__
    assert [(r.status, r.reason) for r in recorder.records] == [("error", reason)]


def test_exception_passes_through_and_the_record_stays(tmp_path: Path) -> None:
    model, before = net(), observable()

    def loop() -> None:
        with Recorder(model, out=tmp_path, **CLEAN | {"steps": 9}) as recorder:
            for i, batch in enumerate(batches(8)):
                with recorder.step():
                    loss_of(model, batch).backward()
                    if i == 5:
                        raise ValueError("bad batch\nof many")

    with pytest.raises(ValueError, match="bad batch"):
        loop()
    (record,) = read_records(tmp_path)[0]
    assert record.measurement is not None
    assert len(record.measurement.timed) == 4
    (caveat,) = (c for c in record.warnings if c.code == "few-samples")
    assert caveat.message == "4 of 9 steps were timed, because the loop ended after 5 with ValueError: bad batch"
    assert caveat.remedy == "correct the error, and record again"
    assert observable() == before


def test_exception_that_the_loop_handles_costs_one_sample(tmp_path: Path) -> None:
    model, tried = net(), 0
    with Recorder(model, out=tmp_path, **CLEAN) as recorder:
        for i, batch in enumerate(batches(8)):
            tried += not recorder.done
            try:
                with recorder.step():
                    if i == 2:
                        model(torch.zeros(1))  # of the wrong size: forward raises
                    loss_of(model, batch).backward()
            except RuntimeError:
                continue
    assert tried == 5
    (record,) = recorder.records
    assert record.measurement is not None
    assert len(record.measurement.timed) == 3


def test_out_of_memory_before_the_timing_is_oom(tmp_path: Path) -> None:
    with pytest.raises(MemoryError), Recorder(net(), out=tmp_path, **CLEAN) as recorder, recorder.step():
        raise MemoryError("no room")
    (record,) = recorder.records
    assert (record.status, record.measurement) == ("oom", None)
    assert record.reason == (
        "the loop ended with MemoryError: no room after 0 of 1 warm-up steps; use a smaller batch or model"
    )


def test_failed_loop_gets_no_advice_to_run_longer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="oops"), Recorder(net(), out=tmp_path, **CLEAN) as recorder, recorder.step():
        raise ValueError("oops")
    (record,) = recorder.records
    assert record.reason == "the loop ended with ValueError: oops after 0 of 1 warm-up steps; correct the script"


def test_interrupted_loop_gets_advice_to_run_longer(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Recorder(net(), out=tmp_path, **CLEAN) as recorder, recorder.step():
        raise KeyboardInterrupt
    (record,) = recorder.records
    assert record.reason == "the loop was interrupted after 0 of 1 warm-up steps; let it run for at least 4 steps"


def test_interrupt_in_the_timing_is_not_reported_as_an_error_to_correct(tmp_path: Path) -> None:
    recorder = Recorder(net(), out=tmp_path, **CLEAN)

    def loop() -> None:
        with recorder:
            for _ in range(3):
                with recorder.step():
                    pass
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop()
    (caveat,) = (c for c in recorder.records[0].warnings if c.code == "few-samples")
    assert caveat.message == "2 of 3 steps were timed, because the loop was interrupted after 3"
    assert caveat.remedy == "let the loop run longer"


def test_break_ends_the_recording(tmp_path: Path) -> None:
    model = net()
    with Recorder(model, out=tmp_path, **CLEAN) as recorder:
        for i, batch in enumerate(batches(8)):
            with recorder.step():
                loss_of(model, batch).backward()
                if i == 2:
                    break
    assert recorder.records[0].status == "ok"
    assert codes(recorder.records[0])[:1] == ["few-samples"]


def test_step_decorates_a_function(tmp_path: Path) -> None:
    model = net()
    recorder = Recorder(model, out=tmp_path, **CLEAN)

    @recorder.step()
    def train_step(batch: Any) -> int:
        loss_of(model, batch).backward()
        return 7

    with recorder:
        assert [train_step(batch) for batch in batches(6)] == [7] * 6
    assert recorder.records[0].status == "ok"


def test_loops_recorded_in_one_folder_count_as_repeats(tmp_path: Path) -> None:
    for _ in range(2):
        train(tmp_path)
    assert [r.repeat for r in read_records(tmp_path)[0]] == [0, 1]


def test_misuse_of_the_recorder_raises_an_error_with_the_remedy(tmp_path: Path) -> None:
    recorder = Recorder(net(), out=tmp_path, **CLEAN)
    with pytest.raises(RuntimeError, match=r"outside of the recorder; write `with recorder:` around the loop"):
        recorder.step().__enter__()
    with pytest.raises(RuntimeError, match=r"no step was recorded; write `with recorder\.step\(\):` around"), recorder:
        pass
    with pytest.raises(RuntimeError, match=r"after the recorder's `with` block; move the loop into it"):
        recorder.step().__enter__()
    with pytest.raises(RuntimeError, match=r"already used; make a new one for each loop"):
        recorder.__enter__()
    with (
        pytest.raises(RuntimeError, match=r"a step began inside another step; use recorder\.phase\(name\)"),
        Recorder(net(), out=tmp_path, **CLEAN) as recorder,
        recorder.step(),
        recorder.step(),
    ):
        pass
    with (
        Recorder(net(), out=tmp_path, **CLEAN | {"warmup": 0}) as recorder,
        recorder.step(),
        pytest.raises(RuntimeError, match=r"another Recorder is active in this process; end its `with` block first"),
    ):
        Recorder(net(), out=tmp_path).__enter__()


def test_measurement_inside_an_active_recorder_is_refused(tmp_path: Path) -> None:
    model, afterwards = net(), None
    with Recorder(model, out=tmp_path, **CLEAN) as recorder:
        for inputs, _ in batches(6):
            with recorder.step():
                model(inputs).sum().backward()
                if not recorder.done:
                    with pytest.raises(
                        ConfigError, match=r"run\(\) was called while a Recorder is recording; call run\(\)"
                    ):
                        cs_systems.run(model=net(), inputs=inputs)
                    with pytest.raises(
                        ConfigError,
                        match=r"sweep\(\) was called .*; call sweep\(\) after the with block .* done is True",
                    ):
                        cs_systems.sweep([cs_systems.RunConfig()])
        afterwards = cs_systems.run(model=net(), inputs=inputs, warmup=0, steps=1)
    assert recorder.records[0].status == afterwards.status == "ok"
    with pytest.raises(ValueError, match="oops"), Recorder(net(), out=tmp_path, **CLEAN) as recorder, recorder.step():
        raise ValueError("oops")
    assert cs_systems.run(model=net(), inputs=inputs, warmup=0, steps=1).status == "ok"


def test_loop_without_an_optimizer_step_is_reported(tmp_path: Path) -> None:
    model = net()
    warned = pytest.warns(RuntimeWarning, match="no step was timed: the loop ended after 0 of 1 warm-up steps; none of")
    with warned, Recorder(model, torch.optim.SGD(model.parameters()), out=tmp_path, **CLEAN) as recorder:
        for batch in batches(3):
            with recorder.step():
                loss_of(model, batch).backward()
    assert "none of 3 steps called step() of a torch optimizer; call it, or" in str(recorder.records[0].reason)


def test_loop_with_only_failed_steps_is_reported(tmp_path: Path) -> None:
    warned = pytest.warns(RuntimeWarning, match="no step ended without an exception; correct the loop")
    with warned, Recorder(net(), out=tmp_path, **CLEAN) as recorder:
        for _ in range(3):
            with suppress(ValueError), recorder.step():
                raise ValueError("oops")


def test_device_that_torch_does_not_find_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="device is cuda:1, but torch finds no CUDA device; leave out device"):
        Recorder(net(), out=tmp_path, device="cuda:1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": 3}, "model is 3; give an instance of a torch Module, or a list of them"),
        ({"optimizer": [3]}, "optimizer contains 3; give an instance of a torch Optimizer, or a list of them"),
        ({"model": nn.Linear}, "model is the class Linear; give an instance of a torch Module, or a list of them"),
        ({"steps": 0}, "steps is 0; give a whole number, at least 1"),
        ({"warmup": 1.5}, "warmup is 1.5; give a whole number, at least 0"),
        (
            {"profile_steps": 0},
            "profile_steps is 0; give a whole number, at least 1, or pass profile='none' without snapshot",
        ),
        ({"profile": "none", "profile_steps": -1}, "profile_steps is -1; give a whole number, at least 0"),
        ({"profile": "ncu"}, "unknown profile 'ncu'; choose among auto, kineto, nsys, none"),
        ({"snapshot": 1}, "snapshot is 1; give True or False"),
        ({"record_host": "yes"}, "record_host is 'yes'; give True or False"),
        ({"name": "a:b"}, "name is 'a:b'; give one or more printable characters, without a colon"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        Recorder(**{"out": tmp_path, **options})
    assert str(refused.value) == message
    with pytest.raises(ConfigError, match="the name of the phase is 'step'; give a text of 1 to 200 printable"):
        Recorder(out=tmp_path).phase("step")


def test_no_profiled_steps_may_be_given_without_a_profiler(tmp_path: Path) -> None:
    recorder, _ = train(tmp_path, profile="none", profile_steps=0)
    assert [record.status for record in recorder.records] == ["ok"]


def test_closed_recorders_leave_no_object_and_no_open_file(tmp_path: Path) -> None:
    def recorded() -> weakref.ref[Recorder]:
        return weakref.ref(train(tmp_path)[0])

    def open_files() -> int:
        return sum("/proc/" in str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink())

    recorded()
    gc.collect()
    before, known = open_files(), [recorded() for _ in range(3)]
    deadline = time.monotonic() + 30.0
    while any(each() is not None for each in known):  # the thread that samples ends within a second
        assert time.monotonic() < deadline
        time.sleep(0.02)
        gc.collect()
    assert open_files() <= before


def test_lost_record_does_not_end_the_loop(tmp_path: Path) -> None:
    model = net()

    def loop() -> int:
        with Recorder(model, out=tmp_path, **CLEAN) as recorder:
            (tmp_path / "records.jsonl").mkdir()
            for batch in batches(8):
                with recorder.step():
                    loss_of(model, batch).backward()
        return recorder._count

    with pytest.warns(
        RuntimeWarning, match="the record of the timing was lost: IsADirectoryError.*; remove the cause, then run"
    ):
        assert loop() == 4


def test_recorder_that_is_never_left_writes_its_record_at_exit(tmp_path: Path) -> None:
    program = f"""
        import torch, cs_systems
        model = torch.nn.Linear(2, 2)
        recorder = cs_systems.Recorder(model, out={str(tmp_path)!r}, warmup=0, steps=9).__enter__()
        for _ in range(4):
            with recorder.step():
                model(torch.zeros(1, 2)).sum().backward()
        print("the output")
        raise SystemExit(3)
    """
    done = forks.python("-c", textwrap.dedent(program))
    assert (done.returncode, done.stdout, done.stderr) == (3, "the output\n", "")
    (record,) = read_records(tmp_path)[0]
    assert record.measurement is not None
    assert len(record.measurement.timed) == 4


def test_importing_the_package_imports_no_torch() -> None:
    program = "import sys, cs_systems; assert 'Recorder' in cs_systems.__all__; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_recorder_keeps_no_model_alive(tmp_path: Path) -> None:
    import weakref

    model = net()
    train(tmp_path, model=model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert "__next__" in vars(dataloader._BaseDataLoaderIter)
