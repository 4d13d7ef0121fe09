"""Recorders that are observing a loop of this process; while one does, `run` and `sweep` refuse to measure.

A measurement inside a recorded loop would become part of its steps, and compete with it for the device.
"""

from __future__ import annotations

from cs_systems.config import ConfigError

_active: set[int] = set()


def begin(recorder: object) -> None:
    _active.add(id(recorder))


def end(recorder: object) -> None:
    _active.discard(id(recorder))


def refuse_inside(function: str) -> None:
    """Raise ConfigError if a Recorder is active."""
    if _active:
        raise ConfigError(
            f"{function}() was called while a Recorder is recording; call {function}() after the with block of "
            "the Recorder, or once its attribute done is True"
        )
