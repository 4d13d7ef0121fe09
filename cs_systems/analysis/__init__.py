"""Analysis of traces, snapshots and records: what happened, and what would help."""
