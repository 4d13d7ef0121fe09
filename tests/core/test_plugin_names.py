"""Plug-ins answer through their contracts: no other code asks for one by its name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cs_systems.core import plugins

PACKAGE = Path(plugins.__file__).parents[1]
# Kind of plug-in → words of the expressions that hold the name of one.
HOLDERS = {
    "workloads": "workload",
    "profilers": "profil|stage",
    "attention": "attention|backend",
    "parallel": "strateg",
    "training.parts": "part",
    "readers": "profiler|format",
}
# Names that are words for other things too, and count only next to such an expression.
WORDS = {"attention", "collective", "dtypes", "memory", "none", "overlap", "records", "residuals", "snapshot"}
# Beginning of a place with its expression → why names may stand there.
ALLOWED = {
    "advise/levers/attention_backend.py": "a lever is an option, with the names that a user could write",
    "advise/levers/fused_parts.py": "the same",
    "analysis/diagnosis/unfused_attention.py: ('sdpa_flash',": "the options that a remedy offers",
    "core/recipes.py": "a recipe is a list of names that a user could write",
    "instrument/attention_calls.py": "the names of our operators in torch, which are those of their backends",
    "measure/recorder/stages.py: self.profiler.measures": "memory is a subject that profilers declare to measure",
    "report/tables/records.py": "memory is a subject that profilers declare to measure",
    "cli/_course.py: values.get('profiler') == 'nsys'": "an option of a command that it writes",
    "cli/attention.py: ('naive',": "what the command compares by default",
    "cli/doctor.py: ('nsys',": "programs that it looks for",
    "cli/memory.py": "the command runs these profilers",
    "cli/parallel.py: ('overlap',": "the command runs these profilers",
    "cli/parallel.py: name == 'rank_memory'": "the command runs it in another way",
    "cli/precision.py: ('accumulation',": "the command runs these workloads",
    "cli/precision.py: r.config['profiler'] == 'dtypes'": "the command runs it",
    "cli/profile.py": "the command runs these profilers",
}


def texts(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.Tuple(elts=members) | ast.List(elts=members) | ast.Set(elts=members):
            for member in members:
                yield from texts(member)
        case ast.Dict(keys=keys):
            for key in keys:
                yield from texts(key) if key else ()


def is_name(text: str, beside: str, own: str) -> bool:
    """Return whether a text is the name of another plug-in than `own`, given the code of what it is compared with."""
    kinds = [kind for kind in HOLDERS if text in plugins.names(kind) and text != own]
    return any(text not in WORDS or re.search(HOLDERS[kind], beside, re.IGNORECASE) for kind in kinds)


def is_prefix(text: str) -> bool:
    return text.endswith("_") and any(name.startswith(text) for kind in HOLDERS for name in plugins.names(kind))


def asked(code: str, own: str = "") -> Iterator[str]:
    """Yield the expressions of a file that compare something with names of plug-ins, or list such names.

    own: the name that the file may use, because it is the file of that plug-in.
    """
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Compare(left=left, comparators=others):
                sides = [left, *others]
                for side in sides:
                    if found := [*texts(side)]:
                        beside = " ".join(ast.unparse(each) for each in sides if each is not side)
                        if any(is_name(text, beside, own) for text in found):
                            yield ast.unparse(node)
            case ast.Match(subject=subject, cases=cases):
                values = (each.value for case in cases for each in ast.walk(case) if isinstance(each, ast.MatchValue))
                if any(is_name(text, ast.unparse(subject), own) for value in values for text in texts(value)):
                    yield f"match {ast.unparse(subject)}"
            case ast.Call(func=ast.Attribute(attr="startswith" | "removeprefix"), args=[given, *_]):
                if any(is_prefix(text) for text in texts(given)):
                    yield ast.unparse(node)
            case ast.Tuple() | ast.List() | ast.Set() | ast.Dict():
                found = [*texts(node)]
                is_list = len(found) > 1 and not {*found} <= WORDS
                if is_list and any({*found} <= {*plugins.names(kind)} for kind in HOLDERS):
                    yield ast.unparse(node)


def test_no_file_compares_with_the_name_of_a_plug_in() -> None:
    """Search all but the defaults of a cell."""
    own = {plugins.KINDS[kind].file(name): name for kind in HOLDERS for name in plugins.names(kind)}
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        if place != "config.py":
            found += [f"{place}: {each}" for each in asked(path.read_text(), own.get(path, ""))]
    assert [each for each in found if not each.startswith((*ALLOWED,))] == [], (
        "let a field of the plug-in's contract answer"
    )


@pytest.mark.parametrize("place", ALLOWED)
def test_each_exception_is_needed(place: str) -> None:
    file, _, expression = place.partition(": ")
    assert any(each.startswith(expression) for each in asked((PACKAGE / file).read_text()))


@pytest.mark.parametrize(
    "code",
    [
        'config.profiler == "memory"',
        '"nsys" != name',
        'record.config["workload"] in ("train_step", "toy")',
        'name.startswith("sdpa_")',
        'KNOWN = {"flash_cuda": 1, "naive": 2}',
        'match stage.profiler:\n    case "none":\n        pass',
    ],
)
def test_comparison_with_a_name_is_found(code: str) -> None:
    assert [*asked(code)]


@pytest.mark.parametrize(
    "code", ['family == "attention"', 'config.compile == "none"', 'PARTS = ("attention", "other")']
)
def test_word_other_than_a_plug_in_name_is_ignored(code: str) -> None:
    assert not [*asked(code)]
