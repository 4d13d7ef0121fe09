"""Structure of any model, read from its module tree: its blocks, and the part that each module computes.

A block is one of the repeated children of a ModuleList or Sequential: of one class, or with the same child names. Its
identity is the list's path and its index, so that encoder and decoder, towers and stages are distinguished. A child
that only holds further lists of blocks is a stage, and its lists count instead. Numbered siblings (`down1`, `down2`) of
one class count as a list too.

A module's part is decided by RULES, a table that a user can extend with `RULES.insert(0, Rule(…))`. The outermost
computation inside a block wins: a norm, or an output layer, inside attention belongs to attention.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from cs_systems.config import Phase
from cs_systems.instrument.annotate import STEP

WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}  # attributes that hold a wrapped module
HEAD = "head"
FFN = "ffn"
ATTENTION = "attention"
# everything inside a module with one of these parts belongs to the part
WHOLE = (ATTENTION, "mixer", "recurrent", FFN, "embedding", HEAD)
_QKV = "w?[qkv]|to_[qkv]|query|key|value|[qkv]_(proj|lin|[ab]_proj)|kv_(proj|[ab]_proj\\w*)|c_attn|w?qkv(_proj)?"
_ANY_QKV = f"(?i:{_QKV}|in_proj(_qkv)?|query_key_value)"


@dataclass(frozen=True)
class Rule:
    """Conditions under which a module has a part; all given conditions must hold.

    Each pattern must match the whole text.

    Attributes:
        part: The name of the part: one of range_names.PARTS, or any other.
        class_name: Pattern of the module's class name.
        name: Pattern of the last word of its path.
        children: Patterns; each must match the name of a child.
        beside: Pattern of the name of a sibling.
        inside: The part of the module around it; "block" for a block without a part, "" for neither.
        linear: True for a module with a weight matrix and no children.
    """

    part: str
    class_name: str | None = None
    name: str | None = None
    children: tuple[str, ...] = ()
    beside: str | None = None
    inside: str | None = None
    linear: bool = False

    def holds(self, module: nn.Module, name: str, siblings: Iterable[str], inside: str) -> bool:
        children = [child for child, _ in module.named_children()]
        return (
            (self.class_name is None or re.fullmatch(self.class_name, type(module).__name__) is not None)
            and (self.name is None or re.fullmatch(self.name, name) is not None)
            and all(any(re.fullmatch(pattern, child) for child in children) for pattern in self.children)
            and (self.beside is None or any(re.fullmatch(self.beside, sibling) for sibling in siblings))
            and (self.inside is None or inside == self.inside or inside.startswith(f"{self.inside}."))
            and (not self.linear or is_linear(module))
        )


# The first rule that matches decides.
RULES: list[Rule] = [
    # Inside attention
    Rule("attention.rope", name=r"rope|rotary\w*", inside=ATTENTION),
    Rule("attention.projections", name=_ANY_QKV, inside=ATTENTION),
    Rule("attention.output", name=r"o|wo|proj|dense|output|(o|out|c|output)_proj|to_out|out_lin", inside=ATTENTION),
    # Attention, state space models, recurrent networks
    Rule("attention.projections", name=_ANY_QKV, inside="block", linear=True),
    Rule(ATTENTION, class_name=r".*(Attention|Attn)(\dd|V\d|Layer|Block|Sublayer)?"),
    Rule(ATTENTION, name=r"(\w+_)?(attn|attention)\d?|mha"),
    Rule(
        ATTENTION, children=("w?q|to_q|query|q_proj|q_lin", "w?k|to_k|key|k_proj|k_lin", "w?v|to_v|value|v_proj|v_lin")
    ),
    Rule(ATTENTION, children=(r"(?i:w?qkv(_proj)?|c_attn|query_key_value|in_proj_qkv)",)),
    Rule("mixer", class_name=r".*(Mixer\d?|SSM|S4D?|DeltaNet|Retention|TimeMix\w*|Hyena\w*|Mamba\d?)"),
    Rule("mixer", children=("in_proj", "conv1d", "out_proj")),
    Rule("recurrent", class_name=r".*(LSTM|GRU|RNN)(Cell|Layer|Block)?"),
    # Two linear layers and what is between them
    Rule(FFN, class_name=r".*(MLP|Mlp|FFN|Ffn|FF|Feed_?[Ff]orward\w*|Intermediate|SwiGLU|Dense\w*Dense)"),
    Rule(FFN, class_name=r".*(MoE|Moe|Experts?|Router|SparseMoeBlock|MoeBlock|MoeLayer)"),
    Rule(FFN, name=r"mlp|ffn?|feed_?forward|intermediate|experts|moe|block_sparse_moe"),
    Rule(FFN, name="output", beside="intermediate"),
    Rule(FFN, name=r"(?i:fc_?\d|linear_?\d|w[123]|(gate|up|down)_proj)", inside="block", linear=True),
    # Before and after the blocks
    Rule("embedding", class_name=r".*(Embed(ding|der)?s?(Bag)?|Rotary\w*|Positional\w*)"),
    Rule("embedding", name=r"\w*embed(ding)?s?|wte|wpe", inside=""),
    Rule(HEAD, class_name=r".*(Head|Pooler|Classifier)", inside=""),
    Rule(HEAD, name=r"(\w+_)?(head|classifier|projection|outputs)|heads?|fc|score|cls|proj_out|pooler", inside=""),
    # Single operations
    Rule("norm", class_name=r".*Norm([123]d|FP32|\w?)"),
    Rule("convolution", class_name=r".*Conv(Transpose)?[123]d(Norm\w*|Same)?"),
    Rule("pooling", class_name=r".*Pool(ing)?([123]d)?"),
    Rule("activation", class_name=r".*(Activation|GELU\w*|ReLU6?|SiLU|Swish|Tanh|Sigmoid|Softmax|Mish|[CS]?ELU|GLU)"),
    Rule("dropout", class_name=r".*(Dropout([123]d)?|DropPath|StochasticDepth)"),
    Rule("loss", class_name=r".*Loss"),
    Rule("linear", linear=True),
]
# A linear layer directly in a block with one of these belongs to the block's feed-forward network.
_MIXES_TOKENS = (ATTENTION, "mixer")
_LEAST_OF_STAGE = 0.5  # least share of a stage's parameters in its lists of blocks


def is_linear(module: nn.Module) -> bool:
    """Return whether the module is a weight matrix: `nn.Linear`, GPT-2's Conv1D, or a quantized layer."""
    weight = getattr(module, "weight", None)
    named = "Linear" in type(module).__name__ or type(module).__name__ == "Conv1D"
    return isinstance(module, nn.Linear) or (named and weight is not None and weight.ndim == 2)


