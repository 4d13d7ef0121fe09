"""Mutation test of the analysis wing: the small changes of numbers and comparisons that no test notices.

Method: each mutant changes one place of one file: a number (doubled, one more, its sign), a unit (1e3 for 1e6), a
    comparison (< for <=, == for !=), `and` for `or`, `min` for `max`, + for -. Docstrings, annotations, decorators,
    assertions and texts stay. pytest collects the tests once; one pass records the lines that each test reaches. For
    each mutant a fork puts the changed code into the loaded module and runs the tests that reach its line, the fastest
    first, until one fails. A mutant of a module's own lines is loaded by running the module again.
Output: for each file the mutants that a test killed, that survived and that no test reaches, then each survivor, as a
    Markdown table. Mutants in EQUIVALENT, which change nothing that can be seen, are counted apart. --results keeps
    one JSON line per mutant; --again runs only those that it has not as killed. Exit status 1: above LIMIT survive.

    python scripts/mutate.py --table tests/mutants/table.md                  # all: hours on one core
    python scripts/mutate.py --sample 160 --seed 7                           # a fresh sample: minutes
    python scripts/mutate.py cs_systems/analysis/diagnosis/*.py              # all of some files
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import hashlib
import importlib
import json
import os
import random
import re
import select
import signal
import sys
import tempfile
import threading
import time
import tomllib
import traceback
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).resolve().parents[1]
TARGETS = (
    *sorted(ROOT.glob("cs_systems/analysis/**/*.py")),
    *(ROOT / f"cs_systems/core/{name}.py" for name in ("caveats", "statistics", "step_kinds")),
)
TESTS = (
    *("tests/analysis", "tests/core/test_caveat_limits.py", "tests/core/test_statistics.py"),
    *("tests/core/test_statistics_limits.py", "tests/core/test_step_kinds.py", "tests/core/test_step_kind_limits.py"),
    *("tests/readers/test_called_modules.py", "tests/readers/test_operators.py", "tests/cli/test_analyze_command.py"),
    *("tests/cli/test_snapshot_command.py", "tests/cli/test_parallel_cli.py", "tests/readers/test_lost_kernels.py"),
    "tests/measure/workloads/test_numerics.py",
    "tests/cli/test_what_if.py",
)
# Names of tests that take long and that others repeat: bytecodes counted, thousands of simulated comparisons.
WITHOUT = (
    "test_work.py or verdict_finds or repeats_replace or covers or hundred_thousand or importing or rarely or binomial"
)
EQUIVALENT = ROOT / "tests" / "mutants" / "equivalent.toml"
LIMIT = 0.05
BUDGET_S = 6.0  # longest time of one test on the processor, in seconds, while traced; slower tests are ended, left out
PATIENCE = 10.0  # a mutant counts as killed (it does not end) after this many times the duration of its tests
KILLED, SURVIVED, UNREACHED = "killed", "survived", "unreached"
COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
UNITS = {1e3: 1e6, 1e6: 1e3, 1e9: 1e6, 1e-3: 1e-6, 1e-6: 1e-3, 1e-9: 1e-6, 1024: 1000}
EXTREMES = {"min": "max", "max": "min"}
Undo = Callable[[], None]


@dataclass(frozen=True)
class Mutant:
    """One change of one place.

    Attributes:
        path: the file, relative to the repository.
        line: the line of the place.
        source: the text of the line, without its indentation.
        kind: number, unit, sign, comparison, boolean, extreme or arithmetic.
        change: the place before and after.
        function: the outermost function that holds it; None for a module's or class's own line.
        number: its number in the file.
    """

    path: str
    line: int
    source: str
    kind: str
    change: str
    function: str | None
    number: int

    @property
    def key(self) -> tuple[str, str, str]:
        """Name of the mutant that does not change where lines above it come or go."""
        return self.path, self.source, self.change


class Sites(ast.NodeVisitor):
    """Places of a file that can be changed, in the order of the source: (node, kind, change, do)."""

    def __init__(self) -> None:
        self.found: list[tuple[ast.expr | ast.stmt, str, str, str | None, Callable[[], Undo]]] = []
        self._names: list[str] = []
        self._function: str | None = None

    def _add(self, node: Any, kind: str, change: str, owner: Any, field: str, value: Any) -> None:
        def do() -> Undo:
            before = getattr(owner, field)
            setattr(owner, field, value)
            return lambda: setattr(owner, field, before)

        self.found.append((node, kind, change, self._function, do))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._names.append(node.name)
        for child in node.body:
            self.visit(child)
        self._names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)  # which the module computes
        outermost = self._function is None
        if outermost:
            self._function = ".".join([*self._names, node.name])
        for child in node.body:
            self.visit(child)
        if outermost:
            self._function = None

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave assertions alone, because they only tell a type checker what cannot happen."""

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
        if value in UNITS:
            self._add(node, "unit", f"{value!r} → {UNITS[value]!r}", node, "value", UNITS[value])
            return
        others = {"number": value * 2 or 1, "sign": -value}
        if isinstance(value, int):
            others["one more"] = value + 1
        for kind, other in others.items():
            if other != value and not (kind == "one more" and other == others["number"]):
                self._add(node, kind, f"{value!r} → {other!r}", node, "value", other)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Change an index to its neighbour alone: the index 1 of a pair is its index -1, too."""
        found = len(self.found)
        self.generic_visit(node)
        self.found[found:] = [one for one in self.found[found:] if one[0] is not node.slice or one[1] != "sign"]

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
            self._add(node, "sign", f"{ast.unparse(node)} → {ast.unparse(node.operand)}", node, "op", ast.UAdd())
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for i, op in enumerate(node.ops):
            if other := COMPARISONS.get(type(op)):
                ops = [*node.ops[:i], other(), *node.ops[i + 1 :]]
                changed = ast.unparse(ast.Compare(node.left, ops, node.comparators))
                self._add(node, "comparison", f"{ast.unparse(node)} → {changed}", node, "ops", ops)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        changed = ast.unparse(ast.BoolOp(other, node.values))
        self._add(node, "boolean", f"{ast.unparse(node)} → {changed}", node, "op", other)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        sides = (node.left, node.right)
        # unions of types or of sets; joined strings or lists
        if isinstance(node.op, ast.BitOr) or any(map(_is_sequence, sides)):
            for side in sides:
                self.visit(side)
            return
        self._arithmetic(node, node.op)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if not _is_sequence(node.value):
            self._arithmetic(node, node.op)
        self.generic_visit(node)

    def _arithmetic(self, node: ast.BinOp | ast.AugAssign, op: ast.operator) -> None:
        other = {ast.Add: ast.Sub(), ast.Sub: ast.Add()}.get(type(op))
        if other is not None:
            change = "+ → -" if isinstance(op, ast.Add) else "- → +"
            self._add(node, "arithmetic", f"{change} in {ast.unparse(node)}", node, "op", other)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in EXTREMES:
            other = EXTREMES[node.func.id]
            self._add(node, "extreme", f"{node.func.id} → {other} in {ast.unparse(node)}", node.func, "id", other)
        self.generic_visit(node)


def _is_sequence(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_sequence(node.left) or _is_sequence(node.right)
    texts = isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    return texts or isinstance(node, ast.List | ast.Tuple | ast.ListComp)


def places(path: Path) -> list[tuple[Path, int]]:
    """Return a file with the number of each of its mutants."""
    sites = Sites()
    sites.visit(ast.parse(path.read_text()))
    return [(path, number) for number in range(len(sites.found))]


def mutants(path: Path, wanted: Collection[int] | None = None) -> Iterator[tuple[Mutant, types.CodeType]]:
    """Yield the wanted mutants of a file, or all, with the code of the changed module."""
    text = path.read_text()
    tree, sites, lines = ast.parse(text), Sites(), text.splitlines()
    sites.visit(tree)
    for number, (node, kind, change, function, do) in enumerate(sites.found):
        if wanted is not None and number not in wanted:
            continue
        name = str(path.relative_to(ROOT))
        mutant = Mutant(name, node.lineno, lines[node.lineno - 1].strip(), kind, change, function, number)
        undo = do()
        try:
            yield mutant, compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)
        finally:
            undo()


class Session:
    """Plugin of pytest that runs the mutants instead of the tests."""

    def __init__(self, chosen: Sequence[tuple[Path, int]], done: Mapping[Any, str], results: Path | None, lines: Path):
        self.chosen, self.done = chosen, done
        self.results, self.lines = results, lines
        self.outcomes: list[tuple[Mutant, str]] = []
        self._kills: Counter[tuple[str | None, str]] = Counter()
        self._sound: dict[tuple[str, str], bool] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Trace all tests, then run each mutant in a fork."""
        paths = {str(path) for path in TARGETS}
        self._items = {item.nodeid: item for item in session.items}
        for path in TARGETS:  # modules of plug-ins are imported only when they are needed
            importlib.import_module(_module(str(path.relative_to(ROOT))))
        self._reached, self._lasted_s = self._traced(paths)
        self._functions = _functions(paths)
        wanted: dict[Path, set[int]] = defaultdict(set)
        for path, number in self.chosen:
            wanted[path].add(number)
        planned = [each for path, numbers in wanted.items() for each in mutants(path, numbers)]
        begun = time.monotonic()
        for i, (mutant, code) in enumerate(planned, 1):
            outcome = self.done.get(mutant.key) or self._run(mutant, code)
            self.outcomes.append((mutant, outcome))
            if self.results is not None:
                with self.results.open("a") as file:
                    file.write(json.dumps({**asdict(mutant), "outcome": outcome}) + "\n")
            if outcome != KILLED:
                print(f"{outcome}: {mutant.path}:{mutant.line}: {mutant.change}", flush=True)
            if i % 50 == 0:
                print(f"{i} of {len(planned)} in {time.monotonic() - begun:.0f} s", flush=True)
        return True

    def _traced(self, paths: set[str]) -> tuple[dict[tuple[str, int], set[str]], dict[str, float]]:
        """Return the tests that reach each line, and how long each test takes; a fork runs the tests of each file."""
        reached: dict[tuple[str, int], set[str]] = defaultdict(set)
        lasted: dict[str, float] = {}
        by_file: dict[str, list[str]] = defaultdict(list)
        for name in self._items:
            by_file[name.partition("::")[0]].append(name)
        known = json.loads(self.lines.read_text()) if self.lines.exists() else {}
        sources = hashlib.sha256(b"".join(path.read_bytes() for path in TARGETS)).hexdigest()
        if known.get("sources") != sources:  # otherwise the line numbers would belong to other code
            known = {"sources": sources}
        for file, names in by_file.items():
            changed_s = Path(file).stat().st_mtime
            if known.get(file, [0])[0] != changed_s:
                answer = _forked(lambda names=names: self._trace_items(names, paths), 600.0)
                known[file] = [changed_s, *json.loads(answer or "[{}, []]")]
            _, found, loaded = known[file]
            for name in loaded:  # so that the forked mutants need not import it
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
            for name, (passed, took_s, lines) in found.items():
                if name not in self._items:
                    continue
                if not passed:
                    print(f"left out, as it fails, is skipped or takes too long without a mutant: {name}", flush=True)
                    continue
                lasted[name] = took_s
                for path, line in lines:
                    reached[path, line].add(name)
        self.lines.write_text(json.dumps(known))
        print(f"{len(lasted)} tests of {sum(lasted.values()):.0f} s, traced", flush=True)
        return reached, lasted

    def _trace_items(self, names: Sequence[str], paths: set[str]) -> str:
        found, before = {}, {*sys.modules}
        signal.signal(signal.SIGVTALRM, lambda *_: pytest.fail(f"takes more than {BUDGET_S:g} s"))
        for name, following in pairwise([*names, None]):
            seen: set[tuple[str, int]] = set()

            def local(frame: types.FrameType, event: str, _: Any, seen: set[tuple[str, int]] = seen) -> Any:
                seen.add((frame.f_code.co_filename, frame.f_lineno))
                return local

            def entered(frame: types.FrameType, event: str, _: Any) -> Any:
                return local if frame.f_code.co_filename in paths else None

            begun = time.process_time()
            threading.settrace(entered)
            sys.settrace(entered)
            signal.setitimer(signal.ITIMER_VIRTUAL, BUDGET_S)
            try:
                passed = self._passes(name, following)
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
                sys.settrace(None)
            found[name] = (passed, time.process_time() - begun, sorted(seen))
        return json.dumps([found, [name for name in sys.modules if name not in before]])

    def _passes(self, name: str, following: str | None) -> bool:
        item = self._items[name]
        reports = runtestprotocol(item, log=False, nextitem=self._items[following] if following else None)
        return all(report.passed for report in reports)

    def _run(self, mutant: Mutant, code: types.CodeType) -> str:
        """Return the outcome of a mutant."""
        names = self._tests_of(mutant)
        if mutant.function is None:
            names = self._sound_of(mutant.path, names)
        if not names:
            return UNREACHED
        limit_s = 20 + PATIENCE * sum(self._lasted_s[name] for name in names)
        killer = _forked(lambda: self._killer(mutant, code, names), limit_s)
        if killer == "":
            return SURVIVED
        if killer is not None:
            self._kills[mutant.function, killer] += 1
        return KILLED

    def _sound_of(self, path: str, names: Sequence[str]) -> list[str]:
        """Return the tests that still pass after the unchanged module is run again.

        No other test can judge a mutant.
        """
        asked = [name for name in names if (path, name) not in self._sound]

        def failing() -> str:
            _run_again(path)
            return "\n".join(name for name, after in pairwise([*asked, None]) if not self._passes(name, after))

        if asked:
            answer = _forked(failing, 600.0)
            failed = {*asked} if answer is None else {*answer.splitlines()}
            self._sound |= {(path, name): name not in failed for name in asked}
            if failed:
                print(f"{path}, run again, fails {len(failed)} of {len(asked)} tests", flush=True)
        return [name for name in names if self._sound[path, name]]

    def _tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that reach the line: those that killed others in the function, name its file or are fast."""
        path = str(ROOT / mutant.path)
        if mutant.function is None:
            named = re.findall(r"\b_?[A-Z][A-Z_]+\b", mutant.source.partition("=")[0])
            users = [f for f in TARGETS if str(f) == path or _module(mutant.path) in f.read_text()]
            lines = [(str(f), i) for f in users for i in _mentions(f, named)] if named else []
            if not any(line in self._reached for line in lines):  # a constant that is computed from other constants
                lines = [key for key in self._reached if key[0] == path]
        else:
            lines = [(path, mutant.line)]
        names = {name for line in lines for name in self._reached.get(line, ())}
        chosen, spent_s = [], 0.0
        topic = Path(mutant.path).stem.replace("_", "-")
        is_other = {name: topic not in name.replace("_", "-") for name in names}
        for name in sorted(names, key=lambda n: (-self._kills[mutant.function, n], is_other[n], self._lasted_s[n])):
            if (spent_s := spent_s + self._lasted_s[name]) > BUDGET_S:
                break
            chosen.append(name)
        return chosen

    def _killer(self, mutant: Mutant, code: types.CodeType, names: Sequence[str]) -> str:
        """Load the mutant and return the test that fails, or ""."""
        if mutant.function is None:
            try:
                _run_again(mutant.path, code)
            except Exception:
                return "import"
        else:
            _replace(self._functions, code, mutant)
        return next((name for name, following in pairwise([*names, None]) if not self._passes(name, following)), "")


def _mentions(path: Path, names: Sequence[str]) -> list[int]:
    pattern = re.compile(rf"\b({'|'.join(names)})\b")
    return [i for i, line in enumerate(path.read_text().splitlines(), 1) if pattern.search(line)]


def _functions(paths: set[str]) -> dict[tuple[str, str, int], list[types.FunctionType]]:
    """Return the functions of these files by file, name and first line."""
    gc.unfreeze()
    found: dict[tuple[str, str, int], list[types.FunctionType]] = defaultdict(list)
    for made in gc.get_objects():
        if type(made) is types.FunctionType and (code := made.__code__).co_filename in paths:
            found[code.co_filename, code.co_qualname, code.co_firstlineno].append(made)
    gc.freeze()
    return found


def _replace(functions: Mapping[Any, Sequence[types.FunctionType]], code: types.CodeType, mutant: Mutant) -> None:
    """Give the functions of a mutant their changed code."""
    pending, replaced = [code], 0
    while pending:
        made = pending.pop()
        pending += [const for const in made.co_consts if isinstance(const, types.CodeType)]
        if made.co_qualname == mutant.function:
            for function in functions[made.co_filename, made.co_qualname, made.co_firstlineno]:
                function.__code__ = made
                replaced += 1
    if not replaced:
        raise LookupError(f"no function {mutant.function} of {mutant.path} is loaded")


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _run_again(path: str, code: types.CodeType | None = None) -> None:
    """Run a module again with this code, and replace its old functions and classes wherever they were imported."""
    module = sys.modules[_module(path)]
    before = dict(vars(module))
    exec(code or compile(Path(path).read_text(), str(ROOT / path), "exec", dont_inherit=True), vars(module))
    made = {name: (old, new) for name, old in before.items() if (new := vars(module)[name]) is not old}
    by_id = {id(old): new for old, new in made.values() if not isinstance(old, int | float | str | None)}
    for name, other in [*sys.modules.items()]:
        if other is module or not name.startswith(("cs_systems", "tests")):
            continue
        for local, value in [*vars(other).items()]:
            if id(value) in by_id:
                setattr(other, local, by_id[id(value)])
            elif type(value) in (int, float, str) and local in made and _equal(made[local][0], value):
                setattr(other, local, made[local][1])


def _equal(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other


def _forked(work: Callable[[], str], limit_s: float) -> str | None:
    """Return the answer of a function that runs in a fork of this process; None if it takes too long or dies."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(reads)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        try:
            answer = work().encode()
        except BaseException:
            os.write(2, traceback.format_exc().encode())
            os._exit(1)
        with os.fdopen(writes, "wb") as file:
            file.write(answer)
        os._exit(0)
    os.close(writes)
    end, parts = time.monotonic() + limit_s, []
    with os.fdopen(reads, "rb", buffering=0) as file:
        while ready := select.select([file], [], [], max(0.0, end - time.monotonic()))[0]:
            if not (part := file.read(1 << 16)):
                break
            parts.append(part)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError("a fork failed; see the traceback above")
    return b"".join(parts).decode() if ready else None


