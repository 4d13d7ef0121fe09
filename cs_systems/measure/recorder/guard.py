"""Error guard for everything that observes a loop: an error in this package ends the observation, not the program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from cs_systems.instrument.compiler import untraced


class Guest:
    """Observer in a foreign process.

    Attributes:
        failure: an error of the observation itself, after which nothing is observed.
    """

    failure: Exception | None = None

    def fail(self, error: Exception) -> None:
        """Stop observing."""
        self.failure = error


_recording: Guest | None = None


def begin(recording: Guest) -> None:
    """Make this recording the one that ends on errors in functions that belong to no other guest."""
    global _recording
    _recording = recording


def end() -> None:
    global _recording
    _recording = None


def as_guest(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that an error in it does not reach the program that calls it.

    An error in a method of a guest ends this guest; any other one ends the recording.
    """

    @untraced
    @functools.wraps(function)
    def guest(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            failed = args[0] if args and isinstance(args[0], Guest) else _recording
            if failed is None:
                raise
            failed.fail(error)
            return None

    return guest
