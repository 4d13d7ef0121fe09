"""Tests of the search for containers that get longer in each step, and of lines that read all of them."""

import sys
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from cs_systems.measure.recorder import lengths


@pytest.mark.parametrize(
    "line",
    [
        "order = self.scores.argsort()",
        "mean = sum(meter.scores) / len(meter.scores)",
        "weights = [t.priority**alpha for t in self.scores]",
        "for score in self.scores:",
        "for n, score in enumerate(self.scores):",
        "totals = {k: v + 1 for k, v in self.scores.items()}",
        "mine = torch.stack([torch.cat(self.scores), torch.cat(self.clicks)])",
        "self.scores = np.concatenate([self.scores, new])",
        "json.dump(scores, file)",
        "scores = torch.cat([scores, new])",
    ],
)
def test_line_that_reads_all_of_a_container_is_found(line: str) -> None:
    assert lengths.reads(line, "meter.scores")


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
    ],
)
def test_line_that_reads_a_part_is_none(line: str) -> None:
    assert not lengths.reads(line, "meter.scores")


class Meter:
    def __init__(self) -> None:
        self.scores: Any = np.zeros(0)
        self.latest: list[float] = [0.0] * 10
        self.window: deque[float] = deque(maxlen=100)
        self.total = torch.zeros(3, requires_grad=True)


def test_what_gets_longer_is_found_by_its_name() -> None:
    meter, losses, rows = Meter(), [0.0], torch.zeros(0)
    weight = torch.nn.Parameter(torch.zeros(2))
    before = lengths.of(sys._getframe())
    for step in range(20):
        meter.scores = np.concatenate([meter.scores, np.ones(8)])
        meter.latest = [*meter.latest[1:], 1.0]
        losses.append(step)
        meter.window.append(step)
        rows = torch.cat([rows, torch.ones(2)])
    weight = torch.nn.Parameter(torch.zeros(200))
    found = lengths.grown(before, lengths.of(sys._getframe()), 20)
    assert {(each.name, each.elements, each.per_step) for each in found} == {
        ("meter.scores", 160, 8.0),
        ("losses", 21, 1.0),
        ("rows", 40, 2.0),
    }
    assert {each.file for each in found} == {__file__}
    assert weight.numel() == 200


class Agent:
    def __init__(self) -> None:
        self.memory = Meter()


def test_container_of_an_object_of_an_object_is_found() -> None:
    agent = Agent()
    before = lengths.of(sys._getframe())
    agent.memory.latest.extend([0.0] * 10)
    assert [each.name for each in lengths.grown(before, lengths.of(sys._getframe()), 10)] == ["agent.memory.latest"]


def reading(meter: Meter) -> Any:
    return meter.scores.mean()


def test_line_reads_only_what_its_own_file_uses() -> None:
    code, line = reading.__code__, 2  # the number of an instruction of the line
    here = lengths.Longer("meter.scores", 160, 8.0, __file__)
    assert lengths.read_at((code, line), [here]) is here
    assert lengths.read_at((code, line), [here._replace(file="other.py")]) is None
    assert lengths.read_at((code, line), []) is None
