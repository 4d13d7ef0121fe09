"""Sweep of the fault campaign on two ranks, through the library: `_fault_driver.py WORKLOAD OUT TIMEOUT_S CELL…`."""

from __future__ import annotations

import sys

import cs_systems
from cs_systems.config import ConfigError


def main() -> int:
    workload, out, timeout_s, *cells = sys.argv[1:]
    base = cs_systems.RunConfig(workload=f"{workload}:factory", device="cpu", warmup=0, steps=2, world_size=2)
    configs = cs_systems.grid(base, batch_size=[int(cell) for cell in cells])
    try:
        for record in cs_systems.sweep(configs, out=out, timeout_s=float(timeout_s)):
            print(record.config["batch_size"], record.status, record.reason, flush=True)
    except (ConfigError, OSError, RuntimeError) as error:
        print(f"cs-systems: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
