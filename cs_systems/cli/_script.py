"""Process of `cs-systems run`: runs the script, and records its loop once torch is imported.

    python -m cs_systems.cli._script OPTIONS_AS_JSON train.py its arguments

The script sees the same process as under plain Python: its arguments, its folder on the path, `__main__`, and torch not
imported yet, except in a trial of `advise`, which may be a fork of a process that has imported it. Standard output is
the script's; the report goes to standard error after the script ends.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import io
import json
import os
import random
import runpy
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs_systems.cli import EXIT_INTERRUPTED
from cs_systems.cli._children import Children, before
from cs_systems.core import origin
from cs_systems.core.printable import command_line, encodable, visible
from cs_systems.core.step_kinds import FEWEST_AT_A_DISTANCE
from cs_systems.core.units import counted
from cs_systems.core.validation import shown

if TYPE_CHECKING:
    from cs_systems.measure.runtime.script_forks import Look


@dataclass(frozen=True)
class Form:
    """Format of the report, and the end of the script, for what the report says of it.

    status: the script's exit status, which an error in JSON names. failure: the result of `_failure`.
    """

    format: str = "terminal"
    status: int = 0
    failure: str | None = None


TERMINAL = Form()


class _AtImportOfTorch(importlib.abc.MetaPathFinder):
    """Import finder that lets the other finders import torch, and then calls `then`.

    It stays installed until torch is imported: a program may look for torch without importing it.
    """

    def __init__(self, then: Any) -> None:
        self._then, self._asks = then, False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch" or self._asks:
            return None
        self._asks = True
        try:
            found = importlib.util.find_spec(name)
        finally:
            self._asks = False
        if found is None or found.loader is None:
            return None
        execute = found.loader.exec_module

        def executed(module: types.ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._then()

        found.loader.exec_module = executed  # type: ignore[method-assign]
        return found


def main() -> None:
    options, argv = json.loads(sys.argv[1]), sys.argv[2:]
    code = {} if "levers" in options else _code_of(argv)
    with origin.by(options.pop("command", None)), origin.of_code(code):
        _run(options, argv)


def _code_of(argv: list[str]) -> dict[str, str]:
    """Return the path and the hash of the script, with the files of its project that it imports; {} if unreadable."""
    from cs_systems.core.plugins import code_sha256

    file = _module_file(argv[1]) if argv[0] == "-m" else Path(argv[0])
    if file is None:
        return {}
    try:
        return {"workload_path": str(file), "workload_sha256": code_sha256(file)}
    except (OSError, ValueError):
        return {}


def _module_file(name: str) -> Path | None:
    """Return the file that `-m name` runs, without importing its packages; None if it is not found."""
    folders: Sequence[str] | None = ["", *sys.path[1:]]
    file = ""
    for part in name.split("."):
        spec = importlib.machinery.PathFinder.find_spec(part, folders)
        if spec is None:
            return None
        folders, file = spec.submodule_search_locations, spec.origin or ""
    main = Path(folders[0], "__main__.py") if folders else Path(file)
    return main if main.is_file() else None


def _run(options: dict[str, Any], argv: list[str]) -> None:
    """Run the script with the recorder's options, and leave its records."""
    _restore_streams(options.pop("streams", ()))
    handover, format, out = options.pop("handover", None), options.pop("format", "terminal"), options["out"]
    options["out"] = str(Path(out).absolute())  # the script may change its directory
    is_trial = "levers" in options  # of advise
    levers, seed, files, imports, made = (
        options.pop(name, ()) for name in ("levers", "seed", "files", "imports", "made")
    )
    told: dict[str, Callable[[], bool]] = {}
    recorders: list[Any] = []
    children, look = Children(), _look(imports)

    def begin() -> None:
        from cs_systems.measure.recorder.unedited import ScriptRecorder

        if look is not None:
            look.torch_is_imported()
        if is_trial:
            told.update(_begin_trial(levers, seed or 0))
        children.watch()
        recorders.append(ScriptRecorder(**options, waits_for_nsys=handover is not None))

    if "torch" in sys.modules:  # a .pth file or sitecustomize imports it in every process
        begin()
    else:
        sys.meta_path.insert(0, _AtImportOfTorch(begin))
    process, is_left = os.getpid(), False

    def leave(status: int, error: BaseException | None = None, replaced_by: str | None = None) -> None:
        """Write the records of this process once; a fork of it writes none."""
        nonlocal is_left
        if is_left or os.getpid() != process:
            return
        is_left = True
        if not status:
            _leave_for_search(told, options["out"], look)
        with _apart_from_script(out, made):
            for recorder in recorders:
                recorder.close(error)
            if is_first_rank():
                records, failure = _recorded(recorders)
                calls = max((recorder.forward_calls for recorder in recorders), default=0)
                why = failure or why_nothing(
                    status, children.remedy(), replaced_by, calls, may_be_edited=not is_trial, error=error
                )
                if not (is_trial and records):  # a search reads the records, and a report's modules take a second
                    _leave(records, handover, out, why, argv, Form(format, status, _failure(status, error, recorders)))

    def leave_line() -> None:
        if os.getpid() == process and any(recorder.records for recorder in recorders):
            _print(f"cs-systems: the script ended; records: {out}/records.jsonl")

    _watch_ends(leave, leave_line)
    failed: BaseException | None = None
    status = 0
    try:
        _become(argv, levers, files)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except Exception as error:
        failed, status = error, 1
        sys.excepthook(type(error), error.with_traceback(_of_script(error)), error.__traceback__)
        raise SystemExit(1) from None
    except KeyboardInterrupt as error:
        failed, status = _printed_from_script(error), EXIT_INTERRUPTED
        raise
    finally:
        _flush_output()
        leave(status, failed)


