"""Data flow of a loop's source: the lines that make what the model is then given, and those that do not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from cs_systems.measure.recorder.batches import ModelCalls
from cs_systems.measure.recorder.stacks import own_lines

# program → the functions that give the model their results; `work` and `other` are the own functions that take time
FEEDS = {
    "x = work()\nmodel(x)": True,
    "x, y = work()\nloss = [model(x), y]": True,
    "x, y = work()\nmodel(other())": False,
    "batch = work()\nx = batch * 2\nmodel(inputs=x)": True,
    "model(work())": True,
    "model(1)\nlog = work()": False,
    "x = []\nfor i in range(2):\n    x.append(work())\nmodel(x)": True,
    "x = [work() for i in range(2)]\nmodel(x)": True,
    "x, seen = [0, 0], [0]\nfor i in range(1):\n    seen[i] = work()\nmodel(x[i])": False,
    "for x in batches():\n    model(x)": True,
    "source = batches()\nx = next(source)\nmodel(x)": True,
    "import math\nx = math.sqrt(2)\nmodel(x)\nmath.hypot(*work())": False,
    "class Trainer:\n    def step(self):\n        model(self.batch)\n    def fit(self):\n        self.batch = work()\n"
    "        self.step()\nTrainer().fit()": True,
    "class Trainer:\n    def step(self, x):\n        model(x)\n    def fit(self):\n        x = 1\n"
    "        self.step(x)\n        self.metric = work()\nTrainer().fit()": False,
    "def train(x):\n    scale = 2\n    model(x * scale)\nx = work()\ntrain(x)": True,
    "def train(x):\n    y = 1\n    model(y)\nx = 1\ny = work()\ntrain(x)": False,
    "x = [[0]]\ny = work()\nfor row, item in zip(x, y):\n    row[0] = item\nmodel(x)": True,
    "x = [[0]]\ny = work()\nfor row, item in zip([[0]], y):\n    row[0] = item\nmodel(x)": False,
    "x = [item * 2 for item in work()]\nmodel(x)": True,
    "x = work()\nloss = [model(item) for row in [x] for item in row]": True,
    "rows = [0]\nx = [1 for i in range(2)]\nfor i, row in zip(work(), rows):\n    other()\nmodel(x)": False,
    "y = work()\nlog = [x for x in y]\nx = 1\nmodel(x)": False,
    "x = work()\nfor _ in range(2):\n    out = model(x)\n    seen = [out]\n    x = work()": True,
    "def act(x):\n    return policy(x)\nx = 1\nfor _ in range(2):\n    y = act(x)\n    x = other(y) or work(y)\n    "
    "model(x)": False,
    "x = 1\nfor _ in range(2):\n    _, y = [0, model(x)]\n    x = work(y)": False,
    "x = 1\nfor _ in range(2):\n    _ = model(x)\n    for _ in range(1):\n        x = work(_)": True,
    "def play():\n    policy(1)\n    return work()\nx = play()\nmodel(x)": False,
}
HEAD = """
def work(*_):
    look()
    return 1, 1
def other(*_):
    return 0
def batches():
    for _ in range(2):
        yield work()
