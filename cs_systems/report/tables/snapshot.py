"""Tables of a memory snapshot: the columns to show, with their headings and captions. Data."""

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
    "fragmentation": "reserved but unallocated memory at the end, by pool",
    "segments": "segments at the end, most fragmented first",
    "alive": "still allocated at the end",
}
LONG = ("top", "timeline", "segments", "alive")  # cut to --top rows
DIFFERENT = {"category": "category", "layer": "layer", "site": "source line"}
