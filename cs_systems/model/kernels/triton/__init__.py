"""Kernels in Triton: FlashAttention-2 (`launch`, `forward`, `backward`, `tiles`, `configs`), and parts of the step.

Of the parts, `swiglu`, `rms_norm`, `rotary`, `embedding`, `cross_entropy` and `quantize` each hold kernels and the
launches on tensors, and `adamw` those of the optimizers with master weights; `rows` has the tiles of the first four.
"""
