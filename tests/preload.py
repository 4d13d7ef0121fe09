"""Modules that programs and ranks of tests import, for the process that they are forked from."""

from __future__ import annotations

import gc

gc.disable()  # turned on again in each fork

import torch.distributed.optim  # noqa: E402
import torch.distributed.run  # noqa: E402, F401

import tests.model.parallel.ranks  # noqa: E402, F401

gc.freeze()