@dataclass(frozen=True)
class Block:
    """Repeated module: the path of its list, its index there, and its name in tables."""

    path: str
    stack: str
    index: int
    label: str = ""


@dataclass(frozen=True)
class ModuleRow:
    """Description of one module for tables, in the order of the model.

    Attributes:
        path: Its path in the model, "" for the model itself.
        class_name: The name of its class.
        range: The name of its ranges.
        stack: The path of the list that its block belongs to, None outside of blocks.
        block: The label of its block, None outside of blocks.
        layer: The row that it belongs to in the table of layers.
        part: The part that it computes, None if unknown.
        parameters: The number of parameters in it and below, each counted once.
    """

    path: str
    class_name: str
    range: str
    stack: str | None
    block: str | None
    layer: str
    part: str | None
    parameters: int


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return path → module, without the words that torch.compile, checkpointing and FSDP wrappers add to a path.

    A module with several paths has the first.
    """
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        found[".".join(word for word in path.split(".") if word not in WRAPPERS)] = module
    return found


def blocks(model: nn.Module) -> list[Block]:
    """Return the blocks of a model in the model's order. No block is inside another."""
    named = named_modules(model)
    found = {block.path: block for block in _of_lists("", model) if block.path in named}
    found |= _single(named, found)
    found |= _numbered(named, found)
    order = {path: number for number, path in enumerate(named)}
    ordered = sorted(found.values(), key=lambda block: order[block.path])
    several = len({block.stack for block in ordered}) > 1

    def label(block: Block) -> str:
        return f"{block.stack} {block.index}".strip() if several else f"block {block.index}"

    return [Block(block.path, block.stack, block.index, label(block)) for block in ordered]


def block_of_modules(model: nn.Module) -> dict[str, Block]:
    """Return path → the block that the module is in, for all modules in blocks."""
    found = {block.path: block for block in blocks(model)}
    around = {path: next((p for p in (path, *_ancestors(path)) if p in found), None) for path in named_modules(model)}
    return {path: found[block] for path, block in around.items() if block is not None}


