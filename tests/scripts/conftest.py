"""What the tests of the studies share: the scripts as modules, and records like those of a real sweep."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cs_systems.config import Precision

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module", autouse=True)
def scripts_path() -> Iterator[None]:
    """A script finds its neighbours, as it does when it is run."""
    sys.path.insert(0, str(ROOT / "scripts"))
    yield
    sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def skeleton() -> Any:
    return importlib.import_module("_study")


@pytest.fixture(scope="module")
def builders() -> Any:
    """Records like those of a real sweep, from the report's tests."""
    spec = importlib.util.spec_from_file_location("report_builders", ROOT / "tests" / "report" / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.CEILINGS[Precision.FP16] = module.CEILINGS[Precision.BF16]
    return module
