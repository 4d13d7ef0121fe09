"""Forms of a user's own parallel strategy, read from the text of its file without importing it.

`path.py:name` names one of these, here with the arguments that each is called with:

- a module around the model, `DDP(module)`, or a function that returns one: after each backward its method
  `finish_gradient_synchronization()` is called, if it has one; otherwise its hooks do everything.
- the same for sharded parameters, `FSDP(module)`: its name has "fsdp" in it, or it has `gather_full_params()`.
- an optimizer around an optimizer's class, `ShardedOptimizer(params, optimizer_cls, **kwargs)`.
- functions of a step, with names that belong together: with `get_ddp(module)`, `ddp_on_train_batch_start(model,
  optimizer)` is called before each forward, and `ddp_on_after_backward(model, optimizer)` after each backward; the
  latter may be named without a module. `ddp_gather_full_params(model)` returns the whole parameters by name.
- a `ParallelStrategy`.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cs_systems.core import plugins
from cs_systems.core.validation import ConfigError

FORMS = (
    "a module such as DDP(module) with finish_gradient_synchronization() or hooks, an optimizer such as "
    "ShardedOptimizer(params, optimizer_cls, **kwargs), a function get_ddp(module) with ddp_on_after_backward(model, "
    "optimizer), or a ParallelStrategy"
)
BEFORE, AFTER, GATHER = "on_train_batch_start", "on_after_backward", "gather_full_params"
_SHARDED = re.compile(r"fsdp|fully_?shard", re.IGNORECASE)
_MOST_HOPS = 5  # most imports followed from a name to the file that defines it
_WHOLE = frozenset({"batch", "optimizer", "gradients", "parameters"})


@dataclass(frozen=True)
class Form:
    """Form of a user's own strategy.

    Attributes:
        kind: the kind of object that the name refers to. "functions": only a function after backward.
        splits: as in `ParallelStrategy`.
        options: the arguments other than the module, by name, and whether each is required.
    """

    kind: Literal["module", "optimizer", "functions"]
    splits: frozenset[str]
    options: Mapping[str, bool]

    @property
    def declared(self) -> dict[str, Any]:
        """Literals that the file of a built-in strategy would declare: the objects it splits, and its options."""
        takes = {name: "size" if name == "bucket_size_mb" else "any" for name in self.options}
        return {"splits": self.splits, "options": takes}


def declared(name: str) -> dict[str, Any]:
    """Return the literals that a strategy's file declares; for a user's own strategy, its form's literals.

    Raises:
        ConfigError: the strategy does not exist, or the text of the file does not show what its name refers to.
    """
    found = plugins.declared("parallel", name)
    return form_of(name).declared if plugins.is_foreign(name) and not found else found


def form_of(name: str) -> Form:
    """Return the form of `path.py:name`. Raises ConfigError like `declared`."""
    plugins.check("parallel", name)
    source, _, attribute = name.rpartition(":")
    file = plugins.source_file(source)
    node = _definition(file, attribute, _MOST_HOPS) if file else None
    if node is None:
        raise ConfigError(
            f"the text of {source} does not show what {attribute} is; define it there, as a class or function, such as "
            f"def wrap(module): return {attribute}(module), and name that"
        )
    assert file is not None
    methods: set[str] = set()
    function: Any = node
    if isinstance(node, ast.ClassDef):
        defined = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
        methods, function = {*defined}, defined.get("__init__")
    return _form(name, attribute, _arguments(function, is_method=node is not function), methods)


def companions(attribute: str) -> dict[str, str]:
    """Return the names of the functions that belong to an object, by BEFORE, AFTER and GATHER."""
    of = attribute.removesuffix(f"_{AFTER}").removeprefix("get_")
    return {each: f"{of}_{each}" for each in (BEFORE, AFTER, GATHER)}


def _form(name: str, attribute: str, arguments: Mapping[str, bool], methods: set[str]) -> Form:
    """Return the form of an object by its arguments, each with whether it is required. Raises ConfigError."""
    first, *others = arguments or [""]
    options = {each: arguments[each] for each in others}
    if attribute.endswith(AFTER):
        return Form("functions", frozenset({"batch"}), {})
    if others and plugins.takes_a_class(others[0]):
        return Form("optimizer", frozenset({"optimizer"}), {each: options[each] for each in others[1:]})
    if not first:
        raise ConfigError(f"strategy {name} takes no module; name {FORMS}")
    is_sharded = GATHER in methods or bool(_SHARDED.search(attribute))
    return Form("module", _WHOLE if is_sharded else frozenset({"batch"}), options)


def _arguments(function: Any, *, is_method: bool) -> dict[str, bool]:
    """Return a function's arguments, except *args and **kwargs, each with whether it has no default."""
    if function is None:  # a class that inherits its __init__
        return {"module": True}
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    needed = len(positional) - len(args.defaults)
    found = {each.arg: place < needed for place, each in enumerate(positional)}
    found |= {each.arg: value is None for each, value in zip(args.kwonlyargs, args.kw_defaults, strict=True)}
    if is_method and positional:
        del found[positional[0].arg]
    return found


def _definition(file: Path, name: str, hops: int) -> ast.ClassDef | ast.FunctionDef | None:
    """Return the class or function that a name in a file refers to, also through imports and aliases."""
    node = _top_level(file, file.stat().st_mtime_ns).get(name)
    if isinstance(node, ast.ClassDef | ast.FunctionDef) or node is None or not hops:
        return node if isinstance(node, ast.ClassDef | ast.FunctionDef) else None
    if isinstance(node, ast.Name):
        return _definition(file, node.id, hops - 1)
    if isinstance(node, ast.ImportFrom):
        there = _imported_file(file, node)
        original = next(each.name for each in node.names if (each.asname or each.name) == name)
        return _definition(there, original, hops - 1) if there else None
    return None


def _imported_file(file: Path, node: ast.ImportFrom) -> Path | None:
    """Return the file of the module in `from module import name`."""
    if not node.level:
        return plugins.source_file(node.module or "", file)
    folder = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
    return next((each for each in (folder.with_suffix(".py"), folder / "__init__.py") if each.is_file()), None)


@functools.lru_cache(maxsize=64)
def _top_level(file: Path, modified_ns: int) -> dict[str, ast.AST]:
    """Return the statements that define the names of a module, by name; none for a file that cannot be read."""
    found: dict[str, ast.AST] = {}
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError):  # reported when the file is imported
        return found
    for node in body:
        match node:
            case ast.ClassDef() | ast.FunctionDef():
                found[node.name] = node
            case ast.ImportFrom():
                found |= {each.asname or each.name: node for each in node.names}
            case ast.Assign(targets=[ast.Name(name)], value=ast.Name() as value):
                found[name] = value
    return found
