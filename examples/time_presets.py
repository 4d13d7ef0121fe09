"""Time two attention backends at two context lengths, and load the results into pandas.

    python examples/time_presets.py [FOLDER]

Shows `grid`, `sweep` and `load`. Each record is on disk as soon as its cell is measured; the same command with the same
folder continues an interrupted sweep. On a GPU, replace `tiny` by `small`, `medium`, `large` or `xl`.
"""

import sys

import cs_systems
from cs_systems import RunConfig, grid


def main(folder: str = "runs/time-presets") -> None:
    base = RunConfig(batch_size=1, steps=5)
    cells = grid(base, size=["tiny"], context_length=[32, 64], attention=["naive", "sdpa_flash"])
    for record in cs_systems.sweep(cells, out=folder):
        print(record.run_config.attention, record.run_config.model.context_length, record.status)

    frame = cs_systems.load(folder)  # one row for each phase of each cell; times in seconds
    steps = frame[frame.phase == "step"]
    print(steps.pivot_table(index="seq_len", columns="attention", values="median_s") * 1e3)


if __name__ == "__main__":
    main(*sys.argv[1:])
