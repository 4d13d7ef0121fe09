"""Failing cells, interrupts and kills lose no other cell, and a resumed sweep measures only the missing cells."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cs_systems.cli import main
from cs_systems.config import PRESETS, ConfigError, Mode, RunConfig
from cs_systems.measure.runtime.channel import Ready
from cs_systems.measure.runtime.journal import Journal
from cs_systems.measure.runtime.supervisor import same_device
from cs_systems.measure.runtime.sweep import Progress, preflight, run, sweep
from cs_systems.record import RunRecord, append_record, read_records

WORKLOADS = Path(__file__).parent / "workloads_that_die.py"
TINY = RunConfig(model=PRESETS["tiny"], batch_size=1, mode=Mode.FORWARD, device="cpu", warmup=0, steps=3)
OWN = RunConfig(device="cpu", warmup=0, steps=3)  # for workloads that use no model


def cell(name: str, **rest: object) -> RunConfig:
    return replace(OWN, workload=f"{WORKLOADS}:{name}", **rest)  # type: ignore[arg-type]


def command(out: Path, *words: str, workload: str = "hangs_at_the_gate") -> list[str]:
    program = [sys.executable, "-m", "cs_systems", "time", "--out", str(out), "--workload", f"{WORKLOADS}:{workload}"]
    modes = ["--mode", "forward", "forward-backward", "train-step", "--device", "cpu"]
    return [*program, *modes, "--warmup", "0", "--steps", "3", *words]


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


CASUALTIES = {
    "raises": ("error", "ZeroDivisionError: the numerator was fine"),
    "is_killed": ("killed", "killed by SIGKILL (by a user, or by the system when memory ran out); its last output: "),
    "exits": ("killed", "exited with status 7"),
    "hangs": ("timeout", "the worker process did not answer within 5 s; raise timeout_s"),
    "python_runs_out_of_memory": ("oom", "MemoryError"),
    "torch_runs_out_of_memory": ("oom", "DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
    "prints": ("ok", None),
}


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, RunRecord], list[RunRecord]]:
    """Return folder, failed cells and harmless cells of a sweep with a harmless cell after each failing one."""
    folder = tmp_path_factory.mktemp("survived")
    cells = []
    for number, name in enumerate(CASUALTIES):
        cells += [cell(name), cell("fine", seed=number)]
    records = list(sweep(cells, out=folder, timeout_s=5))
    return folder, dict(zip(CASUALTIES, records[::2], strict=True)), records[1::2]


@pytest.mark.parametrize("name", CASUALTIES)
def test_failing_cell_fails_no_other_cell(
    survived: tuple[Path, dict[str, RunRecord], list[RunRecord]], name: str
) -> None:
    _, deaths, harmless = survived
    status, reason = CASUALTIES[name]
    assert deaths[name].status == status
    assert (deaths[name].reason or "").find(reason or "") >= 0
    assert harmless[list(CASUALTIES).index(name)].status == "ok"


def test_reason_of_a_killed_cell_has_its_last_output(
    survived: tuple[Path, dict[str, RunRecord], list[RunRecord]],
) -> None:
    _, deaths, _ = survived
    assert "the last line" in (deaths["is_killed"].reason or "")


def test_resume_retries_only_failed_cells(
    survived: tuple[Path, dict[str, RunRecord], list[RunRecord]],
) -> None:
    folder, deaths, harmless = survived
    records, complaints = read_records(folder)
    assert complaints == []
    assert {r.key for r in records} == {r.key for r in [*deaths.values(), *harmless]}

    again = [cell(name) for name in CASUALTIES if name != "hangs"]
    notes: list[str | None] = []
    retried = list(sweep(again, out=folder, timeout_s=5, on_progress=lambda p: notes.append(p.note)))
    assert [r.run_config.workload.rpartition(":")[2] for r in retried] == ["raises", "is_killed", "exits"]
    assert "3 cells are already recorded" in notes


def test_killed_interleaved_cell_leaves_the_others_complete() -> None:
    cells = [cell("fine", rounds=3), cell("is_killed", rounds=3), cell("fine", rounds=3, seed=1)]
    by_status = {r.run_config.seed: r for r in sweep(cells, interleave=True) if r.status == "ok"}
    assert len(by_status) == 2
    assert all(len(r.measurement.timed) == 3 for r in by_status.values() if r.measurement)


def test_broken_attention_file_fails_only_its_interleaved_cell(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def attention(:\n")
    cells = [TINY, replace(TINY, attention=f"{broken}:attention"), replace(TINY, seed=1)]
    assert [r.status for r in sweep(cells, interleave=True)] == ["ok", "error", "ok"]


def test_worker_that_closes_its_pipes_and_hangs_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """End the worker without a timeout, because it cannot reply through a closed pipe."""
    monkeypatch.setattr("cs_systems.measure.runtime.processes.GRACE_S", 0.5)
    monkeypatch.chdir(tmp_path)
    hung, harmless = sweep([cell("closes_its_pipes_and_hangs"), cell("fine")])
    assert (hung.status, harmless.status) == ("killed", "ok")
    assert "it closed its pipes but did not exit within 0.5 s" in (hung.reason or "")
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_prediction_that_hangs_or_dies_fails_only_its_cell() -> None:
    cells = [cell("fine"), cell("hangs_in_preflight"), cell("dies_in_preflight"), cell("fine", seed=1)]
    reasons = [row["reason"] for row in preflight(cells, timeout_s=3)]
    assert (reasons[0], reasons[3]) == (None, None)
    timeout = "the worker process did not answer within 3 s; raise timeout_s"
    assert reasons[1] == f"the memory prediction hung: {timeout}"
    assert reasons[2].startswith("the memory prediction killed the worker: killed by SIGKILL")
    (record,) = sweep([cells[1]], timeout_s=3, skip_oom=True)
    assert (record.status, record.reason) == ("timeout", timeout)


def test_prediction_of_memory_command_ends_at_its_timeout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text("import time\ndef make(config, device):\n    time.sleep(60)\n")
    assert main(["memory", "--workload", f"{slow}:make", "--fits", "8GiB", "--timeout-s", "3"]) == 2
    assert "failed: the worker process did not answer within 3 s; raise --timeout-s" in capsys.readouterr().err


def test_cell_skipped_as_oom_is_measured_without_skip_oom(tmp_path: Path) -> None:
    too_large = cell("predicted_not_to_fit")
    (skipped,) = sweep([too_large], out=tmp_path, skip_oom=True)
    assert (skipped.status, skipped.predicted, skipped.measurement) == ("oom", True, None)
    assert "not run because of skip_oom" in (skipped.reason or "")
    assert list(sweep([too_large], out=tmp_path, skip_oom=True)) == []
    (measured,) = sweep([too_large], out=tmp_path)
    assert (measured.status, measured.predicted, measured.key) == ("ok", False, skipped.key)
    assert list(sweep([too_large], out=tmp_path)) == []
    assert [r.predicted for r in read_records(tmp_path)[0]] == [True, False]


@pytest.mark.gpu
def test_broken_cuda_context_fails_only_its_cell() -> None:
    first, second = sweep([cell("breaks_cuda_context", device="cuda"), replace(TINY, device="cuda")])
    assert first.status == "error"
    assert "device-side assert" in (first.reason or "")
    assert second.status == "ok"


def test_interrupt_keeps_records_and_same_command_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    gate, out = tmp_path / "gate", tmp_path / "out"
    gate.touch()
    reset = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # background processes inherit an ignored SIGINT
    process = subprocess.Popen(command(out), stderr=subprocess.PIPE, text=True, preexec_fn=reset)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("[1/3] ")
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "cs-systems: interrupted; the records so far are kept; to continue:\ncs-systems time " in error
    assert error.endswith(f" --out {out}\n")
    (first,), complaints = read_records(out)
    assert (first.status, complaints) == ("ok", [])

    gate.unlink()
    with (out / "records.jsonl").open("a") as stream:
        stream.write('{"schema_version":1,"key":"cut in the mid')
    assert main(command(out)[3:]) == 0
    told = capfd.readouterr().err
    assert "records.jsonl:2 is incomplete (the run was interrupted while writing it); skipped" in told
    assert "1 cell is already recorded" in told
    assert [line[:5] for line in told.splitlines() if line.startswith("[")] == ["[2/3]", "[3/3]"]
    records, complaints = read_records(out)
    assert [r.config["mode"] for r in records] == ["forward", "forward-backward", "train-step"]
    assert len(complaints) == 1


def test_killed_sweep_leaves_no_worker(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    environment = os.environ | {"TEST_PID_FILE": str(pid_file)}
    parent = subprocess.Popen(command(tmp_path / "out", workload="hangs"), stderr=subprocess.DEVNULL, env=environment)
    wait_for(lambda: pid_file.exists() and pid_file.read_text() != "")
    worker = int(pid_file.read_text())
    assert is_running(worker)
    parent.kill()
    parent.wait()
    wait_for(lambda: not is_running(worker), seconds=10)


def test_folder_that_cannot_be_created_is_refused_before_any_cell(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(command(tmp_path / "file" / "out")[3:]) == 2
    error = capfd.readouterr().err
    assert f"cannot write to {tmp_path}/file/out: Not a directory; choose another --out" in error
    assert "[1/3]" not in error


def test_file_as_out_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").touch()
    with pytest.raises(OSError, match=r"records.jsonl: it is a file; choose another out, a folder of records"):
        next(sweep([cell("fine")], out=tmp_path / "records.jsonl"))


def test_folder_named_records_jsonl_is_refused_before_any_cell(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").mkdir()
    with pytest.raises(OSError, match="Is a directory; choose another out"):
        list(sweep([TINY], out=tmp_path))


def test_full_disk_is_reported_before_any_cell(tmp_path: Path) -> None:
    def disk_with_room_for_a_kilobyte() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))

    done = subprocess.run(
        command(tmp_path / "out"), capture_output=True, text=True, timeout=30, preexec_fn=disk_with_room_for_a_kilobyte
    )
    assert done.returncode == 2
    assert f"cannot write to {tmp_path}/out: File too large; choose another --out" in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return next(iter(sweep([TINY], out=tmp_path_factory.mktemp("measured"))))


def test_records_of_a_newer_schema_are_refused(
    tmp_path: Path, measured: RunRecord, capfd: pytest.CaptureFixture[str]
) -> None:
    newer = json.loads(measured.to_json()) | {"schema_version": 99, "a_field_of_the_future": 1}
    (tmp_path / "records.jsonl").write_text(json.dumps(newer) + "\n")
    assert main(command(tmp_path)[3:]) == 2
    error = capfd.readouterr().err
    assert "records.jsonl:1: the record has schema 99, but this version of cs-systems reads schema 4; upgrade" in error
    assert "upgrade cs-systems" in error
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("torch", "1.0.0", "were measured with torch 1.0.0, not .*, and do not compare; "),
        ("device_name", "Voodoo 2", "were measured on Voodoo 2, not .*, and do not compare; "),
        ("code_version", "0ld", r"were measured by another version of the code \(0ld, now .*\), and do not compare; "),
    ],
)
def test_records_of_another_version_or_device_are_refused(
    tmp_path: Path, measured: RunRecord, field: str, value: str, message: str
) -> None:
    assert measured.environment is not None
    append_record(tmp_path, replace(measured, environment=replace(measured.environment, **{field: value})))
    with pytest.raises(ConfigError, match=f"{message}.*choose another out, or start over with fresh"):
        list(sweep([TINY], out=tmp_path))
    with pytest.raises(ConfigError, match=f"{message}choose another out$"):  # run() has no argument fresh
        run(TINY, out=tmp_path)
    assert len(read_records(tmp_path)[0]) == 1


def test_fresh_starts_over_and_renames_the_old_records(tmp_path: Path, measured: RunRecord) -> None:
    append_record(tmp_path, measured)
    assert [r.status for r in sweep([TINY], out=tmp_path, fresh=True)] == ["ok"]
    assert len(read_records(tmp_path)[0]) == 1
    (aside,) = tmp_path.glob("records-until-*.jsonl")
    assert read_records(aside)[0] == [measured]


def test_fresh_twice_within_a_second_keeps_both_files(tmp_path: Path) -> None:
    for text in ("first", "second", "third"):
        (Journal.prepare(tmp_path).folder / "records.jsonl").write_text(text)
        Journal.prepare(tmp_path, fresh=True)
    assert {file.read_text() for file in tmp_path.glob("records-until-*.jsonl")} == {"first", "second", "third"}


def test_changed_device_is_an_error_with_remedy() -> None:
    gpu, cpu = Ready(1, "NVIDIA H200"), Ready(2, "some CPU")
    same_device(gpu, Ready(3, gpu.device))
    with pytest.raises(
        RuntimeError,
        match=r"the device changed.*H200.*some CPU; check with cs-systems doctor that NVIDIA H200 works, and",
    ):
        same_device(gpu, cpu)


def test_progress_counts_every_cell(tmp_path: Path) -> None:
    def updates() -> Iterator[Progress]:
        received: list[Progress] = []
        for _ in sweep([cell("fine"), cell("raises")], out=tmp_path, repeats=2, on_progress=received.append):
            pass
        yield from received

    finished = [p for p in updates() if p.record]
    assert [(p.done, p.total) for p in finished] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [p.record.repeat for p in finished if p.record] == [0, 0, 1, 1]
    resumed = [(p.done, p.total) for p in updates() if p.record]
    assert resumed == [(2, 4), (4, 4)], "recorded cells count in each repeat"
