"""FlashAttention's forward pass in CUDA C++ at teaching scale: one source a technique, and `launch`."""
