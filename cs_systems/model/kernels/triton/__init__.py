"""Kernels in Triton: FlashAttention-2 (`launch`, `forward`, `backward`, `tiles`, `configs`), and parts of the step.

`swiglu`, `rms_norm`, `rotary`, `embedding`, `cross_entropy` and `quantize` have the kernels of parts and their launches
on tensors, `adamw` those for optimizers with master weights; `rows` has the tiles of the first four.
"""
