"""Dtypes of a step: a table of them, and the reasons why a step did not run in the requested precision."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, TypedDict

from cs_systems.config import Precision
from cs_systems.core.tables import Column, Tables, table
from cs_systems.formulas.rounding import AutocastContext, ModuleDtypes

AUTOCAST = {Precision.BF16: "bfloat16", Precision.FP16: "float16", Precision.FP8: "bfloat16"}
FP8_LAYER = "Fp8Linear"  # the layer of cs_systems.model.training.fp8
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
LOW = frozenset(AUTOCAST.values())


class DtypeRow(TypedDict):
    """Dtypes of a module's tensors, of the logits or of the loss, in `dtypes`; names joined by commas.

    `cast` describes a leaf module: `down` (fp32 in, low precision out), `up`, or None if it kept the dtype.
    """

    what: Annotated[str, Column("module")]
    type: str | None
    calls: int | None
    parameters: Annotated[str | None, Column("param")]
    inputs: Annotated[str | None, Column("input")]
    outputs: Annotated[str | None, Column("output")]
    on_cuda: Annotated[
        str | None,
        Column("on CUDA", "on CUDA: dtype of the output under CUDA's autocast, by torch's list of operations"),
    ]
    output_gradients: Annotated[
        str | None,
        Column("out grad", "out grad: gradient of the output; param grad: gradients of the module's own parameters"),
    ]
    parameter_gradients: Annotated[str | None, Column("param grad")]
    autocast: str | None
    cast: Annotated[
        str | None, Column("", "cast: conversion from input to output, down to the low precision or up to fp32")
    ]


@table(
    "dtypes of a step, by module", "what parameters inputs outputs on_cuda output_gradients parameter_gradients cast"
)
def dtypes(
    modules: Sequence[ModuleDtypes],
    loss: Sequence[str],
    on_cuda: Sequence[ModuleDtypes] = (),
    loss_on_cuda: Sequence[str] = (),
) -> list[DtypeRow]:
    """Return a row for each module in the order of the calls, one for the logits, and one for the loss.

    The logits are the output of the first module called.

    on_cuda, loss_on_cuda: dtypes of the same step under CUDA's autocast, if the step ran on a CPU.
    """
    outputs_on_cuda = {row["module"]: _joined(row["outputs"]) for row in on_cuda}
    rows: list[DtypeRow] = [
        {
            "what": row["module"],
            "type": row["type"],
            "calls": row["calls"],
            "parameters": _joined(row["parameters"]),
            "inputs": _joined(row["inputs"]),
            "outputs": _joined(row["outputs"]),
            "on_cuda": outputs_on_cuda.get(row["module"]),
            "output_gradients": _joined(row["output_gradients"]),
            "parameter_gradients": _joined(row["parameter_gradients"]),
            "autocast": _joined(row["autocast"]),
            "cast": _cast(row),
        }
        for row in modules
    ]
    root = next((row for row, module in zip(rows, modules, strict=True) if module["root"]), None)
    outputs, gradients = (root["outputs"], root["output_gradients"]) if root else (None, None)
    logits = _of_tensor("logits", outputs, gradients, root["on_cuda"] if root else None)
    return [*rows, logits, _of_tensor("loss", _joined(loss), None, _joined(loss_on_cuda))]


def _of_tensor(what: str, outputs: str | None, gradients: str | None, on_cuda: str | None) -> DtypeRow:
    """Return the row of a tensor that belongs to no module: only its own dtype and its gradient's are known."""
    return {
        "what": what,
        "type": None,
        "calls": None,
        "parameters": None,
        "inputs": None,
        "outputs": outputs,
        "on_cuda": on_cuda,
        "output_gradients": gradients,
        "parameter_gradients": None,
        "autocast": None,
        "cast": None,
    }


def _joined(names: Iterable[str]) -> str | None:
    return ", ".join(names) or None


def _cast(row: ModuleDtypes) -> str | None:
    taken, given = ({*names} & {"float32", *LOW} for names in (row["inputs"], row["outputs"]))
    if not row["leaf"] or len(taken) != 1 or len(given) != 1 or taken == given:
        return None
    return "down" if given <= LOW else "up"


def recorded(results: Tables) -> list[DtypeRow]:
    """Return the rows of a record; records of earlier versions have no dtypes on CUDA."""
    return [{**row, "on_cuda": row.get("on_cuda")} for row in dtypes.of(results)]


