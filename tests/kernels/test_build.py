"""The cache of compiled kernels holds nothing that another user may have written."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fairseq.kernels import build as native

SOURCE = Path(native.__file__).with_name("dropout.c")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the cache; the "compiler" writes the text of its own, different each time it
    runs."""
    runs = iter(range(100))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        native, "_compile", lambda compiler, source, target: target.write_text(f"compiled {next(runs)}")
    )
    monkeypatch.setattr(
        subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, stdout=b"a compiler", stderr=b"")
    )
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    yield tmp_path / "fairseq-short"
    assert not list((tmp_path / "temporary").iterdir()), "no folder is left"


def loaded(source: Path = SOURCE) -> str:
    """The content of the library that would be loaded."""
    with native._compiled(source) as path:
        return Path(path).read_bytes()[: -native.DIGEST].decode()


def library(cache: Path) -> Path:
    (path,) = cache.glob("*.so")
    return path


def test_a_library_is_compiled_once_for_a_source(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [loaded(), loaded()] == ["compiled 0"] * 2
    other = tmp_path / "step.c"
    other.write_text(SOURCE.read_text() + "\n")
    assert loaded(other) == "compiled 1"
    monkeypatch.setenv("CFLAGS", "-mno-avx512f")
    assert loaded(other) == "compiled 2"


def test_an_open_umask_leaves_a_library_that_only_this_user_writes(cache: Path) -> None:
    before = os.umask(0)
    try:
        assert [loaded(), loaded()] == ["compiled 0"] * 2
    finally:
        os.umask(before)
    assert library(cache).stat().st_mode & 0o777 == 0o700


def test_a_library_that_others_can_write_is_compiled_again(cache: Path) -> None:
    loaded()
    for mode in (0o720, 0o702):
        library(cache).write_text("theirs")
        library(cache).chmod(mode)
        assert loaded().startswith("compiled")


@pytest.mark.parametrize(
    "damage", [lambda old: b"", lambda old: old[:-1], lambda old: b"C" + old[1:], lambda old: old * 2]
)
def test_a_damaged_library_is_compiled_again(cache: Path, damage: Callable[[bytes], bytes]) -> None:
    loaded()
    library(cache).write_bytes(damage(library(cache).read_bytes()))
    assert [loaded(), loaded()] == ["compiled 1"] * 2


def test_a_link_in_place_of_the_library_is_not_followed(cache: Path, tmp_path: Path) -> None:
    loaded()
    (tmp_path / "theirs").write_text("theirs")
    path = library(cache)
    path.unlink()
    path.symlink_to(tmp_path / "theirs")
    assert loaded() == "compiled 1"
    assert (tmp_path / "theirs").read_text() == "theirs" and not path.is_symlink()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("what", ["library", "folder"])
def test_a_library_or_folder_of_another_user_is_not_used(cache: Path, what: str) -> None:
    loaded()
    path = library(cache)
    path.write_text("theirs")
    os.chown(path if what == "library" else cache, 12345, -1)
    assert loaded() == "compiled 1"


@pytest.mark.parametrize("kind", ["others may write it", "a link"])
def test_a_folder_that_others_may_change_is_not_used(kind: str, cache: Path, tmp_path: Path) -> None:
    loaded()
    library(cache).write_text("theirs")
    if kind == "a link":
        cache.rename(tmp_path / "elsewhere")
        cache.symlink_to(tmp_path / "elsewhere")
    else:
        cache.chmod(0o770)
    assert loaded() == "compiled 1"


def test_a_folder_in_place_of_the_library_is_left_alone(cache: Path) -> None:
    loaded()
    path = library(cache)
    path.unlink()
    path.mkdir()
    assert loaded().startswith("compiled") and path.is_dir()


def test_a_user_without_a_home_and_a_compiler_with_open_quotes_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", without)
    assert native._folder() is None
    monkeypatch.setenv("CC", 'cc "')
    native.library.cache_clear()
    assert native.library("testing", SOURCE) is None and "testing kernels: not compiled (No closing" in caplog.text
    native.library.cache_clear()


def test_several_libraries_are_loaded_in_one_process(tmp_path: Path) -> None:
    if native.library("training", SOURCE) is None:
        pytest.skip("no C compiler")
    for number in range(2):
        source = tmp_path / f"{number}.c"
        source.write_text(f"int number(void) {{ return {number}; }}")
        library = native.library("testing", source)
        assert library is not None and library.number() == number
