"""Recorded steps from calls and activities at given times."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from cs_systems.analysis.replay.graph import Graph, graph
from cs_systems.analysis.replay.recorded import MARK, Recorded
from cs_systems.analysis.replay.waits import US
from cs_systems.readers.forms.columns import UNKNOWN, Categorical
from tests.analysis.replay.simulated import MAIN

LAUNCH, SYNC, WAIT = "cudaLaunchKernel", "cudaDeviceSynchronize", "cudaStreamWaitEvent"


class Called(NamedTuple):
    """Call with its times in µs."""

    name: str
    start: float
    end: float
    thread: int = MAIN


class Ran(NamedTuple):
    """Activity with its times in µs, and the number of its call among those given."""

    call: int | None
    begin: float
    done: float
    stream: int = 0
    name: str = "gemm"
    node: bool = False
    lost: bool = False


def recorded_of(calls: Sequence[Called], ran: Sequence[Ran], end: float = 1e4) -> Recorded:
    """Return one recorded step from 0 to its end; activities in the order of their calls."""
    marks = Called(MARK, 0, 0), Called(MARK, end, end)
    every = [marks[0], *calls, marks[1]]
    names = list(dict.fromkeys(one.name for one in every))
    kinds, labels = ["kernel", "memcpy"], list(dict.fromkeys(one.name for one in ran))
    is_copy = [one.name.startswith(("HtoD", "DtoH")) for one in ran]
    return Recorded(
        name=Categorical(names, np.array([names.index(one.name) for one in every])),
        thread=np.array([one.thread for one in every]),
        start_s=np.array([one.start for one in every]) * US,
        end_s=np.array([one.end for one in every]) * US,
        trace_call=np.array([UNKNOWN, *range(len(calls)), UNKNOWN]),
        marks=np.array([[0, len(calls) + 1]]),
        until_idle=(False,),
        main=MAIN,
        autograd=None,
        call=np.array([UNKNOWN if one.call is None else one.call + 1 for one in ran], np.int64),
        stream=np.array([one.stream for one in ran], np.int64),
        of_stream=tuple((0, number) for number in range(1 + max((one.stream for one in ran), default=0))),
        begin_s=np.array([one.begin for one in ran]) * US,
        done_s=np.array([one.done for one in ran]) * US,
        kind=Categorical(kinds, np.array(is_copy, np.int64)),
        label=Categorical(labels, np.array([labels.index(one.name) for one in ran], np.int64)),
        node=np.array([one.node for one in ran], bool),
        lost=np.array([one.lost for one in ran], bool),
        trace_kernel=np.array([UNKNOWN if copy else k for k, copy in enumerate(is_copy)], np.int64),
    )


def made(calls: Sequence[Called], ran: Sequence[Ran], **trace: Any) -> Graph:
    return graph(SimpleNamespace(**{"waits": (), **trace}), recorded_of(calls, ran))  # type: ignore[arg-type]
