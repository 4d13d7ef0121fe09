"""Device code and its launches for attention backends and parts of the training step, without autograd or checks.

No kernel falls back to another. `compile` compiles a kernel for a GPU that is not present, and returns its registers,
spills and shared memory.
"""
