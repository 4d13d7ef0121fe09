"""Rows of a replayed step for a picture, and the picture."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from cs_systems.analysis.replay import replayed
from cs_systems.analysis.replay.lanes import FREE, RECORDED, REPLAYED, WAITS, WORK, lanes
from cs_systems.readers.forms.columns import UNKNOWN
from cs_systems.report.pages.replay import svg
from tests.analysis.replay.simulated import AUTOGRAD, MS, US, Close, Host, Launch, Open, Run, Sync, simulated

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


def test_boxes_hold_the_host_work_and_the_wait_of_each_call() -> None:
    """The second step: 50 µs and ten launches, then a thread's ten, and a wait; kernels start 4 µs after a launch."""
    trace, steps, _ = simulated(STEP)
    steps = [step._replace(number=number) for number, step in enumerate(steps)]
    found = lanes(replayed(trace, steps), number=1)
    assert found is not None
    recorded, again, _ = found.versions
    (_, host), (_, other), (_, stream) = recorded.lanes
    calls = [(0, 0), (0, 55), *((start, start + 5) for start in range(55, 100, 5)), (150, 153)]
    micros = [(round(box.start_s / US, 6), round(box.end_s / US, 6)) for box in host]
    done = 59 + 20 * 11 - 1
    assert micros == [*calls, (153, done + 6), (done + 6, done + 6)]
    assert [box.kind for box in host] == [WORK] * 12 + [WAITS, WORK]
    assert [round(box.start_s / US, 6) for box in other] == [*range(100, 150, 5)]
    assert [round(box.end_s / US, 6) for box in other] == [*range(105, 155, 5)]
    assert {box.kind for box in other} == {WORK}
    assert [round(box.start_s / US, 6) for box in stream] == [59 + 11 * n for n in range(20)]
    assert recorded.step_s == pytest.approx((done + 6) * US)
    for lane, replayed_lane in zip(recorded.lanes, again.lanes, strict=True):
        assert [box.kind for box in lane.boxes] == [box.kind for box in replayed_lane.boxes]
        for box, replayed_box in zip(lane.boxes, replayed_lane.boxes, strict=True):
            assert box[:2] == pytest.approx(replayed_box[:2])


@pytest.mark.parametrize(("number", "found"), [(None, 3), (4, 4), (9, 3)])
def test_first_step_is_drawn_unless_another_is_asked_for(number: int | None, found: int) -> None:
    trace, steps, _ = simulated(STEP)
    drawn = lanes(replayed(trace, [step._replace(number=n) for n, step in enumerate(steps, 3)]), number)
    assert drawn is not None
    assert drawn.number == found


def test_version_with_free_launches_keeps_the_loading_of_each_batch() -> None:
    loaded = (Open("input"), Host(2 * MS), Close(), *STEP)
    trace, steps, _ = simulated(loaded)
    steps = [step._replace(number=number) for number, step in enumerate(steps)]
    for number in range(3):
        found = lanes(replayed(trace, steps), number)
        assert found is not None
        assert 1.99 * MS < found.versions[2].step_s < 2.3 * MS
