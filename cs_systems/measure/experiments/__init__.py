"""Experiments that the tool makes by itself after the last recorded step; each file exports one, `EXPERIMENT`."""
