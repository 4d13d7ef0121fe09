"""The command line: one file a sub-command, dispatched on the first word so that only that one's parser is built.

A sub-command's module exports `ARGS`, a frozen dataclass from which tyro makes the options, and `run(args) -> int`, the
exit status: 0 if any cell that was asked for gave a result (ok or oom), now or before the sweep was resumed, 2 for
malformed input, 3 if none gave a result, 130 after Ctrl-C.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence

from cs_systems.config import ConfigError, one_of
from cs_systems.lifeline import rank_in_job
from cs_systems.version import __version__

# In the order in which a newcomer needs them. One line each: the overview is all that `--help` has to import.
COMMANDS = {
    "time": "time forward, backward and optimizer of a model, for any sizes × backends × precisions",
    "attention": "time attention alone: backends × shapes, with TFLOP/s and peak memory",
    "profile": "run the same steps under nsys or torch.profiler: kernels, phases, layers, idle time",
    "memory": "what takes the memory, phase by phase; what would fit, and how to make it fit",
    "parallel": "what each way to train on several ranks costs: exposed communication, volume, memory",
    "precision": "what a lower precision gains, why, and what it costs; every dtype; what sums and softmax lose",
    "comm": "what a collective costs between ranks: latency, bandwidth, waiting and set-up",
    "report": "show what was recorded: terminal, markdown, LaTeX, Typst, CSV, figures, one HTML page",
    "compare": "hold two recordings against each other: ratio, confidence interval, verdict",
    "analyze": "read what nsys or torch.profiler recorded: kernels, phases, layers, idle time",
    "snapshot": "read a CUDA memory snapshot of PyTorch: the peak, what takes it, where it was allocated",
    "doctor": "say what works on this machine, what does not, and the command that would fix it",
}
EXIT_MALFORMED = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if (rank := rank_in_job()) is not None:
        from cs_systems import job

        if rank:  # the command is rank 0's
            return job.follow()
        job.job()
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if words[0] == "--version":
        print("cs-systems", __version__)
        return 0
    try:
        return _dispatch(one_of("command", words[0], COMMANDS), words[1:])
    except BrokenPipeError:  # the reader of our output (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ConfigError, OSError, RuntimeError) as error:
        return _fail(str(error), EXIT_MALFORMED)
    except KeyboardInterrupt:
        return _fail("interrupted; what was measured is kept, the same command goes on with the rest", EXIT_INTERRUPTED)


def _dispatch(command: str, words: list[str]) -> int:
    import tyro

    module = importlib.import_module(f"cs_systems.cli.{command}")
    args = tyro.cli(
        module.ARGS,
        prog=f"cs-systems {command}",
        description=_wrapped(module.__doc__ or ""),
        args=words,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )
    status: int = module.run(args)
    return status


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [_filled(f"  {name:<{width}}  {what}", width + 4) for name, what in COMMANDS.items()]
    usage, more = "usage: cs-systems COMMAND [options]", "cs-systems COMMAND --help tells a command's options."
    return "\n".join([usage, "", *lines, "", more])


def _wrapped(text: str) -> str:
    """A docstring's paragraphs, broken for the terminal and indented: tyro keeps line breaks before a space alone."""
    return "\n".join(_filled("  " + paragraph, 2) for paragraph in text.strip().split("\n\n"))


def _filled(text: str, indent: int) -> str:
    return textwrap.fill(text, shutil.get_terminal_size().columns, subsequent_indent=" " * indent)


def _fail(message: str, status: int) -> int:
    """Says it, broken between words where a terminal shows it."""
    lines = f"cs-systems: {message}".splitlines()
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        lines = [textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in lines]
    print("\n".join(lines), file=sys.stderr)
    return status
