"""Rule for a training that diverges: its loss grows by a multiple, and has not become NaN yet."""

from __future__ import annotations

from cs_systems.analysis.comparison.loop_findings import OUTCOME
from cs_systems.analysis.diagnosis import Diagnosis, Rule
from cs_systems.analysis.diagnosis._evidence import Evidence
from cs_systems.analysis.diagnosis._forms import of_training

NOTABLE = 10  # times the largest of the first losses; in curricula and GANs, losses grow by less
REMEDY = (
    "lower the learning rate, warm it up (torch.optim.lr_scheduler.LinearLR), or clip the gradients "
    "(torch.nn.utils.clip_grad_norm_)"
)


def find(evidence: Evidence) -> Diagnosis | None:
    """Find a loss that is far higher in the last quarter than in the first."""
    row = OUTCOME.first(evidence.tables)
    if row is None or row.get("fault"):
        return None
    early, late = row.get("early_loss"), row.get("late_loss")
    if early is None or late is None or early <= 0 or late < NOTABLE * early:
        return None
    cause = (
        f"the training diverges: in the first {row['losses']} backward passes the loss grows from at most {early:.3g} "
        f"to at least {late:.3g}"
    )
    return of_training(cause, REMEDY, [row])


RULE = Rule(find, judges_loop=True, precedes=("start-up",))
