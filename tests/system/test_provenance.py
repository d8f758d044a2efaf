"""The origin of a result is that of the code, the machine and the versions which made it."""

from __future__ import annotations

import platform
import subprocess

import torch

import fairseq
from fairseq.system import provenance


def git(folder, *words):
    names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", "-C", folder, *names, *words], check=True, capture_output=True, text=True).stdout


def test_the_commit_is_that_of_the_checkout_and_says_if_files_were_changed(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    found = git(tmp_path, "rev-parse", "HEAD").strip()[:12]
    assert provenance.commit(tmp_path) == found
    (tmp_path / "code.py").write_text("2")
    assert provenance.commit(tmp_path) == f"{found}-dirty"


def test_a_package_installed_inside_another_projects_checkout_has_no_commit(tmp_path):
    git(tmp_path, "init", "-q")
    inside = tmp_path / "venv" / "site-packages"
    inside.mkdir(parents=True)
    assert provenance.commit(inside) is None


def test_without_git_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.commit() is None


def test_a_result_names_the_machine_and_the_versions():
    about = provenance.about_run()
    assert about["versions"] == {
        "python": platform.python_version(), "torch": torch.__version__, "fairseq": fairseq.__version__
    }  # fmt: skip
    assert about["machine"]["processor"] and about["machine"]["threads"] == torch.get_num_threads()
    assert "gpu" in about["machine"] or not torch.cuda.is_initialized()
