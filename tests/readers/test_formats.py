"""Tests of formats as plug-ins: their declarations, recognition of files, and a new file that adds a format."""

from __future__ import annotations

import codecs
import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from cs_systems.cli import main
from cs_systems.config import ConfigError
from cs_systems.core import plugins
from cs_systems.core.formats import Format, formats, named, recognised
from cs_systems.readers import read
from tests.hostile.files import small_trace

# A format of one line: `TICKS 3 5 9` is a kernel from 3 to 5 s and one from 5 to 9 s.
MINE = '''
"""Format of a tool that only this test knows."""

from cs_systems.core.formats import Format, begins


def read(path, process=None):
    from cs_systems.readers.forms.columns import NO_RANGES
    from cs_systems.readers.forms.trace import NO_CALLS, NO_COPIES, Function, Kernels, Trace

    times = [float(word) for word in path.read_text().split()[1:]]
    rows = [
        (Function("tick", None, None, None, None), begin, end, 0, 0, False, -1)
        for begin, end in zip(times, times[1:])
    ]
    return Trace("ticks", "ticker", {0: "clock"}, Kernels.of(rows), NO_COPIES, NO_CALLS, NO_RANGES, [], None, ())


FORMAT = Format(
    title="a list of ticks", matches=begins(rb"TICKS "), suffixes=(".ticks",), read=read, record="`ticker`"
)
'''
# Run commands in one process, in which the package has an additional file.
PROGRAM = """
import sys
import cs_systems.readers
from cs_systems.core import plugins
cs_systems.readers.__path__.append(sys.argv[1])
known = plugins.names("readers")
names = plugins.names
plugins.names = lambda package: (*known, "mine") if package == "readers" else names(package)
from cs_systems.cli import main
from cs_systems.config import ConfigError
for line in sys.stdin.read().splitlines():
    print("$", line, flush=True)
    try:
        main(line.split())
    except SystemExit:
        pass
"""


def test_one_new_file_adds_a_format_to_commands_listings_helps_and_messages(tmp_path: Path) -> None:
    (code := tmp_path / "code").mkdir()
    (code / "mine.py").write_text(MINE)
    (folder := tmp_path / "folder").mkdir()
    for name in ("a.ticks", "b.ticks"):
        (folder / name).write_text("TICKS 3 5 9")
    (other := tmp_path / "other.txt").write_text("TICKS 3 5 9")
    (unknown := tmp_path / "unknown").write_text("what")
    lines = (
        f"analyze {other} --table kernels",
        f"analyze {folder}",
        "analyze --help",
        f"snapshot {other}",
        f"report {other}",
        f"analyze {unknown}",
    )
    words = [sys.executable, "-c", PROGRAM, str(code)]
    done = subprocess.run(words, input="\n".join(lines), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    _, *parts = (" ".join(part.split()) for part in done.stdout.replace("│", " ").split("$ "))
    analyzed, listed, help, snapshot, report, refused = parts
    assert " · ticker · clock · 1 step of 2 kernels" in analyzed
    assert "a.ticks ticker" in listed
    assert "a list of ticks (.ticks)" in help
    for text in (snapshot, report):
        assert f"{other} contains a list of ticks; read it with cs-systems analyze {other}" in text
    assert f"{unknown} is not a trace; give " in refused
    assert "a list of ticks (.ticks)" in refused


@pytest.mark.parametrize("name", plugins.names("readers"))
def test_format_declares_what_helps_and_documents_need(name: str) -> None:
    format = plugins.get("readers", name)
    assert isinstance(format, Format)
    assert format.read
    assert format.suffixes
    assert format.record
    assert format.title.split()[0] in ("a", "an", "records")
    assert not format.instead


def test_refused_formats_say_what_to_do() -> None:
    refused = [one for one in formats() if not one.read]
    assert len(refused) > 10
    assert all(one.instead for one in refused)


def test_formats_and_helps_need_neither_numpy_nor_torch() -> None:
    program = "import sys, cs_systems.cli.analyze; print([name for name in ('numpy', 'torch') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def chrome(process: str) -> bytes:
    return json.dumps([{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": process}}]).encode()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\n\x80\x01\x08\x01\x12\x09/host:CPU" + bytes(99), "a profile of JAX or TensorFlow (XPlane), which"),
        (b'{"displayTimeUnit":"ns","metadata":{"highres-ticks":true}, "traceEvents":[', "a trace of JAX or TensorFlow"),
        (chrome("Ascend Hardware"), "a recording of Ascend's profiler, and kernels of NPUs are not read; open it in"),
        (b"PERFILE2" + bytes(99), "a recording of Linux perf or eBPF, which holds no kernels of a GPU; give a trace"),
        (b"Attaching 3 probes...\n@: 5\n", "a recording of Linux perf or eBPF, which holds no kernels of a GPU; give"),
    ],
)
@pytest.mark.parametrize("command", ["analyze", "snapshot", "report"])
def test_recording_of_another_tool_is_refused_whatever_its_name(
    command: str, content: bytes, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recording.dat"
    path.write_bytes(content)
    assert main([command, str(path)]) == 2
    assert f"{path} is {reason}" in " ".join(capsys.readouterr().err.split())


def test_unknown_file_is_refused_with_what_can_be_read(tmp_path: Path) -> None:
    (path := tmp_path / "trace.bin").write_bytes(b"\x7fELF")
    with pytest.raises(
        ConfigError, match=r"is not a trace; give\n  a Chrome trace of torch.profiler \(.json, .json.gz\), a"
    ):
        read(path)


def test_content_counts_more_than_the_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.pickle"
    path.write_text(json.dumps(small_trace()))
    found, by_name = recognised(path), named(path)
    assert found
    assert by_name
    assert (found.name, by_name.name) == ("kineto", "snapshot")


def test_trace_with_a_long_header_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(json.dumps({"schemaVersion": 1, "cs_systems.modules": "x" * 100_000, **small_trace()}))
    assert (found := recognised(path))
    assert found.name == "kineto"


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("name", ["trace.json", "scopes.hatchet", "results.json"])
def test_file_with_a_byte_order_mark_is_read(zipped: bool, name: str, tmp_path: Path) -> None:
    """Editors and PowerShell write a byte-order mark before UTF-8."""
    texts = {
        "trace.json": small_trace(),
        "scopes.hatchet": [{"frame": {"name": "a"}, "metrics": {"time (ns)": 5}, "children": []}, {}],
        "results.json": {"rocprofiler-sdk-tool": []},
    }
    content = codecs.BOM_UTF8 + json.dumps(texts[name]).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if zipped else content)
    assert (found := recognised(path))
    assert found.name == {"trace.json": "kineto", "scopes.hatchet": "proton", "results.json": "rocprof"}[name]
    assert found.read
    if name == "trace.json":
        assert len(read(path).kernels) == 1
    elif name == "scopes.hatchet":
        assert found.read(path).scopes[0]["scope"] == "a"
