"""torch's elastic launcher: `python -m torch.distributed.run`, which starts and ends in half the time like this."""

from __future__ import annotations

import gc


def main() -> None:
    gc.disable()  # as in the worker: importing torch makes no garbage
    from torch.distributed import run

    gc.freeze()
    gc.enable()
    run.main()


if __name__ == "__main__":
    main()
