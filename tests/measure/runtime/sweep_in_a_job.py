"""Script for torchrun: sweep over the named workloads of workloads_that_die.py on all ranks of the job.

torchrun --nproc-per-node 2 tests/measure/runtime/sweep_in_a_job.py FOLDER NAME…
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from cs_systems import sweep
from cs_systems.config import RunConfig
from cs_systems.measure.runtime import ranks
from cs_systems.measure.runtime.fork_client import server_pids

WORKLOADS = Path(__file__).parent / "workloads_that_die.py"
TINY = RunConfig(device="cpu", warmup=0, steps=3)

ranks.PATIENCE_S = 4.0
folder, *names = sys.argv[1:]
for record in sweep(
    [
        replace(TINY, workload=f"{WORKLOADS}:{name}", world_size=int(os.environ["WORLD_SIZE"]), seed=seed)
        for seed, name in enumerate(names)
    ],
    out=folder,
):
    print(record.run_config.seed, record.status)
assert not server_pids(), "rank 0 describes the machine itself, without a worker"
