"""Fixtures of the tests of commands."""

from __future__ import annotations

import shutil
import sys
import types
from typing import Any

import pytest
import runs

from fairseq_cli import train as train_command


@pytest.fixture
def mistake(monkeypatch, capsys, tmp_path):
    """Run the command on a mistake; returns the line on stderr that tells of it."""

    def run(*flags, data=runs.DATA, base=runs.SHORT):
        words = runs.words("--save-dir", tmp_path / "checkpoints", base)
        # exact words, so that values may hold spaces
        monkeypatch.setattr(sys, "argv", ["train.py", *([] if data is None else [str(data)]), *words, *map(str, flags)])
        with pytest.raises(SystemExit) as end:
            train_command.cli_main()
        stderr = capsys.readouterr().err.splitlines()
        assert end.value.code == 2, stderr
        assert len(stderr) == 1 and stderr[0].startswith("train.py: error: "), stderr
        return stderr[0].removeprefix("train.py: error: ")

    return run


@pytest.fixture
def data(tmp_path):
    """A copy of the data that may be damaged."""
    return shutil.copytree(runs.DATA, tmp_path / "data-bin")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    runs.train(folder, runs.SHORT, "--disable-validation")
    return folder / "checkpoint_last.pt"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """An evaluation harness that scores one text with the model of each run, which it collects."""
    models: list[Any] = []

    class LM:
        pass

    def simple_evaluate(model: Any, tasks: list[str], **options: object) -> dict[str, Any]:
        models.append(model)
        [score] = model.loglikelihood_rolling([types.SimpleNamespace(args=("the cat",))])
        return {"results": dict.fromkeys(tasks, {"total,none": score})}

    made = {
        "lm_eval": {"simple_evaluate": simple_evaluate, "__spec__": object()},
        "lm_eval.api": {},
        "lm_eval.api.model": {"LM": LM},
        "lm_eval.api.registry": {"register_model": lambda name: lambda cls: cls},
    }
    for name, content in made.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "fairseq.interop.harness.model", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    return models
