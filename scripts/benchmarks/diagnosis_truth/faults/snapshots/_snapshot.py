"""A caching allocator as PyTorch's, and the snapshot that torch.cuda.memory._dump_snapshot would write of it.

Requests are rounded to 512 bytes. Those up to 1 MB come from segments of 2 MB, those up to 10 MB from segments of 20 MB,
larger ones from a segment of their own size, rounded to 2 MB. The smallest free block that fits is taken and split.
Neighbours merge when they are freed. If the device is full, cached segments are given back; then a request fails.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

MB, GB = 1 << 20, 1 << 30
Block = dict[str, Any]


def frames(*places: str) -> list[dict[str, Any]]:
    """Return a stack, innermost first, of places such as "train.py:12:forward"."""
    stack = []
    for place in places:
        filename, line, name = place.rsplit(":", 2)
        stack.append({"filename": filename, "line": int(line), "name": name})
    return stack


class OutOfMemory(Exception):
    """The device has no room for a request."""


class Allocator:
    """Segments with their blocks, and the history of events."""

    def __init__(self, capacity: int = 80 * GB, settings: dict[str, Any] | None = None) -> None:
        self.capacity, self.reserved, self.time, self.next = capacity, 0, 1_795_172_400_000_000, 0x7F0000000000
        self.segments: list[Block] = []
        self.history: list[Block] = []
        self.recording = True
        self.settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "expandable_segments": False}
        self.settings |= settings or {}

    def event(self, action: str, address: int, size: int, stack: list, us: int = 3) -> None:
        self.time += us
        if self.recording:
            entry = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": self.time}
            self.history.append({**entry, "compile_context": "N/A", "user_metadata": "", "frames": stack})

    def free_segments(self) -> None:
        """Give cached segments back to the device, as torch.cuda.empty_cache() does."""
        for segment in list(self.segments):
            if len(segment["blocks"]) == 1 and segment["blocks"][0]["state"] == "inactive":
                self.segments.remove(segment)
                self.reserved -= segment["total_size"]
                self.event("segment_free", segment["address"], segment["total_size"], [])

    def alloc(self, size: float, *stack: str) -> Block:
        """Allocate, or record the failure and raise OutOfMemory."""
        requested, where = int(size), frames(*stack)
        rounded = max((requested + 511) // 512 * 512, 512)
        small = rounded <= MB
        kind = "small" if small else "large"
        fits = [
            (block["size"], segment["address"], block["address"], segment, block)
            for segment in self.segments
            if segment["segment_type"] == kind
            for block in segment["blocks"]
            if block["state"] == "inactive" and block["size"] >= rounded
        ]
        if fits:
            *_, segment, block = min(fits, key=lambda f: f[:3])
        else:
            total = 2 * MB if small else 20 * MB if rounded < 10 * MB else (rounded + 2 * MB - 1) // (2 * MB) * 2 * MB
            if self.reserved + total > self.capacity:
                self.free_segments()
            if self.reserved + total > self.capacity:
                self.event("oom", 0, rounded, where)
                if self.recording:
                    self.history[-1]["device_free"] = self.capacity - self.reserved
                    del self.history[-1]["addr"]
                raise OutOfMemory
            segment = {"device": 0, "address": self.next, "total_size": total, "stream": 0, "segment_type": kind}
            segment |= {"segment_pool_id": (0, 0), "is_expandable": False, "frames": where if self.recording else []}
            block = {"address": self.next, "size": total, "requested_size": 0, "state": "inactive", "frames": []}
            segment["blocks"] = [block]
            self.segments.append(segment)
            self.next += total + 2 * MB
            self.reserved += total
            self.event("segment_alloc", segment["address"], total, where)
        rest = block["size"] - rounded
        if rest >= (512 if small else MB + 1):
            tail = {"address": block["address"] + rounded, "size": rest, "requested_size": 0, "state": "inactive"}
            segment["blocks"].insert(segment["blocks"].index(block) + 1, {**tail, "frames": []})
            block["size"] = rounded
        block.update(state="active_allocated", requested_size=requested, frames=where if self.recording else [])
        self.event("alloc", block["address"], block["size"], where)
        return block

    def free(self, block: Block, *stack: str) -> None:
        """Free a block and merge it with free neighbours."""
        where = frames(*stack)
        self.event("free_requested", block["address"], block["size"], where)
        self.event("free_completed", block["address"], block["size"], where, 1)
        segment = next(s for s in self.segments if any(b is block for b in s["blocks"]))
        blocks = segment["blocks"]
        block.update(state="inactive", frames=[], requested_size=0)
        index = next(i for i, b in enumerate(blocks) if b is block)
        if index + 1 < len(blocks) and blocks[index + 1]["state"] == "inactive":
            block["size"] += blocks.pop(index + 1)["size"]
        if index and blocks[index - 1]["state"] == "inactive":
            blocks[index - 1]["size"] += block["size"]
            del blocks[index]

    def dump(self, path: str) -> None:
        """Write the snapshot."""
        segments = []
        for segment in self.segments:
            used = [b for b in segment["blocks"] if b["state"] == "active_allocated"]
            sizes = {"allocated_size": sum(b["size"] for b in used), "active_size": sum(b["size"] for b in used)}
            sizes["requested_size"] = sum(b["requested_size"] for b in used)
            segments.append({**segment, **sizes})
        content = {"segments": segments, "device_traces": [self.history], "allocator_settings": self.settings}
        Path(path).write_bytes(pickle.dumps({**content, "external_annotations": []}))


LIB = "site-packages/torch/"
CALL = (LIB + "nn/modules/module.py:1790:_call_impl", LIB + "nn/modules/module.py:1779:_wrapped_call_impl")


class Training:
    """Allocations of a transformer's training: parameters, activations, gradients, optimizer state."""

    def __init__(
        self,
        allocator: Allocator,
        *,
        layers: int = 16,
        d: int = 2048,
        tokens: int = 8192,
        vocabulary: int = 32000,
        weight: int = 4,
        activation: int = 2,
        script: str = "train.py",
        scores: tuple[int, int] | None = None,
        checkpointing: bool = False,
    ) -> None:
        self.a, self.layers, self.d, self.tokens, self.vocabulary = allocator, layers, d, tokens, vocabulary
        self.weight, self.activation, self.script, self.scores = weight, activation, script, scores
        self.checkpointing = checkpointing
        self.state: list[Block] = []
        self.gradients: list[Block] = []
        self.saved: list[list[Block]] = []
        self.output: list[Block] = []
        self.shapes = [vocabulary * d] + [s for _ in range(layers) for s in (3 * d * d, d * d, 4 * d * d, 4 * d * d)]
        self.shapes.append(vocabulary * d)
        to = LIB + "nn/modules/module.py:1355:convert"
        place = f"{script}:20:main"
        self.weights = [
            allocator.alloc(n * weight, to, LIB + "nn/modules/module.py:1371:to", place) for n in self.shapes
        ]

    def _saved(self, size: float, module: str, line: int, *inner: str) -> Block:
        outer = (*CALL, f"{self.script}:{line}:forward", *CALL, f"{self.script}:77:step")
        return self.a.alloc(size, *inner, LIB + module, *outer)

    def layer(self, line: int = 31) -> list[Block]:
        """Allocate the tensors that one layer saves for backward."""
        unit = self.tokens * self.d * self.activation
        linear = "nn/modules/linear.py:134:forward"
        saved = [self._saved(unit, "nn/modules/normalization.py:229:forward", line)]
        saved.append(self._saved(3 * unit, linear, line + 1))
        if self.scores:
            heads, length = self.scores
            size = self.tokens * length * heads * self.activation
            for number, name in ((41, "attention"), (43, "attention"), (44, "attention")):
                outer = (f"{self.script}:{line}:forward", *CALL, f"{self.script}:77:step")
                inner = () if number == 41 else (LIB + "nn/functional.py:2140:softmax",) if number == 44 else ()
                saved.append(self.a.alloc(size, *inner, f"{self.script}:{number}:{name}", *outer))
        saved.append(self._saved(unit, linear, line + 3))
        saved.append(self._saved(unit, "nn/modules/normalization.py:229:forward", line + 4))
        saved.append(self._saved(4 * unit, linear, line + 5))
        saved.append(self._saved(4 * unit, "nn/modules/activation.py:816:forward", line + 6))
        saved.append(self._saved(unit, linear, line + 7))
        return saved

    def forward(self) -> None:
        """Run forward and loss."""
        self.saved, self.output = [], []
        unit = self.tokens * self.d * self.activation
        for _ in range(self.layers):
            if self.checkpointing:
                self.saved.append([self._saved(unit, "utils/checkpoint.py:496:checkpoint", 30)])
                inner = self.layer()
                for block in reversed(inner):
                    self.a.free(block)
                continue
            self.saved.append(self.layer())
        logits = self._saved(self.tokens * self.vocabulary * self.activation, "nn/modules/linear.py:134:forward", 60)
        outer = (LIB + "nn/functional.py:3500:cross_entropy", f"{self.script}:79:step")
        log = self.a.alloc(self.tokens * self.vocabulary * 4, *outer)
        self.output = [logits, log]

    def backward(self) -> None:
        """Run backward in autograd's thread, which has no Python frames."""
        keep = bool(self.gradients)
        created: list[Block] = []

        def gradient(index: int) -> None:
            block = self.a.alloc(self.shapes[index] * self.weight)
            if keep:
                self.a.free(block)  # added to the gradient that exists
            else:
                created.append(block)

        grad = self.a.alloc(self.tokens * self.vocabulary * 4)
        for block in self.output:
            self.a.free(block)
        gradient(len(self.shapes) - 1)
        flowing = self.a.alloc(self.tokens * self.d * self.activation)
        self.a.free(grad)
        for layer in reversed(range(self.layers)):
            blocks = self.saved.pop()
            if self.checkpointing:
                blocks = [*blocks, *self.layer()]
            for index in (3, 2, 1, 0):
                temporary = self.a.alloc(4 * self.tokens * self.d * self.activation)
                gradient(1 + 4 * layer + index)
                self.a.free(temporary)
            for block in reversed(blocks):
                self.a.free(block)
        gradient(0)
        self.a.free(flowing)
        self.gradients = self.gradients or created

    def optimizer(self, state: float = 2) -> None:
        """Update; the first call creates the state."""
        if not self.state and state:
            place = (LIB + "optim/adamw.py:152:_init_group", LIB + "optim/adamw.py:220:step", f"{self.script}:81:step")
            for _ in range(int(state)):
                self.state += [self.a.alloc(n * 4, *place) for n in self.shapes]

    def zero_grad(self) -> None:
        """Free the gradients."""
        for block in self.gradients:
            self.a.free(block, LIB + "optim/optimizer.py:1020:zero_grad", f"{self.script}:82:step")
        self.gradients = []

    def step(self, state: float = 2) -> None:
        """Run a whole step."""
        self.forward()
        self.backward()
        self.optimizer(state)
        self.zero_grad()
