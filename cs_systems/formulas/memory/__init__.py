"""Peak memory by formula.

`model` (a training step), `attention` (one call), `ranks` (one rank of N), `allocator` (overhead of CUDA's caching
allocator), `fit` (what fits a device, and what to change first).
"""
