"""FlashAttention's forward pass in CUDA C++ at teaching scale: one source file per technique, and `launch`."""
