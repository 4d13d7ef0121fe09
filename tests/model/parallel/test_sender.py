"""Sender thread: starts collectives in order, raises errors at the wait and ends with its owner."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from functools import partial

import pytest
import torch

from cs_systems.model.parallel._sender import Sender

CPU = torch.device("cpu")


def test_jobs_run_in_order_on_one_thread_without_gradients() -> None:
    sender, ran = Sender(CPU), []
    for number in range(100):
        sender.put(lambda n: ran.append((n, threading.get_ident(), torch.is_grad_enabled())), number)
    sender.finish()
    assert [number for number, _, _ in ran] == [*range(100)]
    assert {thread for _, thread, _ in ran} == {ran[0][1]} != {threading.get_ident()}
    assert not any(with_gradients for _, _, with_gradients in ran)


def test_error_is_raised_at_the_wait_and_skips_later_jobs() -> None:
    sender, ran = Sender(CPU), []
    sender.put(ran.append, 1)
    sender.put(partial(int, "no number"))
    sender.put(ran.append, 2)
    with pytest.raises(ValueError, match="no number"):
        sender.finish()
    sender.put(ran.append, 3)
    sender.finish()
    assert ran == [1, 3]


def test_backward_waits_for_its_jobs_and_raises_their_errors() -> None:
    sender, p, ran = Sender(CPU), torch.ones(1, requires_grad=True), []

    def hook(_: torch.Tensor) -> None:
        sender.join_backward()
        for job in (partial(time.sleep, 0.05), partial(ran.append, 1), partial(int, "no number")):
            sender.put(job)

    p.register_post_accumulate_grad_hook(hook)
    with pytest.raises(ValueError, match="no number"):
        p.sum().backward()
    assert ran == [1]
    assert not sender.in_backward


def test_senders_of_a_device_share_a_thread_but_not_errors() -> None:
    (one, other), ran = (Sender(CPU), Sender(CPU)), []
    for number, sender in enumerate([one, other] * 3):
        sender.put(lambda n: ran.append((n, threading.get_ident())), number)
    one.put(partial(int, "no number"))
    other.put(lambda: ran.append((6, threading.get_ident())))
    other.finish()
    assert [number for number, _ in ran] == [*range(7)]
    assert len({thread for _, thread in ran}) == 1
    with pytest.raises(ValueError, match="no number"):
        one.finish()


def test_interrupt_ends_the_wait() -> None:
    sender, released = Sender(CPU), threading.Event()
    sender.put(released.wait)

    def wait() -> None:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        sender.finish()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
    try:
        with pytest.raises(KeyboardInterrupt):
            wait()
    finally:
        signal.signal(signal.SIGINT, before)
        released.set()


def test_thread_ends_with_its_sender_and_keeps_no_tensor() -> None:
    sender, threads = Sender(torch.device("meta")), []  # no other test uses this device
    sender.put(lambda: threads.append(threading.current_thread()))
    kept = weakref.ref(given := torch.zeros(1))
    sender.put(len, [given])
    sender.finish()
    del given
    assert kept() is None
    assert threads[0].is_alive()
    del sender
    gc.collect()
    threads[0].join(5.0)
    assert not threads[0].is_alive()
