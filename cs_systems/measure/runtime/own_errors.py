"""Errors of a user's code: their place, their text, and the remedy for a failed import."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch

from cs_systems.config import ConfigError, RunConfig
from cs_systems.core import plugins, projects

_OUR_FOLDERS = (Path(__file__).parents[2], Path(torch.__file__).parent)


def print_error(error: Exception) -> None:
    """Print an error to standard error: a user's mistake as one line, other errors from the user's first frame on."""
    if isinstance(error, ConfigError):
        sys.stderr.write(f"{error}\n")
        return
    trace = error.__traceback__
    while trace is not None and _is_ours(Path(trace.tb_frame.f_code.co_filename)):
        trace = trace.tb_next
    shown = error.__traceback__ if trace is None else trace
    traceback.print_exception(type(error), error, shown, file=sys.stderr)


def described(error: Exception, config: RunConfig) -> str:
    """Return an error with its innermost line in the user's own code, as "ValueError: no (mine.py:21)".

    An error without a text has the line itself. A failed import, and what needs a GPU, have the remedy.
    """
    frames = _own_frames(error, config)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    if isinstance(error, ConfigError):
        return f"{str(error)[:_LONGEST]}{place}"
    text = str(error).strip() or (frames and frames[-1].line) or type(error).__name__
    remedy = ""
    if isinstance(error, ImportError) and frames and config.sources:
        remedy = f"; {plugins.import_remedy(config.sources[0], error)}"
    if _NO_DRIVER in text:
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        remedy = f"; {_UNTIMED if interpreted else _UNCOMPILED}"
    return f"{type(error).__name__}: {text}"[:_LONGEST] + place + remedy


_LONGEST = 4000
_NO_DRIVER = "0 active drivers"
_UNCOMPILED = "Triton compiles no kernels for a CPU: set TRITON_INTERPRET=1 (slow), or use a GPU"
_UNTIMED = "triton.autotune times kernels on a GPU: leave it out on a CPU, and call the kernel with one configuration"


def _own_frames(error: Exception, config: RunConfig) -> list[traceback.FrameSummary]:
    """Return the frames of a traceback in the files that a cell names, and in the projects that these belong to."""
    files = [path.resolve() for source in config.sources if (path := plugins.source_file(source))]
    folders = [folder for file in files for folder in projects.import_folders(file)]
    found = []
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename).resolve()
        is_in_project = any(folder in path.parents for folder in folders) and "site-packages" not in path.parts
        if path in files or (is_in_project and not _is_ours(path)):
            found.append(frame)
    return found


def _is_ours(file: Path) -> bool:
    """Return whether a file belongs to cs_systems or to torch, which call a user's model."""
    return any(folder in file.parents for folder in _OUR_FOLDERS)
