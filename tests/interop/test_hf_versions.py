"""Exported folders in the versions of transformers that people have.

The installed transformers is tried with a model that needs code (test_hf_native.py has the others,
and test_recipes_babylm.py loads exports without this package);
``python -m scripts.hf_table`` tries all models in several versions, and other tools, and writes the
table of docs/huggingface.md.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import exports
import outside_folders
import pytest

from scripts import hf_table

RESULTS = json.loads(hf_table.RESULTS.read_text(encoding="utf-8"))


ELSEWHERE = {  # slow, and of this version in test_hf_revisions.py and test_hf_auto_classes.py
    "the hub's layout",
    "`Trainer`",
    "`torch.export`",
}


def test_exports_work_as_people_use_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    exports.keep_code_in(tmp_path / "modules", monkeypatch)
    outside = SimpleNamespace(**runpy.run_path(str(hf_table.SCRIPTS / "outside.py")))
    [path] = outside_folders.make(tmp_path, ("shortformer",))
    folder = outside.Folder(path)
    found = {use: outside.outcome(check, folder) for use, check in outside.CHECKS.items() if use not in ELSEWHERE}
    assert found == dict.fromkeys(found, "yes")
    # What the page says was tried in the same way.
    recorded = next(iter(RESULTS["transformers"].values()))
    assert list(outside.CHECKS) == list(recorded)


def test_the_page_has_the_table_of_the_last_trial() -> None:
    text = hf_table.PAGE.read_text(encoding="utf-8")
    assert hf_table.page(text, RESULTS) == text
    assert len(RESULTS["transformers"]) == 3 and RESULTS["date"] in text


def test_the_trial_has_every_model_and_use() -> None:
    table = hf_table.merged(RESULTS)
    names = {name.replace(" ", "_") for name in outside_folders.NAMES}
    assert len(table) > 20 and all(models.keys() == names == hf_table.TITLES.keys() for models in table.values())
    decoders = [table[use][name] for use in table for name in ("gpt2", "llama", "shortformer") if "GGUF" not in use]
    assert set(decoders) <= {"yes", "–"}


def test_an_error_without_a_reason_is_no_cell_of_the_table() -> None:
    changed = json.loads(json.dumps(RESULTS))
    uses = next(iter(changed["transformers"].values()))
    use = next(iter(uses))
    uses[use]["llama"] = "ValueError: something new"
    with pytest.raises(SystemExit, match="something new"):
        hf_table.table(changed)
    uses[use]["llama"] = "ValueError: ElectraForPreTraining does not support an attention implementation"
    first = next(iter(changed["transformers"]))
    assert f"not {first} (1)" in hf_table.table(changed)
