"""Tests with Chrome traces of other devices and versions: ROCm, CUDA graphs, and accelerators that are not read.

A small builder makes each trace, and an independent reader checks its numbers.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cs_systems.analysis.attribution.kernel_families import family
from cs_systems.analysis.attribution.profile import profile
from cs_systems.analysis.attribution.tables import NO_COSTS, TABLES
from cs_systems.cli import main
from cs_systems.config import ConfigError
from cs_systems.readers import read
from cs_systems.readers._stalls import stalls
from cs_systems.readers.forms.jobs import kind

Event = dict[str, Any]
WriteTrace = Callable[[Sequence[Event]], Path]
OTHER_EXPORT = (
    "an export of nsys in another format than SQLite, which cs-systems cannot read; export the report again with "
    "nsys export -t sqlite"
)


def event(category: str, name: str, start: float, duration: float, pid: int, tid: int, **args: Any) -> Event:
    where = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid}
    return {**where, "ts": start, "dur": duration, "args": args}


def counted(path: Path) -> dict[str, tuple[int, float]]:
    """Return (kernels, their time in µs) by the name of the call that launched them."""
    events = json.loads(path.read_text())["traceEvents"]
    calls = {e["args"]["correlation"]: e["name"] for e in events if e["cat"].endswith("_runtime")}
    found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for e in events:
        if e["cat"] == "kernel":
            name = calls.get(e["args"].get("correlation"), "")
            found[name] = found[name][0] + 1, found[name][1] + e["dur"]
    return dict(found)


def rocm(category: str, steps: int = 2) -> list[Event]:
    """Return steps on ROCm: sizes are at the launch, and correlation ids of copies and kernels alternate."""
    events: list[Event] = []
    number = 100
    for step in range(steps):
        began = 1000.0 * step
        events.append(event("user_annotation", f"ProfilerStep#{step}", began, 900, 7, 7))
        for place, (call, kernel) in enumerate(
            [
                ("hipLaunchKernel", "void at::native::vectorized_elementwise_kernel<4, FillFunctor<float>>(int)"),
                ("hipExtModuleLaunchKernel", "Cijk_Alik_Bljk_SB_MT64x16x32_MI16x16x1"),
                ("hipLaunchKernel", "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"),
            ]
        ):
            at = began + 100 * place
            number += 1
            copy = event("gpu_memcpy", "Memcpy HtoD", at + 5, 2, 2, 0, device=2, stream=0, correlation=number)
            events += [event(category, "hipMemcpyWithStream", at, 4, 7, 7, correlation=number), copy]
            number += 1
            sizes = {"grid": [3, 1, 1], "block": [64, 2, 1], "shared memory": 16}
            events.append(event(category, call, at + 10, 5, 7, 7, correlation=number, **sizes))
            where = {"device": 2, "stream": 0, "correlation": number, "kind": "Dispatch Kernel"}
            events.append(event("kernel", kernel, at + 20, 10.0 + place, 2, 0, **where))
    return events


@pytest.mark.parametrize("category", ["cuda_runtime", "hip_runtime", "xpu_runtime"])
def test_trace_of_rocm_is_read(write_trace: WriteTrace, category: str) -> None:
    path = write_trace(rocm(category))
    made = profile(read(path))
    kernels = made.trace.kernels
    assert len(made.steps) == 2
    expected = counted(path)
    assert sum(count for count, _ in expected.values()) == len(kernels) == 6
    assert made.time_s * 1e6 == pytest.approx(sum(time for _, time in expected.values()))
    assert {(k.function.grid, k.function.block, k.function.shared_bytes) for k in kernels} == {
        ((3, 1, 1), (64, 2, 1), 16)
    }
    assert [family(kernel.function.name) for kernel in list(kernels)[:3]] == ["elementwise", "matmul", "collective"]
    assert all(k.launch_start_s is not None and k.launch_start_s < k.start_s for k in kernels)
    assert [call.name for call in made.trace.calls.where(stalls)] == ["hipMemcpyWithStream"] * 6
    assert made.trace.limitations == ()


@pytest.mark.parametrize("backwards", [False, True])
def test_kernel_belongs_to_the_latest_call_with_its_number(write_trace: WriteTrace, backwards: bool) -> None:
    """Correlation ids are reused, also in another thread; a nested call has the outer call's id, and does not count."""
    events: list[Event] = []
    for turn in range(3):
        at = 100.0 * turn
        outer = event("cuda_runtime", "hipLaunchKernel", at, 10, 7, 7 + turn, correlation=5)
        inner = event("cuda_driver", "hipModuleLaunchKernel", at + 2, 3, 7, 7 + turn, correlation=5)
        events += [outer, inner, event("kernel", f"k{turn}", at + 20, 5, 0, 0, device=0, stream=0, correlation=5)]
    if backwards:
        events = [one for turn in reversed(range(3)) for one in events[3 * turn : 3 * turn + 3]]
    kernels = list(read(write_trace(events)).kernels)
    launches = [(k.function.name, k.thread, k.start_s - (k.launch_start_s or 0)) for k in kernels]
    assert [name for name, *_ in launches] == ["k0", "k1", "k2"]
    assert [thread for _, thread, _ in launches] == [7, 8, 9]
    assert [lag for *_, lag in launches] == pytest.approx([20e-6] * 3)


