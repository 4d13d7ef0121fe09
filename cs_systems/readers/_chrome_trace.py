"""Events of a Chrome trace file as they are written, read in batches, so that the file need not fit into memory.

Source: "Trace Event Format": an array of events, or an object with such an array under `traceEvents`.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, field

from cs_systems.config import ConfigError
from cs_systems.core.formats import Unpacked

WINDOW = 1 << 22  # characters to read at a time
BATCH = 1 << 17  # characters to decode at a time, so that they and their events fit into the processor's cache
CUT_WORD = 16  # characters; a number, word or escape cut by the window's end is shorter
LONGEST_EVENT = 1 << 24  # limit in characters, also for the header; profilers write some thousands
_BETWEEN = re.compile(r"[\s,]*")
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_DECODER = json.JSONDecoder(strict=False)
_NEXT, _COLON = re.compile(r"\s*\{"), re.compile(r"\s*:\s*")
NOTHING = Raw()  # stands for a missing argument


class Arguments(Struct, gc=False):
    """Arguments of an event that the reader uses; arguments that stay `Raw` are decoded only when needed."""

    correlation: Any = UNSET
    device: Any = UNSET
    stream: Any = UNSET
    bytes: Any = UNSET
    awaited: Any = field(name="wait_on_stream", default=UNSET)
    record: Any = field(name="wait_on_cuda_event_record_corr_id", default=UNSET)
    node: Any = field(name="graph node id", default=UNSET)
    registers: Any = field(name="registers per thread", default=UNSET)
    shared: Any = field(name="shared memory", default=UNSET)
    sequence: Any = field(name="Sequence number", default=UNSET)
    forward: Any = field(name="Fwd thread id", default=UNSET)
    grid: Raw = NOTHING
    block: Raw = NOTHING
    shapes: Raw = field(name="Input Dims", default=NOTHING)
    old_shapes: Raw = field(name="Input dims", default=NOTHING)  # before PyTorch 1.11
    values: Raw = field(name="Concrete Inputs", default=NOTHING)
    types: Raw = field(name="Input type", default=NOTHING)
    collective: Raw = field(name="Collective name", default=NOTHING)
    group: Raw = field(name="Process Group Name", default=NOTHING)
    ranks: Raw = field(name="Process Group Ranks", default=NOTHING)
    size: Raw = field(name="Group size", default=NOTHING)
    number: Raw = field(name="Seq", default=NOTHING)
    into: Raw = field(name="In msg nelems", default=NOTHING)
    out: Raw = field(name="Out msg nelems", default=NOTHING)
    dtype: Raw = NOTHING

    def plain(self) -> dict[str, Any]:
        """Return the arguments by their names in the file."""
        values = {one.encode_name: getattr(self, one.name) for one in _ARGUMENTS}
        return {name: plain(value) for name, value in values.items() if value is not UNSET and value is not NOTHING}


class Event(Struct, gc=False):
    """Event as it is in the file; missing fields are UNSET.

    `args` has another class if the file has no object there.
    """

    ph: Any = UNSET
    cat: Any = UNSET
    name: Any = UNSET
    pid: Any = UNSET
    tid: Any = UNSET
    ts: Any = UNSET
    dur: Any = UNSET
    args: Arguments | UnsetType = UNSET


_EVENT, _ARGUMENTS = msgspec.structs.fields(Event), msgspec.structs.fields(Arguments)
_FAST = msgspec.json.Decoder(list[Event])


class Batch(NamedTuple):
    """Consecutive events; `written` returns the event at an index with all fields, decoded by Python's decoder."""

    events: list[Event]
    written: Callable[[int], dict[str, Any]]

    @classmethod
    def of(cls, written: list[dict[str, Any]]) -> Batch:
        return cls([*map(_event, written)], written.__getitem__)


def plain(value: Any) -> Any:
    """Return a decoded value; None if it is missing."""
    return value if type(value) is not Raw else json.loads(text) if (text := bytes(value)) else None


def _event(written: dict[str, Any]) -> Event:
    fields = {one.name: written[one.name] for one in _EVENT if one.name in written}
    if isinstance(args := fields.get("args"), dict):
        known = {one.name: (one, args[one.encode_name]) for one in _ARGUMENTS if one.encode_name in args}
        values = {name: Raw(json.dumps(value)) if one.type is Raw else value for name, (one, value) in known.items()}
        fields["args"] = Arguments(**values)
    return Event(**fields)


class Text:
    """Window on a trace file: the text from `at` on is not decoded yet; `arrays` counts the arrays of events so far."""

    def __init__(self, file: Unpacked, path: Path) -> None:
        self.path = path
        self.text, self.at, self.arrays = "", 0, 1
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def extend(self) -> bool:
        """Append more text to the window; return False at the end of the file.

        The length read doubles while an event does not fit, so that the total work stays linear in the event's length.

        Raises:
            ConfigError: An event, or the header, exceeds LONGEST_EVENT.
        """
        rest = self.text[self.at :]
        if len(rest) > LONGEST_EVENT:
            raise ConfigError(
                f"{self.path} is not a trace of torch.profiler: an event, or the header, has over "
                f"{LONGEST_EVENT >> 20} million characters; export it with export_chrome_trace"
            )
        raw = self._file.read(max(WINDOW, len(rest)))
        more = self._decoder.decode(raw, final=not raw)
        self.text, self.at = rest + more, 0
        return bool(raw)


