"""Device code and what launches it, for the attention backends of the same name: no autograd, no checks, no fallback.

`compile` compiles a kernel for a GPU that is not here, and says its registers, spills and shared memory.
"""
