"""Write a machine's events as `nsys export --type sqlite` does: ranges of NVTX, calls, kernels, copies, synchronisations."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from _machine import MAIN, Machine

SCHEMA = """
create table StringIds(id integer primary key, value text);
create table TARGET_INFO_SESSION_START_TIME(utcEpochNs int, utcTime text, localTime text);
create table PROCESSES(globalPid int, pid int, name text);
create table TARGET_INFO_GPU(vmId int, id int, name text, busLocation text, totalMemory int, memoryBandwidth int,
 clockRate int, smCount int, chipName text, computeMajor int, computeMinor int, smMajor int, smMinor int);
create table CUPTI_ACTIVITY_KIND_RUNTIME(start int, end int, eventClass int, globalTid int, correlationId int,
 nameId int, returnValue int, callchainId int);
create table CUPTI_ACTIVITY_KIND_KERNEL(start int, end int, deviceId int, contextId int, greenContextId int,
 streamId int, correlationId int, globalPid int, demangledName int, shortName int, mangledName int, launchType int,
 cacheConfig int, registersPerThread int, gridX int, gridY int, gridZ int, blockX int, blockY int, blockZ int,
 staticSharedMemory int, dynamicSharedMemory int, localMemoryPerThread int, localMemoryTotal int, gridId int,
 sharedMemoryExecuted int, graphNodeId int, sharedMemoryLimitConfig int);
