"""Peak memory by formula.

`model` (a training step: `tensors` has its sizes, `moments` the possible peaks, `prediction` the results), `attention`
(one call), `ranks` (one rank of N), `allocator` (overhead of CUDA's caching allocator), `fit` (what fits a device, and
what to change first).
"""
