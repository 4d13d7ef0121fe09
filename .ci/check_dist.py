"""Check of the files in dist/: the wheel is installed into a clean environment and runs there.

The environment holds the wheel and its declared dependencies, and nothing else. The dependencies are links to those of
the running interpreter, so that nothing is downloaded. The commands run in another folder than the checkout.

Command: python .ci/check_dist.py dist
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NAME = "cs-systems"
ROOT = Path(__file__).parents[1]
TIME = "time --size tiny --context-length 64 --batch-size 1 --steps 3 --warmup 1 --device cpu --out run"
REPORT = "report run --format html --output report.html"
ASK = f"import cs_systems as c, importlib.metadata as m; print(c.__file__, m.version({NAME!r}), c.__version__)"


class Refused(Exception):
    """A fault of the distribution, with what to do about it."""


def only(folder: Path, pattern: str) -> Path:
    """Return the one file of the folder that matches the pattern."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise Refused(f"expected one {pattern} in {folder}, found {[file.name for file in found]}; run make dist")
    return found[0]


def package_files(root: Path) -> set[str]:
    """Return the files of the package below `root`, relative to it."""
    files = (file for file in (root / "cs_systems").rglob("*") if file.is_file() and file.suffix != ".pyc")
    return {file.relative_to(root).as_posix() for file in files}


def require_all(expected: set[str], found: set[str], where: str) -> None:
    """Raise Refused unless `found` has exactly the expected files."""
    if missing := sorted(expected - found):
        raise Refused(f"{where} lacks {', '.join(missing)}; add them to package-data in pyproject.toml")
    if extra := sorted(found - expected):
        raise Refused(f"{where} has files that the checkout lacks: {', '.join(extra)}; remove build/ and *.egg-info")


def source_files(sdist: Path) -> set[str]:
    """Return the files of a source distribution, relative to its one folder."""
    with tarfile.open(sdist) as archive:
        names = [PurePosixPath(member.name) for member in archive.getmembers() if member.isfile()]
    return {PurePosixPath(*name.parts[1:]).as_posix() for name in names}


def dependencies(requires: Iterable[str], extras: set[str], seen: set[tuple[str, str]]) -> set[str]:
    """Return the names of what is required on this machine, directly or through others.

    Args:
        requires: requirements as in a distribution's metadata.
        extras: extras that are asked for.
        seen: names and extras that were visited; grows.
    """
    for requirement in map(Requirement, requires):
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        visit = (canonicalize_name(requirement.name), ",".join(sorted(requirement.extras)))
        if visit not in seen:
            seen.add(visit)
            dependencies(metadata.requires(requirement.name) or (), requirement.extras, seen)
    return {name for name, _ in seen}


def link(name: str, site: Path) -> None:
    """Link the installed files of a distribution into another environment's site-packages."""
    distribution = metadata.distribution(name)
    for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
        if not (site / top).exists():
            (site / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())


def run(command: list[str | Path], folder: Path) -> str:
    """Run the command in the folder and return what it printed; raise Refused with its output if it fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        words = " ".join(str(word) for word in command)
        raise Refused(f"exit status {done.returncode} of {words}:\n{done.stdout}{done.stderr}")
    return done.stdout


def check(dist: Path, folder: Path) -> None:
    """Raise Refused unless both distributions are complete and the wheel runs in a clean environment below `folder`."""
    wheel, sdist = only(dist, "*.whl"), only(dist, "*.tar.gz")
    expected = package_files(ROOT)
    require_all(expected, {file for file in source_files(sdist) if file.startswith("cs_systems/")}, sdist.name)

    clean, elsewhere = folder / "venv", folder / "elsewhere"
    elsewhere.mkdir()
    venv.create(clean, symlinks=True)
    base = {"base": str(clean), "platbase": str(clean)}
    site = Path(sysconfig.get_path("purelib", "venv", base))
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", clean]
    run([*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", wheel.resolve()], elsewhere)
    require_all(expected, package_files(site), wheel.name)
    (installed,) = metadata.distributions(name=NAME, path=[str(site)])
    needed = sorted(dependencies(installed.requires or (), set(), set()))
    for name in needed:
        link(name, site)
    run([*pip, "check"], elsewhere)

    file, *versions = run([clean / "bin" / "python", "-c", ASK], elsewhere).split()
    if Path(file) != site / "cs_systems" / "__init__.py":
        raise Refused(f"cs_systems was imported from {file}, not from the wheel in {site}; unset PYTHONPATH")
    if set(versions) != {wheel.name.split("-")[1]}:
        raise Refused(f"{wheel.name} installs versions {versions}; run make dist")

    program = clean / "bin" / "cs-systems"
    print(run([program, *TIME.split()], elsewhere))
    run([program, *REPORT.split()], elsewhere)
    page = (elsewhere / "report.html").read_text()
    if "</html>" not in page:
        raise Refused(f"report.html of {len(page)} characters has no end; run cs-systems {REPORT}")
    print(f"{wheel.name}: {len(expected)} files, {len(needed)} dependencies; time and report run without the checkout")


def main() -> int:
    """Check the folder named on the command line and return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            check(Path(sys.argv[1]), Path(folder).resolve())
        except Refused as fault:
            print(f"error: {fault}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
