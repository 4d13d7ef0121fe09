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
import runpy
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class _AtImportOfTorch(importlib.abc.MetaPathFinder):
    """Finder that lets the other ones find torch, and calls `then` once torch is imported."""

    def __init__(self, then: Any) -> None:
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        if found is None or found.loader is None:
            return None
        execute = found.loader.exec_module

        def executed(module: types.ModuleType) -> None:
            execute(module)
            self._then()

        found.loader.exec_module = executed  # type: ignore[method-assign]
        return found


def main() -> None:
    options, argv = json.loads(sys.argv[1]), sys.argv[2:]
    recorders: list[Any] = []

    def begin() -> None:
        from cs_systems.recorder.unedited import ScriptRecorder

        recorders.append(ScriptRecorder(**options))

    sys.meta_path.insert(0, _AtImportOfTorch(begin))
    failed: BaseException | None = None
    try:
        _become(argv)
    except Exception as error:
        failed = error
        sys.excepthook(type(error), error.with_traceback(_of_script(error)), error.__traceback__)
        raise SystemExit(1) from None
    except KeyboardInterrupt as error:
        failed = error
        raise
    finally:
        _report(recorders, options["out"], failed)


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


def _report(recorders: list[Any], out: str, failed: BaseException | None) -> None:
    """Close the recording, and print its table."""
    sys.stdout.flush()
    for recorder in recorders:
        recorder.close(failed)
    records = [record for recorder in recorders for record in recorder.records]
    if int(os.environ.get("RANK", 0)):
        return
    if not records:
        print("cs-systems: no record: the script ran no backward pass of torch in its main thread", file=sys.stderr)
        return
    from cs_systems.report.tables.records import render

    where = f"records: {out}/records.jsonl\nreport:  cs-systems report {out}"
    print(f"\n{render(records)}\n{where}", file=sys.stderr)


if __name__ == "__main__":
    main()