"""


@pytest.mark.parametrize("program", FEEDS)
def test_line_feeds_the_model_if_its_result_is_passed_to_the_call(program: str, tmp_path: Path) -> None:
    file, calls = tmp_path / "loop.py", ModelCalls()
    file.write_text(HEAD + program)
    looks: list[Any] = []

    def chain() -> Any:
        own = own_lines(sys._getframe(2))[0]
        return tuple(line for line in own if line[0].co_filename == str(file))

    names = {
        "model": lambda *_, **__: calls.add(chain(), True) or 0,
        "policy": lambda *_: calls.add(chain(), False),
        "look": lambda: looks.append(chain()),
    }
    exec(compile(file.read_text(), str(file), "exec"), names)
    assert {calls.are_fed_by(each) for each in looks} == {FEEDS[program]}


def test_unreadable_source_has_no_line_that_feeds_the_model() -> None:
    calls, looks = ModelCalls(), list[Any]()
    names = {
        "model": lambda _: calls.add(own_lines(sys._getframe(1))[0], True),
        "look": lambda: looks.append(own_lines(sys._getframe(1))[0]),
    }
    exec(compile("x = look()\nmodel(x)", "gone.py", "exec"), names)
    assert not calls.are_fed_by(looks[0])


# program → whether the loss is computed from what the call of `policy`, a forward without gradients, returns
INTO_LOSS = {
    "soft = policy(1)\nloss = Loss(model(1), soft)\nloss.backward()": True,
    "seen = policy(1)\nloss = Loss(model(1))\nloss.backward()": False,
    "def step():\n    soft = policy(1)\n    return Loss(model(1), soft)\nloss = step()\nloss.backward()": True,
    "def step():\n    x = policy(1)\n    print(x)\n    return Loss(model(1))\nloss = step()\nloss.backward()": False,
    "def step():\n    return Loss(policy(1))\nlosses = [step()]\nfor loss in losses:\n    loss.backward()": True,
}


@pytest.mark.parametrize("program", INTO_LOSS)
def test_forward_without_gradients_goes_into_the_loss_if_it_is_computed_from_its_result(
    program: str, tmp_path: Path
) -> None:
    file, calls = tmp_path / "loop.py", ModelCalls()
    file.write_text(program)
    looks: list[Any] = []

    def chain(depth: int = 2) -> Any:
        own = own_lines(sys._getframe(depth))[0]
        return tuple(line for line in own if line[0].co_filename == str(file))

    class Loss:
        def __init__(self, *_: object) -> None:
            pass

        def backward(self) -> None:
            calls.add_backward(chain())

    names = {"model": lambda _: 0, "policy": lambda _: looks.append(chain()), "Loss": Loss, "print": lambda _: None}
    exec(compile(file.read_text(), str(file), "exec"), names)
    for _ in range(8):
        calls.add(looks[0], False)
    assert [calls.go_into_loss(each) for each in looks] == [INTO_LOSS[program]]
    calls.add(looks[0], False)
    assert not calls.go_into_loss(looks[0]), "so many calls in one pass are a rollout"


# program with a function that sleeps → what it looks at between two pauses
POLLED = {
    "def fetch():\n    while queue.empty():\n        sleep(1)\n    return 1\nmodel(fetch())": "queue.empty()",
    "def fetch():\n    while True:\n        if not queue.empty():\n            return 1\n"
    "        sleep(1)\nmodel(fetch())": "not queue.empty()",
    "def fetch():\n    while True:\n        try:\n            return queue.get_nowait()\n        except KeyError:\n"
    "            sleep(1)\nmodel(fetch())": "queue.get_nowait()",
    "def fetch():\n    while a_long_name(queue.empty(), queue.empty(), 0):\n        sleep(1)\n"
    "model(fetch())": "a condition",
    "def fetch():\n    sleep(1)\n    return 1\nmodel(fetch())": None,
    "def fetch():\n    for _ in range(1):\n        sleep(1)\nmodel(fetch())": None,
    "end = 1\nwhile time.time() < end:\n    sleep(1)\nmodel(end)": None,
    "left = 1\nwhile left:\n    left -= 1\n    sleep(1)\nmodel(1)": None,
    "while queue.empty():\n    model(1)\n    sleep(1)": None,
    "def step():\n    model(1)\nwhile queue.empty():\n    step()\n    sleep(1)": None,
}  # fmt: skip


class Queue:
    """Queue that is empty at the first look."""

    def __init__(self) -> None:
        self.looks = 0

    def empty(self) -> bool:
        self.looks += 1
        return self.looks == 1

    def get_nowait(self) -> int:
        if self.empty():
            raise KeyError
        return 1


@pytest.mark.parametrize("program", POLLED)
def test_loop_that_sleeps_between_two_looks_polls_unless_it_trains_or_waits_for_a_time(
    program: str, tmp_path: Path
) -> None:
    file, calls, looks = tmp_path / "loop.py", ModelCalls(), list[Any]()
    file.write_text(program)

    def chain() -> Any:
        own = own_lines(sys._getframe(2))[0]
        return tuple(line for line in own if line[0].co_filename == str(file))

    class Clock:
        now = 0

        def time(self) -> int:
            self.now += 1
            return self.now - 1

    names = {
        "model": lambda _: calls.add(chain(), True),
        "sleep": lambda _: looks.append(chain()),
        "queue": Queue(),
        "time": Clock(),
        "a_long_name": lambda first, *_: first,
    }
    exec(compile(file.read_text(), str(file), "exec"), names)
    assert [calls.polled(each[-1]) for each in looks] == [POLLED[program]]


def test_polled_result_of_another_process_feeds_the_model_even_if_it_was_asked_by_a_result(tmp_path: Path) -> None:
    file, calls, looks = tmp_path / "loop.py", ModelCalls(), list[Any]()
    file.write_text(
        "def fetch(_):\n    while queue.empty():\n        sleep(1)\n    return 1\n"
        "x = 1\nfor _ in range(1):\n    y = model(x)\n    x = fetch(y)\n"
    )

    def chain() -> Any:
        own = own_lines(sys._getframe(2))[0]
        return tuple(line for line in own if line[0].co_filename == str(file))

    names = {"model": lambda _: calls.add(chain(), True), "sleep": lambda _: looks.append(chain()), "queue": Queue()}
    exec(compile(file.read_text(), str(file), "exec"), names)
    assert [calls.are_fed_by(each) for each in looks] == [True]
