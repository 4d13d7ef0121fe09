"""Loss, optimizers, fp8 layers and checkpointing of a training step; `parts/` has other ways to compute its parts.

`losses`, `optimizers`, `fp8` linear layers, and activation `checkpointing`.
"""
