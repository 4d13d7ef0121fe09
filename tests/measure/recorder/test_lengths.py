"""Tests of the search for containers that get longer in each step, and of lines that read all of them."""

import random
import sys
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from cs_systems.measure.recorder import lengths


@pytest.mark.parametrize(
    "line",
    [
        "order = self.scores.argsort()",
        "mean = sum(self.scores) / len(self.scores)",
        "weights = [t.priority**alpha for t in self.scores]",
        "for score in self.scores:",
        "for n, score in enumerate(self.scores):",
        "totals = {k: v + 1 for k, v in self.scores.items()}",
        "mine = torch.stack([torch.cat(self.scores), torch.cat(self.clicks)])",
        "self.scores = np.concatenate([self.scores, new])",
        "json.dump(self.scores, file)",
        "self.scores = torch.cat([self.scores, new])",
        "fresh = [n for n in self.scores if n not in seen]",
    ],
)
def test_line_that_reads_all_of_a_container_is_found(line: str) -> None:
    assert lengths.reads(line, "self.scores")


@pytest.mark.parametrize(
    "line",
    [
        "self.scores.append(loss.item())",
        "mean = sum(self.scores[-10:]) / 10",
        "for score in self.scores[-10:]:",
        "batch = random.sample(self.scores, 32)",
        "rows = [self.scores[i] for i in chosen]",
        "if key in self.scores:",
        "best = max(self.best_scores)",
        "print(len(self.scores))",
        "mean = sum(self.scores.window)",
        "loss = model(x).sum()",
        "loss = other.mean(scores_now)",
        "fresh = [n for n in numbers if n not in self.scores]",
        "fresh = [n for n in numbers if key(n) in self.scores]",
        "best = next(n for n in self.scores if n > 1)",
        "is_new = all(n != last for n in self.scores)",
        "for score in reversed(self.scores):",
        "for score, label in zip(self.scores, labels):",
        "mean = sum(scores)",
        "mean = sum(meter.scores)",
        "self.step()  # of sum(self.scores)",
    ],
)
def test_line_that_reads_a_part_is_none(line: str) -> None:
    assert not lengths.reads(line, "self.scores")


class Meter:
    def __init__(self) -> None:
        self.scores: Any = np.zeros(0)
        self.latest: list[float] = [0.0] * 10
        self.window: deque[float] = deque(maxlen=100)
        self.total = torch.zeros(3, requires_grad=True)


def looked(steps: Callable[[int], None], frame: FrameType) -> list[lengths.Longer]:
    """Return what is found by looks at the times of a recording with 5 steps of warm-up and 20 timed ones."""
    looks = list[tuple[int, lengths.Look]]()
    for step in range(26):
        if step in (1, 4, 5, 25):
            looks.append((step, lengths.of(frame)))
        steps(step)
    return lengths.grown(looks)


def test_what_gets_longer_is_found_by_its_name() -> None:
    meter, losses, rows = Meter(), [0.0], torch.zeros(0)
    weight = torch.nn.Parameter(torch.zeros(2))
    looks = list[tuple[int, lengths.Look]]()
    for step in range(25):
        if step in (1, 4, 5):
            looks.append((step, lengths.of(sys._getframe())))
        meter.scores = np.concatenate([meter.scores, np.ones(8)])
        meter.latest = [*meter.latest[1:], 1.0]
        losses.append(step)
        meter.window.append(step)
        rows = torch.cat([rows, torch.ones(2)])
    weight = torch.nn.Parameter(torch.zeros(200))
    found = lengths.grown([*looks, (25, lengths.of(sys._getframe()))])
    assert {(each.name, each.elements, each.per_step) for each in found} == {
        ("meter.scores", 200, 8.0),
        ("losses", 26, 1.0),
        ("rows", 50, 2.0),
    }
    assert {each.of.file for each in found} == {__file__}
    assert weight.numel() == 200
    assert lengths.grown([looks[0], (25, lengths.of(sys._getframe()))]) == []


class Agent:
    def __init__(self) -> None:
        self.memory = Meter()


def test_container_of_an_object_of_an_object_is_found() -> None:
    agent = Agent()
    found = looked(lambda step: agent.memory.latest.append(step), sys._getframe())
    assert [each.name for each in found] == ["agent.memory.latest"]


def test_sentences_of_different_lengths_do_not_grow() -> None:
    tokens, draw = list[int](), random.Random(0)
    for _ in range(100):
        lengths_of = [draw.randrange(50, 500) for _ in range(26)]
        lengths_of[25] = 499

        def steps(step: int, lengths_of: list[int] = lengths_of) -> None:
            tokens[:] = [0] * lengths_of[step]

        assert [each.name for each in looked(steps, sys._getframe()) if each.name == "tokens"] == []


def test_memory_of_fixed_size_only_fills_up() -> None:
    memory = deque[float]([], maxlen=1000)
    assert looked(memory.append, sys._getframe()) == []
    assert len(memory) == 26


def test_attribute_of_another_object_of_the_class_may_be_the_one_that_is_read() -> None:
    one, other = Meter(), Meter()
    assert looked(lambda step: one.latest.append(step), sys._getframe()) == []
    assert len(other.latest) == 10


class Stock:
    def __init__(self) -> None:
        self.scores = [1.0] * 10

    def total(self) -> float:
        return sum(self.scores)


class Longest(Meter):
    def total(self) -> Any:
        return sum(score for score in self.scores)


def own(scores: Any) -> Any:
    return sum(scores)


def of_class(name: str = "meter.scores", owner: Any = Meter, elements: int = 200) -> lengths.Longer:
    return lengths.Longer(lengths.Of(name, __file__, owner), elements, 8.0, 1e-6)


def test_line_reads_the_attribute_of_its_own_class() -> None:
    told = of_class(owner=Stock)
    assert lengths.read_at((Stock.total.__code__, 2), [told]) is told
    assert lengths.read_at((Stock.total.__code__, 2), [of_class()]) is None
    assert lengths.read_at((Longest.total.__code__, 2), [of_class(owner=Longest)]) is not None
    assert lengths.read_at((Stock.total.__code__, 2), []) is None
    elsewhere = told._replace(of=told.of._replace(file="other.py"))
    assert lengths.read_at((Stock.total.__code__, 2), [elsewhere]) is None


def test_line_reads_the_variable_of_its_own_function() -> None:
    def around() -> Any:
        scores = [1.0]

        def inner() -> Any:
            return sum(scores)

        return inner

    inner = around().__code__
    module = compile("scores = []", __file__, "exec")
    line = own.__code__, 2
    assert lengths.read_at(line, [of_class("scores", own.__code__)]) is not None
    assert lengths.read_at(line, [of_class("scores", inner)]) is None
    assert lengths.read_at(line, [of_class("scores", module)]) is None
    assert lengths.sees(inner, around.__code__, "scores")
    assert lengths.sees(inner, module, "other")
    assert not lengths.sees(inner, own.__code__, "scores")


def test_line_that_takes_longer_than_the_elements_does_other_work() -> None:
    told, line = of_class(owner=Stock), (Stock.total.__code__, 2)
    assert lengths.read_at(line, [told], 1e-4) is told
    assert lengths.read_at(line, [told], 3e-4) is None
