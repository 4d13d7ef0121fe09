"""Options of a cell that carry out remedies shared by several rules."""

from __future__ import annotations

from cs_systems.config import CAPTURED_COMPILE_MODES

COMPILED = {"compile": ("default", *CAPTURED_COMPILE_MODES)}  # modes that fuse kernels
