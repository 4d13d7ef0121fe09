"""Meaning of range names that are not in `range_names`: mapped by the user, or used by known frameworks, as data.

Every table shows such a name with its meaning, as `my_fwd → forward`.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from cs_systems.analysis.attribution.inferred_phases import are_marked, infers_backward
from cs_systems.config import ConfigError, Phase
from cs_systems.core.range_names import MEANS, PARTS, PHASES, STEP, Meaning, general, is_operator, meaning
from cs_systems.core.validation import choices, did_you_mean, nearest, one_of
from cs_systems.readers.forms.columns import Categorical
from cs_systems.readers.forms.trace import Trace

BUILT_IN = Path(__file__).with_suffix(".toml")
MEANINGS = (STEP, *PHASES, *PARTS)
MOST_LISTED = 12  # number of ranges that a message lists
NOTHING = Meaning(None, None, None)


class Habit(NamedTuple):
    """Names of ranges with one meaning; `source` is the framework, or None for those that the user maps."""

    source: str | None
    means: str
    names: tuple[str, ...]

    def matched(self, known: Iterable[str]) -> set[str]:
        """Return the known names that equal a name of this habit, or else match it as a glob."""
        known = set(known)
        found = set[str]()
        for name in self.names:
            found |= known & {name} or {one for one in known if fnmatchcase(one, name)}
        return found


def mapped(options: Sequence[str]) -> list[Habit]:
    """Return the habits of options such as `forward=## fwd ##`; raise ConfigError for another form or phase."""
    found = []
    for option in options:
        phase, equals, name = option.partition("=")
        if not equals or not name:
            raise ConfigError(
                f"--phase {option!r} is not of the form PHASE=NAME; write --phase forward='my range', with a phase and "
                "the name of a range"
            )
        found.append(Habit(None, one_of("phase", phase.strip(), PHASES), (name,)))
    return found


def read_habits(path: Path) -> list[Habit]:
    """Return the range names in a file; raise ConfigError unless it has the form of `known_ranges.toml`."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"--range-names {path} does not exist; give a TOML file") from None
    except IsADirectoryError:
        raise ConfigError(f"--range-names {path} is a folder; give a TOML file") from None
    except OSError as error:
        raise ConfigError(
            f"--range-names {path} cannot be read: {error.strerror}; make it readable, or give another TOML file"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"--range-names {path} is not a text in UTF-8; save it as UTF-8, or give another TOML file"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--range-names {path} is not valid TOML: {error}; correct the file there") from None
    found = []
    for source, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(
                f"--range-names {path} has {source} outside of a table; write a line such as [mine] before it, and "
                'names as in forward = ["my_forward"]'
            )
        for means, names in table.items():
            if f"{source}.{means}" in MEANINGS or isinstance(names, dict):
                raise ConfigError(
                    f"--range-names {path} has {means!r} as a part of a name, because TOML splits a name without "
                    'quotes at its dots; write the whole name in quotes, such as "attention.scores"'
                )
            if means not in MEANINGS:
                remedy = choices(did_you_mean(means, MEANINGS), MEANINGS)
                raise ConfigError(f"--range-names {path} has the unknown meaning {means!r} in [{source}]; {remedy}")
            if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
                key = f'"{means}"' if "." in means else means
                raise ConfigError(
                    f"--range-names {path}: {means} in [{source}] is not a list of names; "
                    f'write {key} = ["my_range", "other_range"]'
                )
            found.append(Habit(source, means, tuple(names)))
    return found


@functools.cache
def built_in() -> tuple[Habit, ...]:
    return tuple(read_habits(BUILT_IN))


def with_habits(
    traces: Sequence[Trace], options: Sequence[str] = (), file: Path | None = None
) -> list[tuple[Trace, list[str]]]:
    """Return (trace, notes) for each trace, with the meaning appended to the names of ranges.

    Args:
        traces: The traces; a name of an option must be in one of them.
        options: The user's phases, as `forward=NAME`; they always count.
        file: A file of habits, which count before the built-in ones.

    Raises:
        ConfigError: An option has another form, or names no range.
    """
    own, habits = mapped(options), [*(read_habits(file) if file else []), *built_in()]
    everywhere = {general(name) for trace in traces for name in _names(trace)}
    exact = {name for trace in traces for name in _names(trace)}
    for habit in own:
        if not habit.matched(everywhere | exact):
            near = nearest(habit.names[0], everywhere)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else ""
            listed = [*map(repr, sorted(everywhere)[:MOST_LISTED]), *(["…"] if len(everywhere) > MOST_LISTED else [])]
            remedy = choices(hint, listed) if listed else "leave out --phase, because there are no other ranges"
            raise ConfigError(
                f"--phase {habit.means}={habit.names[0]!r} matches no range of the trace (operators and modules do not "
                f"count); {remedy}"
            )
    return [_applied(trace, own, habits) for trace in traces]


def _names(trace: Trace) -> set[str]:
    """Return the names of the ranges that are neither operators nor modules."""
    modules = trace.modules
    return {n for n in trace.ranges.name.values if not is_operator(n) and not (modules and modules.is_module(n))}


def _applied(trace: Trace, own: Sequence[Habit], habits: Sequence[Habit]) -> tuple[Trace, list[str]]:
    trace, _ = _renamed(trace, own, _names(trace))
    # a name with a meaning of its own keeps that meaning
    free = {name for name in _names(trace) if meaning(name) == NOTHING}
    wanted = [habit for habit in habits if not (habit.means in PHASES and are_marked(trace))]
    found = [habit for habit in wanted if habit.matched(free | set(map(general, free)))]
    phases = {habit.means for habit in found if habit.means in PHASES}
    if Phase.FORWARD in phases and Phase.BACKWARD not in phases and infers_backward(trace):
        # operators tell more than a range that marks only forward
        wanted = [habit for habit in wanted if habit.means not in PHASES]
    trace, used = _renamed(trace, wanted, free)
    return trace, [
        f"ranges of {source} count as {', '.join(dict.fromkeys(h.means for h in used if h.source == source))}"
        for source in dict.fromkeys(habit.source for habit in used)
    ]


def _renamed(trace: Trace, habits: Sequence[Habit], names: set[str]) -> tuple[Trace, list[Habit]]:
    """Return the trace with meanings appended to the matching range names, and the entries that matched."""
    means: dict[str, str] = {}
    used = []
    for habit in habits:
        matched = habit.matched({*names, *map(general, names)})
        fresh = {name for name in names if name not in means and (name in matched or general(name) in matched)}
        means |= dict.fromkeys(fresh, habit.means)
        used += [habit] if fresh else []
    if not means:
        return trace, []
    column = trace.ranges.name
    named = [f"{name}{MEANS}{means[name]}" if name in means else name for name in column.values]
    return replace(trace, ranges=replace(trace.ranges, name=Categorical(named, column.codes))), used
