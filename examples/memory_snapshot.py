"""Read a CUDA memory snapshot of PyTorch, and print what the peak consists of.

    python examples/memory_snapshot.py [SNAPSHOT]

SNAPSHOT is a .pickle of torch.cuda.memory._dump_snapshot(); the default is a small one of an H200 that the tests use.
Where there is a GPU, `record` below shows how to write your own. Reading needs neither torch nor a GPU.
"""

import sys
from pathlib import Path

from cs_systems.analysis.memory.allocations import replay
from cs_systems.analysis.memory.categories import attribute
from cs_systems.analysis.memory.tables import composition
from cs_systems.analysis.memory.tensor_names import tensor_names
from cs_systems.readers.snapshot import read

SAMPLE = Path(__file__).parents[1] / "tests/data/snapshot_h200_step.pickle.gz"


def record(step, file: str) -> None:
    """Run a training step and write its memory history to a file; needs a GPU."""
    import torch

    torch.cuda.memory._record_memory_history()
    step()
    torch.cuda.memory._dump_snapshot(file)


def main(snapshot: str | Path = SAMPLE) -> None:
    found = attribute(replay(read(Path(snapshot))))
    print(f"peak: {found.replay.peak_bytes / 2**20:,.1f} MiB")
    for row in composition(found, tensor_names(found)):
        print(f"{row['category']:<18} {row['phase'] or '':<10} {row['bytes'] / 2**20:8.1f} MiB {row['share']:7.1%}")


if __name__ == "__main__":
    main(*sys.argv[1:])
