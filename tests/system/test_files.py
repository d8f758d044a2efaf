"""Files and folders are written completely or not at all, and nothing else is touched."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import signal
import subprocess
import sys

import pytest
import runs
from kills import leftover

from fairseq.errors import UserError
from fairseq.system.files import (
    atomic_file,
    atomic_folder,
    link_or_copy,
    make_folder,
    prepare_file,
    prepare_folder,
    remove_leftovers,
    removing_empty_folders,
)


class Interruption(Exception):
    pass


def start_writer(folder, *, kind="file"):
    """A process that has begun to write in *folder* and waits."""
    code = (
        "import sys; from fairseq.system.files import atomic_file, atomic_folder\n"
        f"with atomic_{kind}(sys.argv[1]) as made:\n"
        f"    {'made.write(b' + repr('half') + '); made.flush()' if kind == 'file' else '(made / chr(97)).touch()'}\n"
        "    print('ready', flush=True); sys.stdin.read()\n"
    )
    target = folder / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(target)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=runs.environment(),
    )
    assert process.stdout.readline() == b"ready\n"
    return process


def test_a_file_appears_when_it_is_complete(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with atomic_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["a"]


def test_an_exception_leaves_the_old_content_and_no_temporary_file(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(Interruption), atomic_file(path) as file:
        file.write(b"new")
        raise Interruption
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["a"]


def test_a_full_disk_is_a_user_error_that_names_flag_and_file(tmp_path):
    message = r"^--out .*/a: cannot be written \(No space left on device\); free"
    with pytest.raises(UserError, match=message), atomic_file(tmp_path / "a", "--out"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert os.listdir(tmp_path) == []


def test_torchs_error_with_a_system_error_behind_it_is_one_line(tmp_path):
    with pytest.raises(UserError, match="File too large"), atomic_file(tmp_path / "a"):
        try:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        except OSError as error:
            raise RuntimeError("unexpected pos 1 vs 2") from error


def test_errors_about_other_files_are_not_blamed_on_this_one(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_file(tmp_path / "a"):
        (tmp_path / "missing-input").read_bytes()
    with pytest.raises(RuntimeError, match="a bug"), atomic_file(tmp_path / "a"):
        raise RuntimeError("a bug")


def test_a_missing_folder_and_a_folder_in_the_way_are_user_errors(tmp_path):
    with pytest.raises(UserError, match="No such file or directory"), atomic_file(tmp_path / "no" / "a"):
        pass
    (tmp_path / "b").mkdir()
    with pytest.raises(UserError, match="Is a directory"), atomic_file(tmp_path / "b"):
        pass
    assert os.listdir(tmp_path) == ["b"]


def test_a_link_is_replaced_and_its_target_stays(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"shared")

    def by_file():
        with atomic_file(link) as file:
            file.write(b"new")

    def by_link():
        (tmp_path / "second").write_bytes(b"new")
        link_or_copy(tmp_path / "second", link)

    for write in (by_file, by_link):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        prepare_file("--out", link)
        write()
        assert not link.is_symlink() and link.read_bytes() == b"new" and target.read_bytes() == b"shared"
    assert sorted(os.listdir(tmp_path)) == ["link", "second", "target"]


def test_devices_and_pipes_are_refused_and_stay(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/null", "/dev/stdout", "/dev/new", "/proc/self/fd/1", tmp_path / "pipe"):
        with pytest.raises(UserError, match="not a regular file"):
            prepare_file("--out", path)
        with pytest.raises(UserError, match="not a regular file"), atomic_file(path):
            pass
    assert (tmp_path / "pipe").is_fifo() and not os.path.exists("/dev/new")


def test_names_of_the_greatest_length_can_be_written(tmp_path):
    name = "ü" * 127
    with atomic_file(tmp_path / name) as file:
        file.write(b"x")
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_live_writers_temporary_files_are_never_removed_and_a_killed_ones_are(tmp_path, kind):
    def temporaries():
        return [name for name in os.listdir(tmp_path) if name != "out"]

    process = start_writer(tmp_path, kind=kind)
    begun = temporaries()
    assert len(begun) == 1 and begun[0].endswith(".tmp")
    remove_leftovers(tmp_path)
    assert temporaries() == begun
    process.send_signal(signal.SIGKILL)
    process.communicate()
    remove_leftovers(tmp_path)
    assert temporaries() == []


def test_the_check_of_a_place_removes_what_a_killed_process_left_there(tmp_path):
    (tmp_path / leftover(tmp_path / "out").name).touch()
    prepare_file("--out", tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_files_of_other_hosts_and_of_others_are_never_removed(tmp_path):
    others = {".a.other-host.12.0badcafe.tmp", ".notes.tmp", "a.tmp", ".checkpoint_last.pt.0badcafe.tmp"}
    own = leftover(tmp_path / "a").name
    for name in others | {own}:
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert set(os.listdir(tmp_path)) == others


@pytest.mark.parametrize("here", [".", "..", "../there"])
def test_a_folder_may_be_the_present_one_or_the_one_above_it(here, tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    with atomic_folder(here) as folder:
        (folder / "a").write_text("1")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a"]


def test_files_of_a_folder_appear_together(tmp_path):
    out = tmp_path / "new" / "out"
    with atomic_folder(out) as folder:
        (folder / "a").write_text("1")
        (folder / "b").write_text("2")
        assert not (out / "a").exists()
    assert sorted(os.listdir(out)) == ["a", "b"]


def test_a_kill_at_any_instant_leaves_a_new_folder_absent_and_an_old_one_whole_or_without_its_last_file(tmp_path):
    def move(instant, done, original, *paths):
        original(*paths)
        done.append(paths)
        if len(done) > instant:
            os.kill(os.getpid(), signal.SIGKILL)

    out, whole = tmp_path / "out", ["a", "b", "c"]
    for there in (False, True):
        for instant in range(6):
            if there:
                out.mkdir()
                for name in whole:
                    (out / name).write_text("old")
            child = os.fork()
            if child == 0:
                done = []
                for name in ("replace", "rename", "unlink"):
                    setattr(os, name, functools.partial(move, instant, done, getattr(os, name)))
                with atomic_folder(out, last="b") as folder:
                    for name in whole:
                        (folder / name).write_text("new")
                os._exit(0)
            os.waitpid(child, 0)
            if there and (out / "b").exists():
                assert len({(out / name).read_text() for name in whole}) == 1, instant
            elif not there:
                assert not out.exists() or sorted(os.listdir(out)) == whole, instant
            for folder in (tmp_path, out):
                remove_leftovers(folder)
                assert not folder.exists() or not any(name.endswith(".tmp") for name in os.listdir(folder))
            shutil.rmtree(out, ignore_errors=True)


def test_a_folder_that_was_not_there_is_gone_after_an_exception(tmp_path):
    with pytest.raises(Interruption), atomic_folder(tmp_path / "out") as folder:
        (folder / "a").touch()
        raise Interruption
    assert os.listdir(tmp_path) == []


def test_files_of_an_earlier_run_that_this_one_did_not_write_are_removed(tmp_path):
    for name in ("a", "b", "last", "foreign"):
        (tmp_path / name).write_text("old")
    with atomic_folder(tmp_path, ("a", "b", "last")) as folder:
        (folder / "a").write_text("new")
        (folder / "last").write_text("new")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a": "new", "last": "new", "foreign": "old"}


def test_messages_name_the_folder_and_not_the_temporary_one(tmp_path):
    message = rf"^{tmp_path}/a: cannot be written"
    with pytest.raises(UserError, match=message), atomic_folder(tmp_path) as folder, atomic_file(folder / "a"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_places_that_cannot_be_written_are_refused_before_any_work(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--out .*file/a: cannot be written"):
        prepare_folder("--out", tmp_path / "file" / "a")
    with pytest.raises(UserError, match="--out .*Is a directory"):
        prepare_file("--out", tmp_path)
    prepare_file("--out", tmp_path / "new" / "a.npz")
    assert sorted(os.listdir(tmp_path)) == ["file", "new"]


def test_after_an_exception_new_folders_that_are_empty_are_gone_and_others_stay(tmp_path):
    (tmp_path / "before").mkdir()
    with pytest.raises(KeyboardInterrupt), removing_empty_folders():
        make_folder(tmp_path / "before" / "new")
        make_folder(tmp_path / "full" / "a" / "b")
        (tmp_path / "full" / "file").touch()
        # A statement that ended well within one that did not.
        with removing_empty_folders():
            prepare_file("--output", tmp_path / "late" / "file")
        raise KeyboardInterrupt
    remaining = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*"))
    assert remaining == ["before", "full", "full/file"]
