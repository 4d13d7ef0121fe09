"""Readers of the files of nsys, ncu, torch.profiler, rocprofv3 and Proton: files in, plain rows out. No torch.

- files: `read` (any kind of file), `folder` (a folder of files), `nsys` and `kineto`, which return a `trace`; `ncu`;
  `inventory` (what each of several files is), `jobs` and `rank_files` (the rank of each); `cache`
- names: `range_names` (phases and layers), `known_ranges` (those of users and frameworks), `kernel_families`, `stalls`
  (calls that block the device)
- attribution: `attribution` (the phase and layer of each kernel), `sequence_numbers` (autograd's, for backward)
- layers that no range names: `called_modules` (from Python's stacks), `inferred_layers` (by repetition)
- operators: `operators` (`aten::mm` and the like as columns), `operator_table`
- tables: `profile` (a trace prepared for tables), `tables`, `gaps` (idle device), `host` (host time by range),
  `overlap` (communication and computation), `memory_ranges` (cudaMalloc by range), `timeline` (data of the page)
"""
