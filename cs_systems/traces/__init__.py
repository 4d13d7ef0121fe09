"""Readers of what nsys, ncu and torch.profiler wrote: files in, plain rows out. No torch.

- files: `read` (any kind of file), `folder` (a folder of them), `nsys` and `kineto`, which give one `trace`; `ncu`
- names: `range_names` (phases and layers), `kernel_families`, `stalls` (calls that block the device)
- attribution: `attribution` (each kernel to its phase and layer), `sequence_numbers` (autograd's, for backward),
  `attribution_check` (one held against the other)
- tables: `profile` (a trace made ready), `tables`, `gaps` (idle device), `host` (time of the host by range), `overlap`
  (communication against computation), `memory_ranges` (cudaMalloc by range), `timeline` (data of the page)
"""