def _flush_output() -> None:
    with suppress(Exception):  # the script may have closed or replaced standard output
        sys.stdout.flush()


@contextmanager
def _apart_from_script(out: str, made: Sequence[str]) -> Iterator[None]:
    """Keep the script's random state and exit status, whatever happens in the report.

    made: folders that were made for the records; they are removed if nothing was written into them.
    """
    state = random.getstate()  # importing the report's modules uses random numbers
    try:
        yield
    except Exception as lost:
        remedy = f"read the records with {command_line('cs-systems', 'report', out)}"
        with suppress(Exception):  # the script may have closed or replaced standard error
            _tell(f"the report was lost with {type(lost).__name__}: {lost}; {remedy}")
    finally:
        if made:
            from cs_systems.measure.runtime.journal import remove_empty

            remove_empty(made)
        random.setstate(state)


def _look(imports: str) -> Look | None:
    """Return what looks at this process for later trials, if a file for the imports is given."""
    if not imports:
        return None
    from cs_systems.measure.runtime.script_forks import Look

    return Look(Path(imports))


def _recorded(recorders: Sequence[Any]) -> tuple[list[Any], str | None]:
    """Return all records, and why a recorder failed; tell of a training that was not recorded."""
    for later in filter(None, (recorder.later_training() for recorder in recorders)):
        _tell(later)
    records = [record for recorder in recorders for record in recorder.records]
    return records, next((recorder.failure for recorder in recorders if recorder.failure), None)


def _begin_trial(levers: Sequence[str], seed: int) -> dict[str, Callable[[], bool]]:
    """Apply the levers of a trial, and return the functions that tell whether they changed anything so far."""
    from cs_systems.advise import in_script
    from cs_systems.measure.recorder.unedited import leave_others_idle

    leave_others_idle()
    return in_script.apply(levers, seed)


def _leave_for_search(told: dict[str, Callable[[], bool]], out: str, look: Look | None) -> None:
    """Leave the names of levers that changed nothing in the folder of the trial, and what later trials may import."""
    if look is not None:
        look.leave()
    if told and is_first_rank():
        from cs_systems.advise import in_script

        in_script.leave_changes(told, Path(out))


def _watch_ends(leave: Callable[..., None], leave_line: Callable[[], None]) -> None:
    """Call `leave` before the script ends without an exception: by os._exit or by becoming another program.

    In another thread, such as a watchdog, call `leave_line` instead, because `leave` waits for the device, which may
    hang.
    """
    main = threading.get_ident()

    def exits(status: int = 0) -> None:
        leave(status) if threading.get_ident() == main else leave_line()

    def replaces(path: Any, *_: Any) -> None:
        leave(0, None, os.fsdecode(path)) if threading.get_ident() == main else leave_line()

    for name, ends in (("_exit", exits), ("execv", replaces), ("execve", replaces)):
        before(os, name, ends)


