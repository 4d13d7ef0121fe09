"""Draw docs/assets/replay.svg: a step of the H200's trace in tests/data, as recorded and as replayed.

python scripts/benchmarks/replay_picture.py
"""

from __future__ import annotations

from pathlib import Path

from cs_systems.analysis.attribution.profile import profile
from cs_systems.analysis.replay import replayed
from cs_systems.analysis.replay.lanes import lanes
from cs_systems.readers import read
from cs_systems.report.pages.replay import svg

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "tests" / "data" / "kineto_h200_step.json.gz"
PICTURE = ROOT / "docs" / "assets" / "replay.svg"


def picture() -> str:
    """Return the picture of the second recorded step."""
    step = lanes(replayed(profile(read(TRACE))), number=1)
    assert step is not None
    return svg(step) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture())
    print(PICTURE.relative_to(ROOT))
