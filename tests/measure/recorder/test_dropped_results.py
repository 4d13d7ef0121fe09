"""Pairs of which a function drops the second part, and uses that may read it."""

# ruff: noqa: RUF015, RUF059 (the parts that nothing reads are the point here)

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cs_systems.measure.recorder.dropped_results import drops_second

found: list[bool] = []


class Pair(nn.Module):
    """Module that returns two numbers, and notes whether its caller drops the second one."""

    def __call__(self, *_: Any) -> tuple[int, int]:
        found.append(drops_second(self, sys._getframe(1)) is not None)
        return 1, 2


class Block(nn.Module):
    """Module with pairs as parts of it."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.pairs, self.noted = Pair(), nn.ModuleList([Pair(), Pair()]), 0
        self.blocks = nn.ModuleList()


pair, block, outer = Pair(), Block(), Block()
outer.blocks.append(block)


def unread() -> int:
    first, weights = pair()
    return first


def deleted() -> int:
    first, weights = block.pair(3)
    del weights
    return first


def with_unpacked_arguments() -> int:
    of = {"some": 3}
    first, _ = block.pair(*of.values())
    return first


def of_an_argument(of: Block = block) -> int:
    return 1 + of.pair(3, 4)[0]


def of_a_list(of: Block = block) -> int:
    return of.pairs[len("a")](3)[0]


def of_a_part_of_a_list(of: Block = outer) -> int:
    first, _ = of.blocks[0].pair(
        3,
        4,
    )
    return first


def in_a_loop() -> int:
    total = 0
    for each in block.pairs:
        total, _ = each(total)
    return total


DROPS = [
    unread,
    deleted,
    with_unpacked_arguments,
    of_an_argument,
    of_a_list,
    of_a_part_of_a_list,
    in_a_loop,
    lambda: pair()[0],
]


def read() -> int:
    first, second = pair()
    return first + second


def read_now_and_then(step: int = 1) -> int:
    first, second = pair()
    if step % 10 == 0:
        print(second)
    return first


def handed_on() -> tuple[int, int]:
    first, second = pair()
    return first, second


def whole() -> tuple[int, int]:
    return pair()


def read_by_an_inner_function() -> Any:
    first, second = pair()
    return first, lambda: second


def in_an_attribute() -> int:
    first, block.noted = pair()
    return first


def in_a_name_and_in_parts() -> int:
    both = first, _ = pair()
    return first + both[1]


def named_before_the_index() -> int:
    first = (both := pair())[0]
    return first + both[1]


def in_a_dict() -> dict[str, Any]:
    first, second = pair()
    return locals()


def by_a_name_at_run_time() -> int:
    first, second = pair()
    return eval("first + second")  # type: ignore[no-any-return]


def last() -> int:
    return pair()[-1]


def second_by_index() -> int:
    return pair()[1]


def by_a_variable(index: int = 0) -> int:
    return pair()[index]


def updated() -> int:
    first, second = pair()
    second += 1
    return first


def first_of_several() -> Any:
    return list(map(pair, [1, 2]))[0]


def pair_of_pairs() -> Any:
    first, _ = map(pair, [1, 2])
    return first


def sorted_results(of: Block = block) -> Any:
    return sorted(map(of.pair, [1, 2]))[0]


def next_of_several() -> Any:
    return next(map(pair, [1, 2]))


def in_a_list() -> Any:
    return [pair() for _ in range(2)][0]


READS = [
    read,
    read_now_and_then,
    handed_on,
    whole,
    read_by_an_inner_function,
    in_an_attribute,
    in_a_name_and_in_parts,
    named_before_the_index,
    in_a_dict,
    by_a_name_at_run_time,
    last,
    second_by_index,
    by_a_variable,
    updated,
    first_of_several,
    pair_of_pairs,
    sorted_results,
    next_of_several,
    in_a_list,
]


@pytest.mark.parametrize("call", DROPS)
def test_second_part_is_dropped(call: Callable[[], Any]) -> None:
    found.clear()
    call()
    assert found
    assert all(found)


@pytest.mark.parametrize("call", READS)
def test_second_part_may_be_read(call: Callable[[], Any]) -> None:
    found.clear()
    call()
    assert found
    assert not any(found)


def test_variable_of_a_script_may_be_read_elsewhere() -> None:
    found.clear()
    exec(compile("first, _ = pair()", __file__, "exec"), dict(globals()))
    assert found == [False]


@pytest.mark.parametrize("reads", [False, True])
def test_function_of_a_file_that_reads_frames_may_be_read(reads: bool, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    text = "def run():\n    first, weights = pair()\n    return first\n"
    script.write_text(text + "variables = lambda: sys._getframe(1).f_" + ("locals" if reads else "globals") + "\n")
    names = {"pair": pair}
    exec(compile(script.read_text(), str(script), "exec"), names)
    found.clear()
    names["run"]()
    assert found == [not reads]


def test_hook_may_read_it() -> None:
    found.clear()
    with pair.register_forward_hook(lambda *_: None):
        unread()
    assert found == [False]


def test_tracer_in_python_may_read_it() -> None:
    found.clear()
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        unread()
    finally:
        sys.settrace(before)
    assert found == [False]


def test_look_keeps_no_variable_of_the_function_alive() -> None:
    tensor = torch.zeros(2)
    known = weakref.ref(tensor)
    found.clear()
    first, _ = pair(tensor)
    del tensor
    assert found == [True]
    assert known() is None


def test_attribute_that_an_object_computes_is_not_read() -> None:
    class Computing:
        __slots__ = ("computed",)
        computed: int

        def __getattr__(self, name: str) -> Pair:
            self.computed = vars(type(self))["computed"].__get__(self) + 1
            return pair

    computing = Computing()
    computing.computed = 0
    found.clear()
    first, _ = computing.pair()
    assert (found, computing.computed) == ([False], 1)
