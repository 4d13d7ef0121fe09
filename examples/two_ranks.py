"""Train on two ranks, and compare a strategy with training on one.

    python examples/two_ranks.py

Shows `strategy` and `world_size`. The ranks are processes that this command starts: with NCCL on two GPUs, with gloo
on a CPU. A sample's time is the slowest rank's. `cs-systems parallel` adds exposed communication and memory.
"""

import cs_systems
from cs_systems import RunConfig, preset


def main() -> None:
    model = preset("tiny")
    alone = RunConfig(model=model, batch_size=1, steps=5)
    ranks = [
        RunConfig(model=model, batch_size=1, steps=5, world_size=2, strategy=strategy)
        for strategy in ("ddp_bucketed", "ddp_bucketed+zero1")
    ]
    for record in cs_systems.sweep([alone, *ranks]):
        config = record.run_config
        if record.measurement is None:
            print(config.strategy, record.status, record.reason)
            continue
        frame = record.frame().set_index("phase")
        print(f"{config.strategy:<20} {config.world_size} ranks  {frame.median_s['step'] * 1e3:8.2f} ms a step")


if __name__ == "__main__":
    main()
