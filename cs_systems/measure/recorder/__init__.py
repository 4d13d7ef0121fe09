"""Recorder for a training loop of one's own: the loop runs as it is, and a record of it is left behind.

    with cs_systems.Recorder(model, optimizer, out="runs/mine") as recorder:
        for batch in loader:
            with recorder.step():
                ...

The command line and sweeps build what they measure; a recorder is a guest in a process that belongs to somebody else.
It starts no worker, changes no setting, joins no collective, prints nothing, and takes its hooks away when it is done.
"""

from __future__ import annotations

from cs_systems.measure.recorder.recorder import Recorder as Recorder
