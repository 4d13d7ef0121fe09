"""Loss, optimizers, fp8 layers and checkpointing of a training step; `parts/` has faster versions of its parts.

`losses`, `optimizers`, `fp8` linear layers, and activation `checkpointing`.
"""
