"""A thread that starts collectives, so that the one that runs backward goes on with it.

To start a collective takes the host tens of microseconds, nearly all of them in C++ without the interpreter's lock.
Where the host binds, a step is longer by that, once for each parameter or bucket; another core does it meanwhile.

Collectives match by order. So there is one such thread for a device, whoever sends: two models with one loss send in
the order of their gradients, on every rank. And backward ends when what it put is started: what its caller sends next
comes after that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

# (errors of who put it, the stream to run on, what, its arguments)
Job = tuple[list[BaseException], torch.cuda.Stream | None, Callable[..., Any], tuple[Any, ...]]


class _Line:
    """The jobs of one device's thread, which ends with this object."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()
        # The thread knows these alone: it must not keep this object alive.
        Thread(target=_serve, args=(self.jobs,), name="sender", daemon=True).start()
        weakref.finalize(self, self.jobs.put, None)


_lines: weakref.WeakValueDictionary[torch.device, _Line] = weakref.WeakValueDictionary()


class Sender:
    """Runs what it is given, in order with all others of its device, on a thread that ends with the last of them.

    in_backward: whether a backward has begun that is not known to have ended.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._line = _lines.get(device) or _Line()
        _lines[device] = self._line
        self._put = self._line.jobs.put
        self._errors: list[BaseException] = []
        self._stream: torch.cuda.Stream | None = None
        self.in_backward = False

    def join_backward(self) -> None:
        """Called by a hook: what is put from here on goes to the stream of this backward, which ends when all is run,
        and raises what that raised."""
        self.in_backward = True
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def put(self, run: Callable[..., Any], *arguments: Any) -> None:
        """Have it run soon, without gradients."""
        self._put((self._errors, self._stream, run, arguments))

    def finish(self) -> None:
        """Wait until all is run. Raises what one of them raised; those after it were left out."""
        done: SimpleQueue[None] = SimpleQueue()
        self._put(([], None, done.put, (None,)))
        done.get()  # which an interrupt ends
        self.in_backward = False
        if self._errors:
            raise self._errors.pop()


def _serve(jobs: SimpleQueue[Job | None]) -> None:
    with torch.no_grad():
        while (job := jobs.get()) is not None:
            errors, stream, run, arguments = job
            try:
                if stream is not None:
                    torch.cuda.set_stream(stream)  # and its device
                if not errors:
                    run(*arguments)
            except BaseException as error:  # raised where finish() is called
                errors.append(error)
            del job, errors, stream, run, arguments  # while it waits for the next one it must not keep a model alive
