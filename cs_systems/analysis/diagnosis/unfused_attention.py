"""Rule for unfused attention: the matrix of scores is written to memory, and read again for mask, softmax and value."""

from __future__ import annotations

from cs_systems.analysis.attribution.tables import attention, families, scores
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._measured import with_part
from cs_systems.core.tables import Row

# Parts of attention that a fused kernel computes together; projections and rotation remain separate.
OVER_SCORES = ("attention.scores", "attention.softmax", "attention.value")
PRODUCTS = ("matmul", "attention")
SCORES = "mask, softmax and copies of the score matrix take"
OPTIONS = {"attention": ("sdpa_flash", "flash_triton", "flash_cuda", "flash_attn", "flex")}
REMEDY = "use a fused kernel (scaled_dot_product_attention; --attention sdpa_flash or flash_triton)"


def find(evidence: Evidence) -> Diagnosis | None:
    """Find the kernels on the score matrix except matrix products, which a fused kernel still computes.

    Without ranges inside attention, only kernels between two matrix products around a softmax are found.
    """
    step_s, lost = evidence.step_s, over_scores(evidence)
    lost_s = sum(row["time_s"] for row in lost)
    if step_s is None or not lost_s:
        return None
    is_softmax_alone = not any("part" in row for row in lost) and {row["family"] for row in lost} == {"softmax"}
    what = "the softmax of unfused attention takes" if is_softmax_alone else SCORES
    cause = f"{what} {lost_s / step_s:.0%} of the step"
    whole_s = sum(row["time_s"] for row in attention.of(evidence.tables) if row["part"] in OVER_SCORES)
    return Diagnosis(
        cause,
        REMEDY,
        step_s,
        step_s - whole_s if whole_s else None,  # a fused kernel may also compute the products faster
        evidence=tuple(lost),
        options=OPTIONS,
        expected=with_part(evidence, "attention"),
        takes=lost_s,
    )


def over_scores(evidence: Evidence) -> list[Row]:
    """Return the kernels on the score matrix except matrix products; none if attention is fused."""
    if any(row["family"] == "attention" for row in families.of(evidence.tables)):
        return []
    rows: list[Row] = [row for row in attention.of(evidence.tables) if row["part"] in OVER_SCORES]
    return (
        [row for row in rows if row["family"] not in PRODUCTS]
        if rows
        else [{**row} for row in scores.of(evidence.tables)]
    )


RULE = Rule(find, shortens_kernels=True, refines=("unfused-elementwise",))
