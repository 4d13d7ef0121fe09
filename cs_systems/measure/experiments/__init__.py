"""Experiments after the last recorded step, one file each, which exports `EXPERIMENT`."""
