"""Modules that ranks of tests import, for the process that they are forked from."""

from __future__ import annotations

import gc

gc.disable()  # `launch` turns collection on in each rank

import torch.distributed.optim  # noqa: E402, F401

import tests.parallel.ranks  # noqa: E402, F401

gc.freeze()
