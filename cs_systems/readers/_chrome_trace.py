"""Events of a Chrome trace file as they are written, read in batches, so that the file need not fit into memory.

Source: "Trace Event Format": an array of events, or an object with such an array under `traceEvents`.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cs_systems.config import ConfigError
from cs_systems.core.formats import Unpacked

WINDOW = 1 << 22  # characters read at a time
BATCH = 1 << 15  # characters decoded at a time: they fit into the processor's cache
CUT_WORD = 16  # characters: a number, a word or an escape that a window cuts is shorter
LONGEST_EVENT = 1 << 24  # characters, for the header too: profilers write some thousands
_BETWEEN = re.compile(r"[\s,]*")
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_DECODER = json.JSONDecoder(strict=False)
Event = dict[str, Any]


class Text:
    """Window on a trace: the text from `at` on is not decoded yet."""

    def __init__(self, file: Unpacked, path: Path) -> None:
        self.path = path
        self.text, self.at = "", 0
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def extend(self) -> bool:
        """Read more text behind what is not decoded yet; return False at the end of the file.

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


def header(text: Text) -> Event:
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
        before: Event = json.loads(text.text[: found.end()] + "]}")
    except json.JSONDecodeError:
        raise ConfigError(
            f"{text.path} is damaged: it does not begin as a Chrome trace does; export it again"
        ) from None
    except ValueError:
        raise ConfigError(f"{text.path} is damaged: a number has thousands of digits; export it again") from None
    text.at = found.end()
    return before


def events(window: Text) -> Iterator[list[Any]]:
    """Yield the events in batches; each list is emptied when the next is requested.

    Decoding an array of events takes two thirds of the time that decoding one after the other does. The text is cut
    after a brace followed by a comma. Where that brace does not close an event, the array fails to parse and its events
    are decoded one by one.
    """
    number, alone = 0, 0
    while True:
        text, at = window.text, _BETWEEN.match(window.text, window.at).end()  # type: ignore[union-attr]
        window.at = at
        if text.startswith("]", at):
            return
        cut = text.rfind("},", at, at + BATCH) + 1 if at >= alone else 0
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
            # More text completes an event that the window cuts, but mends no error before the cut.
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
        yield found
        found.clear()  # the next batch reuses this memory, which is in the processor's cache
