"""Generated traces and snapshots with a given number of steps and of blocks in each step."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np

from cs_systems.readers.forms.columns import UNKNOWN, Categorical, Range, Ranges
from cs_systems.readers.forms.trace import NO_KERNELS, Call, Calls, Copies, Copy, Function, Kernels, Op, Ops, Trace
from tests.analysis.attribution.work import counted

MAIN, AUTOGRAD = 1, 2
STEP_S = 1.0
MIB = 2**20


def trace(steps: int, blocks: int, kernels: bool = True, communicates: bool = True) -> Trace:
    """Return two devices' steps.

    A block has its own ranges and kernels in forward and in backward, a collective, a copy, a call that waits, an
    overhead, and an operator with its backward. Without kernels gloo's ranges communicate.
    """
    third = "ncclDevKernel_AllReduce" if communicates else "triton_poi_fused_add"
    ranges: list[Range] = []
    ran: list[tuple[Function, float, float, int, int, int, float, float, bool, int]] = []
    copies, calls, overheads, ops = [], [], [], []
    sequence = count(1)
    for step in range(steps):
        began, each = step * STEP_S, 0.4 * STEP_S / blocks
        ranges.append(Range("step", began, began + 0.99 * STEP_S, MAIN))
        ranges.append(Range("forward", began, began + 0.4 * STEP_S, MAIN))
        ranges.append(Range("backward", began + 0.4 * STEP_S, began + 0.8 * STEP_S, MAIN))
        ranges.append(Range("optimizer", began + 0.8 * STEP_S, began + 0.9 * STEP_S, MAIN))
        for block in range(blocks):
            at, number = began + block * each, next(sequence)
            ranges.append(Range(f"block {block}", at, at + 0.9 * each, MAIN))
            ranges.append(Range("attention", at, at + 0.5 * each, MAIN))
            ranges.append(Range("gloo:all_reduce", at + 0.4, at + 0.4 + 0.5 * each, AUTOGRAD))
            ops.append(Op("aten::mm", at, at + 0.1 * each, MAIN, number, 0))
            ops.append(Op("MmBackward0", at + 0.4, at + 0.4 + 0.1 * each, AUTOGRAD, number, MAIN))
            calls.append(Call("cudaStreamSynchronize", at + 0.6 * each, at + 0.7 * each, MAIN))
            overheads.append((at + 0.7 * each, at + 0.75 * each))
            for device in (0, 1):
                copies.append(Copy("memcpy", at + 0.8 * each, at + 0.9 * each, device, 7, 64))
                for name, stream, thread, later in (
                    (f"softmax_{block}", 7, MAIN, 0.0),
                    (f"gemm_{block}", 7, AUTOGRAD, 0.4),
                    (third, 8, AUTOGRAD, 0.4),
                ):
                    launch = at + later + 0.01 * each
                    function = Function(name, (1, 1, 1), (32, 1, 1), 32, 0)
                    runs = launch + 0.1 * each, launch + 0.4 * each
                    ran.append((function, *runs, device, stream, thread, launch, launch + 0.01 * each, False, UNKNOWN))
    ran.sort(key=lambda one: one[1])
    return Trace(
        source="made",
        profiler="kineto",
        devices={0: "H200", 1: "H200"},
        kernels=_columns(Kernels, ran) if kernels else NO_KERNELS,
        copies=Copies.of(copies if kernels else []),
        calls=Calls.of(sorted(calls, key=lambda call: call.start_s)),
        ranges=_columns(Ranges, ranges),
        overheads=overheads,
        ops=_columns(Ops, ops) if kernels else None,
        limitations=(),
    )


def _columns(kind: type[Any], rows: list[Any]) -> Any:
    first, *rest = zip(*rows, strict=True)
    named = Categorical.of(first)
    return kind(Categorical(named.values, counted(named.codes)), *(counted(np.array(column)) for column in rest))


def snapshot(steps: int, blocks: int) -> dict[str, Any]:
    """Return a snapshot in which each block has a parameter, an activation and a gradient.

    Each has its own segment and line of code. A temporary has a segment that is allocated and freed, and one request
    fails.
    """
    events: list[dict[str, Any]] = []
    marks: list[dict[str, Any]] = []

    def event(action: str, address: int, line: int, function: str) -> None:
        frames = [{"filename": "train.py", "line": line, "name": function}]
        made = {"action": action, "addr": address, "size": 2 * MIB, "stream": 0, "frames": frames}
        events.append(made | {"time_us": 10 * len(events)})

    def mark(stage: str, name: str) -> None:
        marks.append({"stage": stage, "name": name, "time_us": 10 * len(events) - 5, "device": 0})

    def address(kind: int, block: int) -> int:
        return (kind << 44) + (block << 24)

    for _ in range(steps):
        mark("START", "forward")
        for block in range(blocks):
            mark("START", f"block {block}")
            event("alloc", address(2, block), block, "forward")
            event("segment_alloc", address(4, block), block, "forward")
            event("alloc", address(4, block), block, "forward")
            event("free_requested", address(4, block), block, "forward")
            event("free_completed", address(4, block), block, "forward")
            event("segment_free", address(4, block), block, "forward")
            mark("END", f"block {block}")
        event("oom", 0, 1, "forward")
        mark("END", "forward")
        mark("START", "backward")
        for block in reversed(range(blocks)):
            event("alloc", address(3, block), block, "backward")
            event("free_requested", address(2, block), block, "backward")
            event("free_completed", address(2, block), block, "backward")
        mark("END", "backward")
        for block in range(blocks):
            event("free_requested", address(3, block), 2, "zero_grad")
            event("free_completed", address(3, block), 2, "zero_grad")
    segments = [_segment(address(kind, block), used=kind == 1) for kind in (1, 2, 3) for block in range(blocks)]
    return {
        "segments": segments,
        "device_traces": [events],
        "allocator_settings": {},
        "external_annotations": marks,
    }


def _segment(address: int, used: bool) -> dict[str, Any]:
    """Return a segment of one block."""
    place = {"address": address, "frames": [], "requested_size": 2 * MIB, "size": 2 * MIB}
    return {
        "device": 0,
        "address": address,
        "total_size": 2 * MIB,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "stream": 0,
        "is_expandable": False,
        "blocks": [place | {"state": "active_allocated" if used else "inactive"}],
    }
