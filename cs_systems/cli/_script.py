"""Process of `cs-systems run`: it becomes the script, and records its loop from the moment at which it imports torch.

    python -m cs_systems.cli._script OPTIONS_AS_JSON train.py its arguments

The script finds what Python itself would give it: its arguments, its folder on the path, `__main__`, a process that has
not imported torch yet. Standard output belongs to it; the report goes to standard error, after its end.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import random
import runpy
import sys
import types
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from cs_systems.cli import EXIT_INTERRUPTED
from cs_systems.core import origin


class _AtImportOfTorch(importlib.abc.MetaPathFinder):
    """Finder that lets the other ones find torch, and calls `then` once torch is imported.

    It stays until then: a program may look for torch without importing it.
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
    with origin.by(options.pop("command", None)):
        _run(options, argv)


def _run(options: dict[str, Any], argv: list[str]) -> None:
    """Run the script with the recorder's options, and leave its records."""
    _restore_streams(options.pop("streams", ()))
    handover = options.pop("handover", None)
    recorders: list[Any] = []

    def begin() -> None:
        from cs_systems.recorder.unedited import ScriptRecorder

        recorders.append(ScriptRecorder(**options, waits_for_nsys=handover is not None))

    if "torch" in sys.modules:  # a .pth file or sitecustomize imports it in every process
        begin()
    else:
        sys.meta_path.insert(0, _AtImportOfTorch(begin))
    failed: BaseException | None = None
    status = 0
    try:
        _become(argv)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except Exception as error:
        failed, status = error, 1
        sys.excepthook(type(error), error.with_traceback(_of_script(error)), error.__traceback__)
        raise SystemExit(1) from None
    except KeyboardInterrupt as error:
        failed, status = error, EXIT_INTERRUPTED
        raise
    finally:
        sys.stdout.flush()
        state = random.getstate()  # what is imported for the report draws from it
        for recorder in recorders:
            recorder.close(failed)
        if is_first_rank():
            for failure in filter(None, (recorder.failure for recorder in recorders)):
                print(f"cs-systems: nothing was recorded: {failure}", file=sys.stderr)
                break
            else:
                records = [record for recorder in recorders for record in recorder.records]
                _leave(records, handover, options["out"], status)
            for later in filter(None, (recorder.later_training() for recorder in recorders)):
                print(f"cs-systems: {later}", file=sys.stderr)
        random.setstate(state)


def _become(argv: list[str]) -> None:
    """Run the script, or the module after -m, as Python would."""
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    file = argv[0]
    sys.argv = argv
    sys.path[0] = str(Path(os.path.realpath(file)).parent)
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=file, __builtins__=__builtins__, __cached__=None)
    code = compile(Path(file).read_bytes(), file, "exec")
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _of_script(error: Exception) -> types.TracebackType | None:
    """Return the traceback from the script on, as Python would print it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


def _leave(records: list[Any], handover: str | None, out: str, status: int) -> None:
    """Print the table of the records, or leave them for the process that waits for nsys."""
    if handover is None:
        conclude(records, out, status)
        return
    from cs_systems.record import append_record

    for record in records:
        append_record(handover, record)
    Path(handover).touch()


def conclude(records: list[Any], out: str, status: int) -> None:
    """Print the table of the records to standard error. `status`: the exit status of the script."""
    if not records:
        print(f"cs-systems: nothing was recorded, because {_why_nothing(status)}", file=sys.stderr)
        return
    from cs_systems.cli._output import terminal_width
    from cs_systems.cli.profile import print_of_host
    from cs_systems.core.printable import labelled_command, visible
    from cs_systems.diagnosis import diagnose
    from cs_systems.report.diagnoses import text
    from cs_systems.report.tables.formats import text_width
    from cs_systems.report.tables.records import render

    width = terminal_width(stream=sys.stderr)
    first, table = text(diagnose(records), width=width), render(records, width=width)
    files = [f"{what}: {Path(out, name)}" for record in records for what, name in record.artifacts.items()]
    where = "\n".join(map(visible, [*files, f"records: {out}/records.jsonl"]))
    report = labelled_command("report:", ("cs-systems", "report", out), text_width(width))
    with redirect_stdout(sys.stderr):
        print(f"\n{first}{table}")
        for record in records:
            print_of_host(record)
        print(f"{where}\n{report}")


def _why_nothing(status: int) -> str:
    """Return why a script that ended with this status left no record, and what to do."""
    if status == EXIT_INTERRUPTED:
        return "the script was interrupted before its first backward pass; let it run longer"
    if status:
        return f"the script ended with exit status {status} before its first backward pass; correct its error"
    return (
        "the script ran no backward pass of torch in its main thread; run a script that trains there, or write "
        "`with cs_systems.Recorder(out='runs/mine') as recorder:` around its loop and `with recorder.step():` around "
        "the loop's body"
    )


def is_first_rank() -> bool:
    """Return whether this process is rank 0 of its job, by the variables of torchrun or Slurm, or has no job."""
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0) == 0


def _restore_streams(streams: Sequence[int]) -> None:
    """Give the script the streams of the command, in place of those that nsys writes its messages to."""
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]


if __name__ == "__main__":
    main()
