"""Numbers of recordings and committed runs stay as they are, unless a change means to change them."""

from __future__ import annotations

import json

import pytest

from tests.analysis.recorded_numbers import CASES, differences, kept, short


def test_every_case_has_its_numbers() -> None:
    assert [*kept()] == [*CASES]


@pytest.mark.parametrize("case", CASES)
def test_numbers_of_a_recording_equal_the_committed_ones(case: str) -> None:
    """Run `python -m tests.analysis.recorded_numbers` after a change that means to change them."""
    told = json.loads(json.dumps(short(CASES[case]())))
    assert differences(told, kept()[case]) == []
