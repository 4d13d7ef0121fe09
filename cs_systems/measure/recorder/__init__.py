"""Recorder of a user's own training loop: the loop runs unchanged, and the recorder writes a record of it.

    with cs_systems.Recorder(model, optimizer, out="runs/mine") as recorder:
        for batch in loader:
            with recorder.step():
                ...

Unlike the command line and sweeps, a recorder runs in a process that is not its own. It starts no worker, changes no
setting, joins no collective, prints nothing, and removes its hooks at the end.
"""

from __future__ import annotations

from cs_systems.measure.recorder.recorder import Recorder as Recorder
