"""Checks of a process that forks others, and the end of a fork, which ends as a program does."""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

GPUS = re.compile(r"nvidia\w*|kfd|renderD\d+|dxg")  # names in /dev for NVIDIA, AMD and WSL


def run_and_exit(main: Callable[[], object]) -> NoReturn:
    """Run `main`, then exit as an interpreter does, so that the frames of the forking process do not continue."""
    status = 0
    try:
        try:
            main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            if end.code is not None and not isinstance(end.code, int):
                sys.stderr.write(f"{end.code}\n")
        except BaseException:
            status = 1
            sys.excepthook(*sys.exc_info())
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(status)


def open_descriptors() -> set[int]:
    with os.scandir("/proc/self/fd") as entries:
        listed = {int(entry.name) for entry in entries}
    return {number for number in listed if _is_open(number)}  # the descriptor of the listing itself is closed already


def has_opened_a_gpu() -> bool:
    """Return True if an imported module has initialised a GPU's driver, which no fork can use."""
    opened = (Path(f"/proc/self/fd/{number}").readlink() for number in open_descriptors())
    return any(GPUS.fullmatch(file.name) for file in opened)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
