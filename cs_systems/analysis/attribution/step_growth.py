"""Growth of kernel time over the steps of a recording, by kernel name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cs_systems.analysis.attribution.kernel_families import family, short_name
from cs_systems.readers.forms.trace import Kernels, Step, steps_of

LARGE = 0.05  # least share of the kernel time in the first steps; smaller kernels are ignored
# Least ratio of a kernel's growth to all kernels'. At a lower clock, memory-bound kernels slow down less than products.
ALIKE = 0.5
ENDS = 5  # number of parts into which the steps are divided; the first and the last part are compared


class Growing(NamedTuple):
    """Kernel with its family, its time in the first steps, and how much longer it takes in the last, in s."""

    kernel: str
    family: str
    first_s: float
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
    first_s, last_s = (np.median(part, axis=0) for part in (times[:count], times[-count:]))
    rows = zip(numbers, first_s.tolist(), (last_s - first_s).tolist(), strict=True)
    return sorted((Growing(*name, begun, more) for name, begun, more in rows), key=lambda one: -one.more_s)


def grows_alike(found: Sequence[Growing]) -> bool:
    """Return whether all larger kernels grow in proportion: then the device became slower, not the work larger."""
    first_s, more_s = sum(one.first_s for one in found), sum(one.more_s for one in found)
    large = [one for one in found if one.first_s >= LARGE * first_s]
    return len(large) > 1 and all(one.more_s * first_s >= ALIKE * more_s * one.first_s for one in large)
