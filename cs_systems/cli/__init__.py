"""Command line: one file per sub-command, dispatched on the first word so that only that one's parser is built.

A sub-command's module exports `ARGS`, a frozen dataclass from which tyro makes the options, and `run(args) -> int`, the
exit status: 0 if any requested cell gave a result (ok or oom), now or before the sweep was resumed, 1 if `compare`
found what --fail-on names, 2 for malformed input, 3 if no cell gave a result, 130 after Ctrl-C.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from cs_systems.config import ConfigError, edition, one_of
from cs_systems.core import origin
from cs_systems.core.printable import LEGIBLE, command_line, visible
from cs_systems.core.version import __version__
from cs_systems.measure.runtime.lifetime import torchrun_rank
from cs_systems.report.files import FREE_SPACE, SHORTER, standard_output

# The order suits a newcomer. The texts are here so that `--help` imports no command.
COMMANDS = {
    "time": "time a training step by phase: every combination of sizes, attention backends, precisions",
    "attention": "time attention alone, for any backends and shapes: TFLOP/s and peak memory",
    "profile": "profile training steps with nsys, ncu or torch.profiler: kernels, phases, layers, idle time",
    "memory": "measure memory by phase and owner; predict what fits a device, and how to make it fit",
    "run": "record the loop of an unedited training script: its phases, with a profile if asked",
    "parallel": "compare parallel strategies on several ranks: step time, exposed communication, memory",
    "precision": "compare precisions: speed-up and its causes, errors, dtypes, rounding in sums and softmax",
    "comm": "measure collectives between ranks: latency, bandwidth, waiting and set-up",
    "report": "show the records of a run: tables (terminal, markdown, LaTeX, Typst, CSV), figures, HTML",
    "advise": "try what makes a step faster or smaller, keep what is proved, and print the command",
    "compare": "compare two runs: ratio of the times, confidence interval, verdict",
    "ab": "compare two commands, files or revisions in turn, until the verdict is safe; for CI too",
    "analyze": "analyze a trace of nsys, torch.profiler or rocprofv3: kernels, phases, layers, idle time",
    "snapshot": "analyze a CUDA memory snapshot of PyTorch: the peak, its categories, its largest allocations",
    "course": "run the tasks of a systems course (CS336, assignment 2), and list which are done",
    "schema": "print the JSON Schema of --format json and of records.jsonl: tables, units, meanings",
    "mcp": "serve traces, snapshots and runs to an agent by the Model Context Protocol",
    "doctor": "check what works on this machine, and show the command that fixes what does not",
}
REMEDIES = {
    errno.EACCES: "change its permissions, or give another path",
    errno.ENOSPC: FREE_SPACE,
    errno.EDQUOT: FREE_SPACE,
    errno.ENAMETOOLONG: SHORTER,
}
EXIT_MALFORMED = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    runs_script = words[:1] == ["run"]  # each rank runs the script itself
    if not runs_script and (rank := torchrun_rank()) is not None:
        from cs_systems.measure.runtime import torchrun

        if rank:  # only rank 0 runs the command
            return torchrun.follow()
        torchrun.job()
    status = 0
    try:
        _replace_unusable_streams()
        with origin.by(command_line("cs-systems", *words)):
            status = until_reader_leaves(lambda: _run_command(words))
    except OSError as error:
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()
        return _fail(failed_file(error), EXIT_MALFORMED, words)
    except ConfigError as error:
        return _fail(error.with_options(), EXIT_MALFORMED, words)
    except RuntimeError as error:
        return _fail(str(error), EXIT_MALFORMED, words)
    except KeyboardInterrupt as interrupt:
        from cs_systems.cli._output import Interrupted

        status = _fail(str(interrupt) or "interrupted", EXIT_INTERRUPTED, words)
        if isinstance(interrupt, Interrupted):  # on a line of its own, so that it can be copied
            print(visible(interrupt.command(words)), file=sys.stderr)
    return status


def until_reader_leaves(command: Callable[[], int]) -> int:
    """Return the exit status of the command, or 0 if the reader of the output (head, less) closed the pipe early."""
    try:
        status = command()
        _flush()  # here a closed pipe or a full disk can still be reported
    except BrokenPipeError:
        _drop_output()
        return 0
    return status


def _replace_unusable_streams() -> None:
    """Replace closed streams, and what the terminal's encoding cannot show by similar characters.

    A closed stream (>&-) discards all output.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 (open as long as the process)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=LEGIBLE)


def _flush() -> None:
    with standard_output():
        sys.stdout.flush()


