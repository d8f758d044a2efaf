"""A model is one argument: its folder, or a checkpoint, which has its dictionary and tokenizer
beside it."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import runs
from mistakes import user_error

from fairseq import checkpoint
from fairseq.checkpoint.manager import find_checkpoint
from fairseq.config import options
from fairseq.errors import UserError
from fairseq_cli import eval_lm, generate, interactive, validate
from fairseq_cli.analyze import get_recl_parser, recl
from fairseq_cli.checkpoint import average, get_average_parser
from fairseq_cli.eval_lm import get_eval_lm_parser
from fairseq_cli.generate import get_generation_parser
from fairseq_cli.interactive import get_interactive_generation_parser
from fairseq_cli.validate import get_validation_parser

TEXT = "= dun =\nthe dun is a horse\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one update, with a text beside it."""
    folder = tmp_path_factory.mktemp("model") / "own"
    runs.train(folder, runs.BASELINE, "--disable-validation --no-epoch-checkpoints --max-update 1")
    (folder.parent / "text").write_text(TEXT)
    return folder


def run(command: Any, parser: Any, *words: object) -> Any:
    return command(options.parse_args_and_arch(parser(), runs.words(*words, "--cpu")))


@pytest.mark.parametrize("name", ["", "checkpoint_last.pt"])
def test_the_folder_of_a_model_and_its_checkpoint_are_the_model_and_its_data(
    name: str, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, text, last = model / name, ("--text", model.parent / "text"), model / "checkpoint_last.pt"
    long = run(eval_lm.main, get_eval_lm_parser, runs.DATA, "--path", last, *text)
    short = run(eval_lm.main, get_eval_lm_parser, path, *text)
    assert short["perplexity"] == long["perplexity"] and short["tokens"] == 10
    outputs = []
    for words in ([runs.DATA, "--path", last], [path]):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"= dun\n")))
        capsys.readouterr()
        run(interactive.main, get_interactive_generation_parser, *words, "--max-new-tokens 5")
        run(generate.main, get_generation_parser, *words, *text, "--context-tokens 2 --max-new-tokens 3")
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] and "= dun" in outputs[0]


def test_a_folder_is_taken_wherever_a_checkpoint_is(model: Path, tmp_path: Path) -> None:
    one = run(eval_lm.main, get_eval_lm_parser, runs.DATA, "--batch-size 1 --path", model)
    both = run(eval_lm.main, get_eval_lm_parser, runs.DATA, "--batch-size 1 --path", f"{model}:{model}")
    assert both["perplexity"] == pytest.approx(one["perplexity"], rel=1e-6)
    found = run(validate.main, get_validation_parser, runs.DATA, "--path", model)
    assert list(found) == [str(model / "checkpoint_last.pt")]
    flags = "--disable-validation --no-epoch-checkpoints --max-update"
    for flag, updates in (("--restore-file", [2]), ("--continue-once", [2]), ("--finetune-from-model", [1, 2])):
        log = runs.train(tmp_path / flag, runs.BASELINE, flags, 2, flag, model)
        assert [line["num_updates"] for line in runs.updates(log)] == updates
    words = runs.words("--inputs", model, model, "--output", tmp_path / "average.pt")
    average(options.parse_args_and_arch(get_average_parser(), words))
    states = [checkpoint.load(path)["model"] for path in (tmp_path / "average.pt", model / "checkpoint_last.pt")]
    assert runs.difference(*states) is None


def test_the_folder_of_a_sharded_checkpoint_is_a_checkpoint(tmp_path: Path) -> None:
    parts = tmp_path / "checkpoint_1_5.parts"
    parts.mkdir()
    (parts / "plain.pt").write_text("{}")
    (tmp_path / "checkpoint_best.pt").symlink_to(parts.name)
    assert (
        find_checkpoint(tmp_path) == find_checkpoint(tmp_path / "checkpoint_best.pt") == tmp_path / "checkpoint_best.pt"
    )
    assert find_checkpoint(parts) == parts


def test_mistakes_name_the_argument(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    shutil.copy(model / "checkpoint_last.pt", tmp_path)
    for words, message in (
        ([model], f"--text: give a text to read; {model} is a model, which has no splits"),
        ([tmp_path / "nowhere"], f"DATA: {tmp_path}/nowhere: file or folder not found"),
        ([tmp_path / "empty"], f"or give a model as DATA: {tmp_path}/empty has no checkpoint"),
        ([runs.DATA], f"or give a model as DATA: {runs.DATA} has no checkpoint"),
        ([runs.DATA, "--path", tmp_path / "empty"], f"{tmp_path}/empty: no checkpoint in this folder; expected"),
        ([tmp_path, "--text", model.parent / "text"], f"{tmp_path}/dict.txt: file not found"),
    ):
        with pytest.raises(UserError) as error:
            run(eval_lm.main, get_eval_lm_parser, *words)
        assert message in error.value.with_flags
    # These read splits only, as their help says.
    for command, parser in ((validate.main, get_validation_parser), (recl, get_recl_parser)):
        assert "\n  DATA                        data folder\n" in parser().format_help()
        with user_error(f"^DATA: {model} is a model, which has no splits; give the data folder, and --path {model}"):
            run(command, parser, model)
