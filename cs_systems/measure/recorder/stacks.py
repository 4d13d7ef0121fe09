"""Samples of the main thread's stack: the lines of the program's own code that take its time.

A thread asks the interpreter every millisecond or two to call a function in the main thread, which looks at its own
stack. A sample is weighted by the time since the previous one. During one long call the interpreter takes no sample;
the next one, at the same line, gets all of its time. It takes none either at the end of an operator such as `x / 2` or
`x[i]`, but some lines later: so if the main thread is in one, which has given Python's lock away, the asking thread
notes its lines, and until when it saw it there. Time in which the thread itself waited for a core counts only if the
function is still the same. The thread either samples all the time, or sleeps until a step lasts much longer than usual.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import inspect
import itertools
import linecache
import os
import re
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any, NamedTuple

import torch

from cs_systems.instrument.compiler import untraced

PERIOD_S, SLOW_PERIOD_S = 0.001, 0.005  # period in all steps after the timing, and in slow steps at any time
SHORTEST_SLEEP_S = 0.02  # shortest sleep between two looks at the clock in usual steps: at most about 0.1% of one core
LONGEST_SLEEP_S = 1.0
# Interval at which the interpreter switches threads while the stack is sampled. With a longer one, a sample would only
# be taken at the next line that lets other threads run, such as a torch operator, and never in the program's own Python
# before it.
SWITCH_S = 1e-5
_SET_TIMER_SLACK, _SLACK_NS = 29, 1000  # arguments of prctl, so that sleeps of the thread end on time
UNSEEN = 2.0  # times the period after which the main thread no longer is where it was seen
REST = 4.0  # times as long as a look lasts until the next; under a tracer of the program, a look may last milliseconds
MOST_SAMPLES = 50_000
SAMPLER = "cs-systems-sampler"  # name of the thread
_PACKAGE = Path(__file__).parents[2]
_OF_PYTHON = (  # without its prefix, which may hold the program, too: /usr holds /usr/src/app
    sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
)
_LIBRARIES = tuple({f"{path}/" for path in (*_OF_PYTHON, Path(torch.__file__).parent, _PACKAGE)})
_OF_LIBRARIES = "site-packages", "dist-packages", "/torchinductor_"  # the last holds code of torch.compile
_MODULE_CALL = torch.nn.modules.module.__file__
_TORCH = f"{Path(torch.__file__).parent}/"
_CALLEE = re.compile(r"(?:await\s+)?([A-Za-z_][\w.]*(?:\([^()]*\)\.[\w.]+)*)\s*\(")
_READS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME")  # beginnings: there are variants, such as of two names
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_OPERATORS = ("BINARY_", "STORE_SUBSCR", "STORE_SLICE", "COMPARE_OP", "UNARY_")  # beginnings
MOST_BYTES = 8_000  # of a function's instructions; to look through more, the program would pause for too long
DEEPEST = 2  # lists inside lists with a first element that is looked at
_HOLD_LOCALS = {"locals", "vars", "eval", "exec"}  # functions that use the dictionary of their caller's variables
_NAME = re.compile(r"[A-Za-z_]\w*$")
_LONGEST_CALLEE = 40
# calls in loops that wait for a point in time: the loop itself is the cause
CLOCKS = {f"time.{name}" for name in ("perf_counter", "time", "monotonic", "thread_time", "process_time")}
Line = tuple[CodeType, int]
Lines = tuple[tuple[Line, ...], Line | None]  # of a stack, as `own_lines` returns them


class Sample(NamedTuple):
    """One sample of the stack.

    Attributes:
        step: the number of the step.
        phase: the result of `phase_of` at that time.
        chain: the lines of the program's own frames, outermost first, down to a call of a module.
        leaf: the innermost own line of the program, also inside a module; None without one.
        time_s: the time since the previous sample, without lost_s.
        lost_s: the part of it in which the garbage collector ran.
        is_plain: the innermost own line, or its whole function, uses no tensor.
        late_s: the time from the request for the sample until it was taken, without waits for a core, or the CPU time
            of it, if that is more: the rest of the call that was running.
        sequence: the number that autograd gives to the next operator.
    """

    step: int
    phase: Any
    chain: tuple[Line, ...]
    leaf: Line | None
    time_s: float
    lost_s: float = 0.0
    is_plain: bool = False
    late_s: float = 0.0
    sequence: int = 0


class Sampler:
    """Sampler of the main thread's stack; in a loop of another thread it takes no sample.

    phase_of: returns the current phase of the loop, in any form.
    lost_s: returns a running total of time that is not the program's own, such as garbage collection.
    """

    def __init__(self, phase_of: Any, lost_s: Any) -> None:
        self._phase_of, self._lost_s = phase_of, lost_s
        self._step: tuple[int, float, float] | None = None  # step number, start, and duration from which it is sampled
        self._samples_all = False
        self._is_traced = False  # a request under a tracer may never end
        self._own = 0  # number of the recording's own tasks that run now, one inside another
        self._wakes = threading.Event()
        self._thread: threading.Thread | None = None
        self._ends = False
        self._switch_s: float | None = None
        self._asked: _Request | None = None
        self._last_step, self._lost_before_s = -1, 0.0
        self._last = time.perf_counter(), 0.0, 0.0  # time of the last sample, and the running totals at that time
        self._look_s = 0.0  # how long it took
        self._waiting: CoreQueue | None = None
        self._main, self._main_cpu_s = CoreQueue(), cpu_clock()
        # by a reference that does not keep this object, and with it the whole recording, until the process ends
        self._call = _Call(functools.partial(Sampler._look, weakref.ref(self)))
        _calls.append(self._call)
        self.samples: list[Sample] = []

    def step_begins(self, number: int, limit_s: float) -> None:
        """Begin a step; sample it after `limit_s`, or from its start while all steps are sampled."""
        self._is_traced = _is_traced()
        self._step = number, time.perf_counter(), limit_s
        self._lost_before_s = self._lost_s()
        if not limit_s:
            self._wakes.set()
        if self._thread is None and threading.current_thread() is threading.main_thread():
            self._thread = threading.Thread(target=self._run, args=(_Stack(),), name=SAMPLER, daemon=True)
            self._thread.start()

    @property
    def has_begun(self) -> bool:
        """Flag of a loop with a step that began in the main thread."""
        return self._thread is not None

    def pause(self) -> None:
        """Sample nothing until the next step begins."""
        self._step = None

    def own_begins(self) -> None:
        """Take no sample until `own_ends`, because the recording itself works."""
        self._own += 1

    def own_ends(self, own_s: float) -> None:
        """Leave the time of the recording's own work out of the step and of its next sample."""
        self._own -= 1
        if self._own:
            return
        last_s, *totals_s = self._last
        self._last = last_s + own_s, totals_s[0], totals_s[1]
        if self._step is not None:
            number, begin_s, limit_s = self._step
            self._step = number, begin_s + own_s, limit_s

    def sample_all(self, wanted: bool) -> None:
        """Begin or end sampling each step from its start."""
        if wanted == self._samples_all:
            return
        self._samples_all = wanted
        self._wakes.set()

    def close(self) -> None:
        self._restore_switching()
        self._ends = True
        self._step = None
        self._wakes.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(LONGEST_SLEEP_S)  # it wakes at once
            if self._thread.is_alive():
                return
        for queue in filter(None, (self._main, self._waiting)):
            queue.close()

    def _switch_often(self) -> None:
        before = sys.getswitchinterval()
        if self._switch_s is None and before > SWITCH_S:
            self._switch_s = before
            sys.setswitchinterval(SWITCH_S)

    def _restore_switching(self) -> None:
        # at once, because the other thread may restore it at the same time
        before, self._switch_s = self._switch_s, None
        if before is not None and abs(sys.getswitchinterval() - SWITCH_S) < SWITCH_S / 10:
            sys.setswitchinterval(before)

    def _run(self, stack: _Stack) -> None:
        """Keep requesting samples from the main thread while its step is to be sampled. stack: the main thread's."""
        self._waiting = waiting = CoreQueue()
        _end_sleeps_on_time()
        while not self._ends and len(self.samples) < MOST_SAMPLES:
            if (left_s := self._left_s()) > 0:
                self._restore_switching()
                self._wakes.wait(min(max(left_s, SHORTEST_SLEEP_S), LONGEST_SLEEP_S))
                self._wakes.clear()
                continue
            self._switch_often()
            if self._asked is None and time.perf_counter() - self._last[0] >= REST * self._look_s:
                # first, because the sample may be taken before the call returns
                now = time.perf_counter()
                request = _Request(now, waiting.total_s(), self._main.total_s(), self._main_cpu_s())
                self._asked = request
                if ctypes.pythonapi.Py_AddPendingCall(self._call, None) != 0:
                    self._asked = None
                else:  # after the request: a short call that ends meanwhile is not made longer
                    request.lines = stack.in_operator()
            elif (pending := self._asked) is not None and pending.lines is not None:
                now = time.perf_counter()
                if stack.in_operator() == pending.lines:
                    pending.seen_s = now
            time.sleep(PERIOD_S if self._samples_all else SLOW_PERIOD_S)

    def _left_s(self) -> float:
        """Return the time until this step is sampled; 0 from then on."""
        step = self._step
        if step is None or self._is_traced:
            return SHORTEST_SLEEP_S
        return 0.0 if self._samples_all else max(0.0, step[1] + step[2] - time.perf_counter())

    @staticmethod
    @untraced
    def _look(known: weakref.ref[Sampler], _: Any) -> int:
        """Take a sample in the main thread; its stack cannot change meanwhile."""
        self = known()
        if self is None:
            return 0
        asked, self._asked = self._asked, None
        step, now = self._step, time.perf_counter()
        if step is None or self._ends or self._own or self._left_s() > 0 or asked is None or _is_traced():
            return 0
        number, begin_s, limit_s = step
        waited_s, lost_s = self._waiting.total_s() if self._waiting else 0.0, self._lost_s()
        last_s, was_waited_s, was_lost_s = self._last
        if number != self._last_step:  # the time before belongs to another step
            last_s = begin_s if self._samples_all else max(begin_s + limit_s, last_s)
            was_lost_s = self._lost_before_s if last_s == begin_s else lost_s
            self._last_step = number
        lines, seen = own_lines(sys._getframe(1)), asked.lines
        leaf = (seen or lines)[1]
        collected_s = max(0.0, lost_s - was_lost_s)
        before = self.samples[-1] if self.samples else None
        stays = before and before.step == number and before.leaf and leaf and leaf[0] is before.leaf[0]
        before_s = max(0.0, asked.asked_s - last_s - (0.0 if stays else asked.waited_s - was_waited_s))
        weight_s = max(0.0, before_s + now - max(asked.asked_s, last_s) - collected_s)
        # the scheduler counts a wait at its end, so that one in which the sample was requested is subtracted whole
        waiting_s, cpu_s = self._main.total_s() - asked.main_waited_s, self._main_cpu_s() - asked.main_cpu_s
        late_s = max(0.0, now - asked.asked_s - waiting_s, cpu_s)
        phase, sequence = self._phase_of(), torch._C._autograd._get_sequence_nr()

        def add(lines: Lines, time_s: float, lost_s: float, late_s: float) -> None:
            chain, leaf = lines
            is_plain = leaf is not None and self._samples_all and uses_no_tensor(sys._getframe(2), leaf)
            self.samples.append(Sample(number, phase, chain, leaf, time_s, lost_s, is_plain, late_s, sequence))

        unseen_s = now - asked.seen_s
        if seen is None:
            add(lines, weight_s, collected_s, late_s)
        elif unseen_s <= UNSEEN * (PERIOD_S if self._samples_all else SLOW_PERIOD_S):
            add(seen, weight_s, collected_s, late_s)
        else:  # the lock was kept since, as by `sorted`, so that this thread was not seen any more
            rest_s = min(weight_s, unseen_s)
            add(seen, weight_s - rest_s, collected_s, max(0.0, late_s - unseen_s))
            add(lines, rest_s, 0.0, min(late_s, unseen_s))
        self._last = time.perf_counter(), waited_s, lost_s
        self._look_s = self._last[0] - now
        return 0


