"""Rows of a replayed step for a picture, and the picture."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from cs_systems.analysis.replay import replayed
from cs_systems.analysis.replay.lanes import FREE, RECORDED, REPLAYED, WAITS, WORK, lanes
from cs_systems.readers.forms.columns import UNKNOWN
from cs_systems.report.pages.replay import svg
from tests.analysis.replay.simulated import AUTOGRAD, US, Host, Launch, Run, Sync, simulated

BACKWARD = Run(AUTOGRAD, tuple(Launch(10 * US, name="softmax") for _ in range(10)))
STEP = (Host(50 * US), *(Launch(10 * US) for _ in range(10)), BACKWARD, Sync())


def test_the_versions_of_a_step_have_its_threads_and_streams() -> None:
    trace, steps, _ = simulated(STEP)
    steps = [step._replace(number=number) for number, step in enumerate(steps)]
    found = lanes(replayed(trace, steps), number=1)
    assert found is not None
    assert found.number == 1
    assert [version.name for version in found.versions] == [RECORDED, REPLAYED, FREE]
    recorded, again, free = found.versions
    assert [lane.name for lane in recorded.lanes] == ["host", "other thread", "stream 7"]
    assert [lane.name for lane in free.lanes] == ["stream 7"]
    assert again.step_s == pytest.approx(recorded.step_s)
    assert free.step_s < recorded.step_s
    assert min(box.start_s for lane in free.lanes for box in lane.boxes) == 0
    host, _, stream = recorded.lanes
    assert host.boxes[-2].kind == WAITS
    assert {box.kind for box in host.boxes} == {WORK, WAITS}
    assert [box.kind for box in stream.boxes] == ["matmul"] * 10 + ["softmax"] * 10
    assert stream.boxes[0].end_s - stream.boxes[0].start_s == pytest.approx(10 * US)
    for before, after in zip(stream.boxes, again.lanes[2].boxes, strict=True):
        assert before.start_s == pytest.approx(after.start_s)


def test_without_predictions_the_step_has_no_version_with_free_launches() -> None:
    trace, steps, _ = simulated(STEP)
    replay = replayed(trace, steps)
    object.__setattr__(replay, "why_not", "a reason")
    found = lanes(replay)
    assert found is not None
    assert [version.name for version in found.versions] == [RECORDED, REPLAYED]


def test_no_replay_gives_no_picture() -> None:
    trace, steps, _ = simulated(STEP)
    trace.kernels.call[:] = UNKNOWN
    assert lanes(replayed(trace, steps)) is None


def test_the_picture_draws_each_version_to_one_scale() -> None:
    trace, steps, _ = simulated(STEP)
    found = lanes(replayed(trace, steps))
    assert found is not None
    picture = ElementTree.fromstring(svg(found))
    texts = ["".join(one.itertext()) for one in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert [text.partition(":")[0] for text in texts if ":" in text] == [RECORDED, REPLAYED, FREE]
    assert texts.count("stream 7") == 3
    boxes = [one for one in picture.iter("{http://www.w3.org/2000/svg}rect") if one.get("x")]
    assert all(float(one.attrib["x"]) + float(one.attrib["width"]) <= 1000 for one in boxes)
    assert len([one for one in boxes if one.attrib["fill"].startswith("var(--pale")]) == 2  # the host's waits
