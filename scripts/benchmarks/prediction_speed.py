"""Time to predict a config's memory, to find the sizes that fit, and to find the cheapest checkpoints.

Method: each preset at context 2048, batch 4, bf16, sdpa_flash, a training step; the median of 20 calls in one process.
The promise: a prediction takes under 50 ms. `fits` searches the largest batch and context, and what to change where it
does not fit; the cheapest plan looks at every form of checkpointing that suits the model.
Output: a markdown table on standard output. Committed: profiles/memory_prediction/speed.md.

    python scripts/benchmarks/prediction_speed.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from cs_systems.config import PRESETS, Precision, RunConfig, preset
from cs_systems.formulas.memory.fit import cheapest_plan, fits, needed_bytes
from cs_systems.report.tables.rows import render_rows

REPEATS, DEVICE_BYTES = 20, 80 * 2**30


def seconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return median(times)


def main() -> int:
    rows = []
    for name in [name for name in PRESETS if name not in ("xl-2025", "xl-2026")]:  # shapes of other names, too
        model = preset(name, context_length=2048)
        config = RunConfig(model=model, precision=Precision.BF16, attention="sdpa_flash", device="cuda")
        needed = needed_bytes(config)
        rows.append(
            {
                "size": name,
                "layers": model.num_layers,
                "needed_bytes": needed,
                "fits 80 GiB": "yes" if needed <= DEVICE_BYTES else "no",
                "prediction_s": seconds(lambda config=config: needed_bytes(config)),
                "fits_s": seconds(lambda config=config: fits(config, DEVICE_BYTES)),
                "cheapest_plan_s": seconds(lambda config=config: cheapest_plan(config, DEVICE_BYTES)),
            }
        )
    print(render_rows(rows, "markdown", f"medians of {REPEATS} calls on one CPU core"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
