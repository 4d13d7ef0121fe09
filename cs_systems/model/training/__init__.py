"""Loss, optimizers, fp8 linear layers and activation checkpointing of a training step; `parts/` has faster parts."""
