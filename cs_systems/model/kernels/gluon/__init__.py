"""FlashAttention-3 for Hopper in Gluon.

`launch` (from tensors to kernels), `forward`, `backward`, `parts`, `rows`, `configs`.
"""
