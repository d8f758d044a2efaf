"""The blocks of docs/huggingface.md, followed as they are printed."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import foreign_decoders
import preprocessing
import pytest
import runs
from exports import keep_code_in

from fairseq_cli import eval_lm, export_model, import_model

transformers = pytest.importorskip("transformers")
PROGRAMS = {"fairseq-eval-lm": eval_lm, "fairseq-export": export_model, "fairseq-import": import_model}
PAGE = (runs.ROOT / "docs" / "huggingface.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
REVISIONS = re.findall(r"`(fairseq-export [^`]*--revisions)`", PAGE)


def block(text: str) -> str:
    """The one block with *text*, by which a block that moved is still found."""
    [found] = [content for _, content in BLOCKS if text in content]
    return found


def run(commands: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for line in commands.replace("\\\n", " ").splitlines():
        program, *words = shlex.split(line, comments=True)
        monkeypatch.setattr(sys, "argv", [f"/somebody/bin/{program}", *words])
        PROGRAMS[program].cli_main()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained model called own, whose data has byte-level subwords, a text, and
    GPT-2 as transformers saves it."""
    home = tmp_path_factory.mktemp("home")
    data, text = home / "data-bin", "the lower river\nthe newest riverbed isn't wide\n"
    (home / "test.txt").write_text(text)
    (home / "train.txt").write_text(text * 9)
    splits = {"trainpref": home / "train.txt", "validpref": home / "test.txt"}
    preprocessing.run(data, **splits, bpe="hf", learn_bpe=270)
    flags = "--arch transformer_lm_tiny --adaptive-softmax-cutoff 50,90 --adaptive-input-cutoff 50,90 --cpu"
    runs.train(home / "own", flags, "--max-update 9 --batch-size 1 --tokens-per-sample 8 --lr 0.01",
        "--save-interval-words 10", data=data)  # fmt: skip
    folder, _ = foreign_decoders.folder_of(home, *foreign_decoders.CASES["pythia"])
    folder.rename(home / "gpt2")
    return home


@pytest.fixture(autouse=True)
def in_the_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    keep_code_in(home / "modules", monkeypatch)


def test_a_model_is_exported_and_generates_without_a_question(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builtins.input", lambda *text: pytest.fail(f"asks {text}"))
    run(block("fairseq-export own --to hf --out exported"), monkeypatch)
    run(block("--results-path results"), monkeypatch)
    capsys.readouterr()
    names: dict[str, Any] = {}
    exec(block("AutoTokenizer.from_pretrained"), names)
    assert capsys.readouterr().out.startswith("The river")
    lines = "the lower river\nthe newest\n"
    assert names["tokenizer"].decode(names["tokenizer"](lines)["input_ids"]) == lines
    card = (home / "shared" / "README.md").read_text(encoding="utf-8")
    assert f"A language model of {names['model'].num_parameters():,} parameters" in card
    assert "| `fairseq-eval-lm own --text test.txt --results-path results` |" in card and "somebody" not in card


def test_revisions_are_uploaded_to_their_branches(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [line] = REVISIONS
    shutil.rmtree(home / "exported", ignore_errors=True)
    calls: list[tuple[str, dict[str, Any]]] = []

    class HfApi:
        def __getattr__(self, name: str) -> Any:
            return lambda *words, **options: calls.append((name, options))

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(HfApi=HfApi))  # type: ignore[arg-type]
    run(f"{line} --push me/babylm", monkeypatch)
    branches = [options["revision"] for name, options in calls if "revision" in options]
    assert len(branches) > 1 and sorted(branches) == sorted(path.name for path in home.glob("exported/chck_*"))
    for branch in branches:
        transformers.AutoModelForCausalLM.from_pretrained("exported", subfolder=branch, trust_remote_code=True)


def test_a_model_of_transformers_is_imported_and_evaluated(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(block("fairseq-import gpt2"), monkeypatch)
    assert "Perplexity" in capsys.readouterr().out
