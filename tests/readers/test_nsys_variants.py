"""Tests of nsys exports of several schema versions: names of tables, columns and GPUs, graphs, and row limits.

The numbers are checked by plain SQL on the same file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from cs_systems.analysis.attribution.profile import profile
from cs_systems.config import ConfigError
from cs_systems.readers import _nsys as nsys
from cs_systems.readers import read

Change = Callable[..., Path]
K, R, N, G = nsys.KERNELS, nsys.RUNTIME, nsys.NVTX, nsys.GRAPHS
# Version of the schema → statements that convert the real export, of schema 3.11, to it.
VERSIONS = {
    "2021, without graphs": (
        f"ALTER TABLE {K} DROP COLUMN graphNodeId",
        f"ALTER TABLE {K} DROP COLUMN greenContextId",
        f"ALTER TABLE {K} DROP COLUMN sharedMemoryLimitConfig",
        f"ALTER TABLE {N} DROP COLUMN jsonText",
        f"ALTER TABLE {N} DROP COLUMN jsonTextId",
        "ALTER TABLE TARGET_INFO_GPU DROP COLUMN cuDevice",
        "DROP TABLE META_DATA_EXPORT",
    ),
    "2022, EXPORT_META_DATA": (
        "ALTER TABLE META_DATA_EXPORT RENAME TO EXPORT_META_DATA",
        f"ALTER TABLE {K} DROP COLUMN greenContextId",
    ),
    "2024": (),
    "registered strings": (
        f"INSERT INTO StringIds SELECT 900000 + min(rowid), text FROM {N} GROUP BY text",
        f"UPDATE {N} SET textId = (SELECT id FROM StringIds WHERE value = text AND id >= 900000), text = NULL",
    ),
    "payloads and newer columns": (
        f"ALTER TABLE {N} ADD COLUMN binaryData TEXT",
        f"UPDATE {N} SET uint64Value = 7, jsonText = '[1]'",
        f"ALTER TABLE {K} ADD COLUMN launchPriority INTEGER",
        "CREATE TABLE NVTX_PAYLOAD_SCHEMAS (domainId INTEGER, schemaId INTEGER)",
    ),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_gives_the_same_numbers(change: Change, version: str) -> None:
    path = change(*VERSIONS[version])
    with closing(sqlite3.connect(path)) as database:
        query = f"SELECT value, count(*), sum(end - start) FROM {K} JOIN StringIds ON id = demangledName GROUP BY 1"
        expected = {name: (count, time) for name, count, time in database.execute(query)}
        names = f"SELECT count(*) FROM {N} LEFT JOIN StringIds ON id = textId WHERE ifnull(text, value) = 'forward'"
        ((forwards,),) = database.execute(names)
    made = profile(read(path), "step")
    found: dict[str, tuple[int, float]] = {}
    for (function, _), total in made.groups.items():
        calls, time_s = found.get(function.name, (0, 0.0))
        found[function.name] = calls + total.calls, time_s + total.time_s
    assert {name: calls for name, (calls, _) in found.items()} == {name: calls for name, (calls, _) in expected.items()}
    for name, (_, time_s) in found.items():
        assert time_s == pytest.approx(expected[name][1] * 1e-9)
    assert len(made.trace.ranges.named(lambda name: name == "forward")) == forwards == 3
    assert made.trace.devices == {0: "NVIDIA H200"}
    assert made.trace.limitations == ()


def test_calls_of_mpi_in_tables_of_their_own_are_ranges(change: Change) -> None:
    """Newer exports hold calls of MPI in tables, older ones as NVTX ranges."""
    columns = "(start INTEGER, end INTEGER, globalTid INTEGER, textId INTEGER)"
    spans = f"start, end, globalTid FROM {N} WHERE text = 'forward'"
    ranges = read(
        change(
            "INSERT INTO StringIds VALUES (900001, 'MPI_Send'), (900002, 'MPI_Barrier')",
            *(f"CREATE TABLE {table} {columns}" for table in nsys.MPI),
            f"INSERT INTO {nsys.MPI[0]} SELECT {spans.replace(' FROM', ', 900001 FROM')}",
            f"INSERT INTO {nsys.MPI[1]} SELECT {spans.replace(' FROM', ', 900002 FROM')}",
            f"INSERT INTO {nsys.MPI[1]} VALUES (1, NULL, 1, 900002)",
        )
    ).ranges
    forward, send, barrier = (
        [each[1:] for each in ranges.named(wanted.__eq__)] for wanted in ("forward", "MPI_Send", "MPI_Barrier")
    )
    assert send == barrier == forward
    assert len(forward) == 3


@pytest.mark.parametrize("nvtx", [f"DROP TABLE {N}", f"UPDATE {N} SET end = NULL"])
def test_calls_of_mpi_alone_are_a_trace_of_the_host(nvtx: str, change: Change) -> None:
    """A rank without CUDA, traced with --trace=mpi."""
    table = nsys.MPI[1]
    path = change(
        "INSERT INTO StringIds VALUES (900002, 'MPI_Barrier')",
        f"CREATE TABLE {table} AS SELECT start, end, globalTid, 900002 AS textId FROM {N} WHERE text = 'forward'",
        *(f"DROP TABLE IF EXISTS {each}" for each in (K, R, *nsys.COPIES.values())),
        nvtx,
    )
    trace = read(path)
    assert len(trace.kernels) == 0
    assert [*trace.ranges.name.in_order_of_use().values] == ["MPI_Barrier"]


def test_export_without_kernels_counts_launches_of_graphs_and_adds_versions_of_a_call(change: Change) -> None:
    path = change(
        f"DELETE FROM {K}",
        f"DELETE FROM {R} WHERE rowid NOT IN (SELECT rowid FROM {R} LIMIT 2)",
        "INSERT INTO StringIds VALUES (900001, 'cudaGraphLaunch_v10000'), (900002, 'cudaGraphLaunch_v11000')",
        f"UPDATE {R} SET start = 0, end = 1500, nameId = 900001 + (rowid = (SELECT max(rowid) FROM {R}))",
    )
    calls = r"2 launches \(time of the CUDA calls: 3.00 µs in cudaGraphLaunch\), so probably the GPU's profiling"
    with pytest.raises(ConfigError, match=f"holds no kernel, although it holds {calls}"):
        read(path)


def test_gpu_names_follow_cuda_visible_devices(change: Change) -> None:
    """CUDA numbers the devices that it sees; nsys also numbers all of the machine."""
    another = (
        "CREATE TABLE other AS SELECT * FROM TARGET_INFO_GPU",
        "UPDATE other SET id = 1, name = 'NVIDIA L4'",
        "INSERT INTO TARGET_INFO_GPU SELECT * FROM other",
    )
    path = change(*another, "UPDATE TARGET_INFO_GPU SET cuDevice = 1 - id")
    assert read(path).devices == {0: "NVIDIA L4", 1: "NVIDIA H200"}
    assert read(change(*another)).devices == {0: "NVIDIA H200", 1: "NVIDIA L4"}  # without CUDA's device numbers


def graphs(alone: bool) -> tuple[str, ...]:
    """Return statements that record every third kernel's launch as a whole graph of 1 µs; alone: no kernel is left."""
    columns = "start, end, deviceId, streamId, correlationId, globalPid"
    return (
        f"CREATE TABLE {G} ({columns}, graphId)",
        f"INSERT INTO {G} SELECT start, start + 1000, deviceId, streamId, correlationId, globalPid, rowid % 2 + 4 "
        f"FROM {K} WHERE rowid % 3 = 0",
        f"DELETE FROM {K}" + ("" if alone else " WHERE rowid % 3 = 0"),
    )


