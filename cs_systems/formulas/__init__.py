"""Predictions by arithmetic, before any measurement. No torch; each formula cites its source.

- one step, one call: `cost` (FLOPs and bytes), `operator_flops` (FLOPs by the shapes of inputs), `peaks` (data-sheet
  limits of devices), `memory/` (peak bytes, and what fits a device), `rounding` (errors of sums in low precision)
- one message: `latency_bandwidth` (linear fit of measured times)
- N ranks: `rank_layout` (valid layouts of a strategy), `communication` (bytes that each rank sends), `scaling`
  (duration of a step, simulated on its streams)
"""
