"""Kinds of work of the host, told by the names of functions and ranges: a checkpoint, a log, a compilation."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple


class HostWork(NamedTuple):
    """Kind of work: words that follow "the host", and its remedy."""

    words: str
    remedy: str


_BEGIN, _END = r"(?<![a-z])", r"(?![a-z])"  # of a word inside a name, as in `save_checkpoint`
# The first pattern found in a name without its place gives the kind.
_KINDS = {
    r"gc\.collect|\bcollect\b|" + _BEGIN + "gc_collect": HostWork(
        "collects garbage", "leave out gc.collect(), or call it every 100th step"
    ),
    r"dynamo|inductor|compile_fx|^_compile\.|triton\S*compile|convert_frame": HostWork(
        "compiles",
        "let torch.compile see the same shapes in each step: pad them, or mark them (mark_dynamic, dynamic=True)",
    ),
    _BEGIN + r"sav(e|ing)_?(checkpoint|ckpt|model|pretrained|state)|checkpoint_?sav(e|ing)|write_checkpoint|torch\.save"
    r"|\bsave\b": HostWork("writes a checkpoint", "save less often, or in another thread"),
    r"wandb|tensorboard|mlflow|\binfo\b|savefig|"
    + _BEGIN
    + r"add_(scalar|histogram|figure|image)|(?<![a-z_])_?log(ging|_(metric|dict|scalar|stat)s?)?"
    + r"(?![a-z_])": HostWork("writes a log", "log less often"),
    _BEGIN + r"(load|next|fetch|get|read|prepare)_?(batch|data)" + _END: HostWork(
        "loads the next batch", "load it in a data loader's workers (num_workers, prefetch_factor), or in advance"
    ),
    _BEGIN + f"(evaluate|evaluation|validate|validation){_END}": HostWork(
        "evaluates", "evaluate less often or on fewer batches"
    ),
    r"\bprint\b": HostWork("prints", "print less often"),
    r"\bsleep\b": HostWork("sleeps", "remove the pause"),
    r"\b(item|tolist|cpu)\b": HostWork("reads values of tensors", "read values less often"),
}


@functools.lru_cache(maxsize=4096)
def host_work(name: str) -> HostWork | None:
    """Return the kind of work of a function or range, such as `save_checkpoint() at train.py:140`; None if unknown."""
    own = re.sub(r" at \S+:\d+|\S+\.py:\d+", "", name)
    return next((work for pattern, work in _KINDS.items() if re.search(pattern, own)), None)
