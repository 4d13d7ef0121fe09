"""Kernels in Triton: FlashAttention-2 (`launch`, `forward`, `backward`, `tiles`, `configs`), and parts of the step.

Of the parts, `swiglu`, `rms_norm`, `rotary` and `embedding` each hold kernels and the launches on tensors; `rows` has
their tiles.
"""
