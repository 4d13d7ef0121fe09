"""FlashAttention-3 for Hopper in CUDA C++.

`launch` and `launch_forward` (from tensors to kernels), `driver` (compiles and launches them), and the sources.
"""
