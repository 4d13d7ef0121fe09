"""Profiles of Triton's Proton: one that Proton itself writes without a GPU, ones of its forms, and unusable ones."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cs_systems.cli import main
from cs_systems.config import ConfigError
from cs_systems.readers import _proton as proton

Node = dict[str, Any]
# Proton's library loaded by its path, because importing triton takes seconds: nested scopes with metrics.
RECORD = """
import importlib.util, sys
from importlib.machinery import ExtensionFileLoader
spec = importlib.util.spec_from_loader("libproton", ExtensionFileLoader("libproton", sys.argv[1]))
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
library = module.proton
session = library.start(sys.argv[2], "shadow", "tree", "instrumentation", "cuda")

def scope(name, metrics, inside=()):
    number = library.record_scope()
    library.enter_scope(number, name)
    if metrics:
        library.add_metrics(number, metrics)
    for one in inside:
        scope(*one)
    library.exit_scope(number, name)

matmul = ("matmul", {"flops16": 2e9, "bytes": 1e6, "time (ns)": 1e6, "count": 1})
scope("step", {}, [("load", {"cpu_time (ns)(exc)": 2000.0, "tokens": 5}), ("forward", {}, [matmul] * 3), matmul])
library.deactivate(session, False)
library.finalize(session, sys.argv[3])
"""


def record(folder: Path, form: str = "hatchet") -> Path:
    found = importlib.util.find_spec("triton")
    folders = found.submodule_search_locations if found else None
    if not folders or not (library := Path(folders[0], "_C", "libproton.so")).is_file():
        pytest.skip("Triton is not installed with Proton")
    words = [sys.executable, "-c", RECORD, str(library), str(folder / "profile"), form]
    subprocess.run(words, check=True, timeout=60)
    return folder / f"profile.{form}"


def node(name: str, metrics: Node | None = None, *children: Node) -> Node:
    return {"children": [*children], "frame": {"name": name, "type": "function"}, "metrics": metrics or {}}


def kernel(name: str, time_ns: float, device: str = "0", **metrics: Any) -> Node:
    return node(name, {"time (ns)": time_ns, "count": 1, "device_id": device, "device_type": "CUDA", **metrics})


def write(folder: Path, *children: Node, devices: Node | None = None) -> Path:
    path = folder / "made.hatchet"
    path.write_text(json.dumps([node("ROOT", {"count": 0, "time (ns)": 0}, *children), devices or {}], indent=1))
    return path


def sums(file: Path) -> dict[str, dict[str, float]]:
    """Return each path's metrics, summed over the nodes inside it by an independent recursion."""

    def of(one: Node, path: str) -> dict[str, float]:
        total = {name: value for name, value in one["metrics"].items() if isinstance(value, int | float)}
        for child in one["children"]:
            for name, value in of(child, f"{path} / {child['frame']['name']}".removeprefix(" / ")).items():
                total[name] = total.get(name, 0) + value
        found[path] = total
        return total

    found: dict[str, dict[str, float]] = {}
    of(json.loads(file.read_text())[0], "")
    return found


def test_file_of_proton_is_read(tmp_path: Path) -> None:
    path = record(tmp_path)
    profile, expected = proton.read(path), sums(path)
    assert [row["scope"] for row in profile.scopes] == ["step", "· forward", "· · matmul", "· matmul", "· load"]
    for row in profile.scopes:
        own = expected[row["path"]]
        assert row["calls"] == own.get("count")
        assert row["flops"] == own.get("flops16")
        assert row["time_s"] == (pytest.approx(own["time (ns)"] * 1e-9) if "count" in own else None)
        assert row["flops_per_s"] == (pytest.approx(2e12) if "count" in own else None)
        assert row["bytes_per_s"] == (pytest.approx(1e9) if "count" in own else None)
    assert [row["cpu_s"] for row in profile.scopes] == [None] * 4 + [pytest.approx(2e-6)]
    assert profile.notes == ("not shown: the file's metrics tokens",)


def test_file_in_messagepack_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'in MessagePack; write JSON, with proton.finalize\(output_format="hatchet"'):
        proton.read(record(tmp_path, "hatchet_msgpack"))


def test_kernels_are_summed_over_scopes_by_device(tmp_path: Path) -> None:
    metadata = node(proton.LAUNCH_METADATA, {}, kernel("sum", 50), kernel("max", 60))
    path = write(
        tmp_path,
        node("a", {}, kernel("gemm", 300, flops8=6e5, bytes=30), metadata),
        node("b", {}, kernel("gemm", 100, flops8=2e5), kernel("gemm", 200, "1"), kernel("copy", 300)),
        devices={"CUDA": {"0": {"arch": "90", "num_sms": 132, "clock_rate": 1980000}, "1": {}}},
    )
    profile = proton.read(path)
    rows: list[Any] = [(r["kernel"], r["device"], r["calls"], r["time_s"], r["share"]) for r in profile.kernels]
    assert rows == [
        ("gemm", "CUDA 0", 2, pytest.approx(400e-9), pytest.approx(4 / 9)),
        ("copy", "CUDA 0", 1, pytest.approx(300e-9), pytest.approx(3 / 9)),
        ("gemm", "CUDA 1", 1, pytest.approx(200e-9), pytest.approx(2 / 9)),
    ]
    assert profile.kernels[0]["flops_per_s"] == pytest.approx(2e12)
    assert profile.devices == ("CUDA 0 (architecture 90, 132 multiprocessors, 1.98 GHz)", "CUDA 1")
    assert profile.notes == ("2 kernels that computed the launches' metadata are left out",)