def graphs(launches: int, kernels: int, node_ids: bool, runtime: str = "cudaGraphLaunch") -> list[Event]:
    """Return launches of a graph and one plain kernel; every second launch has no recorded kernel."""
    events = [
        event("cuda_runtime", "cudaLaunchKernel", 0, 1, 7, 7, correlation=1),
        event("kernel", "gemm", 5, 2, 0, 7, device=0, stream=7, correlation=1),
    ]
    for launch in range(launches):
        at, number = 100.0 * (launch + 1), 10 + launch
        events.append(event("cuda_runtime", runtime, at, 3, 7, 7, correlation=number))
        for kernel in range(0 if launch % 2 else kernels):
            args = {"device": 0, "stream": 7, "correlation": number} | (
                {"graph node id": kernel + 1} if node_ids else {}
            )
            events.append(event("kernel", f"node_{kernel}", at + 10 + 3 * kernel, 2, 0, 7, **args))
    return events


@pytest.mark.parametrize("node_ids", [True, False])
@pytest.mark.parametrize("runtime", ["cudaGraphLaunch", "hipGraphLaunch"])
def test_kernels_of_graphs_are_counted(write_trace: WriteTrace, node_ids: bool, runtime: str) -> None:
    path = write_trace(graphs(4, 3, node_ids, runtime))
    made = profile(read(path))
    assert counted(path) == {"cudaLaunchKernel": (1, 2), runtime: (6, 12)}
    assert int(made.trace.kernels.in_graph.sum()) == 6
    assert made.time_s * 1e6 == pytest.approx(14)
    assert any(note.startswith("6 kernels ran in CUDA graphs") for note in made.notes)
    assert any(
        note.startswith("2 of 4 launches of CUDA graphs have no recorded kernel; record with") for note in made.notes
    )
    (idle,) = TABLES["gaps"](made, NO_COSTS)
    assert idle["cause"] == "kernels not recorded"
    whole = profile(read(write_trace(graphs(1, 3, node_ids, runtime))))
    assert "kernels not recorded" not in {row["cause"] for row in TABLES["gaps"](whole, NO_COSTS)}


def test_unread_accelerator_is_noted(write_trace: WriteTrace) -> None:
    other = [event("mtia_ccp_events", "dma_request", at, 1, 9, 801) for at in range(3)]
    trace = read(write_trace([*graphs(0, 0, False), *other]))
    assert trace.limitations == ("it holds 3 events of an MTIA accelerator, which are not read",)


def test_kernel_without_device_and_stream_has_those_of_its_row(write_trace: WriteTrace) -> None:
    (kernel,) = read(write_trace([event("kernel", "gemm", 5, 10, 2, 7)])).kernels
    assert (kernel.device, kernel.stream) == (2, 7)