def header(text: Text) -> dict[str, Any]:
    """Return the object before the events and move the window to the first event; {} for a bare array of events.

    Raises:
        ConfigError: The file has no `traceEvents`, or does not begin as a Chrome trace.
    """
    text.extend()
    if (begin := text.text.lstrip()).startswith("["):
        text.at = len(text.text) - len(begin) + 1
        return {}
    while not (found := _EVENTS.search(text.text)):
        if not text.extend():
            raise ConfigError(
                f"{text.path} is not a trace, because it has no traceEvents; give a file that torch.profiler's "
                "export_chrome_trace wrote"
            )
    try:
        before: dict[str, Any] = json.loads(text.text[: found.end()] + "]}")
    except json.JSONDecodeError:
        raise ConfigError(
            f"{text.path} is damaged: it does not begin as a Chrome trace does; export it again"
        ) from None
    except ValueError:
        raise ConfigError(f"{text.path} is damaged: a number has thousands of digits; export it again") from None
    text.at = found.end()
    return before


def events(window: Text) -> Iterator[Batch]:
    """Yield the events in batches.

    Decoding an array of events takes far less time than decoding them one by one. The text is cut after a brace
    followed by a comma and another brace. If that brace does not close an event, the array fails to parse and its
    events are decoded one by one. The fast decoder reads only strict JSON; Python's decoder reads events that it
    rejects.
    """
    number, alone = 0, 0
    while True:
        text, at = window.text, _BETWEEN.match(window.text, window.at).end()  # type: ignore[union-attr]
        window.at = at
        if text.startswith("]", at):
            if not _again(window):
                return
            continue
        cut = 0
        if at >= alone and not (cut := _cut(text, at)):
            alone = at + BATCH
        if cut and (batch := _fast(window.path, f"[{text[at:cut]}]")):
            number += len(batch.events)
            window.at = cut
            yield batch
            continue
        try:
            if cut:
                found, window.at = _DECODER.decode(f"[{text[at:cut]}]"), cut
            else:
                event, window.at = _DECODER.raw_decode(text, at)
                found = [event]
        except ValueError as error:
            if cut:
                alone = cut
                continue
            if not isinstance(error, json.JSONDecodeError):
                raise ConfigError(
                    f"{window.path} is damaged: a number in event {number + 1:,} has thousands of digits; record again"
                ) from None
            alone = 0
            # More text completes an event that the window cuts, but does not repair an error before the cut.
            is_final = error.pos < len(text) - CUT_WORD and not error.msg.startswith("Unterminated string")
            if is_final or not window.extend():
                ends = not is_final and (error.pos >= len(text) - 1 or at >= len(text) or text.rstrip()[-1] not in "]}")
                problem = (
                    f"is truncated: it ends inside event {number + 1:,}; copy it again, let the "
                    "profiler finish writing, or record again"
                    if ends
                    else f"is damaged: event {number + 1:,} is not valid JSON; record again without quotation marks in "
                    "names of ranges, and without with_stack"
                )
                raise ConfigError(f"{window.path} {problem}") from None
            continue
        number += len(found)
        yield Batch.of([one for one in found if type(one) is dict])


def _again(window: Text) -> bool:
    """Move the window from the end of the events to further ones in the same object; return False if there are none."""
    while len(window.text) - window.at < LONGEST_EVENT // 2 and window.extend():
        pass
    text, at = window.text, window.at + 1
    try:
        while True:
            key, at = _DECODER.raw_decode(text, _BETWEEN.match(text, at).end())  # type: ignore[union-attr]
            if not (colon := _COLON.match(text, at)):
                return False
            if key == "traceEvents" and text.startswith("[", colon.end()):
                window.at, window.arrays = colon.end() + 1, window.arrays + 1
                return True
            _, at = _DECODER.raw_decode(text, colon.end())
    except (ValueError, RecursionError):
        return False


def _cut(text: str, at: int) -> int:
    """Return the end of a batch that begins at `at`, after a brace that likely closes an event; 0 if there is none."""
    end = at + BATCH
    while (end := text.rfind("},", at, end)) >= 0:
        if _NEXT.match(text, end + 2):
            return end + 1
    return 0


def _fast(path: Path, text: str) -> Batch | None:
    """Return the events of an array; None if it is not strict JSON or an event does not have the profiler's form."""

    def written(number: int) -> dict[str, Any]:
        try:
            return _DECODER.decode(text)[number]  # type: ignore[no-any-return]
        except ValueError:  # the fast decoder skipped it
            raise ConfigError(f"{path} is damaged: a number has thousands of digits; record again") from None

    try:
        return Batch(_FAST.decode(text), written)
    except (msgspec.DecodeError, RecursionError):
        return None
