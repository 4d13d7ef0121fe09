"""torch.compile: operators fused into fewer kernels, block by block or the whole model."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from cs_systems.advise.edits import all_calls, before_optimizer, calls, dotted, names_of
from cs_systems.advise.lever import Lever, Option, ScriptChange, Situation
from cs_systems.advise.levers._models import at_optimizer
from cs_systems.core.fields import Subject

NOT_MODELS = ("re", "regex", "py_compile")  # modules with a `compile` of their own


def options(situation: Situation) -> Sequence[Option] | str:
    config = situation.config
    if config.compile != "none":
        return f"the model is compiled already (mode {config.compile})"
    built_in = config.subject is Subject.STEP
    found = [{"compile": "default", "compile_scope": "block"}] if built_in and config.model.num_layers > 1 else []
    found.append({"compile": "default"})
    if situation.on_gpu and config.graph == "none":
        found.append({"compile": "reduce-overhead"})
    return [Option(fields) for fields in found]


def unfit(situation: Situation) -> str | None:
    if not compiles(situation.source) or (situation.ran and not situation.ran.get("compiled_graphs")):
        return None  # a call that an option of the script or of its library leaves out compiles nothing
    return "the script calls torch.compile itself"


def compiles(source: str) -> bool:
    """Return whether a script compiles a model: by torch.compile, or by the model's own method."""
    others = set[str]().union(*(names_of(source, module, "compile") for module in NOT_MODELS))
    found = ((dotted(call.func), call.args) for call in all_calls(source, ("compile",)))
    methods = (args for name, args in found if "." in name and name not in others)
    return calls(source, names_of(source, "torch", "compile")) or any(not any(map(_is_text, args)) for args in methods)


def _is_text(value: ast.expr) -> bool:
    """Return whether an argument is a text, such as a pattern or a template; no model's method takes one."""
    match value:
        case ast.JoinedStr() | ast.Constant(value=str() | bytes()):
            return True
    return False


def hook() -> Callable[[], bool]:
    return at_optimizer(lambda model: model.compile())


LEVER = Lever(
    "sums in another order inside of fused kernels",
    options,
    "model.compile()",
    0.35,
    ScriptChange("torch.compile of the model", unfit, hook=hook, patch=before_optimizer("{model}.compile()")),
    remedies=("launch-bound", "unfused-elementwise", "small-operators"),
    cost=7.0,
    saves_memory=True,
)