def test_exchanges_get_their_names_from_ranges_around_their_launches(write_trace: WriteTrace) -> None:
    """Before PyTorch 2.2, `SendRecv` is the kernel of both all_to_all and send, and has no arguments."""
    shape = {"Input Dims": [[24, 2]], "Input type": ["long int"]}
    events = [
        event("user_annotation", "nccl:all_to_all", 10, 10, 1, 1, **shape),
        event("user_annotation", "nccl:send 0->1", 30, 10, 1, 1, **{"Input Dims": [[8]], "Input type": ["float"]}),
        event("user_annotation", "nccl:coalesced", 50, 10, 1, 1),
        *(event("cuda_runtime", "cudaLaunchKernelExC", at, 2, 1, 1, correlation=at) for at in (15, 35, 55, 75)),
        *(
            event("kernel", "ncclKernel_SendRecv_RING_SIMPLE", at + 100, 9, 0, 20, device=0, stream=20, correlation=at)
            for at in (15, 35, 55, 75)
        ),
    ]
    messages = read(write_trace(events)).messages
    assert {index: (kind(said.name), said.size_bytes) for index, said in messages.items()} == {
        0: ("all_to_all", 24 * 2 * 8),
        1: ("send", None),
    }


def test_counters_in_place_of_kernels_are_refused_with_the_reason(write_trace: WriteTrace) -> None:
    """CUPTI's range profiler replays each kernel, so the range's time is not the kernel's."""
    call = event("cuda_runtime", "cudaLaunchKernel", 0, 1, 7, 7, correlation=1)
    counter = event("cuda_profiler_range", "gemm", 5, 121431, 0, 0, **{"smsp__inst_executed.sum": 3})
    with pytest.raises(
        ConfigError, match=r"holds no kernel, but 1 counters of kernels .*; record without profiler_metrics"
    ):
        read(write_trace([call, counter]))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            '{\n "schema": "1.0.1", "pid": 5, "nodes": []}',
            "an execution trace of PyTorch, which has no times; give the",
        ),
        (
            "[[-1, 1, 37888, 7]]",
            "a memory timeline of export_memory_timeline, which cs-systems cannot read; call torch.cuda.memory",
        ),
        (
            '<html>\n<head><meta charset="utf-8" /><title>GPU Memory Timeline HTML</title></head>\n<body>',
            "a memory timeline of export_memory_timeline, which cs-systems cannot read; call torch.cuda.memory",
        ),
        (
            '"Kind","Agent_Id","Queue_Id","Kernel_Name"\n"KERNEL_DISPATCH",1,1,"gemm"\n',
            "a table of rocprof in CSV, which cs-systems cannot read; record again with rocprofv3",
        ),
        (
            '"Index","KernelName","gpu-id"\n0,"gemm",1\n',
            "a table of rocprof in CSV, which cs-systems cannot read; record again with rocprofv3",
        ),
        (
            '{ "traceEvents":[{}\n,{"args":{"name":"CPU HIP API"},"ph":"M","pid":2,"name":"process_name"}]}',
            "a trace of rocprof before version 3, which cs-systems cannot read; record again with rocprofv3",
        ),
        ('{"data":["GpuMetrics"]}', OTHER_EXPORT),
        ('data: "GpuMetrics"\n', OTHER_EXPORT),
        (
            '{"$schema":"https://www.speedscope.app/file-format-schema.json","profiles":[]}',
            "a profile of the CPU's stacks for speedscope, which holds no kernels; give a trace of torch.profiler",
        ),
        (
            "train.py(3): f;torch/nn/modules/module.py(1750): _call_impl;aten::linear 123\ntrain.py(3): f 2\n",
            "a list of stacks of export_stacks, which has no single kernels; give the trace that export_chrome_trace",
        ),
    ],
)
@pytest.mark.parametrize("command", ["analyze", "snapshot"])
def test_file_of_another_recorder_is_refused_by_its_name(
    tmp_path: Path, text: str, reason: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    assert main([command, str(path)]) == 2
    assert f"{path} is {reason}" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("export.arrow", b"\xff" * 4 + b"\xf0\0table_name", OTHER_EXPORT),
        ("export.h5", b"\x89HDF\r\n\x1a\n", OTHER_EXPORT),
        (
            "export/KERNEL.parquet",
            b"PAR1",
            "a folder of Parquet files, which cs-systems cannot read; if nsys wrote them, export the report again",
        ),
    ],
)
def test_binary_file_of_another_format_is_refused_by_its_name(
    tmp_path: Path, name: str, content: bytes, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    given = path.parent if path.suffix == ".parquet" else path
    assert main(["analyze", str(given)]) == 2
    assert f"{given} is {reason}" in " ".join(capsys.readouterr().err.split())
