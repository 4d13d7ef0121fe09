"""Facts about optimizers agree with what the optimizers do, and no other file has them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

from cs_systems.core import optimizers
from cs_systems.core.optimizers import OPTIMIZERS, Form, Optimizer, optimizer
from cs_systems.model.training.adamw import AdamW
from cs_systems.model.training.optimizers import make_optimizer

PACKAGE = Path(optimizers.__file__).parents[1]
# Other files with names of optimizers → why.
ALLOWED = {"core/recipes.py": "a recipe is a list of names that a user could write"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bytes_of_the_state_are_those_that_the_optimizer_holds(name: str) -> None:
    facts = OPTIMIZERS[name]
    dtype = torch.bfloat16 if facts.has_master_weights else torch.float32
    weight = nn.Parameter(torch.ones(16, 64, dtype=dtype))
    weight.grad = torch.ones_like(weight)
    made = make_optimizer(name, [weight])
    made.step()
    held = [value for value in made.state[weight].values() if isinstance(value, torch.Tensor) and value.ndim]
    assert sum(value.nbytes for value in held) == weight.numel() * facts.state_bytes(dtype.itemsize)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_form_is_the_one_that_torch_is_asked_for(name: str) -> None:
    facts, made = OPTIMIZERS[name], make_optimizer(name, [nn.Parameter(torch.ones(2, dtype=torch.bfloat16))])
    if isinstance(made, AdamW):  # this package's own: with master weights it has a kernel for all parameters
        assert facts.form is (Form.FUSED if facts.has_master_weights else Form.EACH)
    else:
        asked = {form for form in (Form.FUSED, Form.FOREACH) if made.defaults[form.value]}
        assert asked == {facts.form}


def test_update_reads_all_and_writes_all_but_the_gradient() -> None:
    moved = {name: facts.update_bytes(2 if facts.has_master_weights else 4) for name, facts in OPTIMIZERS.items()}
    plain = dict.fromkeys(("adamw", "adamw_foreach", "adamw_fused"), 7 * 4)
    assert moved == {**plain, "adamw_master": 26, "adamw_bf16_state": 18}


def test_default_stands_for_the_usual_optimizer_and_nothing_is_known_of_your_own() -> None:
    assert optimizer("default") == OPTIMIZERS["adamw_fused"]
    assert optimizer("mine.py:Lion") == Optimizer()
    assert not Optimizer().is_fused


def test_no_other_file_names_an_optimizer() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in OPTIMIZERS
    }
    assert found == {"core/optimizers.py", *ALLOWED}
