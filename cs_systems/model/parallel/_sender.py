"""Thread that starts collectives, so that the thread that runs backward continues.

Starting a collective takes the host tens of microseconds, nearly all in C++ without the interpreter's lock. This would
lengthen a CPU-bound step once per parameter or bucket; the thread does it on another core.

Collectives match by order. So there is one such thread per device, shared by all senders: two models with one loss send
in the order of their gradients, on every rank. Backward ends only when its jobs are started, so that later collectives
of its caller come after them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

# (error list of the sender, the stream to run on, function, its arguments)
Job = tuple[list[BaseException], torch.cuda.Stream | None, Callable[..., Any], tuple[Any, ...]]


class _Line:
    """Job queue of one device's thread; the thread ends with this object."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()
        # The thread references only the queue, so it does not keep this object alive.
        Thread(target=_serve, args=(self.jobs,), name="sender", daemon=True).start()
        weakref.finalize(self, self.jobs.put, None)


_lines: weakref.WeakValueDictionary[torch.device, _Line] = weakref.WeakValueDictionary()


class Sender:
    """Sender of jobs to the thread of its device, which runs all senders' jobs in order and ends with the last sender.

    in_backward: whether a backward has begun, and may not have ended.
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
        """Run jobs put from now on in the stream of this backward. A hook calls this.

        Backward ends when all of them have run, and raises the error of any of them.
        """
        self.in_backward = True
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def put(self, run: Callable[..., Any], *arguments: Any) -> None:
        """Queue a function to be run soon, without gradients."""
        self._put((self._errors, self._stream, run, arguments))

    def finish(self) -> None:
        """Wait until all jobs are run. Raises the error of the first job that failed; those after it were skipped."""
        done: SimpleQueue[None] = SimpleQueue()
        self._put(([], None, done.put, (None,)))
        done.get()  # an interrupt can end this wait
        self.in_backward = False
        if self._errors:
            raise self._errors.pop()


def _serve(jobs: SimpleQueue[Job | None]) -> None:
    with torch.no_grad():
        while (job := jobs.get()) is not None:
            errors, stream, run, arguments = job
            try:
                if stream is not None:
                    torch.cuda.set_stream(stream)  # also sets the device
                if not errors:
                    run(*arguments)
            except BaseException as error:  # finish() raises it
                errors.append(error)
            del job, errors, stream, run, arguments  # a waiting thread must not keep a model alive
