"""Parser of activation-checkpointing plans: which blocks keep their activations, and which recompute them.

Forms of a plan (Chen et al. 2016; selective: Korthikanti et al. 2022):

    none                 every block keeps the activations that its backward needs
    every:4              4 consecutive blocks form one checkpoint: its input is kept, the rest is recomputed in backward
    blocks:0,2,5-7       each of these blocks is a checkpoint of its own
    selective:attention  each block is a checkpoint that also keeps the output of its attention
    selective:matmul     each block is a checkpoint that also keeps the outputs of its linear layers
    selective:products   each block is a checkpoint that keeps both, and recomputes no product
    selective:products:7 the same, but the first 7 blocks keep their input only; so with the other selective plans
    nested:8:2           8 consecutive blocks form one checkpoint; its recomputation checkpoints every 2 blocks again
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cs_systems.core.validation import choices, nearest, shown

FORMS = (
    "none", "every:K", "blocks:0,2,5-7", "selective:attention", "selective:matmul", "selective:products",
    "selective:products:N", "nested:K:k",
)  # fmt: skip
SELECTIVE = ("attention", "matmul", "products")


@dataclass(frozen=True)
class Segment:
    """One checkpoint, over the blocks `first` to `stop` − 1.

    `inner` holds the checkpoints nested in it. `keeps` names what it keeps besides its input: "attention", "matmul",
    "products", or None.
    """

    first: int
    stop: int
    inner: tuple[Segment, ...] = ()
    keeps: str | None = None

    @property
    def blocks(self) -> int:
        return self.stop - self.first


def segments(checkpoint: str, num_layers: int) -> tuple[Segment, ...]:
    """Return the checkpoints of a model of `num_layers` blocks, in order.

    Raises:
        ValueError: the plan cannot be parsed or does not fit the model.
    """
    form, _, rest = checkpoint.partition(":")
    if checkpoint == "none":
        return ()
    if form == "every" and rest:
        return _rows(0, num_layers, [_count(checkpoint, rest)])
    if form == "blocks" and rest:
        return tuple(Segment(i, i + 1) for i in sorted(_chosen(checkpoint, rest, num_layers)))
    keeps, colon, bare = rest.partition(":")
    if form == "selective" and keeps in SELECTIVE:
        without = _count(checkpoint, bare) if colon else 0
        rows = _rows(0, num_layers, [1])
        return rows[:without] + tuple(replace(segment, keeps=keeps) for segment in rows[without:])
    if form == "nested" and rest.count(":"):
        sizes = [_count(checkpoint, word) for word in rest.split(":")]
        if sizes != sorted(set(sizes), reverse=True):
            raise ValueError(
                f"the numbers of blocks in checkpoint {shown(checkpoint)} must become smaller "
                "from left to right; write a form such as nested:8:2"
            )
        return _rows(0, num_layers, sizes)
    near = nearest(form, ("none", "every", "blocks", "selective", "nested"))
    hint = f"did you mean {near[0]}?" if near and near[0] != form else ""
    raise ValueError(f"unknown checkpoint {checkpoint!r}; {choices(hint, FORMS)}")


def items(first: int, stop: int, within: Sequence[Segment]) -> Iterator[int | Segment]:
    """Yield the blocks and checkpoints from `first` to `stop` − 1 in execution order."""
    waiting = list(within)
    while first < stop:
        if waiting and waiting[0].first == first:
            first = waiting[0].stop
            yield waiting.pop(0)
        else:
            yield first
            first += 1


def _rows(first: int, stop: int, sizes: Sequence[int]) -> tuple[Segment, ...]:
    """Return consecutive checkpoints of sizes[0] blocks; the last may be shorter.

    Each of them is divided by sizes[1:] in the same way.
    """
    made = []
    for start in range(first, stop, sizes[0]):
        end = min(start + sizes[0], stop)
        made.append(Segment(start, end, _rows(start, end, sizes[1:]) if sizes[1:] else ()))
    return tuple(made)


def _count(checkpoint: str, word: str) -> int:
    if word.isdecimal() and int(word) < 1:
        bare, _, _ = checkpoint.rpartition(":")
        instead = f", or write {bare} for none" if bare.startswith("selective") else ""
        raise ValueError(
            f"{word} in checkpoint {checkpoint!r} is too few blocks; give a whole number of at least 1{instead}"
        )
    if not word.isdecimal():
        raise ValueError(f"{word!r} in checkpoint {checkpoint!r} is not a number of blocks; {choices('', FORMS)}")
    return int(word)


def _chosen(checkpoint: str, words: str, num_layers: int) -> set[int]:
    chosen: set[int] = set()
    for word in words.split(","):
        first, dash, last = word.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(
                f"{word!r} in checkpoint {checkpoint!r} is not a block or a range; write a form such as blocks:0,2,5-7"
            )
        begin, end = int(first), int(last or first)
        if begin > end:
            raise ValueError(f"range {word} in checkpoint {checkpoint!r} ends before it begins; write {last}-{first}")
        if end >= num_layers:
            raise ValueError(
                f"checkpoint {checkpoint!r} names block {end}, which does not exist; "
                f"choose among blocks 0 to {num_layers - 1}"
            )
        chosen |= set(range(begin, end + 1))
    return chosen
