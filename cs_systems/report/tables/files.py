"""Tables of several files and of the ranks of a job: the columns to show, with their headings and captions. Data."""

from __future__ import annotations

FILES = {
    "file": "file", "format": "format", "rank": "rank", "duration_s": "duration", "kernels": "kernels",
    "steps": "steps",
}  # fmt: skip
HOLDS = {"file": "file", "device": "device", "cell": "cell", "holds": "tables with data"}
FILES_CAPTION, HOLDS_CAPTION = "files", "contents of the files"
SHOWN = {
    "ranks": {
        "rank": "rank", "step_s": "step", "busy_share": "busy", "compute_s": "compute",
        "communication_s": "comm.", "exposed_s": "exposed", "waiting_s": "waiting", "late_s": "late",
        "last_share": "last",
    },
    "collectives": {
        "collective": "collective", "ranks": "ranks", "size_bytes": "size", "calls_per_step": "calls",
        "waiting_s": "waiting", "transfer_s": "transfer", "algbw_bytes_per_s": "algbw", "busbw_bytes_per_s": "busbw",
    },
    "beside": {
        "collective": "collective", "size_bytes": "size", "group": "group", "time_s": "time", "hidden_share": "hidden",
        "beside": "beside",
    },
}  # fmt: skip
CAPTIONS = {
    "ranks": "ranks, per step",
    "collectives": "collectives across the ranks, mean of one call",
    "beside": "computation beside the collectives, mean of one call on one rank",
}
NOTES = {
    "ranks": [
        "compute: kernels other than collectives, and copies; waiting: for the last rank to arrive; late: behind the "
        "first rank, mean of a collective; last: share of the collectives in which the rank arrived last",
    ],
    "collectives": ["transfer: from the arrival of the last rank; the bandwidths are those of the transfer"],
    "beside": ["hidden: share of the time in which the rank also computed; beside: what it computed the longest"],
}
LONG = {"collectives": 20, "beside": 20}