@pytest.mark.parametrize("alone", [True, False])
def test_whole_graph_counts_as_one_kernel(change: Change, alone: bool) -> None:
    path = change(*graphs(alone))
    with closing(sqlite3.connect(path)) as database:
        ((whole, in_graphs),) = database.execute(f"SELECT count(*), sum(end - start) FROM {G}")
        ((single, in_kernels),) = database.execute(f"SELECT count(*), ifnull(sum(end - start), 0) FROM {K}")
    made = profile(read(path))
    assert (len(made.trace.kernels), int(made.trace.kernels.in_graph.sum())) == (whole + single, whole)
    assert made.time_s == pytest.approx((in_graphs + in_kernels) * 1e-9)
    names = {kernel.function.name for kernel in made.trace.kernels if kernel.in_graph}
    assert names == {"CUDA graph 4", "CUDA graph 5"}
    assert made.phase_coverage > 0.9  # a graph has the phase of its launch
    assert made.trace.limitations[0].startswith(
        f"{whole} launches of CUDA graphs were recorded without their kernels and count as one kernel each; record with"
    )


def test_too_many_rows_are_refused(nsys_path: Path, change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsys, "MOST_ROWS", 1500)
    with pytest.raises(ConfigError, match=r"holds [\d,]+ kernels, calls and ranges, but at most 1,500 are read; "):
        read(nsys_path)
    monkeypatch.setattr(nsys, "MOST_ROWS", 50_000)
    path = change(f"UPDATE {K} SET rowid = rowid + (1 << 60)")  # a high row id does not mean many rows
    assert len(read(path).kernels) == 714
