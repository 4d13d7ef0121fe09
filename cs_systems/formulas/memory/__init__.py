"""Peak memory by formula.

`model` predicts a training step in one process: `tensors` has the sizes of its tensors, including gradients and
optimizer state, `instants` the possible peaks, `prediction` the results. `ranks` divides them among ranks, as a
strategy does. `attention` predicts one attention call. `allocator` has the overhead of CUDA's caching allocator, `fit`
finds configurations that fit a device, and the changes to make first.
"""
