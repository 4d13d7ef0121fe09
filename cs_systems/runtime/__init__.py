"""Runtime: starts worker processes, watches them, and turns configurations into records.

Parent side, without torch: `sweep` (the public entry points), `scheduler` (which cells are measured together),
`supervisor` (starts, watches and replaces workers), `journal` (the folder of records), `processes` (process trees and
their pipes), `guardian` (the small process that ends a tree), `ranks` (N workers as one), `channel` (messages),
`profiled` (a cell under a profiler). Worker side, with torch: `worker` (its loop), `execute` (cells become records),
`process_state` (what a cell must not change), `torchrun` (the ranks of a job that torchrun started).
"""
