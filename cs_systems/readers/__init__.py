"""Readers of the files that tools wrote, one file per format: a plain Trace, Snapshot or Counters, and no judgement."""
