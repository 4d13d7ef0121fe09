"""Workers of a DataLoader: batches are prepared in other processes while the step computes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from cs_systems.advise.edits import calls, chained, in_calls, with_value
from cs_systems.advise.lever import Lever, ScriptChange, Situation
from cs_systems.advise.levers._loaders import NAMES, made_with, may_take_workers, unfit_stream
from cs_systems.analysis.comparison.loop_findings import COPY
from cs_systems.core.phases import Phase
from cs_systems.machine.cores import usable_cores

WORKERS = min(4, usable_cores())


def unfit(situation: Situation) -> str | None:
    if not calls(situation.source, NAMES):
        return "the script makes no DataLoader"
    if reason := unfit_stream(situation):
        return reason
    takes = re.search(r"num_workers\s*=(?!=)(?!\s*0\b)", situation.source)
    if takes:
        return "the script sets num_workers itself"
    return situation.too_short(Phase.INPUT, COPY, what="waiting for a batch or its copy")


def hook() -> Callable[[], bool]:
    import torch

    def work(keywords: dict[str, Any]) -> str:
        if keywords.get("num_workers"):
            return ""
        changed: dict[str, Any] = {"num_workers": WORKERS}
        if "num_workers" not in keywords:
            changed |= {"persistent_workers": True}
            changed |= {"pin_memory": torch.cuda.is_available()} if "pin_memory" not in keywords else {}
        keywords |= changed
        return f"DataLoader(…, {', '.join(f'{name}={value}' for name, value in changed.items())})"

    return made_with(work)


KEYWORDS = {"num_workers": str(WORKERS), "persistent_workers": "True", "pin_memory": "torch.cuda.is_available()"}
LEVER = Lever(
    "random changes of samples draw from the workers' seeds",
    None,
    f"DataLoader(…, num_workers={WORKERS}, persistent_workers=True, pin_memory=True)",
    0.15,
    ScriptChange(
        f"{WORKERS} worker{'s' if WORKERS > 1 else ''} of the DataLoader that persist, pinned memory on a GPU",
        unfit,
        hook=hook,
        patch=chained(
            with_value("num_workers", 0, str(WORKERS), NAMES), in_calls(NAMES, KEYWORDS, where=may_take_workers)
        ),
    ),
    remedies=("data-input", "batch-preparation"),
    shortens_input=True,
)
