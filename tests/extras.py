"""Programs and packages that some tests need and README does not ask for; the name of each is a marker.

tests/conftest.py skips a marked test where its extra is missing, and gives it the marker `extra` too. `.ci/run` hides
all of them from the tests without the marker, and then adds them for those that have it.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from functools import cache


def _nsys() -> str | None:
    from cs_systems.measure.profilers import _nsys

    return _nsys.problem()


def _ncu() -> str | None:
    from cs_systems.measure.profilers import ncu

    return ncu.problem()


def _ncu_report() -> str | None:
    from cs_systems.readers.ncu import INSTALL

    return None if importlib.util.find_spec("ncu_report") else f"ncu-report is not installed; {INSTALL}"


def _nvcc() -> str | None:
    return None if shutil.which("nvcc") else "nvcc is not on the PATH; install NVIDIA's CUDA toolkit"


def _cuda_core() -> str | None:
    from cs_systems.model.kernels.cuda import driver

    return driver.missing()


def _chromium() -> str | None:
    from scripts.benchmarks._browser import CHROMIUM

    return None if CHROMIUM else "Chromium is not installed; apt-get install chromium"


def _pdflatex() -> str | None:
    if shutil.which("pdflatex"):
        return None
    return "pdflatex is not on the PATH; install TeX Live: apt-get install texlive-latex-recommended"


def _typst() -> str | None:
    return None if importlib.util.find_spec("typst") else "the package typst is not installed; pip install typst"


def _mcp() -> str | None:
    from cs_systems.cli.mcp import INSTALL

    return None if importlib.util.find_spec("mcp") else f"the package mcp is not installed; {INSTALL}"


EXTRAS: dict[str, Callable[[], str | None]] = {
    "nsys": _nsys,
    "ncu": _ncu,
    "ncu_report": _ncu_report,
    "nvcc": _nvcc,
    "cuda_core": _cuda_core,
    "chromium": _chromium,
    "pdflatex": _pdflatex,
    "typst": _typst,
    "mcp": _mcp,
    "peers": lambda: None,  # each of these tests names its library
}
"""Function for each extra that returns why it is missing, with the remedy, or None."""

missing = cache(lambda name: EXTRAS[name]())

_of_running_test: frozenset[str] = frozenset()


def begin(names: frozenset[str]) -> None:
    """Keep the extras of the test that runs next."""
    global _of_running_test
    _of_running_test = names


def require(name: str) -> None:
    """Raise AssertionError unless the running test is marked with the extra, on a machine that has it too."""
    assert name in _of_running_test, f"this test uses {name}; mark it @pytest.mark.{name}"
