"""Meaning of range names as data: phases, layers and the parts of a block.

A name must match as a whole, in any case: `forward` is the phase, and `forward hook` matches nothing. A module's path
is matched word by word: `model.layers.3.self_attn.q_proj` is in block 3, and is a projection of attention there.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from cs_systems.core.phases import Phase

UNATTRIBUTED = "unattributed"
# layer of every collective, no matter in which module's range; phase of collectives outside of every phase
COMMUNICATION = "communication"
SPLITS = {"phases": "phase", "families": "family", "layers": "layer"}  # table → column by which its rows are split
FUSED = "fused ("  # prefix of the range of a compiled kernel with operators of several layers, which follow it
MEANS = " → "  # separator between a range's name and its meaning by `known_ranges`
STEP = "step"  # a range's name, or its meaning by `known_ranges`
LOADER = "enumerate(DataLoader)"  # beginning of the name of torch's range around the wait for a batch
STEPS = (STEP, "ProfilerStep#*", f"*{MEANS}{STEP}")  # glob patterns for the names of a step's range

# phases of a recorded loop that a step of `time` does not have
LOOP_PHASES = ("copy", "zero_grad", "host_sync")
PHASES = {
    Phase.INPUT: r"input|enumerate\(DataLoader\)#.*",
    Phase.FORWARD: r"forward([ _]pass)?",
    Phase.LOSS: r"loss",
    Phase.BACKWARD: r"backward([ _]pass)?",
    Phase.SYNCHRONIZE: r"synchronize",
    Phase.CLIP: r"clip",
    Phase.OPTIMIZER: r"optimizer([ _]step)?|Optimizer\.step#.*",
    COMMUNICATION: COMMUNICATION,
    **{name: name for name in LOOP_PHASES},
}
BLOCK = r"(?:.*\.)?(?:(?:transformer[ _])?(?:blocks?|layers?)[ _.#]?|h\.)(\d+)"
LAYERS = {
    "block {}": BLOCK,
    "embedding": r"(?:.*\.)?(?:token[ _])?embeddings?|(?:.*\.)?embed_tokens|(?:.*\.)?wte",
    "final norm": r"(?:.*\.)?(?:final[ _]norm|ln_final|ln_f|norm_f)|model\.norm",
    "lm_head": r"(?:.*\.)?lm[ _]head",
    "loss": r"loss",
    "optimizer": PHASES[Phase.OPTIMIZER],
}
PARTS = {
    "attention": r"attention|attn|self_attn",
    "attention.projections": r"projections?|w?qkv(?:[ _]proj)?|(?:[qkv]|in)_proj|c_attn",
    "attention.rope": r"rope|rotary(?:_emb)?",
    "attention.scores": r"scores",
    "attention.softmax": r"softmax",
    "attention.value": r"value",
    "attention.output": r"output|output_proj|out_proj|o_proj",
    "ffn": r"ffn|mlp|feed[ _-]?forward",
    "norm": r"(?:.*[ _])?(?:layer|rms)?norm|ln[ _]?\d|norm[ _]?\d",
}


# numbers that distinguish occurrences of one range; the last three patterns are for emit_nvtx
_OCCURRENCE = re.compile(
    r"(?<=ProfilerStep#)\d+|, (?:op_id|seq) = \d+|, sizes = \[.*?\](?=, input_op_ids|$)|, input_op_ids = \[.*\]$"
)
_OPERATOR = re.compile(r"\w+::\w+|\w+Backward\d*|autograd::engine::.*|detach_?")


@functools.lru_cache(maxsize=65536)
def general(name: str) -> str:
    """Return the name that all occurrences of a range share: `ProfilerStep#551` → `ProfilerStep#*`."""
    return _OCCURRENCE.sub(lambda found: "*" if found[0].isdigit() else "", name)


def is_operator(name: str) -> bool:
    """Return whether a range has the name of a PyTorch operator."""
    return _OPERATOR.fullmatch(general(name)) is not None


class Meaning(NamedTuple):
    """Phase, layer and part that a range's name stands for; each is None if the name has none."""

    phase: str | None
    layer: str | None
    part: str | None


@functools.lru_cache(maxsize=65536)
def meaning(name: str) -> Meaning:
    """Return the meaning of one range's name, also as `## forward ##`; a `loss` is both a phase and a layer."""
    name = name.rpartition(MEANS)[2].strip("# ")
    phase = next((str(phase) for phase, pattern in PHASES.items() if _is(pattern, name)), None)
    layer = next((form.format(*found.groups()) for form, p in LAYERS.items() if (found := _is(p, name))), None)
    if layer:
        return Meaning(phase, layer, None)
    if inside := _is(rf"(?P<block>{BLOCK})\.(?P<part>.+)", name):
        return Meaning(phase, meaning(inside["block"]).layer, _part(inside["part"]))
    return Meaning(phase, None, _part(name))


def _part(path: str) -> str | None:
    """Return the part that the words of a path mean together."""
    part = None
    for word in path.split("."):
        part = refined(part, next((known for known, pattern in PARTS.items() if _is(pattern, word)), None))
    return part


def with_ancestors(path: str) -> list[str]:
    """Return the paths of a module and of all modules around it, the outermost first."""
    words = path.split(".") if path else []
    return [".".join(words[:count]) for count in range(len(words) + 1)]


def refined(part: str | None, inside: str | None) -> str | None:
    """Return the part that results if `inside` is open in `part`.

    `attention.scores` is more specific than `attention`, and a `norm` inside attention still belongs to attention.
    """
    return inside if inside and (part is None or inside.startswith(part)) else part


def _is(pattern: str, name: str) -> re.Match[str] | None:
    return re.fullmatch(pattern, name, re.IGNORECASE)
