"""Tables of a profile by module: the columns to show, with their headings and captions. Data."""

from __future__ import annotations

_TIMES = {"forward_s": "forward", "backward_s": "backward", "time_s": "time", "share": "share of time"}
_WORK = {"flops": "work", "achieved_flops_per_s": "rate", "ceiling_share": "of ceiling"}
# table → its columns for a person, with their headings; CSV has all columns, under their own names.
SHOWN = {
    "tree": {
        "module": "module", "class": "class", "modules": "number", "part": "part", "parameters": "parameters",
        **_TIMES, **_WORK, "kept_bytes": "kept",
    },
    "blocks": {"block": "block", "class": "class", "parameters": "parameters", **_TIMES, **_WORK, "kept_bytes": "kept"},
    "classes": {"class": "class", "modules": "number", **_TIMES, **_WORK},
    "modules": {
        "path": "module", "class": "class", "part": "part", "parameters": "parameters", **_TIMES, **_WORK,
        "kept_bytes": "kept",
    },
}  # fmt: skip
CAPTIONS = {
    "tree": "module tree, the blocks of a list summed, per step",
    "blocks": "blocks, per step",
    "classes": "classes of modules by their own time, per step",
    "modules": "modules, per step",
}
LONG = {"modules": 10}  # tables cut to --top rows, with the number by default
