"""Tests of the channel, which accepts only complete frames of one writer, in order."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_systems.config import RunConfig
from cs_systems.measure.runtime import channel
from cs_systems.measure.runtime.channel import CellRecord, ChannelError, Done, Message, Ready, Receiver, Visit, Warming
from cs_systems.measure.runtime.processes import Expected, Member, RequestUnread

PID = 4321
texts = st.text(max_size=20)
messages = st.one_of(
    st.builds(Visit, st.integers(0, 99), st.none() | st.integers(0, 9), st.integers(0, 2**60)),
    st.builds(Warming, st.integers(0, 99), st.integers(0, 9), st.integers(0, 9)),
    st.builds(channel.Timing, st.integers(0, 99), st.integers(0, 9), st.integers(0, 9)),
    st.builds(CellRecord, st.integers(0, 99), st.dictionaries(texts, texts | st.integers() | st.none()), st.booleans()),
    st.builds(Done, st.booleans()),
    st.builds(channel.Join, texts, st.floats(0, 1e6) | st.integers(0, 9)),
    st.builds(channel.Counted, st.none() | texts),
)


@pytest.fixture
def pipe() -> Iterator[tuple[Receiver, int]]:
    read, write = os.pipe()
    yield Receiver(read), write
    os.close(read)
    os.close(write)


def frames(*sent: Message, pid: int = PID) -> bytes:
    return b"".join(channel.encode(message, pid, number) for number, message in enumerate(sent))


@given(messages, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_message_round_trips_through_a_frame(message: Message, pid: int, number: int) -> None:
    assert channel.decode(channel.encode(message, pid, number), pid, number) == message


@given(st.binary(min_size=1, max_size=200), st.integers(0, 400), messages)
def test_foreign_bytes_are_not_accepted_as_a_message(noise: bytes, at: int, message: Message) -> None:
    frame = channel.encode(message, PID, 0)
    at = min(at, len(frame))
    with pytest.raises(ChannelError):
        channel.decode(frame[:at] + noise + frame[at:], PID, 0)


@given(messages, st.data())
def test_changed_byte_is_refused(message: Message, data: st.DataObject) -> None:
    frame = bytearray(channel.encode(message, PID, 0))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ChannelError):
        channel.decode(bytes(frame), PID, 0)


@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
def test_messages_arrive_in_any_pieces(pipe: tuple[Receiver, int], size: int) -> None:
    receiver, write = pipe
    sent = [Ready(PID, "cpu"), Visit(0), CellRecord(0, {"status": "ok"}), Done(True)]
    data, found = frames(*sent), []
    for start in range(0, len(data), size):
        os.write(write, data[start : start + size])
        found += receiver.messages()
    assert found == sent


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        (b'{"event": "done"}\n', "the step wrote to the worker's pipe"),
        (b"\0", "the step wrote to the worker's pipe"),
        (b"\x1eCS1" + b"\xff" * 40, "the step wrote to the worker's pipe"),
        (channel.encode(Done(True), PID + 1, 1), f"process {PID + 1}, forked by the step, replied"),
        (
            channel.encode(Done(True), PID, 0),
            r"the step probably wrote to the worker's pipe \(message 0 came in place of message 1\); write only",
        ),
        (channel.encode(Done(True), PID, 2), r"\(message 2 came in place of message 1\)"),
    ],
    ids=["JSON", "NUL", "a torn header", "a child", "an old message", "a later message"],
)
def test_foreign_message_is_refused_with_the_reason(pipe: tuple[Receiver, int], noise: bytes, message: str) -> None:
    receiver, write = pipe
    os.write(write, frames(Ready(PID, "cpu")) + noise)
    arrived = receiver.messages()
    assert next(arrived) == Ready(PID, "cpu")
    with pytest.raises(ChannelError, match=message):
        next(arrived)


def test_messages_before_invalid_data_are_kept(pipe: tuple[Receiver, int]) -> None:
    receiver, write = pipe
    sent = [Ready(PID, "cpu"), Visit(0), CellRecord(0, {"status": "ok"}), Visit(1)]
    os.write(write, frames(*sent) + b"noise")
    member = Member(0, -1, receiver)
    member.listen()
    assert member.received == sent
    assert "the step wrote to the worker's pipe (b'noise'" in str(member.broken)
    os.write(write, b"more")
    member.listen()
    assert member.received == sent


def test_first_message_must_be_ready(pipe: tuple[Receiver, int]) -> None:
    receiver, write = pipe
    os.write(write, frames(Done(True)))
    with pytest.raises(ChannelError, match="the first message of the worker was Done in place of Ready; measure again"):
        next(receiver.messages())


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"type": "Nothing"}', '{"type": "Done"}', '{"type": "Done", "usable": 3.5}', "[" * 10**5]
)
def test_json_other_than_a_message_is_refused(text: str) -> None:
    with pytest.raises(ChannelError, match=r"message of the worker cannot be read .*; measure again"):
        channel.from_json(text)


@pytest.mark.parametrize(
    ("replies", "message"),
    [
        ([Done(True)], "a worker process sent an unexpected reply \\(Done\\); measure again"),
        ([Warming(1, 1, 2)], "a worker process replied for cell 1, which is finished or was not requested"),
        ([Visit(1)], "a worker process replied for cell 1, which is finished or was not requested"),
        (
            [CellRecord(0, {}), CellRecord(0, {})],
            "a worker process replied for cell 0, which is finished or was not requested",
        ),
        ([CellRecord(0, {}), Visit(0)], "a worker process replied for cell 0, which is finished or was not requested"),
    ],
)
def test_replies_for_unrequested_cells_are_refused(replies: list[Message], message: str) -> None:
    expected = Expected(channel.run_request([RunConfig()]))
    *before, last = replies
    for reply in before:
        expected.check(reply)
    with pytest.raises(ChannelError, match=message):
        expected.check(last)


def test_unread_request_has_a_remedy_other_than_timeout_s(pipe: tuple[Receiver, int]) -> None:
    receiver, write = pipe
    os.set_blocking(write, False)
    large = channel.Preflight([{"name": "x" * (1 << 20)}])
    with pytest.raises(RequestUnread, match="read no request within 0 s") as caught:
        Member(0, write, receiver).send(large, 0)
    assert caught.value.remedy == "; close other programs and measure again"


SENDS_FROM_FORK = """
import os, sys
from cs_systems.measure.runtime.channel import Done, Ready, Sender
sender = Sender(int(sys.argv[1]))
sender.send(Ready(os.getpid(), "cpu"))
if os.fork() == 0:
    sender.send(Done(False))  # ends here
os.wait()
sender.send(Done(True))
"""


def test_forked_child_neither_sends_nor_keeps_the_pipe_open() -> None:
    read, write = os.pipe()
    subprocess.run([sys.executable, "-c", SENDS_FROM_FORK, str(write)], pass_fds=[write], check=True, timeout=30)
    os.close(write)
    receiver = Receiver(read)
    hello, done = receiver.messages()
    assert isinstance(hello, Ready)
    assert done == Done(True)
    assert receiver.closed
    os.close(read)
