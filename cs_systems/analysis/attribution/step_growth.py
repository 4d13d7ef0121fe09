"""Growth of the time of kernels over the steps of a recording, by the name of the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cs_systems.analysis.attribution.kernel_families import family, short_name
from cs_systems.readers.forms.trace import Kernels, Step, steps_of

ENDS = 5  # parts of the steps of which the first and the last are compared


class Growing(NamedTuple):
    """Kernel by its short name, its family, and by how much the last steps run it longer than the first, in s."""

    kernel: str
    family: str
    more_s: float


def growing(kernels: Kernels, windows: Sequence[Step]) -> list[Growing]:
    """Return the kernels of these consecutive windows, the one that grows most first."""
    functions = kernels.function.values
    numbers: dict[tuple[str, str], int] = {}
    of_function = [numbers.setdefault((short_name(one.name), family(one.name)), len(numbers)) for one in functions]
    number, inside = steps_of(kernels.start_s, windows)
    both = number * len(numbers) + np.array(of_function, np.int64)[kernels.function.codes]
    lasted = np.bincount(both[inside], (kernels.end_s - kernels.start_s)[inside], len(windows) * len(numbers))
    times, count = lasted.reshape(len(windows), len(numbers)), max(1, len(windows) // ENDS)
    more_s = np.median(times[-count:], axis=0) - np.median(times[:count], axis=0)
    found = [Growing(*name, each) for name, each in zip(numbers, more_s.tolist(), strict=True)]
    return sorted(found, key=lambda one: -one.more_s)
