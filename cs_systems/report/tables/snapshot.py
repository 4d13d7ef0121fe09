"""Tables of a memory snapshot: the columns to show, with their headings and captions."""

from __future__ import annotations

# table → its columns for a person, with their headings; CSV has all columns, under their own names.
SHOWN = {
    "composition": {
        "category": "category", "phase": "allocated in", "allocations": "count", "bytes": "memory",
        "share": "share of peak",
    },
    "layers": {"layer": "layer", "allocations": "count", "bytes": "memory", "share": "share of activations"},
    "top": {
        "bytes": "size", "allocations": "count", "total_bytes": "total", "category": "category", "layers": "layers",
        "described": "tensor; source line",
    },
    "timeline": {
        "phase": "phase", "start_s": "start", "duration_s": "duration", "events": "events", "before_bytes": "before",
        "peak_bytes": "maximum", "after_bytes": "after", "is_peak": "peak",
    },
    "annotations": {
        "annotation": "name", "kind": "kind", "occurrences": "times", "allocations": "count",
        "at_peak_bytes": "at peak", "highest_bytes": "maximum", "change_bytes": "change",
    },
    "out_of_memory": {
        "event": "event", "requested_bytes": "requested", "device_free_bytes": "free", "reserved_bytes": "reserved",
        "allocated_bytes": "allocated", "cached_bytes": "cached", "largest_free_bytes": "largest",
        "free_pieces": "pieces",
    },
    "fragmentation": {
        "pool": "pool", "segments": "segments", "reserved_bytes": "reserved", "allocated_bytes": "allocated",
        "free_segments_bytes": "free segments", "inactive_split_bytes": "inactive", "inactive_splits": "splits",
        "largest_split_bytes": "largest",
    },
    "segments": {
        "address": "segment", "pool": "pool", "reserved_bytes": "reserved", "allocated_bytes": "allocated",
        "inactive_split_bytes": "inactive", "inactive_splits": "splits", "largest_split_bytes": "largest",
    },
    "alive": {
        "bytes": "size", "allocations": "count", "total_bytes": "total", "category": "category", "layers": "layers",
        "described": "tensor; source line",
    },
}  # fmt: skip
CAPTIONS = {
    "composition": "memory at the peak, by category",
    "layers": "activations at the peak, by layer",
    "top": "largest allocations at the peak",
    "timeline": "allocated memory by phase",
    "annotations": "memory by the program's own names",
    "out_of_memory": "requests that failed",
    "fragmentation": "reserved but unallocated memory at the end, by pool",
    "segments": "segments at the end, most fragmented first",
    "alive": "still allocated at the end",
}
AT_PEAK, AT_END = "at the peak", "at the end"  # without events, only the memory at the end is known


def caption(name: str, *, has_events: bool) -> str:
    """Return the caption of a table."""
    return CAPTIONS[name] if has_events else CAPTIONS[name].replace(AT_PEAK, AT_END)


def shown(name: str, *, has_events: bool) -> dict[str, str]:
    """Return the columns of a table to show, with their headings."""
    return SHOWN[name] if has_events else {c: "share" if t == "share of peak" else t for c, t in SHOWN[name].items()}


LONG = ("top", "timeline", "annotations", "out_of_memory", "segments", "alive")  # cut to --top rows
OPTIONAL = ("annotations", "out_of_memory")  # left out where they are empty, unless --table names them
# Columns that a narrow terminal may drop, in this order.
LEAVES = ("inactive_splits", "largest_split_bytes", "duration_s", "events", "free_segments_bytes")
DEVICES = {
    "device": "device", "events": "events", "peak_bytes": "peak", "peak_time_s": "peak at", "end_bytes": "at the end",
    "reserved_bytes": "reserved", "highest_reserved_bytes": "highest", "out_of_memory": "failed",
}  # fmt: skip
DIFFERENT = {"category": "category", "layer": "layer", "site": "source line"}
FILES = {
    "file": "file", "device": "device", "events": "events", "peak_bytes": "peak", "reserved_bytes": "reserved",
    "category": "largest", "category_share": "its share", "out_of_memory": "OOM",
}  # fmt: skip
SUFFIXES = (".pickle", ".pickle.gz", ".pkl", ".pkl.gz", ".pickle.json", ".pickle.gz.json", ".pkl.json")  # and sidecars
FILES_CAPTION = "peaks of the snapshots"
