"""Predictions by arithmetic, before anything is measured. No torch; each formula with its source.

- one step, one call: `cost` (FLOPs and bytes), `peaks` (the most that a device can do), `memory/` (peak bytes, and what
  fits a device), `rounding` (errors of sums in low precision)
- one message: `latency_bandwidth` (the line through measured times), `bucket_size` (the best one for gradients)
- N ranks: `rank_layout` (arrangements that a strategy allows), `communication` (bytes that each rank sends), `scaling`
  (duration of a step), `streams` (end of work on several streams)
"""