_Call = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_calls: list[Any] = []  # kept until the process ends, because Python may still have to run one of them


class _Request:
    """Request of a sample: its time, and until then the waiting times of the asking and the main thread, and CPU time.

    lines: those of the main thread's stack, if it was in an operator. seen_s: when it was last seen there.
    """

    def __init__(self, asked_s: float, waited_s: float, main_waited_s: float, main_cpu_s: float) -> None:
        self.asked_s, self.waited_s = asked_s, waited_s
        self.main_waited_s, self.main_cpu_s = main_waited_s, main_cpu_s
        self.lines: Lines | None = None
        self.seen_s = asked_s


class _Stack:
    """Stack of the thread that made this object, for another thread to read.

    Reads the frame of the thread's state, because `sys._current_frames` may wait forever for a thread that starts.
    """

    def __init__(self) -> None:
        self._state = _state()

    def in_operator(self) -> Lines | None:
        """Return the own lines of the stack; None if it changes meanwhile, or is not in an operator or index.

        Another thread gets Python's lock while this one is in a call, at the start of a function, in a jump, or because
        an operator has given the lock away. At the end of a call a requested sample is taken at once.
        """
        try:
            frame = _frame_of(self._state)
            at = frame.f_lasti
            if at // 2 not in _operators(frame.f_code):
                return None
            lines = own_lines(frame)
            is_same = _frame_of(self._state) is frame and frame.f_lasti == at
        except ValueError:  # the thread runs no Python any more
            return None
        return lines if is_same else None


