"""Runtime: worker processes, their supervision, and the measurement of configurations into records.

Parent side, without torch: `sweep` (the public entry points), `scheduler` (groups cells into batches),
`supervisor` (starts, watches and replaces workers), `journal` (the folder of records), `processes` (process trees and
their pipes), `guardian` (the small process that ends a tree), `fork_client` (workers that start as forks), `ranks` (N
workers as one), `channel` (messages), `profiled` (a cell under a profiler). Worker side, with torch: `fork_server` (the
process from which workers are forked), `worker` (its loop), `execute` (turns cells into records), `process_state`
(state that a cell must not change), `torchrun` (the ranks of a job that torchrun started).
"""
