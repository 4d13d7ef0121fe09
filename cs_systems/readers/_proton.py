"""Reader of Triton's Proton profiles: a tree of scopes and kernels with their metrics.

Proton writes the tree as JSON that the tool Hatchet reads (`.hatchet`): a list of nodes {frame, metrics, children} and,
as the last entry, properties of the devices. With `data="trace"` it writes one Chrome trace per line and stream, in
which each kernel names its scopes; the same tree is built from it. The file is untrusted.

A node's metrics are its own; a scope's metrics are the sum over the nodes inside it. The program itself declared the
work (`flops`, `flops16`, …) and the traffic (`bytes`).

Source: `triton.profiler` and its viewer; TreeData.cpp and TraceData.cpp of Proton.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cs_systems.config import ConfigError
from cs_systems.core.formats import Unpacked
from cs_systems.core.printable import INDENT
from cs_systems.core.validation import is_number, is_whole, shown
from cs_systems.readers._paths import check_file
from cs_systems.readers.forms.scopes import ScopeKernelRow, ScopeRow, Scopes
from cs_systems.readers.proton import SUFFIXES

SCOPES = re.compile(rb'\s*\[\s*\{\s*"(children|frame|metrics)"\s*:')
SCOPES_TRACE = re.compile(rb'\s*\{\s*"displayTimeUnit"\s*:\s*"us"\s*,\s*"traceEvents"\s*:.*"call_stack"', re.DOTALL)
MOST_BYTES = 1 << 28
HIGHEST = 1e100  # limit of a valid metric, so that sums stay finite
LAUNCH_METADATA = "__proton_launch_metadata"  # scope of kernels that Proton itself launches
_TIME = re.compile(r"(?P<what>time|cpu_time) \((?P<unit>ns|us|ms|s)\)")
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_WORK = re.compile(r"flops(8|16|32|64)?")
# Metric of Proton → name here. Metrics with a unit in parentheses are matched by _TIME.
_COUNTS = {
    "count": "calls",
    "bytes": "bytes",
    "cycles": "cycles",
    "num_samples": "samples",
    "num_stalled_samples": "stalled_samples",
}
_DESCRIBING = ("device_id", "device_type", "normalized_cycles", "num_samples", "num_stalled_samples")
_REMEDY = "write it with triton.profiler: proton.start(NAME) before and proton.finalize() after the kernels"


@dataclass
class _Node:
    """Node of the tree; `own` holds its metrics under the names of ScopeRow, `device` is the device of a kernel."""

    name: str
    own: dict[str, float] = field(default_factory=dict)
    device: str | None = None
    children: list[_Node] = field(default_factory=list)


def matches(head: bytes, path: Path) -> bool:
    """Return whether a file begins like a tree of scopes or a trace with scopes, or has the suffix of one."""
    return bool(SCOPES.match(head) or SCOPES_TRACE.match(head)) or path.suffix in SUFFIXES


def read(path: Path) -> Scopes:
    """Return the profile in a file, gzipped or not.

    Raises:
        ConfigError: The file is not a profile of Proton, or holds no metric.
    """
    reader = _Reader(path)
    try:
        root, properties = reader.tree(_documents(path))
    except RecursionError:
        raise ConfigError(f"{path} is damaged: scopes are nested hundreds of levels deep; {_REMEDY}") from None
    sums = _sums(root)
    if not any(sums.values()):
        raise ConfigError(
            f"{path} holds no time, count, FLOPs or bytes of any scope; profile again, with proton.start(NAME) before "
            "and proton.finalize() after a part that launches kernels"
        )
    return Scopes(
        str(path), tuple(_described(properties)), _scope_rows(root, sums), _kernel_rows(root), tuple(reader.notes())
    )


def _documents(path: Path) -> list[Any]:
    """Return the JSON documents of a file: the tree, or a Chrome trace on each line."""
    check_file(path, "profile", SUFFIXES)
    if path.suffix == ".hatchet_msgpack":
        raise ConfigError(f'{path} is in MessagePack; write JSON, with proton.finalize(output_format="hatchet")')
    number = 1  # number of the line on which a document begins
    try:
        with closing(Unpacked(path)) as file:
            raw = file.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise ConfigError(
                f"{path} has over {MOST_BYTES >> 20} MiB, too much for a profile of Proton; profile fewer steps"
            )
        text = raw.decode("utf-8")
        if not SCOPES_TRACE.match(raw):
            return [json.loads(text)]
        documents = []
        for line in text.splitlines():
            if line.strip():
                documents.append(json.loads(line))
            number += 1
        return documents
    except ConfigError:
        raise
    except (EOFError, zlib.error, gzip.BadGzipFile, ValueError) as error:
        where = ""
        if isinstance(error, json.JSONDecodeError):
            where = f" at line {number + error.lineno - 1}, column {error.colno}"
        raise ConfigError(
            f"{path} is truncated or damaged{where}; copy it again, or profile again and let proton.finalize() finish"
        ) from None


class _Reader:
    """Builder of the tree; it counts the entries that it leaves out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0
        self.first_damaged = ""
        self.metadata = 0
        self.others: dict[str, None] = {}  # metrics without a column

    def notes(self) -> Iterator[str]:
        if self.metadata:
            yield f"{self.metadata} kernels that computed the launches' metadata are left out"
        if self.damaged:
            yield f"{self.damaged} metrics are not valid numbers and are left out; the first is {self.first_damaged}"
        if self.others:
            names = [*self.others]
            listed = ", ".join(names[:8]) + (" …" if names[8:] else "")
            yield f"not shown: the file's metrics {listed}"

    def tree(self, documents: Sequence[Any]) -> tuple[_Node, Mapping[str, Any]]:
        """Return the root and the properties of the devices."""
        (first, *_) = documents
        if isinstance(first, list):
            nodes = [one for one in first if isinstance(one, dict) and "frame" in one]
            properties = [one for one in first if isinstance(one, dict) and "frame" not in one]
            root = _Node("ROOT")
            self._fill(root, {"children": nodes})
            while len(root.children) == 1 and root.children[0].name == "ROOT" and not root.own:
                (root,) = root.children
            return root, properties[-1] if properties else {}
        root = _Node("ROOT")
        known: dict[tuple[int, str], _Node] = {}
        for document in documents:
            for event in _list(document, "traceEvents"):
                self._add_kernel(root, known, event)
        return root, {}

    def _fill(self, node: _Node, source: Mapping[str, Any]) -> None:
        """Fill in a new, empty node from its JSON."""
        left: list[tuple[_Node, Mapping[str, Any]]] = [(node, source)]
        while left:
            parent, of = left.pop()
            for child in _list(of, "children"):
                if not isinstance(child, dict) or not isinstance(frame := child.get("frame"), dict):
                    lack = "has no 'frame'" if isinstance(child, dict) else f"is {shown(child)}, not an object"
                    raise ConfigError(
                        f"{self.path} is not a profile of Proton: an entry under 'children' {lack}; {_REMEDY}"
                    )
                made = _Node(str(frame.get("name", "?")))
                if made.name == LAUNCH_METADATA:
                    self.metadata += self._kernels_in(child)
                    continue
                metrics = child.get("metrics")
                self._take(made, metrics if isinstance(metrics, dict) else {})
                parent.children.append(made)
                left.append((made, child))

    def _kernels_in(self, source: Mapping[str, Any]) -> int:
        """Return the number of launches inside a node."""
        count, left = 0, [source]
        while left:
            one = left.pop()
            metrics = one.get("metrics")
            calls = metrics.get("count") if isinstance(metrics, dict) else None
            count += calls if is_whole(calls) and 0 <= calls < HIGHEST else 0
            left += [child for child in _list(one, "children") if isinstance(child, dict)]
        return count

    def _add_kernel(self, root: _Node, known: dict[tuple[int, str], _Node], event: Any) -> None:
        """Add a kernel of a Chrome trace under its scopes."""
        if not isinstance(event, dict) or event.get("ph") != "X" or event.get("cat") != "kernel":
            return
        stack = [str(name) for name in _list(event.get("args"), "call_stack") if name != "ROOT"]
        node = root
        for name in stack or [str(event.get("name", "?"))]:
            child = known.get((id(node), name))
            if child is None:
                child = known[id(node), name] = _Node(name)
                node.children.append(child)
            node = child
        node.device = "GPU"
        self._take(node, {"time (us)": event.get("dur"), "count": 1})

    def _take(self, node: _Node, metrics: Mapping[str, Any]) -> None:
        kind, number = metrics.get("device_type"), metrics.get("device_id")
        if number is not None:
            node.device = f"{kind or 'GPU'} {number}"
        for name, value in metrics.items():
            known, factor = _column(name)
            if known is None:
                if name.lower() not in _DESCRIBING:
                    self.others.setdefault(name)
            elif is_number(value) and 0 <= value < HIGHEST:
                node.own[known] = node.own.get(known, 0) + value * factor
            else:
                self.damaged += 1
                self.first_damaged = self.first_damaged or f"{name} {shown(value)} of {node.name!r}"