def table(outcomes: Iterable[tuple[Mutant, str]], of: str) -> tuple[str, float]:
    """Return the page of the outcomes, and the share of the mutants that survived or that no test reaches."""
    allowed = {(e["path"], e["source"], e["change"]): e["reason"] for e in _equivalent()}
    files: dict[str, Counter[str]] = defaultdict(Counter)
    left, same = [], []
    for mutant, outcome in outcomes:
        if outcome != KILLED and mutant.key in allowed:
            outcome = "equivalent"
            same.append(f"- {mutant.path}:{mutant.line}: `{mutant.change}`: {allowed[mutant.key]}")
        elif outcome != KILLED:
            left.append(f"- {outcome}: {mutant.path}:{mutant.line}: `{mutant.change}`")
        files[mutant.path][outcome] += 1
    whole = sum(files.values(), Counter[str]())
    count = sum(whole.values())
    share = (whole[SURVIVED] + whole[UNREACHED]) / count if count else 0.0
    columns = (KILLED, SURVIVED, UNREACHED, "equivalent")
    lines = [f"| file | mutants | {' | '.join(columns)} |", f"| --- {'| ---: ' * 5}|"]
    for name, row in (*sorted(files.items()), ("all", whole)):
        lines.append(f"| {name} | {sum(row.values())} | {' | '.join(str(row[c]) for c in columns)} |")
    head = f"{of}: {share:.1%} of {count} survived or are reached by no test.\n"
    parts = ["# Mutants of the analysis wing\n", head, "\n".join(lines), "\n## Not killed\n", *left]
    return "\n".join([*parts, "\n## Equivalent\n", *same, ""]), share


