"""Simulated caching allocator that records events as PyTorch's does.

It is written for the tests from PyTorch's documentation alone: best fit in two pools, split, merge. It counts the
allocated bytes over time, which the replay has to reconstruct.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MIB = 2**20


@dataclass
class Block:
    address: int
    size: int
    segment: int
    requested: int = 0
    state: str = "inactive"


@dataclass
class CachingAllocator:
    """Allocator: its `allocated` equals `memory_allocated()`, and it keeps events while `recording`."""

    recording: bool = False
    allocated: int = 0
    peak: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    next_segment: int = 1 << 40

    def record(self, action: str, address: int, size: int, frames: tuple[Any, ...] = ()) -> None:
        if self.recording:
            made = {"action": action, "addr": address, "size": size, "stream": 0, "frames": list(frames)}
            self.events.append(made | {"time_us": 1_000_000 + len(self.events)})

    def alloc(self, requested: int, frames: tuple[Any, ...] = ()) -> int:
        size = max(512, (requested + 511) // 512 * 512)
        small = size <= MIB
        fitting = [b for b in self.blocks if b.state == "inactive" and b.size >= size and self.is_small(b) == small]
        block = min(fitting, key=lambda b: (b.size, b.address)) if fitting else self.new_segment(size, small)
        rest = block.size - size
        if rest >= 512 if small else rest > MIB:
            block.size = size
            self.blocks.append(Block(block.address + size, rest, block.segment))
        block.state, block.requested = "active_allocated", requested
        self.allocated += block.size
        if self.recording:
            self.peak = max(self.peak, self.allocated)
        self.record("alloc", block.address, requested, frames)
        return block.address

    def start(self) -> None:
        self.recording, self.peak = True, self.allocated

    def request_free(self, address: int, frames: tuple[Any, ...] = ()) -> None:
        block = self.at(address)
        block.state = "active_pending_free"
        self.allocated -= block.size
        self.record("free_requested", address, block.requested, frames)

    def complete_free(self, address: int, frames: tuple[Any, ...] = ()) -> None:
        block = self.at(address)
        self.record("free_completed", address, block.requested, frames)
        block.state, block.requested = "inactive", 0
        for other in [b for b in self.blocks if b.segment == block.segment and b.state == "inactive"]:
            if other.address + other.size == block.address:
                block.address, block.size = other.address, block.size + other.size
                self.blocks.remove(other)
            elif block.address + block.size == other.address:
                block.size += other.size
                self.blocks.remove(other)

    def free(self, address: int, frames: tuple[Any, ...] = ()) -> None:
        self.request_free(address, frames)
        self.complete_free(address, frames)

    def empty_cache(self) -> None:
        for segment in {b.segment for b in self.blocks}:
            of_segment = [b for b in self.blocks if b.segment == segment]
            if len(of_segment) == 1 and of_segment[0].state == "inactive":
                self.record("segment_free", segment, of_segment[0].size)
                self.blocks.remove(of_segment[0])

    def new_segment(self, size: int, small: bool) -> Block:
        large = 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
        block = Block(self.next_segment, 2 * MIB if small else large, self.next_segment)
        self.next_segment += 1 << 34
        self.blocks.append(block)
        self.record("segment_alloc", block.address, block.size)
        return block

    def is_small(self, block: Block) -> bool:
        return sum(b.size for b in self.blocks if b.segment == block.segment) == 2 * MIB

    def at(self, address: int) -> Block:
        return next(b for b in self.blocks if b.address == address and b.state != "inactive")

    def snapshot(self, device: int = 0) -> dict[str, Any]:
        segments = []
        for segment in sorted({b.segment for b in self.blocks}):
            blocks = sorted((b for b in self.blocks if b.segment == segment), key=lambda b: b.address)
            total = sum(b.size for b in blocks)
            segments.append(
                {
                    "device": device,
                    "address": segment,
                    "total_size": total,
                    "segment_type": "small" if total == 2 * MIB else "large",
                    "segment_pool_id": (0, 0),
                    "stream": 0,
                    "is_expandable": False,
                    "blocks": [
                        {"address": b.address, "size": b.size, "requested_size": b.requested, "state": b.state}
                        | {"frames": []}
                        for b in blocks
                    ],
                }
            )
        traces: list[list[dict[str, Any]]] = [[] for _ in range(device)] + [self.events]
        return {
            "segments": segments,
            "device_traces": traces,
            "allocator_settings": {},
            "external_annotations": [],
        }