def _column(metric: str) -> tuple[str | None, float]:
    """Return the column of one of Proton's metrics and the factor to base units; (None, 1) for any other."""
    name = metric.lower()
    if timed := _TIME.fullmatch(name):
        return ("time_s" if timed["what"] == "time" else "cpu_s"), _UNITS_S[timed["unit"]]
    return ("flops" if _WORK.fullmatch(name) else _COUNTS.get(name)), 1


def _list(source: Any, name: str) -> list[Any]:
    value = source.get(name) if isinstance(source, dict) else None
    return value if isinstance(value, list) else []


def _walk(root: _Node) -> Iterator[tuple[int, _Node]]:
    """Yield (depth, node) for all nodes but the root, a scope before the nodes inside it; depths begin at 1."""
    left = [(1, child) for child in reversed(root.children)]
    while left:
        depth, node = left.pop()
        yield depth, node
        left += [(depth + 1, child) for child in reversed(node.children)]


def _sums(root: _Node) -> dict[int, dict[str, float]]:
    """Return each node's metrics summed over the nodes inside it, by the node's id.

    Host time is not summed, because a scope's own host time already includes the scopes inside it.
    """
    sums: dict[int, dict[str, float]] = {}
    for node in reversed([root, *(node for _, node in _walk(root))]):
        total: dict[str, float] = defaultdict(float, node.own)
        for child in node.children:
            for name, value in sums[id(child)].items():
                if name != "cpu_s":
                    total[name] += value
        sums[id(node)] = dict(total)
    return sums


