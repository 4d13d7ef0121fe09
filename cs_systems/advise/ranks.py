"""Launcher of a script's ranks: `torchrun` with its options, before the script."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from cs_systems.config import ConfigError

TORCHRUN = "torchrun"
MODULE = "torch.distributed.run"
EXAMPLE = "cs-systems advise -- torchrun --nproc-per-node 2 train.py"
OTHERS = ("srun", "mpirun", "accelerate", "deepspeed")


def is_launcher(words: Sequence[str]) -> bool:
    """Return whether a command begins with torchrun, or with its module."""
    program = Path(words[0]).name if words else ""
    by_module = re.fullmatch(r"python[\d.]*", program) and [*words[1:3]] == ["-m", MODULE]
    return program == TORCHRUN or bool(by_module)


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command of the launcher, empty without one, and the script with its arguments. Raises ConfigError."""
    if int(os.environ.get("WORLD_SIZE") or 1) > 1 and "RANK" in os.environ:
        raise ConfigError(f"advise runs inside of a job of ranks, and starts the ranks itself; write {EXAMPLE}")
    if words and (program := Path(words[0]).name) in OTHERS:
        raise ConfigError(f"advise starts ranks with torchrun, not with {program}; write {EXAMPLE}")
    if not is_launcher(words):
        return [], [*words]
    given = [*words[1:]] if Path(words[0]).name == TORCHRUN else [*words[3:]]
    at = next((n for n, word in enumerate(given) if word.endswith(".py") and not word.startswith("-")), None)
    if at is None or {"-m", "--module"} & {*given[:at]}:
        raise ConfigError(f"torchrun is given no file of a script, which the diff needs; write {EXAMPLE}")
    if {"--no-python", "--no_python"} & {*given[:at]}:
        raise ConfigError("--no-python starts another program than Python; leave it out")
    nodes = re.search(r"(?:^| )--nnodes[= ](\S+)", " ".join(given[:at]))
    if nodes and nodes[1] not in ("1", "1:1"):
        raise ConfigError(f"--nnodes is {nodes[1]}, and advise starts ranks on one machine; leave it out")
    return [sys.executable, "-m", MODULE, *given[:at]], given[at:]
