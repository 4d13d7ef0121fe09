"""Kernels in CUDA C++ for Hopper: FlashAttention-3, and matrix products that end with other work of the step.

Each `launch` module goes from tensors to kernels; `driver` compiles and loads these.
"""