def _equivalent() -> list[dict[str, str]]:
    if not EQUIVALENT.exists():
        return []
    found: list[dict[str, str]] = tomllib.loads(EQUIVALENT.read_text())["equivalent"]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="files to change (default: the analysis wing)")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files or folders of tests")
    parser.add_argument("--without", default=WITHOUT, help="expression of pytest's -k for tests to leave out")
    parser.add_argument("--sample", type=int, help="number of mutants, drawn at random; default: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--results", type=Path, help="file for one JSON line per mutant")
    parser.add_argument("--again", action="store_true", help="run only mutants that --results has not as killed")
    parser.add_argument("--lines", type=Path, help="file that keeps the lines of each test for the same code")
    parser.add_argument("--table", type=Path, help="file for the page")
    options = parser.parse_args(argv)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    done = {}
    if options.again:
        rows = [json.loads(line) for line in options.results.read_text().splitlines()]
        done = {(r["path"], r["source"], r["change"]): KILLED for r in rows if r["outcome"] == KILLED}
    files = [path.resolve() for path in options.files] or TARGETS
    of_files = [place for path in files for place in places(path)]
    chosen = sorted(random.Random(options.seed).sample(of_files, min(options.sample or len(of_files), len(of_files))))
    with tempfile.TemporaryDirectory() as folder:
        lines = options.lines or Path(folder, "lines.json")
        plugin = Session(chosen, done, options.results, lines)
        words = [*options.tests, "-q", "--basetemp", f"{folder}/tests", "-p", "no:cacheprovider", "-p", "no:xdist"]
        words += ["-k", f"not ({options.without})"] * bool(options.without)
        pytest.main(words, plugins=[plugin])
    of = f"{len(chosen):,} of {len(of_files):,} mutants" + f", seed {options.seed}" * (options.sample is not None)
    page, share = table(plugin.outcomes, of)
    if options.table is not None:
        options.table.write_text(page)
    else:
        print(page)
    return int(share > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