def _scope_rows(root: _Node, sums: Mapping[int, Mapping[str, float]]) -> list[ScopeRow]:
    """Return one row for each node, in each scope the longest first."""
    whole = sums[id(root)].get("time_s")
    for node in (root, *(node for _, node in _walk(root))):
        node.children.sort(key=lambda child: -sums[id(child)].get("time_s", 0.0))
    rows: list[ScopeRow] = []
    path: list[str] = []
    for depth, node in _walk(root):
        path[depth - 1 :] = [node.name]
        total = sums[id(node)]
        time_s = total.get("time_s")
        rows.append(
            {
                "scope": INDENT * (depth - 1) + node.name,
                "path": " / ".join(path),
                "device": node.device,
                "calls": _whole(total.get("calls")),
                "time_s": time_s,
                "self_s": None if time_s is None else node.own.get("time_s", 0.0),
                "share": _ratio(time_s, whole),
                "cpu_s": total.get("cpu_s"),
                "flops": total.get("flops"),
                "flops_per_s": _ratio(total.get("flops"), time_s),
                "bytes": total.get("bytes"),
                "bytes_per_s": _ratio(total.get("bytes"), time_s),
                "cycles": _whole(total.get("cycles")),
                "samples": _whole(total.get("samples")),
                "stalled_share": _ratio(total.get("stalled_samples"), total.get("samples")),
            }
        )
    return rows


def _kernel_rows(root: _Node) -> list[ScopeKernelRow]:
    """Return one row for each kernel and device, summed over all scopes, the longest first."""
    sums: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for _, node in _walk(root):
        if node.device is not None:
            for name, value in node.own.items():
                sums[node.name, node.device][name] += value
    whole = sum(total.get("time_s", 0.0) for total in sums.values())
    rows: list[ScopeKernelRow] = [
        {
            "kernel": kernel,
            "device": device,
            "calls": _whole(total.get("calls")),
            "time_s": time_s,
            "mean_s": _ratio(time_s, total.get("calls")),
            "share": _ratio(time_s, whole),
            "flops_per_s": _ratio(total.get("flops"), time_s),
            "bytes_per_s": _ratio(total.get("bytes"), time_s),
        }
        for (kernel, device), total in sums.items()
        for time_s in [total.get("time_s")]
    ]
    return sorted(rows, key=lambda row: -(row["time_s"] or 0.0))


def _ratio(value: float | None, by: float | None) -> float | None:
    return None if value is None or not by else value / by


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _described(properties: Mapping[str, Any]) -> Iterable[str]:
    """Yield a description of each device."""
    for kind, devices in properties.items():
        for number, one in devices.items() if isinstance(devices, dict) else ():
            of = one if isinstance(one, dict) else {}
            clock = of.get("clock_rate")  # in kHz
            parts = [
                f"architecture {of['arch']}" if "arch" in of else "",
                f"{of['num_sms']} multiprocessors" if "num_sms" in of else "",
                f"{clock / 1e6:.3g} GHz" if is_number(clock) and 0 < clock < HIGHEST else "",
            ]
            yield f"{kind} {number}" + (f" ({', '.join(filter(None, parts))})" if any(parts) else "")
