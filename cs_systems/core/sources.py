"""Input files of a command that takes files, folders and archives; folders and archives are expanded to their files.

An archive (.zip, .tar, .tar.gz, .tgz) is unpacked only into a temporary folder. Members that are links or devices, or
have a path outside the folder, are refused, and so are archives that exceed the limits below.
"""

from __future__ import annotations

import gzip
import lzma
import re
import shlex
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from cs_systems.core.formats import EXPANSION_FROM, MOST_EXPANSION, Unpacked, head
from cs_systems.core.validation import ConfigError

MOST_FILES = 10_000  # limit of files in a folder, or of members of an archive
LARGEST_BYTES = 64 << 30  # limit of the total size of an archive's members
CHUNK = 1 << 20
UNPACK = "unpack it yourself and give the folder"
_DAMAGE = (
    *(tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile),
    *(zlib.error, lzma.LZMAError, EOFError, RuntimeError),
)
_EXPANDED = f"{MOST_EXPANSION} times its size, unlike any trace or snapshot"


@dataclass(frozen=True)
class Source:
    """File to read: `label` is its name for the user, `given` is the file, folder or archive that the user named."""

    path: Path
    label: str
    given: Path

    @property
    def is_inside(self) -> bool:
        return self.given != self.path


def is_archive(path: Path) -> bool:
    """Return whether the file is an archive that `opened` can unpack, by its content."""
    if not path.is_file():
        return False
    begins = head(path)
    return begins.startswith(b"PK\x03\x04") or begins[257:262] == b"ustar"


@contextmanager
def opened(paths: Sequence[Path], suffixes: tuple[str, ...]) -> Iterator[list[Source]]:
    """Yield the given files, and the files in given folders and archives with one of the suffixes.

    Hidden files and links inside a folder are left out. An error inside the block names files of an archive by their
    path in the archive.

    Raises:
        ConfigError: An archive is damaged, too large or not safe to unpack, or a folder has too many files.
    """
    with tempfile.TemporaryDirectory(prefix="cs-systems-") as folder:
        found: list[Source] = []
        unpacked: dict[str, Path] = {}
        for number, path in enumerate(paths):
            root = path
            if is_archive(path):
                root = Path(folder) / str(number)
                root.mkdir()
                unpacked[str(root)] = path
                _unpack(path, root, suffixes)
            if not root.is_dir():
                found.append(Source(path, str(path), path))
                continue
            inside = [file for file in _files(root) if file.name.endswith(suffixes)]
            labels = [str(file) if root == path else f"{path}:{file.relative_to(root)}" for file in inside]
            found += [Source(file, label, path) for file, label in zip(inside, labels, strict=True)]
        try:
            yield found
        except ConfigError as error:
            text = str(error)
            for root_text, path in unpacked.items():
                own = rf"(read it with cs-systems \w+) \S*{re.escape(root_text)}/.*"  # the remedy is another command
                text = re.sub(own, lambda found, path=path: f"{found[1]} {shlex.quote(str(path))}", text)  # type: ignore[misc]
                text = text.replace(f"{root_text}/", f"{path}:").replace(root_text, str(path))
            raise ConfigError(text, **error.fields) from None


def _files(folder: Path) -> list[Path]:
    found: list[Path] = []
    folders = [folder]
    while folders:
        for entry in sorted(folders.pop().iterdir()):
            if entry.name.startswith(".") or entry.is_symlink():
                continue
            if entry.is_dir():
                folders.append(entry)
            elif entry.is_file():
                found.append(entry)
            if len(found) + len(folders) > MOST_FILES:
                raise ConfigError(
                    f"the folder {folder} contains over {MOST_FILES:,} files and folders; give a folder with fewer, "
                    "or the files themselves"
                )
    return sorted(found)


def _unpack(path: Path, folder: Path, suffixes: tuple[str, ...]) -> None:
    """Unpack the members with one of the suffixes."""
    members = _zip_members if head(path).startswith(b"PK") else _tar_members
    largest = min(LARGEST_BYTES, max(EXPANSION_FROM, MOST_EXPANSION * path.stat().st_size))
    free = max(0, shutil.disk_usage(folder).free - (1 << 30))
    written = 0
    try:
        for count, (name, problem, open_member) in enumerate(members(path)):
            if count >= MOST_FILES:
                raise ConfigError(
                    f"{path} has over {MOST_FILES:,} files; unpack it yourself and give a folder with fewer"
                )
            parts = PurePosixPath(name.replace("\\", "/")).parts
            if not parts and name.endswith("/"):  # the folder itself
                continue
            if not parts or ".." in parts or parts[0] == "/" or re.match("[A-Za-z]:", parts[0]):
                problem = "has a path that leaves the archive"
            elif not name.isprintable():
                problem = "has a path with unprintable characters"
            if problem:
                raise ConfigError(f"{path}: member {name!r} {problem}; {UNPACK}, if you trust it")
            if name.endswith("/") or not name.endswith(suffixes) or parts[-1].startswith("."):
                continue
            target = folder.joinpath(*parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as file, closing(open_member()) as member:
                while data := member.read(CHUNK):
                    written += len(data)
                    if written > free:
                        raise ConfigError(
                            f"{path} unpacks to more than {free / 2**30:.1f} GiB, the free space of "
                            f"{folder.parent.parent} less a reserve of 1 GiB; set TMPDIR to a folder with more space"
                        )
                    if written > largest:
                        over = f"{LARGEST_BYTES >> 30} GiB" if largest == LARGEST_BYTES else _EXPANDED
                        raise ConfigError(f"{path} unpacks to over {over}; if you trust it, {UNPACK}")
                    file.write(data)
    except NotImplementedError as error:
        raise ConfigError(f"{path} is compressed in a way that Python cannot unpack ({error}); {UNPACK}") from None
    except _DAMAGE as error:
        remedy = "copy it again, or make it again if the original is damaged too"
        raise ConfigError(f"{path} is a damaged archive ({error}); {remedy}") from None
    except (FileExistsError, NotADirectoryError):
        twice = f"contains {name!r} twice, or a file where that path needs a folder"
        raise ConfigError(f"{path} {twice}; {UNPACK}") from None


Member = tuple[str, str | None, Callable[[], Any]]  # name, reason to refuse it if any, function that opens it


def _zip_members(path: Path) -> Iterator[Member]:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            mode = info.external_attr >> 16
            problem = "is encrypted" if info.flag_bits & 1 else None
            if mode and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) and stat.S_IFMT(mode):
                problem = "is a link or a device"
            yield info.filename, problem, lambda info=info: archive.open(info)  # type: ignore[misc]


def _tar_members(path: Path) -> Iterator[Member]:
    with closing(Unpacked(path)) as file, tarfile.open(fileobj=_readable(file), mode="r|") as archive:
        for info in archive:
            problem = None if info.isreg() or info.isdir() else "is a link or a device"
            name = f"{info.name}/" if info.isdir() else info.name
            yield name, problem, lambda info=info: archive.extractfile(info)  # type: ignore[misc]


def _readable(file: Unpacked) -> IO[bytes]:
    return file  # type: ignore[return-value]  # a stream of tarfile is read by `read` alone
