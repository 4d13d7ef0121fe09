"""Modules that programs and ranks of tests import, for the process that they are forked from."""

from __future__ import annotations

import gc

gc.disable()  # turned on again in each fork
# A third of the work of a short recorded program would be to import these, and the rules and levers.

import pandas as pd  # noqa: E402, F401
import rich.console  # noqa: E402
import rich.table  # noqa: E402, F401
import torch.distributed.optim  # noqa: E402
import torch.distributed.run  # noqa: E402, F401

import cs_systems.analysis.diagnosis._evidence  # noqa: E402
import cs_systems.cli._advice  # noqa: E402
import cs_systems.cli._children  # noqa: E402
import cs_systems.cli.profile  # noqa: E402
import cs_systems.cli.run  # noqa: E402
import cs_systems.measure.recorder.recorder  # noqa: E402
import cs_systems.measure.recorder.unedited  # noqa: E402
import cs_systems.report.diagnoses  # noqa: E402
import cs_systems.report.pages.profile  # noqa: E402
import cs_systems.report.tables.formats  # noqa: E402
import cs_systems.report.tables.records  # noqa: E402, F401
import tests.model.parallel.ranks  # noqa: E402, F401
from cs_systems.core import plugins  # noqa: E402

for package in ("diagnosis", "levers", "readers", "experiments", "profilers"):
    for name in plugins.names(package):
        plugins.get(package, name)

gc.freeze()
