"""Built-in optimizers, each an AdamW, and what follows from how they update: memory, traffic and launches."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

DEFAULT = "default"  # stands for USUAL
USUAL, MASTER, BF16_STATE = "adamw_fused", "adamw_master", "adamw_bf16_state"
MOMENT_BYTES = {"float32": 4, "bfloat16": 2}
BF16_BYTES = 2  # also of the remainder, by which a master weight differs from its bf16 parameter


class Form(StrEnum):
    """Form of an update.

    Attributes:
        EACH: several operations for one parameter after the other.
        FOREACH: several operations for all parameters at once, with temporary tensors for all.
        FUSED: one kernel for many parameters, which also counts the steps on the device.
    """

    EACH = "each"
    FOREACH = "foreach"
    FUSED = "fused"


@dataclass(frozen=True)
class Optimizer:
    """Facts about an optimizer.

    Attributes:
        form: the form of its update; None if unknown.
        moments: torch's name of the dtype of its two moments, if it keeps exact float32 master weights of bf16
            parameters. Otherwise it has none, and the moments have the parameters' dtype.
    """

    form: Form | None = None
    moments: str | None = None

    @property
    def is_fused(self) -> bool:
        return self.form is Form.FUSED

    @property
    def has_master_weights(self) -> bool:
        return self.moments is not None

    def state_bytes(self, parameter_bytes: int) -> int:
        """Return the bytes of state for each parameter: two moments, and with master weights a remainder."""
        return 2 * parameter_bytes if self.moments is None else BF16_BYTES + 2 * MOMENT_BYTES[self.moments]

    def update_bytes(self, parameter_bytes: int) -> int:
        """Return the bytes that an update moves for each parameter: it reads all, and writes all but the gradient."""
        element = BF16_BYTES if self.has_master_weights else parameter_bytes
        return 2 * (element + self.state_bytes(element)) + element


OPTIMIZERS = {
    "adamw": Optimizer(Form.EACH),
    "adamw_foreach": Optimizer(Form.FOREACH),
    USUAL: Optimizer(Form.FUSED),
    MASTER: Optimizer(Form.FUSED, "float32"),
    BF16_STATE: Optimizer(Form.FUSED, "bfloat16"),
}


def optimizer(name: str) -> Optimizer:
    """Return the facts about an optimizer; a user's own is taken for an AdamW without master weights."""
    return OPTIMIZERS.get(USUAL if name == DEFAULT else name, Optimizer())