def rows(model: nn.Module) -> list[ModuleRow]:
    """Return a row for each module of a model. A module with several paths has a row for the first."""
    named = named_modules(model)
    by_path = {block.path: block for block in blocks(model)}
    names = range_names(named, type(model).__name__)
    parts = _parts(named, by_path)
    holders = {above for path in by_path for above in _ancestors(path)}
    # the built-in model has names for layers outside of blocks; in other models a layer is a module's path
    own = is_own(named)
    found = []
    for path, module in named.items():
        block = next((by_path[above] for above in (path, *_ancestors(path)) if above in by_path), None)
        outside = next((above for above in (*reversed(_ancestors(path)), path) if above not in holders), path)
        layer = block.label if block else (own and names[outside]) or outside or type(model).__name__
        found.append(
            ModuleRow(
                path,
                type(module).__name__,
                names[path] or "",
                block.stack if block else None,
                block.label if block else None,
                layer,
                parts[path],
                sum(p.numel() for p in module.parameters()),
            )
        )
    return found


def as_table(found: Iterable[ModuleRow]) -> list[dict[str, Any]]:
    """Return the rows as the table `modules` of a trace or record: {path, class, range, stack, block, …}."""
    return [{"class" if name == "class_name" else name: value for name, value in asdict(row).items()} for row in found]


# Names of ranges ------------------------------------------------------------------------------------------------------

# Pattern of a module's path in BasicTransformerLM → the name of its range. Other models' ranges are paths.
RANGES = {
    r"token_embeddings": "embedding",
    r"layers\.(\d+)": "block {}",
    r"layers\.\d+\.ln\d": "norm",
    r"layers\.\d+\.attn": "attention",
    r"layers\.\d+\.attn\.[qkv]_proj": "projections",
    r"layers\.\d+\.attn\.rope": "rope",
    r"layers\.\d+\.attn\.output_proj": "output",
    r"layers\.\d+\.ffn": "ffn",
    r"ln_final": "final norm",
    r"lm_head": "lm_head",
}
_OWN_PATHS = re.compile(r"(|token_embeddings|ln_final|lm_head|layers(\.\d+(\.(ln\d|attn|ffn)(\..+)?)?)?)")
_TAKEN = {STEP, *(phase.value for phase in Phase)}  # these names are ranges of phases


def range_name(path: str) -> str | None:
    """Return the range name of a module of BasicTransformerLM, None if it has none: `layers.3.attn` → `attention`."""
    for pattern, name in RANGES.items():
        if found := re.fullmatch(pattern, path):
            return name.format(*found.groups())
    return None


def is_own(paths: Iterable[str]) -> bool:
    """Return whether all paths belong to BasicTransformerLM, which has its own names of ranges."""
    return all(_OWN_PATHS.fullmatch(path) for path in paths)


def range_names(paths: Iterable[str], root: str) -> dict[str, str | None]:
    """Return path → name of the module's range, None for no range.

    root: the name of the model's own range. A path that means a phase gets a suffix: `loss` → `loss (module)`.
    """
    paths = list(paths)
    if is_own(paths):
        return {path: range_name(path) for path in paths}
    return {path: f"{path} (module)" if path.lower() in _TAKEN else path or root for path in paths}


# Blocks ---------------------------------------------------------------------------------------------------------------


def _of_lists(path: str, module: nn.Module) -> Iterator[Block]:
    children = list(module.named_children())
    repeated = isinstance(module, (nn.ModuleList, nn.Sequential)) and _repeated([child for _, child in children])
    for index, (name, child) in enumerate(children):
        below = path if name in WRAPPERS else _joined(path, name)
        if repeated and not _is_stage(child):
            yield Block(below, path, index)
        else:
            yield from _of_lists(below, child)


def _repeated(modules: Sequence[nn.Module]) -> bool:
    """Return whether the children of a list are repetitions.

    They have one class, or the same child names, or (if two kinds of blocks alternate) few classes for their number.
    """
    if len(modules) < 2:
        return False
    classes = {type(module) for module in modules}
    names = {frozenset(name for name, _ in module.named_children()) for module in modules}
    if len(classes) == 1 and isinstance(modules[0], (nn.Dropout, nn.Identity)):
        return False
    return len(classes) == 1 or (len(names) == 1 and names != {frozenset()}) or _in_turns(classes, names, modules)


def _in_turns(classes: set[type], names: set[frozenset[str]], modules: Sequence[nn.Module]) -> bool:
    return frozenset() not in names and 2 * len(classes) <= len(modules) and len(modules) >= 4


