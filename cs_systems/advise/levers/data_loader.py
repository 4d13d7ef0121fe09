"""Workers of a DataLoader: batches are prepared in other processes while the step computes."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from typing import Any

from cs_systems.advise.edits import calls, chained, in_calls, with_value
from cs_systems.advise.lever import Lever, ScriptChange, Situation

WORKERS = max(1, min(4, (os.cpu_count() or 2) // 2))

POSITION = 5  # of num_workers among the arguments of a DataLoader


def unfit(situation: Situation) -> str | None:
    if not calls(situation.source, ("DataLoader",)):
        return "the script makes no DataLoader"
    if "IterableDataset" in situation.source:
        return "each worker would read the whole IterableDataset, unless it is divided among them"
    takes = re.search(r"num_workers\s*=(?!=)(?!\s*0\b)", situation.source)
    return "the script sets num_workers itself" if takes else None


def hook() -> Callable[[], bool]:
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    made: Any = DataLoader.__init__
    changed: list[bool] = []

    @functools.wraps(made)
    def with_workers(self: Any, *args: Any, **kwargs: Any) -> None:
        dataset = args[0] if args else kwargs.get("dataset")
        if len(args) > POSITION or isinstance(dataset, IterableDataset):
            made(self, *args, **kwargs)
            return
        changed.append(not kwargs.get("num_workers"))
        if "num_workers" not in kwargs:
            kwargs |= {"num_workers": WORKERS, "persistent_workers": True}
            kwargs.setdefault("pin_memory", torch.cuda.is_available())
        elif kwargs["num_workers"] == 0:
            kwargs["num_workers"] = WORKERS
        made(self, *args, **kwargs)

    DataLoader.__init__ = with_workers  # type: ignore[method-assign]
    return lambda: any(changed)


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