@pytest.mark.parametrize("lines", [1, 2])
def test_chrome_trace_of_proton_gives_the_same_tree(tmp_path: Path, lines: int) -> None:
    """Older versions of Proton write one document for each stream."""

    def event(stack: str, start: float, dur: float) -> Node:
        named = {"cat": "kernel", "dur": dur, "name": stack.rpartition("/")[2], "ph": "X", "tid": 7, "ts": start}
        return {"args": {"call_stack": ["ROOT", *stack.split("/")]}, **named}

    events = [event("a/gemm", 0, 2), event("a/gemm", 3, 4), event("a/b/copy", 9, 1)]
    documents = [events] if lines == 1 else [events[:2], events[2:]]
    path = tmp_path / "profile.chrome_trace"
    text = "\n".join(json.dumps({"displayTimeUnit": "us", "traceEvents": some}) for some in documents)
    path.write_text(text)
    rows: list[Any] = [(r["scope"], r["calls"], pytest.approx(r["time_s"])) for r in proton.read(path).scopes]
    assert rows == [("a", 3, 7e-6), ("· gemm", 2, 6e-6), ("· b", 1, 1e-6), ("· · copy", 1, 1e-6)]


def test_scopes_inside_a_kernel_have_cycles_and_samples(tmp_path: Path) -> None:
    inner = node("load", {"cycles": 900, "normalized_cycles": 9.0, "num_samples": 8, "num_stalled_samples": 2})
    (row, _) = proton.read(write(tmp_path, node("kernel", {}, inner))).scopes
    assert (row["cycles"], row["samples"], row["stalled_share"], row["time_s"]) == (900, 8, 0.25, None)


def test_numbers_that_are_not_valid_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, kernel("gemm", 100, bytes=-5, flops=10**400), kernel("copy", float("nan")))
    profile = proton.read(path)
    assert [row["bytes"] for row in profile.scopes] == [None, None]
    assert profile.notes == ("3 metrics are not valid numbers and are left out; the first is bytes -5 of 'gemm'",)


def nested(depth: int) -> str:
    return '[{"children": ' * depth + "[]" + "}]" * depth


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty: the profile was never written; check the disk space and record again"),
        ('[{"children": [', "is truncated or damaged at line 1, column 16; copy it again, or profile again and let"),
        (
            '{"displayTimeUnit": "us", "traceEvents": [{"args": {"call_stack": []}}]}\n\n{"displayTimeUnit":',
            "is truncated or damaged at line 3, column 20;",
        ),
        ('[{"children": [3]}]', "holds no time, count, FLOPs or bytes of any scope"),
        (
            '[{"frame": {"name": "ROOT"}, "children": [3]}]',
            "is not a profile of Proton: an entry under 'children' is 3, not an object",
        ),
        ('[{"frame": {"name": "ROOT"}, "metrics": {}, "children": []}, {}]', "holds no time, count, FLOPs or bytes"),
        (nested(100_000), "nested hundreds of levels deep"),
    ],
)
def test_unusable_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.hatchet"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        proton.read(path)


def test_truncated_gzip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "half.hatchet.gz"
    path.write_bytes(gzip.compress(write(tmp_path, kernel("gemm", 100)).read_bytes())[:-9])
    with pytest.raises(ConfigError, match=r"half.hatchet.gz is truncated or damaged; copy it again, or profile"):
        proton.read(path)


def test_command_shows_scopes_and_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = write(tmp_path, node("attention", {}, kernel("scores", 3000, flops16=6e6), kernel("softmax", 1000)))
    path = tmp_path / "named_otherwise.json.gz"
    path.write_bytes(gzip.compress(plain.read_bytes()))
    assert main(["analyze", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "scopes and their kernels, nested" in shown
    assert "kernels by time" in shown
    assert main(["analyze", str(path), "--table", "kernels", "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["kernel"], row["calls"]) for row in rows] == [("scores", "1"), ("softmax", "1")]
    assert [float(row["time_s"]) for row in rows] == pytest.approx([3e-6, 1e-6])
    assert main(["analyze", str(path), "--range", "step"]) == 2
    assert ("which contains scopes of Triton's Proton; use only --table, --top, --format") in capsys.readouterr().err
    assert main(["snapshot", str(path)]) == 2
    assert "contains a profile of Triton's Proton; read it with cs-systems analyze" in capsys.readouterr().err