def _is_stage(module: nn.Module) -> bool:
    """Return whether a repeated module only holds lists of blocks, with most of its parameters and all attention."""
    lists = [
        below
        for _, below in module.named_modules()
        if isinstance(below, (nn.ModuleList, nn.Sequential))
        and _repeated(children := list(below.children()))  # without the None that the list itself may hold
        and any(list(children[0].children()))
    ]
    if not lists:
        return False
    held = {id(p): p.numel() for below in lists for p in below.parameters()}
    whole = sum(p.numel() for p in module.parameters())
    inside = {below for one in lists for below in one.modules()}
    tops = (child for child in module.modules() if child is not module and child not in inside)
    mixes = any(rule.holds(top, "", (), "") for top in tops for rule in RULES if rule.part in _MIXES_TOKENS)
    return not mixes and sum(held.values()) >= _LEAST_OF_STAGE * whole


def _single(named: Mapping[str, nn.Module], found: dict[str, Block]) -> dict[str, Block]:
    """Return the only children of lists, if they share their class with a block or another such child."""
    known = {type(named[path]) for path in found}
    alone = {
        path: children[0]
        for path, module in named.items()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        and len(children := list(module.named_children())) == 1
        and any(list(children[0][1].children()))
    }
    alone = {path: child for path, child in alone.items() if not _inside(path, found)}
    counts = Counter(type(child) for _, child in alone.values())
    blocks = [(path, name) for path, (name, child) in alone.items() if type(child) in known or counts[type(child)] > 1]
    return {below: Block(below, path, 0) for path, name in blocks if (below := _joined(path, name))}


def _numbered(named: Mapping[str, nn.Module], found: dict[str, Block]) -> dict[str, Block]:
    """Return siblings of one class, named alike but for a final number, neither inside a block nor containing one.

    Their children have parameters, unlike the children of a norm that holds its activation.
    """
    around = {above for path in found for above in _ancestors(path)}
    groups: dict[tuple[str, str, type], list[tuple[int, str]]] = defaultdict(list)
    for path, module in named.items():
        parent, _, name = path.rpartition(".")
        word = re.fullmatch(r"(.*?[A-Za-z_])(\d+)", name)
        is_free = path not in around and not _inside(path, found)
        if word and is_free and any(True for child in module.children() for _ in child.parameters()):
            groups[parent, word[1], type(module)].append((int(word[2]), path))
    made: dict[str, Block] = {}
    for (parent, prefix, _), members in groups.items():
        if len(members) > 1 and not _inside(parent, made) and parent not in made:
            made |= {path: Block(path, _joined(parent, prefix), number) for number, path in members}
    return made


def _inside(path: str, found: Iterable[str]) -> bool:
    found = set(found)
    return path in found or any(above in found for above in _ancestors(path))


def _ancestors(path: str) -> list[str]:
    """Return the paths above, the nearest first, down to "", the model."""
    words = path.split(".") if path else []
    return [".".join(words[:count]) for count in range(len(words) - 1, -1, -1)]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# Parts ----------------------------------------------------------------------------------------------------------------


def _parts(named: dict[str, nn.Module], by_path: dict[str, Block]) -> dict[str, str | None]:
    parts: dict[str, str | None] = {"": None}
    found: list[str] = []
    for path, module in named.items():
        if not path:
            continue
        parent, _, name = path.rpartition(".")
        around = parts.get(parent)
        whole = around is not None and around.partition(".")[0] in WHOLE
        in_block = _inside(path, by_path)
        inside = around if whole and around else ("block" if in_block else "")
        part = None
        if path not in by_path and not _holds_block(path, by_path) and not isinstance(module, nn.ModuleList):
            part = _part(module, name, parent, named, inside)
        if whole and around:
            keeps = part is not None and part.startswith(f"{around.partition('.')[0]}.") and "." not in around
            part = part if keeps else around
        parts[path] = part
        found.append(path)
    for path in by_path:
        below = [other for other in found if other.startswith(f"{path}.")]
        if any((parts[other] or "").partition(".")[0] in _MIXES_TOKENS for other in below):
            parts |= dict.fromkeys((other for other in below if parts[other] == "linear"), FFN)
    return parts


def _part(module: nn.Module, name: str, parent: str, named: dict[str, nn.Module], inside: str) -> str | None:
    above = named.get(parent)
    siblings = [child for child, _ in above.named_children()] if above is not None else []
    return next((rule.part for rule in RULES if rule.holds(module, name, siblings, inside)), None)


def _holds_block(path: str, by_path: Iterable[str]) -> bool:
    return any(block.startswith(f"{path}.") for block in by_path)
