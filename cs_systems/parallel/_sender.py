"""A thread that starts collectives, so that the one that runs backward goes on with it.

To start a collective takes the host tens of microseconds, nearly all of them in C++ without the interpreter's lock.
Where the host binds, a step is longer by that, once for each parameter or bucket; another core does it meanwhile.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch

Job = tuple[Callable[..., Any], tuple[Any, ...]]


class Sender:
    """Runs what it is given, in order, on a thread that ends with this object. device: on which that thread works."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._errors: list[BaseException] = []
        # The thread knows these alone: it must not keep this object alive.
        Thread(target=_serve, args=(self._jobs, self._errors), name="sender", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def follow(self) -> None:
        """From here on what it runs goes to the stream that is current for the caller."""
        if self._device.type == "cuda":
            self.put(torch.cuda.set_stream, torch.cuda.current_stream(self._device))

    def put(self, run: Callable[..., Any], *arguments: Any) -> None:
        """Have it run soon, without gradients."""
        self._jobs.put((run, arguments))

    def finish(self) -> None:
        """Wait until all is run. Raises what one of them raised; those after it were left out."""
        done = Event()
        self.put(done.set)
        while not done.wait(1.0):  # not for ever: an interrupt is answered between
            pass
        if self._errors:
            raise self._errors.pop()


def _serve(jobs: SimpleQueue[Job | None], errors: list[BaseException]) -> None:
    with torch.no_grad():
        while (job := jobs.get()) is not None:
            run, arguments = job
            try:
                if not errors or isinstance(getattr(run, "__self__", None), Event):
                    run(*arguments)
            except BaseException as error:  # raised where finish() is called
                errors.append(error)
            del job, run, arguments  # while it waits for the next one it must not keep a model alive
