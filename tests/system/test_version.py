"""A package that is imported as fairseq, too, is named at import, with the way to separate them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fairseq.system import version

ROOT = Path(__file__).parents[2]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installed packages, the only one that is searched."""
    monkeypatch.setattr(sys, "path", [str(tmp_path / "none"), str(tmp_path)])

    def install(folder, **files):
        (tmp_path / folder).mkdir()
        for name, content in files.items():
            (tmp_path / folder / name.replace("__", ".")).write_text(content)

    return install


def warnings(caplog):
    version.warn_of_neighbour()
    return [record.getMessage() for record in caplog.records]


def test_meta_s_package_is_named_on_one_line_with_the_way_to_separate_them(tmp_path):
    (tmp_path / "fairseq-0.12.2.dist-info").mkdir()
    (tmp_path / "fairseq-0.12.2.dist-info/top_level.txt").write_text("examples\nfairseq\nfairseq_cli\n")
    code = f"import sys; sys.path += [{str(tmp_path)!r}, {str(tmp_path)!r}]; import fairseq"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == ""
    assert run.stderr == (
        f"the package fairseq in {tmp_path} is imported as fairseq, too, and `pip uninstall` of either removes files "
        "of both; to separate them, run `pip uninstall fairseq fairseq-short` and install one of them again, the other "
        "in an environment of its own\n"
    )


@pytest.mark.parametrize(
    ("folder", "files"),
    [
        ("fairseq.egg-info", {"top_level__txt": "fairseq\r\n"}),
        ("fairseq_fixed-0.12.3.dist-info", {"RECORD": "fairseq_cli/a.py,,\nfairseq/__init__.py,sha256=x,3\n"}),
        ("Fairseq_Nat-1.0.dist-info", {"top_level__txt": "nat\n", "RECORD": "fairseq/__init__.py,,\n"}),
    ],
)
def test_other_packages_with_a_module_fairseq_are_named(site, caplog, folder, files):
    site(folder, **files)
    (message,) = warnings(caplog)
    assert f"the package {folder.split('-')[0].split('.')[0].replace('_', '-').lower()} in " in message


@pytest.mark.parametrize(
    ("folder", "files"),
    [
        ("fairseq_short-0.6.0.dist-info", {"top_level__txt": "fairseq\nfairseq_cli\n"}),
        ("fairseq2-0.4.dist-info", {"top_level__txt": "fairseq2\n", "RECORD": "fairseq2/__init__.py,,\n"}),
        ("fairseq_helper-1.dist-info", {"RECORD": "src/fairseq/__init__.py,,\nfairseq/__init__.pyc\n"}),
        ("fairseq-0.12.2.dist-info", {}),
        ("fairseq-0.12.2", {"top_level__txt": "fairseq\n"}),
        ("torch-2.13.0.dist-info", {"top_level__txt": "fairseq\n"}),
    ],
)
def test_this_package_and_those_without_a_module_fairseq_are_not(site, caplog, folder, files):
    site(folder, **files)
    assert warnings(caplog) == []


def test_processes_that_this_one_starts_do_not_repeat_it(site, caplog, monkeypatch):
    site("fairseq-0.12.2.dist-info", top_level__txt="fairseq\n")
    monkeypatch.setattr("multiprocessing.parent_process", lambda: object())
    assert warnings(caplog) == []


def test_the_name_of_this_package_is_that_of_the_project():
    assert f'\nname = "{version.NAME}"\n' in (ROOT / "pyproject.toml").read_text()
