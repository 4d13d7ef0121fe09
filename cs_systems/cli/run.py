"""Record the loop of a training script that is not edited: its phases, as a record; with --with, a profile too.

Steps are found by the script's optimizer, phases by autograd and data loaders. The script keeps its arguments, output,
results and exit status; the report goes to standard error.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from cs_systems.cli._options import MaybePath, MaybeText, flag, one_name, optional
from cs_systems.config import ConfigError

WITH = ("none", "kineto", "nsys")


@dataclass(frozen=True)
class Run:
    script: Annotated[
        Positional[tuple[str, ...]],
        arg(metavar="-- SCRIPT ...", help="the script, or -m and a module, with its arguments"),
    ] = ()
    steps: Annotated[str, arg(metavar="FIRST:LAST", help="time the steps after the first number, up to the last")] = (
        "5:25"
    )
    with_: Annotated[
        str,
        one_name("value of --with", WITH),
        arg(name="with", help="then profile 3 steps: kineto (torch.profiler), or nsys below nsys profile"),
    ] = "none"
    snapshot: Annotated[bool, flag("then also record a CUDA memory snapshot")] = False
    name: Annotated[MaybeText, optional("TEXT", "name of the loop in tables", "the name of the script")] = None
    out: Annotated[MaybePath, optional("DIR", "folder of the records", "runs/NAME")] = None


ARGS = Run


def run(args: Run) -> int:
    """Replace this process by the script's."""
    words = list(args.script)
    if not words or words == ["-m"]:
        raise ConfigError("no script is given; write cs-systems run -- train.py its arguments")
    if words[0] != "-m" and not Path(words[0]).is_file():
        raise ConfigError(f"script {words[0]!r} does not exist; correct the path")
    first, last = _steps(args.steps)
    name = args.name or (words[1] if words[0] == "-m" else Path(words[0]).stem)
    out = str(args.out or Path("runs") / name)
    options: dict[str, object] = {"name": name, "out": out, "warmup": first, "steps": last - first}
    options |= {"profile": args.with_, "snapshot": args.snapshot}
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "cs_systems.cli._script", json.dumps(options), *words])


def _steps(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text)
    if not found or not 1 <= int(found[1]) < int(found[2]):
        raise ConfigError(f"--steps is {text!r}; give two numbers of steps, such as 10:20, the first at least 1")
    return int(found[1]), int(found[2])
