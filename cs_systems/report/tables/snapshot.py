"""Tables of a memory snapshot that are shown, with their columns and headings. Data."""

from __future__ import annotations

# table → its columns for a person, with their headings; CSV has all columns, under their own names.
SHOWN = {
    "composition": {
        "category": "what", "phase": "made in", "allocations": "count", "bytes": "memory", "share": "of the peak",
    },
    "layers": {"layer": "layer", "allocations": "count", "bytes": "memory", "share": "of activations"},
    "top": {
        "bytes": "each", "allocations": "count", "total_bytes": "together", "category": "what", "layers": "layers",
        "described": "tensor; where",
    },
    "timeline": {
        "phase": "phase", "start_s": "from", "duration_s": "for", "events": "events", "before_bytes": "before",
        "peak_bytes": "at most", "after_bytes": "after", "is_peak": "peak",
    },
    "fragmentation": {
        "pool": "pool", "segments": "segments", "reserved_bytes": "reserved", "allocated_bytes": "allocated",
        "free_segments_bytes": "empty", "inactive_split_bytes": "inactive splits", "inactive_splits": "count",
        "largest_split_bytes": "largest",
    },
    "segments": {
        "address": "segment", "pool": "pool", "reserved_bytes": "reserved", "allocated_bytes": "allocated",
        "inactive_split_bytes": "inactive splits", "inactive_splits": "count", "largest_split_bytes": "largest",
    },
    "alive": {
        "bytes": "each", "allocations": "count", "total_bytes": "together", "category": "what", "layers": "layers",
        "described": "tensor; where",
    },
}  # fmt: skip
CAPTIONS = {
    "composition": "what the peak consists of",
    "layers": "activations at the peak, by layer",
    "top": "largest allocations at the peak",
    "timeline": "allocated over the phases",
    "fragmentation": "reserved and not allocated at the end, by pool",
    "segments": "segments at the end, the most fragmented first",
    "alive": "still allocated at the end",
}
LONG = ("top", "timeline", "segments", "alive")  # cut to --top rows
DIFFERENT = {"category": "what", "layer": "layer", "site": "line of code"}
