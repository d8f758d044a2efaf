"""Files and folders are written completely or not at all, and nothing else is touched."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import runs

from fairseq.errors import UserError
from fairseq.system import files, opening
from fairseq.system.files import (
    atomic_file,
    atomic_files,
    atomic_folder,
    link_or_copy,
    prepare_file,
    prepare_folder,
    remove_leftovers,
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


def write_both(first, second):
    with atomic_files() as group:
        for path in (first, second):
            with group.file(path, "--out") as file:
                file.write(b"new")


@pytest.fixture
def two(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "x").write_bytes(b"old")
    return tmp_path / "a" / "x", tmp_path / "b" / "y"


def test_files_of_a_group_appear_together(two):
    write_both(*two)
    assert [path.read_bytes() for path in two] == [b"new", b"new"]
    assert [os.listdir(path.parent) for path in two] == [["x"], ["y"]]


def test_a_group_that_fails_while_it_is_written_leaves_none_of_its_files(two):
    with pytest.raises(UserError, match=r"^--out .*y: cannot be written \(No space left"), atomic_files() as group:
        with group.file(two[0], "--out") as file:
            file.write(b"new")
        with group.file(two[1], "--out"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert two[0].read_bytes() == b"old" and [os.listdir(path.parent) for path in two] == [["x"], []]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_group_whose_second_rename_fails_takes_back_the_first(two, monkeypatch, order):
    first, second = (two[place] for place in order)
    replace = os.replace

    def fail(source, target):
        if str(target) == str(second) and b"new" in Path(source).read_bytes():
            raise PermissionError(errno.EACCES, "Permission denied", str(target))
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(UserError, match=rf"^--out {second}: cannot be written \(Permission denied\)"):
        write_both(first, second)
    assert two[0].read_bytes() == b"old" and [os.listdir(path.parent) for path in two] == [["x"], []]


@pytest.fixture
def device(tmp_path_factory):
    """A device by name: one that root may lose by a mistake is a node of the test's own."""

    def find(name):
        path = Path("/dev") / name
        if os.geteuid() != 0:
            return path
        own = tmp_path_factory.mktemp("dev") / name
        try:
            os.mknod(own, 0o666 | stat.S_IFCHR, path.stat().st_rdev)
            own.open("wb").close()
        except OSError as error:
            pytest.skip(f"root cannot make a device here: {error}")
        return own

    return find


def test_a_device_in_a_group_that_is_full_takes_back_the_others(two, device):
    full = device("full")
    with pytest.raises(UserError, match=f"^--out {full}: cannot be written"):
        write_both(two[0], full)
    assert two[0].read_bytes() == b"old" and os.listdir(two[0].parent) == ["x"]


def test_torchs_error_with_a_system_error_behind_it_is_one_line(tmp_path):
    with pytest.raises(UserError, match="File too large"), atomic_file(tmp_path / "a"):
        try:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        except OSError as error:
            raise RuntimeError("unexpected pos 1 vs 2") from error