def _become(argv: list[str], levers: Sequence[str] = (), files: Sequence[str] = ()) -> None:
    """Run the script, or the module named after -m, as Python would.

    `levers` may change the text that runs, also of `files`, the modules of the script.
    """
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    file = str(Path.cwd() / argv[0])  # absolute, as under plain Python
    sys.argv = argv
    sys.path[0] = str(Path(os.path.realpath(file)).parent)
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=file, __builtins__=__builtins__, __cached__=None)
    if levers:
        from cs_systems.advise import in_script
        from cs_systems.advise.sources import read

        in_script.edit_modules(levers, files)
        code = in_script.compiled(levers, read(Path(file)), file)
    else:
        code = compile(Path(file).read_bytes(), file, "exec")
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _printed_from_script(error: BaseException) -> BaseException:
    """Let Python print the traceback of an error from the script's first frame on, and return the error."""
    printed = sys.excepthook

    def shown(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        printed(kind, error.with_traceback(_of_script(error)), trace)

    sys.excepthook = shown
    return error


def _of_script(error: BaseException) -> types.TracebackType | None:
    """Return the traceback from the script's first frame on, as Python would print it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


def _leave(records: list[Any], handover: str | None, out: str, why_nothing: str, argv: list[str], form: Form) -> None:
    """Print the table of the records, or save the records for the parent process that waits for nsys."""
    if handover is None:
        conclude(records, out, why_nothing, argv, form)
        return
    from cs_systems.record import append_record

    for record in records:
        append_record(handover, record)
    Path(handover).touch()


def conclude(records: list[Any], out: str, why: str, script: Sequence[str] = (), form: Form = TERMINAL) -> None:
    """Print the table of the records to standard error, and how to try the first remedy; or, as JSON, a document.

    why: the reason if there are no records, from `why_nothing`. script: the script and its arguments.
    """
    if sys.stderr is None:  # by the script
        return
    if form.format == "json":
        _print_document(records, out, why, form)
        return
    if not records:
        _tell(f"nothing was recorded, because {why}")
        return
    from cs_systems.analysis.diagnosis import diagnose
    from cs_systems.cli._advice import try_command
    from cs_systems.cli._output import terminal_width
    from cs_systems.cli.profile import print_of_host
    from cs_systems.core.printable import labelled_command
    from cs_systems.report.diagnoses import text
    from cs_systems.report.tables.formats import text_width
    from cs_systems.report.tables.records import render

    width = terminal_width(stream=sys.stderr)
    answer = diagnose(records)
    first, table = text(answer, width=width), render(records, width=width)
    if form.failure:
        first = f"{_filled(form.failure, is_report=True)}\n\n{first}"
    files = [f"{what}: {Path(out, name)}" for record in records for what, name in record.artifacts.items()]
    where = "\n".join(map(visible, [*files, f"records: {out}/records.jsonl"]))
    report = labelled_command("report:", ("cs-systems", "report", out), text_width(width))
    with redirect_stdout(io.StringIO()) as tables:
        for record in records:
            print_of_host(record)
    # The stream belongs to the script; its settings are kept for what the script prints at exit.
    text_of_all = f"\n{first}{table}\n{tables.getvalue()}{where}\n{report}"
    started = [] if script[:1] in ([], ["-m"]) else as_started(script)
    if started and (words := try_command(answer, script=started, record=records[0])):
        text_of_all += f"\n{labelled_command('advise:', words, text_width(width))}"
    _print(text_of_all)
    print_whole_loop(records)


def _print_document(records: list[Any], out: str, why: str, form: Form) -> None:
    """Print the records as one line on standard error, because standard output is the script's."""
    from cs_systems.analysis.comparison.loop_findings import WHOLE_LOOP
    from cs_systems.cli.profile import IN_DOCUMENT
    from cs_systems.report.tables import document, records_document

    if records:
        pieces = records_document.measured(records, [WHOLE_LOOP.name, *IN_DOCUMENT, "ranges", "operators"])
        notes = [*filter(None, [form.failure]), f"records: {out}/records.jsonl"]
        text = document.document(pieces + "".join(map(document.note, notes)))
    else:
        text = document.error(f"nothing was recorded, because {why}", form.status)
    _print(text, end="")


def as_started(script: Sequence[str]) -> list[str]:
    """Return the words of a script with the launcher of this job's ranks; empty for a job on several nodes."""
    ranks, here = (os.environ.get(name) or "1" for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if ranks == "1":
        return [*script]
    return ["torchrun", "--nproc-per-node", ranks, *script] if here == ranks else []


def print_whole_loop(records: Sequence[Any]) -> None:
    """Print how the time of a whole loop divides among kinds of steps, if it is longer than the recorded steps.

    As the report that it ends, it is wrapped in a pipe, too.
    """
    from cs_systems.analysis.comparison.loop_findings import WHOLE_LOOP
    from cs_systems.analysis.comparison.loop_time import sentence

    recorded = sum(len(record.measurement.samples) for record in records if record.measurement is not None)
    rows = next(filter(None, (WHOLE_LOOP.of(record.results) for record in records)), ())
    if sum(row["steps"] for row in rows) < max(2 * FEWEST_AT_A_DISTANCE, 1.5 * recorded):
        return
    _print(_filled(f"whole loop: {sentence(rows)}", is_report=True))


def _tell(message: str) -> None:
    """Print a message of this package to standard error."""
    _print(_filled(f"cs-systems: {message}"))


def _print(text: str, end: str = "\n") -> None:
    """Print to standard error, unless the script has set it to None: `print` would use standard output instead."""
    if sys.stderr is not None:
        print(encodable(text, sys.stderr), end=end, file=sys.stderr)


def _filled(text: str, *, is_report: bool = False) -> str:
    """Return the text, wrapped between words if standard error is a terminal, or if the text is of the report."""
    from cs_systems.cli._output import terminal_width
    from cs_systems.report.tables.formats import text_width

    width = terminal_width(stream=sys.stderr)
    width = text_width(width) if is_report else width
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False) if width else text


def _failure(status: int, error: BaseException | None, recorders: Sequence[Any]) -> str | None:
    """Return a sentence about the end of a script that failed or was interrupted, or None."""
    steps = next(filter(None, (recorder.steps_done() for recorder in recorders)), None)
    when = f" after step {steps} of its loop" if steps else ""
    if isinstance(error, Exception):
        return f"the script failed{when} with {_described(error)}"
    if status == EXIT_INTERRUPTED:
        return f"the script was interrupted{when}"
    return f"the script ended{when} with exit status {status}" if status else None


def _described(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return visible(f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__)


def why_nothing(
    status: int,
    children: str | None = None,
    replaced_by: str | None = None,
    calls: int = 0,
    *,
    may_be_edited: bool = True,
    error: BaseException | None = None,
) -> str:
    """Return why a script left no record, and what to do.

    Args:
        status: the script's exit status.
        children: the result of `Children.remedy`.
        replaced_by: the program that replaced the script's process (os.exec); None if none did.
        calls: most calls of a model, if they are no loop of forward passes that could be recorded.
        may_be_edited: the remedy may be a Recorder in the script, which a search leaves idle.
        error: the exception that ended the script.
    """
    if status == EXIT_INTERRUPTED:
        return "the script was interrupted before its first backward pass; let it run longer"
    if status:
        what = (
            f"failed with {_described(error)}" if isinstance(error, Exception) else f"ended with exit status {status}"
        )
        return f"the script {what} before its first backward pass; {_correction(error)}"
    if replaced_by is not None:
        what = f"the script replaced itself by {visible(shown(replaced_by))} before its first backward pass"
        return f"{what}; set the environment variables that it sets yourself, and run that program with cs-systems run"
    what = "the script ran no backward pass of torch in its main thread"
    if children is not None:
        return f"{what}; {children}"
    short = f", and called a model only {counted(calls, 'time')}" if calls else ""
    longer = " or calls a model in a longer loop" if calls else ""
    if not may_be_edited:
        return f"{what}; give a script that trains there"
    return (
        f"{what}{short}; run a script that trains there{longer}, or write "
        "`with cs_systems.Recorder(out='runs/mine') as recorder:` around its loop and `with recorder.step():` around "
        "the loop's body"
    )


def _correction(error: BaseException | None) -> str:
    """Return the remedy of an error; for the end of standard input, how to give what the script asks for."""
    if isinstance(error, EOFError) and str(error) == "EOF when reading a line":  # of input()
        return "it asks for input: type it at a terminal, or give it as cs-systems run -- train.py < answers.txt"
    return "correct its error"


def is_first_rank() -> bool:
    """Return whether this process is rank 0, by the environment variables of torchrun or Slurm.

    True outside of a job.
    """
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0) == 0


def _restore_streams(streams: Sequence[int]) -> None:
    """Restore the command's standard streams for the script; nsys writes its messages elsewhere."""
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]


if __name__ == "__main__":
    main()