@functools.lru_cache(maxsize=512)
def _operators(code: CodeType) -> frozenset[int]:
    """Return the places of the instructions of a function that are operators, indices or comparisons."""
    if len(code.co_code) > MOST_BYTES:
        return frozenset()
    return frozenset(each.offset // 2 for each in dis.get_instructions(code) if each.opname.startswith(_OPERATORS))


def _is_traced() -> bool:
    """Return whether a tracer or profiler in Python observes this thread, which would observe a look, too."""
    return any(isinstance(each, (FunctionType, MethodType)) for each in (sys.gettrace(), sys.getprofile()))


# prototypes of their own, because a program may set those of ctypes.pythonapi
_state = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThreadState_Get", ctypes.pythonapi))
_frame_of = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p)(("PyThreadState_GetFrame", ctypes.pythonapi))


def _end_sleeps_on_time() -> None:
    """Let sleeps of this thread end within a microsecond, if the system can; the default is about 50."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, _SLACK_NS, 0, 0, 0)


class CoreQueue:
    """Total time for which the thread that made this object has waited for a core, from Linux's scheduler.

    0 if unknown. After the end of the thread, it is the last known one.
    """

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open(
                f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC
            )
        except OSError:
            self._file = None
        self._last_s = 0.0

    def total_s(self) -> float:
        if self._file is not None:
            with suppress(ProcessLookupError):
                self._last_s = int(os.pread(self._file, 100, 0).split()[1]) * 1e-9
        return self._last_s

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # the program may have closed all its descriptors
                os.close(file)


def cpu_clock() -> Callable[[], float]:
    """Return a function that returns the CPU time of this thread in any thread; always 0 where none is known."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return lambda: 0.0
    return functools.partial(time.clock_gettime, time.pthread_getcpuclockid(threading.get_ident()))


