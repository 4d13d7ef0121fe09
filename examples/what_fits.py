"""Predict which configurations fit a GPU that you do not have. Nothing is run.

    python examples/what_fits.py [GIB]

Shows `preflight`, which returns for each cell its peak memory by formula, and why it cannot run on this machine.
On the command line: `cs-systems memory --size xl --fits 24GiB`.
"""

import sys

from cs_systems import RunConfig, grid, preflight


def main(gib: str = "24") -> None:
    base = RunConfig(attention="sdpa_flash", batch_size=4)
    cells = grid(base, size=["small", "medium", "large"], precision=["fp32", "bf16"], checkpoint=["none", "every:1"])
    for config, row in zip(cells, preflight(cells), strict=True):
        peak = row["predicted_peak_bytes"] / 2**30
        verdict = "fits" if peak <= float(gib) else "does not fit"
        print(
            f"{config.model.name:<8} {config.precision:<6} {config.checkpoint:<8} {peak:6.1f} GiB  {verdict} {gib} GiB"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
