"""Number of cores that a process may use."""

import os
import subprocess
import sys

import pytest

COUNTED = (
    "import os; os.sched_setaffinity(0, [{core}]); from cs_systems.machine.cores import usable_cores as n; print(n())"
)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux binds processes to cores")
def test_cores_that_a_process_may_not_use_are_not_counted():
    code = COUNTED.format(core=min(os.sched_getaffinity(0)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