_is_own: dict[str, bool] = {}


def is_own(file: str) -> bool:
    """Return whether a source file belongs to the program, not to a library, the standard library or this package."""
    known = _is_own.get(file)
    if known is None:
        compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        libraries = "<", *_LIBRARIES, *([f"{Path(compiled).resolve()}/"] if compiled else [])
        is_library = file.startswith(libraries) or any(part in file for part in _OF_LIBRARIES)
        known = _is_own[file] = not is_library
    return known


def own_lines(frame: FrameType | None) -> Lines:
    """Return the own lines of a stack down to the outermost call of a module, and the innermost own line overall."""
    chain: list[Line] = []
    leaf: Line | None = None
    while frame is not None:
        code = frame.f_code
        if is_own(code.co_filename):
            line = code, frame.f_lasti
            leaf = leaf or line
            chain.append(line)
        elif code.co_name == "_call_impl" and code.co_filename == _MODULE_CALL:
            chain.clear()  # time inside a module belongs to the line that calls it
        frame = frame.f_back
    return tuple(reversed(chain)), leaf


def uses_no_tensor(frame: FrameType | None, line: Line) -> bool:
    """Return whether a line uses plain values alone, or no variable of its function's innermost call holds a tensor.

    A line inside a function of PyTorch, such as a call of a module or of backward, uses tensors, even if it names only
    their owner; so does a line that reads an attribute with a tensor or a module.
    """
    code = line[0]
    if len(code.co_code) > MOST_BYTES:
        return False
    while frame is not None and frame.f_code is not code:
        if frame.f_code.co_filename.startswith(_TORCH):
            return False
        frame = frame.f_back
    if frame is None or not code.co_flags & inspect.CO_OPTIMIZED or holds_locals(code):
        return False  # the body of a script, or a function that may keep the dictionary which is emptied below
    names, outside = frame.f_locals, frame.f_globals
    used, attributes = _names_by_line(code).get(line_of(line), (frozenset(), frozenset()))
    values = [names[n] if n in names else outside.get(n) for n in used]
    is_plain = bool(used) and all(map(_is_plain, values))
    tensor = any(_has_tensor(value, attributes) for value in values) or any(
        isinstance(each, torch.Tensor) for value in names.values() for each in _value_and_first(value)
    )
    if isinstance(names, dict):
        names.clear()  # Python keeps this copy with the frame, and it would keep the tensors alive
    return is_plain or not tensor


