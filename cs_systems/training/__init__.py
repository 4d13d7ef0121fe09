"""Parts of a training step beside the model.

`losses`, `optimizers`, `fp8` linear layers, and activation `checkpointing`.
"""