def collapsed(rows: Sequence[DtypeRow]) -> list[DtypeRow]:
    """Return the rows, with those that differ only in the block number merged: `layers.0–11.attn`.

    A merged row takes the place of its first row.
    """
    groups: dict[tuple[object, ...], list[DtypeRow]] = {}
    for row in rows:
        alike = tuple(value for name, value in row.items() if name != "what")
        groups.setdefault((*_BLOCK.split(row["what"], maxsplit=1)[::2], *alike), []).append(row)
    made = [shown for same in groups.values() for shown in _as_one(same)]
    order = {id(row): place for place, row in enumerate(rows)}
    return [row for _, row in sorted(made, key=lambda pair: order[id(pair[0])])]


# The block's number in a module path: `layers.3.attn` → "layers", "3", "attn".
_BLOCK = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


def _as_one(same: list[DtypeRow]) -> list[tuple[DtypeRow, DtypeRow]]:
    """Return (the first row, the merged row with the range of numbers), or each row alone if numbers are missing."""
    found = [_BLOCK.search(row["what"]) for row in same]
    numbers = [int(match[1]) for match in found if match]
    if len(numbers) < 2 or numbers != list(range(numbers[0], numbers[0] + len(same))):
        return [(row, row) for row in same]
    assert found[0] is not None
    begin, end = found[0].span(1)
    path = same[0]["what"]
    return [(same[0], {**same[0], "what": f"{path[:begin]}{numbers[0]}–{numbers[-1]}{path[end:]}"})]


def contradiction(
    precision: Precision, modules: Sequence[ModuleDtypes], contexts: Sequence[AutocastContext]
) -> str | None:
    """Return why a step did not run in the requested precision, with the remedy; None if it did."""
    in_effect = sorted({name for row in modules for name in row["autocast"] if name != "off"})
    device = max((device for row in modules for device in row["devices"]), default="cpu")  # a mask may be on the CPU
    asked, name = AUTOCAST.get(precision), _first_root(modules)
    if asked is None:
        if own := [name for name in in_effect if name.split()[0] == device]:
            dtype = own[0].split()[1]
            return (
                f"requested {precision.value}, but the step ran under autocast in {dtype}; use precision "
                f"{SHORT.get(dtype, dtype)}, or remove autocast from the step"
            )
        return _not_pure(modules) if precision is Precision.BF16_PURE else None
    if f"{device} {asked}" in in_effect:
        return _not_fp8(modules) if precision is Precision.FP8 else None
    fix = f'call {name} inside torch.autocast("{device}", torch.{asked})'
    for other in in_effect:
        found, dtype = other.split()
        if found == device:
            return f"requested {asked}, but autocast runs in {dtype}; {fix}, or use precision {SHORT.get(dtype, dtype)}"
        return (
            f"autocast is on for {found}, but {name}'s tensors are on {device}: it only casts operations on its own "
            f"device; {fix}"
        )
    return f"{_without_effect(asked, device, name, contexts)}; {fix}"


def _without_effect(asked: str, device: str, name: str, contexts: Sequence[AutocastContext]) -> str:
    """Return the reason why no module ran under autocast, although a context may have been entered."""
    own = [context for context in contexts if context["device"] == device]
    if any(context["enabled"] for context in own):
        return f"autocast was entered for {device}, but {name} was called outside of it, in its parameters' dtype"
    if own:
        return f"autocast was entered for {device} with enabled=False, so that {name} ran in its parameters' dtype"
    for context in contexts:
        off = "" if context["enabled"] else " (and switched off by torch, with a warning)"
        return f"autocast was entered for {context['device']}{off}, but {name}'s tensors are on {device}"
    return f"requested {asked}, but the step enters no autocast, so that {name} ran in its parameters' dtype"


def _first_root(modules: Sequence[ModuleDtypes]) -> str:
    return str(next((row["module"] for row in modules if row["root"]), "the model"))


def _not_fp8(modules: Sequence[ModuleDtypes]) -> str | None:
    if any(row["type"] == FP8_LAYER for row in modules):
        return None
    return (
        "requested fp8, but no layer computes in it; call cs_systems.model.training.fp8.use_fp8(model), or use another "
        "precision"
    )


def _not_pure(modules: Sequence[ModuleDtypes]) -> str | None:
    found = sorted({name for row in modules for name in row["parameters"]} - {"bfloat16"})
    return (
        f"requested bf16-pure, but there are parameters in {', '.join(found)}; use model.bfloat16()" if found else None
    )