def test_errors_about_other_files_are_not_blamed_on_this_one(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_file(tmp_path / "out" / ".." / "a"):
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


def test_a_device_is_written_to_and_stays_a_device(device):
    null = device("null")
    prepare_file("--out", null)
    with atomic_file(null) as file:
        np.savez(file, a=np.arange(3))
    assert stat.S_ISCHR(null.stat().st_mode) and opening.is_special(null)


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    with atomic_file(pipe) as file:
        file.write(b"content")
    reader.join()
    assert received == [b"content"] and opening.is_special(pipe) and os.listdir(tmp_path) == ["pipe"]


def test_a_link_is_replaced_and_its_target_stays(tmp_path):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.write_bytes(b"shared")

    def by_file():
        with atomic_file(link) as file:
            file.write(b"new")

    def by_group():
        write_both(link, tmp_path / "second")

    def by_link():
        (tmp_path / "second").write_bytes(b"new")
        link_or_copy(tmp_path / "second", link)

    for write in (by_file, by_group, by_link):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        prepare_file("--out", link)
        write()
        assert not link.is_symlink() and link.read_bytes() == b"new" and target.read_bytes() == b"shared"
    assert sorted(os.listdir(tmp_path)) == ["folder", "link", "second"]


def test_a_group_that_fails_leaves_the_link_that_it_had_replaced(two, monkeypatch):
    link, target = two[0].with_name("link"), two[0]
    link.symlink_to(target.name)
    replace = os.replace

    def fail(source, target):
        if str(target) == str(two[1]):
            raise PermissionError(errno.EACCES, "Permission denied", str(target))
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(UserError, match=r"^--out .*y: cannot be written \(Permission denied\)"):
        write_both(link, two[1])
    assert os.readlink(link) == target.name and target.read_bytes() == b"old"


def test_what_a_shell_redirects_is_written_and_the_link_of_the_system_stays(tmp_path):
    code = (
        "import sys; from fairseq.system.files import atomic_file\nwith atomic_file(sys.argv[1]) as f: f.write(b'new')"
    )
    for name in ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"):
        with open(tmp_path / "out", "wb") as out:
            subprocess.run([sys.executable, "-c", code, name], stdout=out, check=True, env=runs.environment())
        assert (tmp_path / "out").read_bytes() == b"new" and os.listdir(tmp_path) == ["out"]
    assert os.path.islink("/dev/stdout")


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


def test_a_temporary_folder_that_is_removed_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    """As another process does that takes it for a leftover: before or after it is opened."""
    for moment in ("open", "flock"):
        module, calls = (os, []) if moment == "open" else (files.fcntl, [])
        original = getattr(module, moment)

        def remove_first(subject, *rest, original=original, calls=calls):
            calls.append(subject)
            if len(calls) == 1:
                (temporary,) = tmp_path.glob(".*.tmp")
                temporary.rmdir()
            return original(subject, *rest)

        monkeypatch.setattr(module, moment, remove_first)
        with files.new_folder(tmp_path / f"of-{moment}") as folder:
            monkeypatch.undo()
            (folder / "a").touch()
        assert len(calls) == 2 and os.listdir(tmp_path / f"of-{moment}") == ["a"]
    assert sorted(os.listdir(tmp_path)) == ["of-flock", "of-open"]


def test_without_descriptors_no_temporary_folder_is_left(tmp_path):
    code = (
        "import os, resource, sys; from fairseq.system.files import new_folder, atomic_folder\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))\n"
        "while True:\n"
        "    try: os.open(os.devnull, os.O_RDONLY)\n"
        "    except OSError: break\n"
        "for make, name in ((new_folder, 'a'), (atomic_folder, 'b')):\n"
        "    try:\n"
        "        with make(os.path.join(sys.argv[1], name)): pass\n"
        "    except Exception as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=runs.environment()
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all("Too many open files" in line for line in lines), done.stderr
    assert os.listdir(tmp_path) == []


def test_the_check_of_a_place_removes_what_a_killed_process_left_there(tmp_path):
    (tmp_path / files._temporary_path(tmp_path / "out").name).touch()
    prepare_file("--out", tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_files_of_other_hosts_and_of_others_are_never_removed(tmp_path):
    others = {".a.other-host.12.0badcafe.tmp", ".notes.tmp", "a.tmp", ".checkpoint_last.pt.0badcafe.tmp"}
    own = files._temporary_path(tmp_path / "a").name
    for name in others | {own}:
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert set(os.listdir(tmp_path)) == others


def test_files_of_a_folder_appear_together(tmp_path):
    out = tmp_path / "new" / "out"
    with atomic_folder(out) as folder:
        (folder / "a").write_text("1")
        (folder / "b").write_text("2")
        assert not (out / "a").exists()
    assert sorted(os.listdir(out)) == ["a", "b"]


@pytest.mark.parametrize("there", [False, True])
def test_a_kill_at_any_instant_leaves_a_folder_empty_or_whole(tmp_path, there):
    out, done = tmp_path / "out", []

    def move(instant, original, source, target):
        original(source, target)
        done.append(target)
        if len(done) > instant:
            os.kill(os.getpid(), signal.SIGKILL)

    for instant in range(4):
        if there:
            out.mkdir()
        child = os.fork()
        if child == 0:
            for name in ("replace", "rename"):
                setattr(os, name, functools.partial(move, instant, getattr(os, name)))
            with atomic_folder(out) as folder:
                for name in "abc":
                    (folder / name).touch()
            os._exit(0)
        os.waitpid(child, 0)
        assert not out.exists() or sorted(os.listdir(out)) in ([], ["a", "b", "c"]), instant
        remove_leftovers(out)
        with atomic_folder(out) as folder:
            (folder / "a").touch()
        assert not any(name.endswith(".tmp") for name in (*os.listdir(tmp_path), *os.listdir(out)))
        shutil.rmtree(out)


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


def test_the_last_file_of_a_folder_is_absent_while_the_others_move(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("old")
    (tmp_path / "last").write_text("old")

    def stop(source, target):
        raise Interruption

    with pytest.raises(Interruption), atomic_folder(tmp_path, ("a", "last")) as folder:
        (folder / "a").write_text("new")
        (folder / "last").write_text("new")
        monkeypatch.setattr(os, "replace", stop)
    assert os.listdir(tmp_path) == ["a"]


def test_a_folder_in_the_way_of_a_file_leaves_everything_as_it_was(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "last").write_text("old")
    with (
        pytest.raises(UserError, match="--out .*/a: cannot be written"),
        atomic_folder(tmp_path, ("a", "last"), "--out") as folder,
    ):
        (folder / "a").write_text("new")
    assert (tmp_path / "last").read_text() == "old"


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
