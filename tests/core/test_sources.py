"""Tests of folders and archives given as input: the files inside, and members that must not be unpacked."""

from __future__ import annotations

import gzip
import io
import shutil
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from cs_systems.core import sources
from cs_systems.core.formats import refuse_other
from cs_systems.core.sources import opened
from cs_systems.core.validation import ConfigError

SUFFIXES = (".json", ".pickle")
FILES = {"a/one.json": b"1", "two.pickle": b"22", "a/b/three.txt": b"333", ".hidden.json": b"4"}


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in FILES.items():
            archive.writestr(name, content)


def tarred(path: Path, mode: str = "w:gz") -> None:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in FILES.items():
            (info := tarfile.TarInfo(name)).size = len(content)
            archive.addfile(info, io.BytesIO(content))


def in_folder(path: Path) -> None:
    for name, content in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    (path / "link.json").symlink_to(path / "two.pickle")


@pytest.mark.parametrize("make", [zipped, tarred, lambda path: tarred(path, "w"), in_folder])
def test_files_inside_are_found_by_suffix(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(path := tmp_path / "given")
    before = {*tmp_path.rglob("*")}
    with opened([path], SUFFIXES) as found:
        assert [(source.path.name, source.path.read_bytes()) for source in found] == [
            ("one.json", b"1"),
            ("two.pickle", b"22"),
        ]
        assert [source.label for source in found] == [
            f"{path}{'/' if path.is_dir() else ':'}{name}" for name in ("a/one.json", "two.pickle")
        ]
        inside = found[0].path
        with pytest.raises(ConfigError, match=rf"^{path}[:/]two.pickle is bad$"), opened([path], SUFFIXES) as again:
            raise ConfigError(f"{again[1].path} is bad")
    assert inside.exists() == path.is_dir()
    assert {*tmp_path.rglob("*")} == before


def test_uncompressed_files_are_opened_under_any_name(tmp_path: Path) -> None:
    paths = [tmp_path / "missing.x", tmp_path / "there.txt"]
    paths[1].touch()
    with opened(paths, SUFFIXES) as found:
        assert [(source.path, source.label, source.is_inside) for source in found] == [
            (p, str(p), False) for p in paths
        ]


def tar_with(path: Path, info: tarfile.TarInfo) -> None:
    with tarfile.open(path, "w:gz") as archive:
        archive.addfile(info, io.BytesIO(b"0" * info.size))


def test_archive_of_a_whole_folder_is_unpacked(tmp_path: Path) -> None:
    with tarfile.open(path := tmp_path / "runs.tgz", "w:gz") as archive:
        archive.addfile(member("./", type=tarfile.DIRTYPE))
        archive.addfile(member("./rank0:trace.json"))
    with opened([path], SUFFIXES) as found:
        assert [source.label for source in found] == [f"{path}:rank0:trace.json"]


def test_damaged_gzip_is_named(tmp_path: Path) -> None:
    tarred(path := tmp_path / "runs.tgz", "w")
    path.write_bytes(gzip.compress(path.read_bytes()[:1000]) + b"rubbish")
    with pytest.raises(ConfigError, match=r"is a damaged archive \(Not a gzipped file"), opened([path], SUFFIXES):
        pass


def member(name: str, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def zip_with(path: Path, info: zipfile.ZipInfo, times: int = 1) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for _ in range(times):
            archive.writestr(info, "text")


def zip_link() -> zipfile.ZipInfo:
    info = zipfile.ZipInfo("link.json")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda p: tar_with(p, member("../up.json")),
            r"member '../up.json' has a path that leaves the archive; unpack",
        ),
        (lambda p: tar_with(p, member("/etc/x.json")), r"member '/etc/x.json' has a path that leaves the archive"),
        (
            lambda p: tar_with(p, member("l.json", type=tarfile.SYMTYPE, linkname="/etc/passwd")),
            r"is a link or a device",
        ),
        (lambda p: tar_with(p, member("l.json", type=tarfile.LNKTYPE, linkname="a")), r"is a link or a device"),
        (lambda p: tar_with(p, member("d.json", type=tarfile.CHRTYPE)), r"is a link or a device"),
        (lambda p: zip_with(p, zipfile.ZipInfo("a/../../up.json")), r"has a path that leaves the archive"),
        (lambda p: zip_with(p, zipfile.ZipInfo("..\\up.json")), r"has a path that leaves the archive"),
        (lambda p: zip_with(p, zipfile.ZipInfo("C:/up.json")), r"has a path that leaves the archive"),
        (lambda p: tar_with(p, member("a:b/../../x.json")), r"has a path that leaves the archive"),
        (lambda p: zip_with(p, zip_link()), r"member 'link.json' is a link or a device"),
    ],
)
def test_member_outside_the_folder_is_refused(make: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    make(path := tmp_path / "bad.archive")
    with pytest.raises(ConfigError, match=message), opened([path], SUFFIXES):
        raise AssertionError("never opened")
    assert list(tmp_path.iterdir()) == [path]


def test_command_for_a_file_of_an_archive_names_the_archive(tmp_path: Path) -> None:
    with zipfile.ZipFile(path := tmp_path / "a b.zip", "w") as archive:
        archive.writestr("model/data.pkl", b"\x80\x02}q\x00.")
    with pytest.raises(ConfigError) as raised, opened([path], (".pkl",)) as (source,):
        refuse_other(source.path, "analyze")
    assert str(raised.value) == (
        f"{path}:model/data.pkl contains a pickle, the format of memory snapshots; read it with "
        f"cs-systems snapshot '{path}'"
    )


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_repeated_path_and_damage_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    zip_with(path, zipfile.ZipInfo("a.json"), times=2)
    with (
        pytest.raises(
            ConfigError, match=r"a.zip contains 'a.json' twice, or a file where that path needs a folder; unpack"
        ),
        opened([path], SUFFIXES),
    ):
        pass
    unknown = bytearray(path.read_bytes())
    for place in (unknown.find(b"PK\x03\x04") + 8, unknown.find(b"PK\x01\x02") + 10):
        unknown[place] = 9  # Deflate64, which Windows writes for large files
    path.write_bytes(unknown)
    with (
        pytest.raises(ConfigError, match=r"compressed in a way that Python cannot unpack \(.*\); unpack it yourself"),
        opened([path], SUFFIXES),
    ):
        pass
    path.write_bytes(path.read_bytes()[:40])
    with (
        pytest.raises(ConfigError, match=r"a.zip is a damaged archive \(.*\); copy it again, or make it again if"),
        opened([path], SUFFIXES),
    ):
        pass


def test_archive_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.json", bytes(sources.EXPANSION_FROM + 1))
    with pytest.raises(ConfigError, match=r"bomb.zip unpacks to over 100 times its size"), opened([path], SUFFIXES):
        pass
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
        full = rf"unpacks to more than 0.0 GiB, the free space of {tempfile.gettempdir()} less a reserve of 1"
        with pytest.raises(ConfigError, match=full), opened([path], SUFFIXES):
            pass
    tarred(path := tmp_path / "many.tgz")
    monkeypatch.setattr(sources, "MOST_FILES", 3)
    with (
        pytest.raises(ConfigError, match=r"many.tgz has over 3 files; unpack it yourself and give a folder with fewer"),
        opened([path], SUFFIXES),
    ):
        pass
    in_folder(tmp_path / "folder")
    monkeypatch.setattr(sources, "MOST_FILES", 2)
    with (
        pytest.raises(ConfigError, match="folder contains over 2 files and folders; give a folder with fewer"),
        opened([tmp_path / "folder"], (*SUFFIXES, ".txt")),
    ):
        pass
