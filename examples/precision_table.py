"""Compare precisions: the time of a step, its gain over fp32, and the peak memory that the formula predicts.

    python examples/precision_table.py

Shows how to make a table of your own from records. A CPU gains little or nothing from bf16; run it on a GPU with a
larger preset. `cs-systems precision` adds numerical error, learning curves and causes.
"""

import pandas as pd

import cs_systems
from cs_systems import RunConfig, grid


def main(size: str = "tiny") -> None:
    base = RunConfig(batch_size=1, steps=5, attention="sdpa_flash")
    records = list(cs_systems.sweep(grid(base, size=[size], precision=["fp32", "bf16", "bf16-pure"])))
    for record in records:
        if record.status != "ok":  # a cell that cannot run here is a record with its reason
            print(record.run_config.precision, record.status, record.reason)

    frame = cs_systems.frame(records)
    steps = frame[frame.phase == "step"].set_index("precision")
    table = pd.DataFrame(
        {
            "step (ms)": steps.median_s * 1e3,
            "gain": steps.median_s["fp32"] / steps.median_s,
            "predicted peak (MiB)": steps.predicted_peak_bytes / 2**20,
        }
    )
    print(table.round(2))


if __name__ == "__main__":
    main()
