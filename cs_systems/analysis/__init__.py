"""What joins records, and readers of what profilers leave: files and records in, plain rows out. No torch.

A recording of a profiler goes from its file to tables in this order:
- `read` tells which kind of file it is, `folder` which ones a folder has, and of which cells;
- `nsys` and `kineto`, with the events of `chrome_trace`, read a file into the one form of `trace`;
- `names` says what the name of a range means, `families` what the name of a kernel does, `stalls` what that of a call;
- `attribution` gives each kernel its phase and layer, where no range does with the help of `sequence`, against which
  `check` holds the whole; `gaps` says why no kernel ran, `host` how long the host was in each range;
- `memory_ranges` gives each call of cudaMalloc and cudaFree its phase and layer in the same way;
- `overlap` holds communication against computation on a rank, and the ranks against each other;
- `profile` puts that together for `tables`, for `difference` (of two), and for `view` (the page).

Hardware counters are read by `ncu` alone: they are of single kernels, and no part of a recording.

A memory snapshot goes its own way: `snapshot` reads the file, through `unpickle`, which lets nothing in it run;
`allocations` replays the events; `memory_phases` says in which phase and layer each happened, `sites` at which line;
`memory_categories` what each allocation is, `tensor_names` what a person calls it; `memory_tables` and `memory_view`
are what is shown.

Records alone are enough for `compare` (two sets of them), `precision` (each precision against fp32), `precision_causes`
(two precisions that were profiled), `parallel` (strategies beside one rank), `warmup` (the first steps of one),
`dtypes` (of a step, under autocast), and `numerics`, which explains sums by the arithmetic of `rounding`.
"""
