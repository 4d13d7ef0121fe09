"""Export of a profile as a Chrome trace: our reader of Kineto's traces reads it back, and our tracks have their slices.

The slices of a track never overlap, because a viewer shows none that do.
"""

import gzip
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cs_systems.analysis.attribution.profile import Profile, profile
from cs_systems.analysis.attribution.tables import gaps, phases
from cs_systems.analysis.diagnosis import Answer, apply_rules
from cs_systems.analysis.diagnosis._evidence import of_profile
from cs_systems.cli import main
from cs_systems.readers import read
from cs_systems.readers.forms.trace import Trace
from cs_systems.report import chrome_trace
from tests.readers import test_perfetto, test_rocprof

DATA = Path(__file__).parents[1] / "data"
KINETO = DATA / "kineto_h200_step.json.gz"
NS = 1e-9


def _nsys(folder: Path) -> Path:
    (path := folder / "a.sqlite").write_bytes(gzip.decompress((DATA / "nsys_h200_step.sqlite.gz").read_bytes()))
    return path


def _perfetto(folder: Path) -> Path:
    (path := folder / "1_results.pftrace").write_bytes(test_perfetto.rocprofv3().bytes())
    return path


FILES: dict[str, Callable[[Path], Path]] = {
    "kineto": lambda _: KINETO,
    "kineto of one rank": lambda _: DATA / "ranks_h200" / "accumulation_rank0.json.gz",
    "nsys": _nsys,
    "rocprofv3": lambda folder: test_rocprof.as_json(folder / "7_results.json", [test_rocprof.STEPS]),
    "rocpd": lambda folder: test_rocprof.as_database(folder / "7_results.db", [test_rocprof.STEPS]),
    "perfetto": _perfetto,
}


def exported(path: Path, file: Path) -> tuple[Profile, Answer]:
    made = profile(read(path))
    answer = apply_rules(of_profile(made))
    chrome_trace.write(made, answer, file)
    return made, answer


def work(trace: Trace) -> list[tuple[Any, ...]]:
    """Return name, device, stream, time and time since the launch of each kernel, to the ns."""
    kernels = trace.kernels
    durations = np.round((kernels.end_s - kernels.start_s) / NS).tolist()
    waited = np.round((kernels.start_s - np.nan_to_num(kernels.launch_start_s)) / NS).tolist()
    late = [None if one.launch_start_s is None else since for one, since in zip(kernels, waited, strict=True)]
    rows = zip(kernels, durations, late, strict=True)
    return [(k.function, k.device, k.stream, k.in_graph, d, since) for k, d, since in rows]


def copied(trace: Trace) -> list[tuple[Any, ...]]:
    return sorted((c.kind, c.device, c.stream, c.bytes, round((c.end_s - c.start_s) / NS)) for c in trace.copies)


def near(left: list[tuple[Any, ...]], right: list[tuple[Any, ...]], times: int) -> bool:
    """Return whether rows are equal; of their last columns, which are times in ns, to 1 ns."""
    return len(left) == len(right) and all(
        one[:-times] == other[:-times] and one[-times:] == pytest.approx(other[-times:], abs=1)
        for one, other in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("name", FILES)
def test_export_of_every_reader_is_read_back_with_the_same_work(name: str, tmp_path: Path) -> None:
    before, _ = exported(FILES[name](tmp_path), file := tmp_path / "export.json.gz")
    after = profile(read(file))
    assert near(work(after.trace), work(before.trace), 2)
    assert near(copied(after.trace), copied(before.trace), 1)
    for of in ("calls", "ranges"):
        rows = [sorted(getattr(one.trace, of).name) for one in (before, after)]
        assert rows[0] == rows[1]
    assert after.time_s == pytest.approx(before.time_s, abs=len(before.trace.kernels) * NS)
    assert len(after.steps) == len(before.steps)
    times = [{row["phase"]: row["time_s"] for row in phases(one)} for one in (before, after)]
    assert times[1] == pytest.approx(times[0], abs=1e-6)


def slices(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each slice of our own tracks, with the name of its track."""
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for event in events:
        if event.get("cat") == chrome_trace.CATEGORY:
            yield names[event["pid"], event["tid"]], event


def test_steps_phases_layers_idle_time_and_causes_are_tracks_whose_slices_never_overlap(tmp_path: Path) -> None:
    made, answer = exported(KINETO, file := tmp_path / "a.json.gz")
    tracks: dict[str, list[dict[str, Any]]] = {}
    for track, event in slices(file):
        tracks.setdefault(track, []).append(event)
    causes = [f"{number}. {one.cause}" for number, one in enumerate(answer.diagnoses, 1)]
    assert [*tracks] == ["steps", "GPU 0 phases", "GPU 0 layers", "GPU 0 idle", *causes]
    for events in tracks.values():
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(events))
        assert all(event["dur"] >= 0 for event in events)
    assert len(tracks["steps"]) == len(made.steps)
    assert {"forward", "backward", "optimizer"} <= {event["name"] for event in tracks["GPU 0 phases"]}
    assert any("block 0" in event["name"] for event in tracks["GPU 0 layers"])
    idle_s = sum(sum(found.idle_s(len(made.steps))) for found in made.gaps.values())
    assert sum(event["dur"] for event in tracks["GPU 0 idle"]) * 1e-6 == pytest.approx(idle_s, rel=1e-3)
    idle = [event["args"] for event in tracks["GPU 0 idle"] if event["name"] == "idle: launch-bound"]
    launches_s = sum(args["launch-bound (µs)"] for args in idle) * 1e-6 / len(made.steps)
    (row,) = (row for row in gaps(made) if row["cause"] == "launch-bound")
    assert launches_s == pytest.approx(row["time_s"], rel=0.05), "gaps that another cause begins have a share too"
    assert tracks[causes[0]][0]["args"]["remedy"] == answer.diagnoses[0].remedy


def test_equal_traces_give_equal_bytes(tmp_path: Path) -> None:
    files = [tmp_path / "a.json.gz", tmp_path / "b.json.gz"]
    for file in files:
        exported(KINETO, file)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_command_writes_the_export_next_to_its_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.json"
    assert main(["analyze", str(KINETO), "--export", str(file), "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["answer"]["diagnoses"]
    assert err == f"export: {file} (open it in ui.perfetto.dev)\n"
    assert main(["analyze", str(file)]) == 0
    assert "67% of the step the GPU waits for kernel launches" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([KINETO, "--export", "a.txt"], "--export a.txt must end with .json or .json.gz; choose such a name"),
        ([KINETO, KINETO, "--export", "a.json"], "--export writes the trace of one process; leave out --export"),
        ([KINETO, "--export", "a.json", "--what-if", "input=0"], "--what-if shows its own table; leave out --export"),
        ([KINETO, "--export", KINETO], f"--export {KINETO} would overwrite the input {KINETO}; name another file"),
    ],
)
def test_export_without_effect_is_refused(
    words: list[Any], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["analyze", *map(str, words)]) == 2
    assert message in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
