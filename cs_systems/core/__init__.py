"""Data and arithmetic helpers that every other package may use. No torch, no I/O beyond reading files.

- input: `validation` (ConfigError and its checks), `shapes` (models and attention calls), `collectives` (collective
  calls, their sizes and bandwidths), `checkpoint_plan` (which blocks are recomputed), `formats` (which command reads
  a file), `plugins` (finds a backend, workload, strategy or profiler by its file's name)
- results: `tables` (how a table is declared), `statistics` (quantiles, intervals, verdicts), `caveats` (doubts about a
  timing), `diagnostic` (one line of `doctor`), `printable` (sanitized text)
"""
