"""Peak memory by formula: `model` (a training step), `attention` (one call), `ranks` (one rank of N), `allocator` (what
CUDA's caching allocator adds), `fit` (what fits a device, and what to change first)."""
