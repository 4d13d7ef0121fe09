"""Modules of a model, from the calls that torch.profiler records with `with_stack=True`: `nn.Module: Block_3`.

The calls nest as the modules do. Paths consist of class names, numbered in the order of first calls if a module calls
several of one class: `GPT.Block_3.Linear_0`. Blocks are modules of one class that the same module calls. If these only
call blocks themselves, such as encoder and decoder, they are stages, and the inner blocks count.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from cs_systems.readers.forms.columns import UNKNOWN, Range
from cs_systems.readers.forms.modules import Modules
from cs_systems.readers.forms.operators import nested
from cs_systems.record import Row

PREFIX = "nn.Module: "
HOW = "layers are the modules that Python's stacks name, numbered by class in the order of their first calls"
CONTAINERS = ("Sequential", "ModuleList", "ModuleDict")
LEAST_OF_STAGE = 0.85  # least share of a stage's time in its blocks
# Part of a module by its class; everything inside attention or a feed-forward network belongs to it.
PARTS = {
    "attention": r".*(Attention|Attn)(\dd|V\d|Layer|Block|Sublayer)?",
    "ffn": r".*(MLP|Mlp|FFN|Ffn|Feed_?[Ff]orward\w*|MoE|Moe|Experts?|SparseMoeBlock)",
    "embedding": r".*(Embed(ding|der)?s?(Bag)?|Rotary\w*)",
    "norm": r".*Norm([123]d)?",
}
WHOLE = ("attention", "ffn")


class _Module:
    """Module with the time of its calls; children are in the order of their first calls."""

    def __init__(self, name: str, parent: _Module | None) -> None:
        self.name, self.parent = name, parent
        self.class_name = re.sub(r"_\d+$", "", name.removeprefix(PREFIX))
        self.children: list[_Module] = []
        self.time_s = 0.0
        self.path = ""

    def repeated(self) -> list[list[_Module]]:
        """Return the groups of children with the same class that themselves call modules."""
        groups: dict[str, list[_Module]] = defaultdict(list)
        for child in self.children:
            if child.children:
                groups[child.class_name].append(child)
        return [group for group in groups.values() if len(group) > 1]

    def is_stage(self) -> bool:
        inner = [one for module in (self, *self._only()) for group in module.repeated() for one in group]
        return sum(one.time_s for one in inner) >= LEAST_OF_STAGE * self.time_s > 0

    def _only(self) -> list[_Module]:
        """Return the containers inside, such as ModuleList, which compute nothing themselves."""
        inside = [child for child in self.children if child.class_name in CONTAINERS]
        return [*inside, *(below for child in inside for below in child._only())]


def called_modules(calls: Sequence[Range]) -> tuple[list[Range], Modules] | None:
    """Return the calls as ranges named by the module's path, and the modules; None if there are no calls."""
    if not calls:
        return None
    calls = sorted(calls, key=lambda call: (call.thread, call.start_s, -call.end_s))
    columns = (np.array([getattr(call, name) for call in calls]) for name in ("start_s", "end_s", "thread"))
    parents, _ = nested(*columns)
    known: dict[str, _Module] = {}
    for call, parent in zip(calls, parents.tolist(), strict=True):
        if call.name not in known:
            above = None if parent == UNKNOWN else known[calls[parent].name]
            known[call.name] = module = _Module(call.name, above)
            if above is not None:
                above.children.append(module)
        known[call.name].time_s += call.end_s - call.start_s
    program = _Module("", None)
    program.children = [module for module in known.values() if module.parent is None]
    _name_all(program)
    return [call._replace(name=known[call.name].path) for call in calls], Modules(_rows(program), HOW)


def _name_all(parent: _Module) -> None:
    counts, before = Counter(child.class_name for child in parent.children), Counter[str]()
    for child in parent.children:
        of_class = child.class_name
        name = f"{of_class}_{before[of_class]}" if counts[of_class] > 1 else of_class
        before[of_class] += 1
        child.path = f"{parent.path}.{name}" if parent.path else name
        _name_all(child)


def _blocks(module: _Module) -> list[list[_Module]]:
    """Return the lists of blocks in a module; no block is inside another."""
    found, inside = [], set[int]()
    for group in module.repeated():
        if group[0].class_name not in CONTAINERS and not any(one.is_stage() for one in group):
            found.append(group)
            inside |= {id(one) for one in group}
    return found + [group for child in module.children if id(child) not in inside for group in _blocks(child)]


def _rows(program: _Module) -> list[Row]:
    stacks = _blocks(program)
    names = Counter(group[0].class_name for group in stacks)
    labels: dict[int, tuple[str, str]] = {}  # block → (path of its list, label)
    for group in stacks:
        for index, block in enumerate(group):
            stack = re.sub(r"\d+$", "", block.path)
            one = group[0].class_name if names[group[0].class_name] == 1 else stack.rstrip("_")
            labels[id(block)] = stack, f"{one} {index}" if len(stacks) > 1 else f"block {index}"
    rows: list[Row] = []

    def add(module: _Module, block: tuple[str, str] | None, layer: str, around: str | None) -> None:
        block = labels.get(id(module), block)
        holds = any(id(below) in labels for below in _below(module))
        mine = next((part for part, pattern in PARTS.items() if re.fullmatch(pattern, module.class_name)), None)
        part = around if around in WHOLE else (None if holds or id(module) in labels else mine)
        layer = block[1] if block else (layer or ("" if holds else module.path))
        stack, label = block or (None, None)
        rows.append(
            {
                "path": module.path, "class": module.class_name, "range": module.path, "stack": stack, "block": label,
                "layer": layer or module.path, "part": part, "parameters": None,
            }
        )  # fmt: skip
        for child in module.children:
            add(child, block, layer, part)

    for child in program.children:
        add(child, None, "", None)
    return rows


def _below(module: _Module) -> list[_Module]:
    return [one for child in module.children for one in (child, *_below(child))]
