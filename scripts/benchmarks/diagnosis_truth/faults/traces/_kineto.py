"""Write a machine's events as torch.profiler does: Kineto's Chrome trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from _machine import MAIN, Machine

BASE = 4_315_368_000_000.0
DRIVER = ("cuLaunchKernel", "cuLaunchKernelEx")
CBID = {"cudaLaunchKernel": 211, "cudaLaunchKernelExC": 430, "cudaMemcpyAsync": 41, "cudaStreamSynchronize": 131}


def write(machine: Machine, path: str, *, python: bool = True, properties: bool = True) -> None:
    """Write the trace, compressed if the name ends in .gz; without ranges of Python if `with_stack` was off."""
    pid = MAIN + 5000 * (machine.rank or 0)
    device = machine.rank or 0
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "ts": BASE, "pid": pid, "tid": 0, "args": {"name": "python3"}},
        {"name": "process_labels", "ph": "M", "ts": BASE, "pid": pid, "tid": 0, "args": {"labels": "CPU"}},
        {"name": "process_labels", "ph": "M", "ts": BASE, "pid": device, "tid": 0, "args": {"labels": f"GPU {device}"}},
    ]
    for index, event in enumerate(sorted(machine.events, key=lambda e: (e.start, -e.end))):
        thread = pid + event.thread - MAIN
        args: dict[str, Any] = {}
        host = {"pid": pid, "tid": thread}
        gpu = {"pid": device, "tid": event.stream}
        where = host
        if event.kind == "op":
            category = "cpu_op"
            args = {"External id": event.external, "Record function id": 0, "Ev Idx": index}
            if event.data["sequence"] is not None:
                args |= {"Sequence number": event.data["sequence"], "Fwd thread id": 0 if event.thread == MAIN else 1}
            if event.data["dims"] is not None:
                args["Input Dims"] = event.data["dims"]
        elif event.kind == "range":
            category = "user_annotation"
            args = {"External id": event.external, "Record function id": 0, "Ev Idx": index}
        elif event.kind == "python":
            if not python:
                continue
            category = "python_function"
            args = {"Python id": index, "Python parent id": None, "Ev Idx": index}
        elif event.kind == "call":
            category = "cuda_driver" if event.name in DRIVER else "cuda_runtime"
            args = {"External id": event.external, "cbid": CBID.get(event.name, 0), "correlation": event.correlation}
        else:
            where = gpu
            category = {"kernel": "kernel", "copy": "gpu_memcpy", "set": "gpu_memset", "sync": "cuda_sync"}[event.kind]
            args = {"External id": event.external, "device": device, "context": 1, "stream": event.stream}
            args["correlation"] = event.correlation
            if event.kind == "kernel":
                grid, block = event.data["grid"], event.data["block"]
                blocks = grid[0] * grid[1] * grid[2] / 132
                warps = blocks * block[0] * block[1] * block[2] / 32
                args |= {"queued": 0, "registers per thread": 64, "shared memory": 0, "blocks per SM": blocks}
                args |= {"warps per SM": warps, "grid": list(grid), "block": list(block)}
                args |= {"est. achieved occupancy %": min(int(warps / 64 * 100), 100)}
                args |= event.data.get("collective", {})
                if event.data["graph"] is not None:
                    args["graph node id"] = event.data["graph"]
            elif event.kind == "sync":
                args = {"cuda_sync_kind": event.name, "stream": -1 if event.data["what"] == "device" else event.stream}
                args |= {"correlation": event.correlation, "device": device, "context": 1}
            else:
                args |= {"bytes": event.data["bytes"]}
                args["memory bandwidth (GB/s)"] = event.data["bytes"] / max(event.end - event.start, 1e-3) / 1e3
        written = {"ph": "X", "cat": category, "name": event.name, **where}
        written |= {"ts": round(BASE + event.start, 3), "dur": round(event.end - event.start, 3), "args": args}
        events.append(written)
        if event.kind == "call" and event.name.startswith(("cudaLaunch", "cuLaunch", "cudaMemcpy", "cudaMemset")):
            flow = {"ph": "s", "id": event.correlation, "cat": "ac2g", "name": "ac2g", **where}
            events.append({**flow, "ts": written["ts"]})
        elif event.kind in ("kernel", "copy", "set"):
            flow = {"ph": "f", "id": event.correlation, "cat": "ac2g", "name": "ac2g", "bp": "e", **where}
            events.append({**flow, "ts": written["ts"]})
    low, high = min(e.start for e in machine.events), max(e.end for e in machine.events)
    span = {"ph": "X", "cat": "Trace", "ts": BASE + low - 50, "dur": high - low + 900, "pid": "Spans"}
    events.append({**span, "tid": "PyTorch Profiler", "name": "PyTorch Profiler (0)", "args": {"Op count": 0}})
    document: dict[str, Any] = {"schemaVersion": 1}
    if properties:
        major, sms = (8, 108) if "A100" in machine.gpu else (9, 132)
        chip = {"id": device, "name": machine.gpu, "totalGlobalMem": 85_029_158_912, "computeMajor": major}
        chip |= {"computeMinor": 0, "maxThreadsPerBlock": 1024, "maxThreadsPerMultiprocessor": 2048, "numSms": sms}
        document["deviceProperties"] = [chip]
    if machine.rank is not None:
        group = {"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl", "pg_size": machine.world}
        group["ranks"] = list(range(machine.world))
        job = {"backend": "nccl", "rank": machine.rank, "world_size": machine.world, "pg_count": 1}
        document["distributedInfo"] = {**job, "pg_config": [group], "nccl_version": "2.27.3"}
    document |= {"record_shapes": 1, "with_stack": int(python), "cuda_runtime_version": 12080, "displayTimeUnit": "ms"}
    document |= {"baseTimeNanoseconds": 1_790_857_026_000_000_000, "traceName": path, "traceEvents": events}
    text = json.dumps(document)
    if path.endswith(".gz"):
        Path(path).write_bytes(gzip.compress(text.encode(), 1, mtime=0))
    else:
        Path(path).write_text(text)


def write_ranks(machines: list[Machine]) -> None:
    """Write one trace per rank, rank0.json.gz and so on."""
    for machine in machines:
        write(machine, f"rank{machine.rank}.json.gz", python=False)