def _drop_output() -> None:
    """Discard buffered output, which Python would otherwise try to write again at exit, with an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run_command(words: Sequence[str]) -> int:
    if nul := next((word for word in words if "\0" in word), None):
        raise ConfigError(f"argument {nul!r} contains a NUL character; remove it")
    if not words or words[0] in ("-h", "--help"):
        with standard_output():
            print(_overview())
        return 0
    if words[0] == "--version":
        print("cs-systems", __version__)
        return 0
    return _dispatch(one_of("command", words[0], COMMANDS), words[1:])


def _dispatch(command: str, words: Sequence[str]) -> int:
    import tyro

    module = importlib.import_module(f"cs_systems.cli.{command}")
    from cs_systems.cli._options import check_words
    from cs_systems.cli._unknown_options import refuse_unknown

    refuse_unknown(words, module.ARGS, f"cs-systems {command}")
    check_words(words, module.ARGS)
    words, rest = _without_rest(words, module.ARGS)
    try:
        with standard_output(), _printable_parser_errors(words):
            args = tyro.cli(
                module.ARGS,
                prog=f"cs-systems {command}",
                description=_description(module) if {"-h", "--help"} & {*words} else "",
                args=words,
                # Every option has its help: tyro need not read and tokenize the command's source for comments.
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.HelptextFromCommentsOff),
            )
    finally:
        _flush()  # also after --help, where tyro exits
    from cs_systems.cli._options import typed

    if rest:
        from dataclasses import replace

        args = replace(args, rest=rest)
    _say_editions(args)
    from cs_systems.cli._document import printing

    with typed(words), printing(args):
        status: int = module.run(args)
    return status


def _without_rest(words: Sequence[str], kind: Any) -> tuple[Sequence[str], tuple[str, ...]]:
    """Return the words before `--`, and those after it for a command with a `rest` (the words of another program)."""
    if "--" not in words or not hasattr(kind, "rest"):
        return words, ()
    place = words.index("--")
    return words[:place], tuple(words[place + 1 :])


def _say_editions(args: Any) -> None:
    """Print which shape a size name selects, for names that have two."""
    from cs_systems.cli._options import sizes_of

    for name in sizes_of(args):
        if said := edition(name):
            print(_on_terminal(said), file=sys.stderr)


@contextmanager
def _printable_parser_errors(words: Sequence[str]) -> Iterator[None]:
    """Escape control characters of a malformed word where the parser quotes it."""
    if all(map(str.isprintable, words)) and not _wants_json(words):
        yield
        return
    errors = io.StringIO()
    try:
        with redirect_stderr(errors):
            yield
    except SystemExit as end:
        if end.code and _wants_json(words):
            raise ConfigError(" ".join(re.sub(r"[\u2500-\u257f]+", " ", errors.getvalue()).split())) from None
        raise
    finally:
        if not _wants_json(words):
            sys.stderr.write(visible(errors.getvalue()))


def _wants_json(words: Sequence[str]) -> bool:
    own = words[: words.index("--")] if "--" in words else words
    return "--format=json" in own or ("--format", "json") in pairwise(own)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [_filled(f"  {name:<{width}}  {text}", width + 4) for name, text in COMMANDS.items()]
    usage, more = (
        "usage: cs-systems COMMAND [options]",
        "Run cs-systems COMMAND --help to see the options of a command.",
    )
    return "\n".join([usage, "", *lines, "", more])


def _description(module: ModuleType) -> str:
    """Return the help of a command: its docstring, and the text of its `further_help`."""
    further: list[str] = getattr(module, "further_help", list)()
    return "\n".join([_wrapped(module.__doc__ or ""), *(_filled("  " + line, 6) for line in further)])


def _wrapped(text: str) -> str:
    """Wrap and indent a docstring's paragraphs for the terminal, because tyro keeps only line breaks before a space."""
    return "\n".join(_filled("  " + paragraph, 2) for paragraph in text.strip().split("\n\n"))


def _filled(text: str, indent: int) -> str:
    return textwrap.fill(text, shutil.get_terminal_size().columns, subsequent_indent=" " * indent)


def failed_file(error: OSError) -> str:
    """Describe a failed file: its name, the cause and the remedy, instead of the system's `[Errno 13]`."""
    if error.strerror is None:
        return error.with_options() if isinstance(error, ConfigError) else str(error)
    text = f"{os.fsdecode(error.filename)}: {error.strerror}" if error.filename else error.strerror
    remedy = REMEDIES.get(error.errno or 0)
    return f"{text}; {remedy}" if remedy else text


def _on_terminal(line: str) -> str:
    """Return a line for standard error, wrapped between words if that is a terminal."""
    if not sys.stderr.isatty():
        return line
    indent = " " * (len(line) - len(line.lstrip()))
    columns = shutil.get_terminal_size().columns
    return textwrap.fill(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _fail(message: str, status: int, words: Sequence[str]) -> int:
    """Print the message, wrapped between words on a terminal, and return the status.

    With --format json, the error is also a document: on standard output, or after the message if that is a script's.
    """
    lines = visible(f"cs-systems: {message}").split("\n")
    print("\n".join(map(_on_terminal, lines)), file=sys.stderr)
    if _wants_json(words):
        from cs_systems.report.tables.document import error

        print(error(message, status), end="", file=sys.stderr if words[:1] == ["run"] else sys.stdout)
    return status
