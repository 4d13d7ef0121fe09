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
AT_PEAK, AT_HIGHEST, AT_END = "at the peak", "where the history is highest", "at the end"


def moment(*, has_peak: bool, has_events: bool) -> str:
    """Return when the memory was as the tables show it; without events, only the memory at the end is known."""
    return AT_PEAK if has_peak else AT_HIGHEST if has_events else AT_END


def caption(name: str, when: str) -> str:
    """Return the caption of a table of that moment."""
    return CAPTIONS[name].replace(AT_PEAK, when)


def shown(name: str, when: str) -> dict[str, str]:
    """Return the columns of a table of that moment to show, with their headings."""
    titles = {} if when == AT_PEAK else {"share of peak": "share", "at peak": "then"}
    return {column: titles.get(title, title) for column, title in SHOWN[name].items()}


LONG = ("top", "timeline", "annotations", "out_of_memory", "segments", "alive")  # cut to --top rows
OPTIONAL = ("annotations", "out_of_memory")  # left out where they are empty, unless --table names them
# Columns that a narrow terminal may drop, in this order.
LEAVES = ("inactive_splits", "largest_split_bytes", "duration_s", "events", "free_segments_bytes")
DEVICES = {
    "device": "device", "events": "events", "peak_bytes": "peak", "peak_time_s": "peak at",
    "peak_reserved_bytes": "reserved then", "end_bytes": "at the end", "reserved_bytes": "reserved",
    "highest_reserved_bytes": "highest reserved", "out_of_memory": "failed",
}  # fmt: skip
DIFFERENT = {"category": "category", "layer": "layer", "site": "source line"}
FILES = {
    "file": "file", "device": "device", "events": "events", "peak_bytes": "peak", "reserved_bytes": "reserved then",
    "category": "largest", "category_share": "its share", "out_of_memory": "OOM",
}  # fmt: skip
FILES_CAPTION = "peaks of the snapshots"
