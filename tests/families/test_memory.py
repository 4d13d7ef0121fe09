"""Memory of a training step of every family, predicted on fake tensors."""

from __future__ import annotations

from typing import Any

import pytest

from cs_systems.config import RunConfig
from cs_systems.core.plugins import LIVE, holding
from cs_systems.measure.runtime.forecast import forecast
from tests.families.models import FAMILIES


@pytest.mark.filterwarnings("ignore")  # those of the libraries
@pytest.mark.parametrize("name", FAMILIES)
def test_prediction_equals_the_memory_of_the_real_step(name: str) -> None:
    if FAMILIES[name].is_missing:
        pytest.skip(f"needs the package {FAMILIES[name].needs}")

    def factory(config: RunConfig, device: Any) -> dict[str, Any]:
        model, forward, loss_of = FAMILIES[name].make()
        return {"model": model, "batch": 0, "forward": lambda _model, _batch: forward(), "loss": loss_of}

    config = RunConfig(workload=f"{LIVE}{name}", device="cuda")
    with holding(config.workload, factory):
        fake, real = forecast(config), forecast(config, fake=False)
    assert (fake["reason"], real["reason"]) == (None, None)
    # A mask that hides nothing is dropped where its values can be read (BERT), and kept on fake tensors.
    assert fake["peak_bytes"] == pytest.approx(real["peak_bytes"], rel=1e-4)
    assert fake["reserved_bytes"] == pytest.approx(real["reserved_bytes"], rel=1e-4)
    assert fake["flops"] == real["flops"]
