"""Instrumentation that observes a running model from outside, separate from timing.

- ranges for profilers: `annotate` (one range), `hooks` (a range for each module), `compiled_ranges` (ranges in the code
  of Inductor)
- readings: `probes` (counters around a step), `memory_readings`, `dtype_readings`, `saved_tensors` (kept for backward)
"""
