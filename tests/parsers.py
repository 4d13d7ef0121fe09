"""Parsers of the commands, made once in each test process: tyro takes 40 ms to make one, and 4 ms to use it."""

from __future__ import annotations

from typing import Any

from tyro._parsers import ParserSpecification

_made: dict[Any, ParserSpecification] = {}


def make_each_once() -> None:
    """Let `tyro.cli` keep the parser of each dataclass for its next call."""
    make = ParserSpecification.from_callable_or_type

    def once(kind: Any, **options: Any) -> ParserSpecification:
        if options["parent_classes"]:  # of a nested dataclass
            return make(kind, **options)
        if (key := (kind, options["description"])) not in _made:
            _made[key] = make(kind, **options)
        return _made[key]

    ParserSpecification.from_callable_or_type = staticmethod(once)  # type: ignore[method-assign]
