"""Check of a commit message, as a commit-msg hook: its subject has at most 72 characters and stands alone.

Command: python .ci/check_commit_message.py .git/COMMIT_EDITMSG
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

LONGEST = 72
# Below this line `git commit --verbose` shows the change.
SCISSORS = re.compile(r"^.? ?-+ >8 -+$", re.MULTILINE)
# These commits disappear when they are squashed, and git writes their subjects.
SQUASHED = re.compile(r"^((fixup|squash|amend)! )+")


def fault(text: str) -> str | None:
    """Return what is wrong with a message without comments, and what to do; None for a good one."""
    subject, *rest = text.strip().split("\n")
    length = len(SQUASHED.sub("", subject.rstrip()))
    if length > LONGEST:
        return f"subject has {length} characters, the limit is {LONGEST}; shorten it and move the reasons to the body"
    if rest and rest[0].strip():
        return f"line 2 must be empty, got {rest[0]!r}; separate subject and body with an empty line"
    return None


def without_comments(text: str) -> str:
    """Return the message as git stores it: without comments, whichever character begins them."""
    command = ["git", "stripspace", "--strip-comments"]
    return subprocess.run(command, input=SCISSORS.split(text)[0], capture_output=True, text=True, check=True).stdout


def main() -> int:
    """Check the file named on the command line and return the exit status."""
    found = fault(without_comments(Path(sys.argv[1]).read_text()))
    if found:
        print(f"error: {found}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
