"""Workers of a DataLoader: batches are prepared in other processes while the step computes."""

from __future__ import annotations

import functools
import os
import re
from typing import Any

from cs_systems.advise.edits import calls, chained, in_calls, with_value
from cs_systems.advise.lever import Lever, ScriptChange, Situation

WORKERS = max(1, min(4, (os.cpu_count() or 2) // 2))


def unfit(situation: Situation) -> str | None:
    if not calls(situation.source, ("DataLoader",)):
        return "the script makes no DataLoader"
    takes = re.search(r"num_workers\s*=(?!=)(?!\s*0\b)", situation.source)
    return "the script sets num_workers itself" if takes else None


def hook() -> None:
    import torch
    from torch.utils.data import DataLoader

    made: Any = DataLoader.__init__

    @functools.wraps(made)
    def with_workers(self: Any, *args: Any, **kwargs: Any) -> None:
        if "num_workers" not in kwargs:
            kwargs |= {"num_workers": WORKERS, "persistent_workers": True}
            kwargs.setdefault("pin_memory", torch.cuda.is_available())
        elif kwargs["num_workers"] == 0:
            kwargs["num_workers"] = WORKERS
        made(self, *args, **kwargs)

    DataLoader.__init__ = with_workers  # type: ignore[method-assign]


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
        patch=chained(with_value("num_workers", 0, str(WORKERS), ("DataLoader",)), in_calls(("DataLoader",), KEYWORDS)),
    ),
    remedies=("data-input", "batch-preparation"),
)
