"""Device code and its launch code, for the attention backends of the same name: no autograd, no checks, no fallback.

`compile` compiles a kernel for a GPU that is not present, and returns its registers, spills and shared memory.
"""
