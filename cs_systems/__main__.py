"""`python -m cs_systems` and `cs-systems`: the same program."""

import sys

from cs_systems.cli import main

if __name__ == "__main__":
    sys.exit(main())
