"""Peak memory by formula.

`model` predicts a training step in one process: `tensors` has its sizes, those of gradients and of the optimizer's
state among them, `instants` the possible peaks, `prediction` the results. `ranks` divides them among ranks, as a
strategy does. `attention` predicts one attention call. `allocator` has the overhead of CUDA's caching allocator, `fit`
what fits a device, and what to change first.
"""