@functools.lru_cache(maxsize=512)  # one pass over a function, because samples are taken in the program's own thread
def _names_by_line(code: CodeType) -> dict[int, tuple[frozenset[str], frozenset[str]]]:
    """Return the variables that the instructions of each line of a function read, and the attributes."""
    found: dict[int, tuple[set[str], set[str]]] = {}
    numbers = _line_numbers(code)
    for each in dis.get_instructions(code):
        names, attributes = found.setdefault(numbers[each.offset // 2], (set(), set()))
        names.update(names_read(each.opname, each.argval))
        if each.opname in _ATTRIBUTES:
            attributes.add(each.argval)
    return {number: (frozenset(names), frozenset(attributes)) for number, (names, attributes) in found.items()}


def _has_tensor(value: Any, attributes: frozenset[str]) -> bool:
    """Return whether one of these attributes of an object is a tensor or a module, without a call of the object."""
    if not attributes or isinstance(value, (ModuleType, type)):
        return False
    try:
        of = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return False
    kept = of, *(of.get(name) for name in ("_parameters", "_buffers", "_modules"))
    inside = (each[name] for each in kept if isinstance(each, dict) for name in attributes & each.keys())
    return any(isinstance(first, (torch.Tensor, torch.nn.Module)) for one in inside for first in _value_and_first(one))


def names_read(operation: str, argument: Any) -> tuple[str, ...]:
    """Return the variables that an instruction reads; since Python 3.13 it may read two, or store one and read one."""
    if operation == "STORE_FAST_LOAD_FAST":
        return (argument[1],)
    if not operation.startswith(_READS):
        return ()
    return argument if isinstance(argument, tuple) else (argument,)


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Return whether a value is a number, text, array, module or function outside of torch, or a list of such."""
    if type(value) in (list, tuple):
        return not value or (depth < DEEPEST and _is_plain(value[0], depth + 1))
    if isinstance(value, (ModuleType, FunctionType, BuiltinFunctionType, type)):
        name = value.__name__ if isinstance(value, ModuleType) else value.__module__ or ""
        return name.partition(".")[0] != "torch"
    return isinstance(value, (int, float, complex, str, bytes, range, NoneType)) or type(value).__module__ == "numpy"


@functools.lru_cache(maxsize=4096)  # called for each sample
def holds_locals(code: CodeType) -> bool:
    """Return whether a function may keep the dictionary of its variables, because it calls `locals()` or the like."""
    instructions = dis.get_instructions(code)
    return any(
        load.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        and load.argval in _HOLD_LOCALS
        # with an argument, `vars` returns the attributes of an object
        and (load.argval != "vars" or (call.opname in ("PRECALL", "CALL") and not call.arg))
        for load, call in pairwise(instructions)
    )


def _value_and_first(value: Any) -> tuple[Any, ...]:
    return (value, value[0]) if type(value) in (list, tuple) and value else (value,)


def position_of(line: Line) -> tuple[int | None, int | None, int | None, int | None]:
    """Return the first and last line and the first and last column of an instruction's source; None if unknown."""
    code, at = line
    positions = [*code.co_positions()]
    return positions[at // 2] if 0 <= at // 2 < len(positions) else (None,) * 4


def line_of(line: Line) -> int:
    """Return the number of the line; the jump at the end of a loop, which has none, belongs to the line before it."""
    code, at = line
    numbers = _line_numbers(code)
    return numbers[min(at // 2, len(numbers) - 1)] if at >= 0 else code.co_firstlineno


@functools.lru_cache(maxsize=512)
def _line_numbers(code: CodeType) -> tuple[int, ...]:
    """Return the number of the line of each instruction."""
    known = (first for first, *_ in code.co_positions())
    return tuple(itertools.accumulate(known, lambda before, first: first or before, initial=code.co_firstlineno))[1:]


def place_of(line: Line) -> str:
    """Return file and line, such as `train.py:12`."""
    return f"{Path(line[0].co_filename).name}:{line_of(line)}"


def function_of(line: Line) -> str:
    """Return the name of the function, such as `Trainer.evaluate`; "" for the body of a script."""
    name = line[0].co_qualname.replace("<locals>.", "")
    return "" if name == "<module>" else name


def callee_of(line: Line) -> str | None:
    """Return the function that the source calls at this place, such as `time.sleep`; None if none is found."""
    found = _CALLEE.match(_called_text(line))
    name = found[1] if found and found[1] not in CLOCKS else None
    return name if name and len(name) <= _LONGEST_CALLEE else None


def method_of(line: Line) -> str | None:
    """Return the last name of the function that is called at this place: `contiguous` of `x.mT.contiguous()`."""
    text, depth = _called_text(line), 0
    for place in range(len(text) - 1, -1, -1) if text.endswith(")") else ():
        depth += (text[place] == ")") - (text[place] == "(")
        if not depth:  # the bracket that the last one closes
            found = _NAME.search(text[:place])
            return found[0] if found else None
    return None


def _called_text(line: Line) -> str:
    """Return the source of an instruction."""
    first, last, begin, end = position_of(line)
    if first is None or last is None or begin is None or end is None:
        return ""
    texts = [linecache.getline(line[0].co_filename, number).encode() for number in range(first, last + 1)]
    texts[-1] = texts[-1][:end]
    texts[0] = texts[0][begin:]
    return b"".join(texts).decode(errors="replace").strip()


def source_of(line: Line) -> str:
    """Return the text of the line."""
    return linecache.getline(line[0].co_filename, line_of(line)).strip()
