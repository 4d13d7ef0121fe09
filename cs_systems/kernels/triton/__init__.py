"""FlashAttention-2 in Triton: `launch` (from tensors to kernels), `forward`, `backward`, `tiles`, `configs`."""
