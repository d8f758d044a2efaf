"""Commands of the documentation that evaluate and generate, run as they are printed, without a flag
more."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import runs

from fairseq_cli import eval_lm, generate, harness, validate

PROGRAMS = {
    "fairseq-eval-lm": eval_lm,
    "fairseq-generate": generate,
    "fairseq-harness": harness,
    "fairseq-validate": validate,
}
OWN = ("own", "checkpoints", "bert", "seed1")  # models that this test makes; others are of recipes
PAIR = '{"sentence_good": "the cat sat", "sentence_bad": "the cat sat the", "UID": "agreement"}\n'


def printed() -> list[tuple[str, ...]]:
    """The commands of pages and of ``--help`` with a model that is made here."""
    pages = [runs.ROOT / "README.md", *(runs.ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages if page.name != "commands.md")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    for module in PROGRAMS.values():
        lines += re.findall(r'^        "(fairseq-.*)",$', Path(module.__file__).read_text(), flags=re.MULTILINE)
    found = {tuple(shlex.split(line, comments=True)) for line in lines if line.partition(" ")[0] in PROGRAMS}
    found = {words for words in found if not any("wikitext" in word for word in words)}
    return sorted(words for words in found if any(word.partition("/")[0] in OWN for word in words))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models, data and texts that the commands name."""
    home = tmp_path_factory.mktemp("home")
    runs.train(home / "own", runs.SHORT, "--tokens-per-sample 64")
    encoder = "--task masked_lm --criterion masked_lm --arch bert_tiny --cpu --train-subset valid --max-update 1"
    runs.train(home / "bert", encoder, "--tokens-per-sample 16 --max-tokens 64 --lr 0.01 --log-format json")
    for model in ("own", "bert"):
        shutil.copy(runs.DATA / "dict.txt", home / model)
    for copy in ("checkpoints", "seed1/model", "seed2/model", "seed3/model"):
        shutil.copytree(home / "own", home / copy)
    shutil.copytree(runs.DATA, home / "data-bin")
    for name in ("test.txt", "vocab.txt", "stimuli.txt"):
        (home / name).write_text("the cat sat\non the mat\n")
    (home / "blimp" / "data").mkdir(parents=True)
    for path in (home / "blimp" / "data" / "agreement.jsonl", home / "blimp.jsonl", home / "pairs.jsonl"):
        path.write_text(PAIR)
    (home / "tasks").mkdir()
    return home


@pytest.mark.parametrize("line", printed(), ids=" ".join)
def test_a_printed_command_runs(
    line: tuple[str, ...], home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *words = line
    monkeypatch.chdir(home)
    monkeypatch.setattr("sys.argv", [program, *words])
    PROGRAMS[program].cli_main()
    assert capsys.readouterr().out.strip()


def test_pairs_and_help_need_no_evaluation_harness(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == "lm_eval" or name == "fairseq.interop.harness.model":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.chdir(home)
    monkeypatch.setattr("sys.argv", ["fairseq-harness", "own", "--pairs", "blimp.jsonl", "--results-path", "pairs"])
    harness.cli_main()
    assert "agreement" in capsys.readouterr().out
    assert json.loads(Path("pairs/results.json").read_text())["phenomena"]["agreement"]["pairs"] == 1
    monkeypatch.setattr("sys.argv", ["fairseq-harness", "own"])
    with pytest.raises(SystemExit):
        harness.cli_main()
    assert "--pairs: give minimal pairs" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["fairseq-harness", "--help"])
    with pytest.raises(SystemExit) as stop:
        harness.cli_main()
    assert stop.value.code == 0 and "--pairs" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["evaluation", "experiment", "generation"])
def test_the_python_of_a_page_runs(
    page: str, home: Path, library: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    text = (runs.ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        if "transformers" not in code:
            exec(code, names)
    assert len(capsys.readouterr().out.splitlines()) > 1
    assert "harness_model" not in text or names["results"]["results"]["lambada_openai"]["total,none"] < 0
