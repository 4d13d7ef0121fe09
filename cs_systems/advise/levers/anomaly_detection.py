"""Anomaly detection of autograd off: no stack is stored for each operator, and no gradient is searched for NaN."""

from __future__ import annotations

import ast
from typing import Any

from cs_systems.advise.edits import chained, dotted, name_of, replaced, with_value
from cs_systems.advise.lever import Lever, ScriptChange, Situation

OFF = "torch.autograd.set_detect_anomaly(False)"


def unfit(situation: Situation) -> str | None:
    return None if "detect_anomaly" in situation.source else "the script does not switch anomaly detection on"


def hook() -> None:
    import torch

    def stay_off(*_: Any, **__: Any) -> None:
        """Leave anomaly detection off, whatever is asked."""

    torch.set_anomaly_enabled = stay_off


def switched_off(node: ast.expr) -> str | None:
    """Return the call that replaces one which switches the detection on, by the same import of torch.autograd."""
    if not isinstance(node, ast.Call):
        return None
    name, given = dotted(node.func), (*node.args[:1], *(each.value for each in node.keywords if each.arg == "mode"))
    is_on = any(isinstance(value, ast.Constant) and value.value is True for value in given)
    if name.endswith("autograd.detect_anomaly") or (name_of(node) == "set_detect_anomaly" and is_on):
        owner = f"{ast.unparse(node.func.value)}." if isinstance(node.func, ast.Attribute) else ""
        return f"{owner}set_detect_anomaly(False)"
    return None


LEVER = Lever(
    "",
    None,
    OFF,
    0.4,
    ScriptChange(
        "anomaly detection off",
        unfit,
        hook=hook,
        patch=chained(replaced(switched_off), with_value("detect_anomaly", True, "False")),
    ),
    remedies=("anomaly-detection",),
)
