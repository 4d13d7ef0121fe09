"""Entry point of `python -m cs_systems`, the same program as `cs-systems`."""

import sys

from cs_systems.cli import main

if __name__ == "__main__":
    sys.exit(main())