create table META_DATA_EXPORT(name text, value text);
"""
LAZY = {
    "NVTX_EVENTS": """start int, end int, eventType int, rangeId int, category int, color int, text text, globalTid int,
 endGlobalTid int, textId int, domainId int, uint64Value int, int64Value int, doubleValue real, uint32Value int,
 int32Value int, floatValue real, jsonTextId int, jsonText text""",
    "CUPTI_ACTIVITY_KIND_MEMCPY": """start int, end int, deviceId int, contextId int, greenContextId int, streamId int,
 correlationId int, globalPid int, bytes int, copyKind int, deprecatedSrcId int, srcKind int, dstKind int,
 srcDeviceId int, srcContextId int, dstDeviceId int, dstContextId int, migrationCause int, graphNodeId int,
 virtualAddress int""",
    "CUPTI_ACTIVITY_KIND_MEMSET": """start int, end int, deviceId int, contextId int, greenContextId int, streamId int,
 correlationId int, globalPid int, value int, bytes int, graphNodeId int, memKind int""",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": """start int, end int, deviceId int, contextId int, greenContextId int,
 streamId int, correlationId int, globalPid int, syncType int, eventId int""",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": """start int, end int, deviceId int, contextId int, greenContextId int,
 streamId int, correlationId int, globalPid int, graphId int, graphExecId int""",
}
VERSIONS = {
    "cudaLaunchKernel": "_v7000",
    "cudaLaunchKernelExC": "_v11060",
    "cuLaunchKernel": "",
    "cuLaunchKernelEx": "",
    "cudaGraphLaunch": "_v10000",
}
SYNC = {"event": 1, "stream": 3, "device": 4}


class Export:
    """The database while it is written."""

    def __init__(self, path: str, gpu: str) -> None:
        Path(path).unlink(missing_ok=True)
        self.base = sqlite3.connect(path)
        self.base.executescript(SCHEMA)
        self.texts: dict[str, int] = {}
        major = 8 if "A100" in gpu else 9
        sms = 108 if major == 8 else 132
        chip = {"vmId": 1, "id": 0, "name": gpu, "busLocation": "0000:00:06.0", "totalMemory": 85_029_158_912}
        chip |= {"memoryBandwidth": 3_352_320_000_000, "clockRate": 1980000, "smCount": sms, "computeMajor": major}
        self.insert("TARGET_INFO_GPU", **chip, chipName="GH100", computeMinor=0, smMajor=major, smMinor=0)
        self.insert(
            "TARGET_INFO_SESSION_START_TIME",
            utcEpochNs=1_795_172_609_294_606_846,
            utcTime="2026-11-20T11:03:29",
            localTime="2026-11-20T11:03:29",
        )
        self.insert("META_DATA_EXPORT", name="EXPORT_PRODUCT_VERSION", value="2025.3.2.474")

    def text(self, value: str) -> int:
        """Return the number of a text."""
        if value not in self.texts:
            self.texts[value] = len(self.texts) + 100
            self.base.execute("insert into StringIds values (?, ?)", (self.texts[value], value))
        return self.texts[value]

    def insert(self, table: str, **columns: object) -> None:
        """Add a row; tables come into being with their first row, as in nsys."""
        if table in LAZY:
            self.base.execute(f"create table if not exists {table}({LAZY[table]})")
        names = ", ".join(columns)
        marks = ", ".join("?" * len(columns))
        self.base.execute(f"insert into {table}({names}) values ({marks})", tuple(columns.values()))


def write(machine: Machine, path: str, *, whole_graphs: bool = False) -> None:
    """Write the export; kernels of CUDA graphs as one activity per graph if nsys recorded them whole."""
    export = Export(path, machine.gpu)
    pid = MAIN + 5000 * (machine.rank or 0)
    process = (1 << 48) | (pid << 24)
    export.insert("PROCESSES", globalPid=process, pid=pid, name="python3")
    graphs: dict[int, list[float]] = {}
    for event in sorted(machine.events, key=lambda e: (e.start, -e.end)):
        span = {"start": round(event.start * 1000), "end": round(event.end * 1000)}
        gpu = {"deviceId": 0, "contextId": 1, "streamId": event.stream, "correlationId": event.correlation}
        gpu["globalPid"] = process
        thread = process | (pid + event.thread - MAIN)
        if event.kind == "range":
            export.insert("NVTX_EVENTS", **span, eventType=59, text=event.name, globalTid=thread, domainId=0)
        elif event.kind == "call":
            name = event.name + VERSIONS.get(event.name, "_v3020")
            rest = {"globalTid": thread, "correlationId": event.correlation, "nameId": export.text(name)}
            export.insert("CUPTI_ACTIVITY_KIND_RUNTIME", **span, eventClass=0, returnValue=0, **rest)
        elif event.kind == "kernel":
            if whole_graphs and event.data["graph"] is not None:
                graphs.setdefault(event.correlation, []).extend((event.start, event.end))
                continue
            (x, y, z), (bx, by, bz) = event.data["grid"], event.data["block"]
            shape = {"gridX": x, "gridY": y, "gridZ": z, "blockX": bx, "blockY": by, "blockZ": bz}
            short = event.name.split("(")[0].split("<")[0].split("::")[-1].removeprefix("void ")
            names = {"demangledName": export.text(event.name), "shortName": export.text(short)}
            rest = {"registersPerThread": 64, "staticSharedMemory": 0, "dynamicSharedMemory": 0, "launchType": 1}
            node = {"graphNodeId": event.data["graph"]}
            export.insert("CUPTI_ACTIVITY_KIND_KERNEL", **span, **gpu, **shape, **names, **rest, **node)
        elif event.kind == "copy":
            direction, pinned = event.data["direction"], event.data["pinned"]
            kinds = {"H": 1 if pinned else 0, "D": 2}
            copy = {"bytes": event.data["bytes"], "copyKind": {"HtoD": 1, "DtoH": 2, "DtoD": 8}[direction]}
            copy |= {"srcKind": kinds[direction[0]], "dstKind": kinds[direction[-1]]}
            export.insert("CUPTI_ACTIVITY_KIND_MEMCPY", **span, **gpu, **copy)
        elif event.kind == "set":
            export.insert("CUPTI_ACTIVITY_KIND_MEMSET", **span, **gpu, value=0, bytes=event.data["bytes"], memKind=2)
        elif event.kind == "sync":
            kind = {"syncType": SYNC[event.data["what"]], "eventId": 4294967295}
            export.insert("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", **span, **gpu, **kind)
    for correlation, times in graphs.items():
        row = {"start": round(min(times) * 1000), "end": round(max(times) * 1000), "correlationId": correlation}
        row |= {"deviceId": 0, "contextId": 1, "streamId": 7, "globalPid": process, "graphId": 2, "graphExecId": 3}
        export.insert("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", **row)
    export.base.commit()
    export.base.close()
