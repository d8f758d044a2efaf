"""A checkpoint is used with the dictionary it was trained with: another one of the same size is
refused everywhere."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs

from fairseq import checkpoint
from fairseq.config import options
from fairseq.errors import UserError
from fairseq.hub import LanguageModel, load_model
from fairseq.text.dictionary import Dictionary
from fairseq_cli import eval_lm, export_model, generate, import_model, interactive, validate
from fairseq_cli.checkpoint import average, get_average_parser
from fairseq_cli.eval_lm import get_eval_lm_parser
from fairseq_cli.export_model import get_export_parser
from fairseq_cli.generate import get_generation_parser
from fairseq_cli.import_model import get_import_parser
from fairseq_cli.interactive import get_interactive_generation_parser
from fairseq_cli.validate import get_validation_parser

SHORT = "--disable-validation --no-epoch-checkpoints --max-update"


def other_data(folder: Path, source: Path = runs.DATA) -> Path:
    """The data in *source* with a dictionary of the same size, whose words have other ids."""
    shutil.copytree(source, folder)
    lines = (folder / "dict.txt").read_text(encoding="utf-8").splitlines()
    (folder / "dict.txt").write_text("\n".join([*lines[1:], lines[0]]) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return other_data(tmp_path_factory.mktemp("other") / "data")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one update."""
    folder = tmp_path_factory.mktemp("run")
    runs.train(folder, runs.BASELINE, SHORT, 1)
    return folder


@pytest.fixture(params=["with its digest", "older, beside its dictionary"])
def path(request: pytest.FixtureRequest, trained: Path, tmp_path: Path) -> Path:
    """A checkpoint: one alone in its folder, and one of an earlier version beside its
    ``dict.txt``."""
    state = checkpoint.read(trained / "checkpoint_last.pt")
    if request.param.startswith("older"):
        del state["dictionary"]
        shutil.copy(runs.DATA / "dict.txt", tmp_path)
    checkpoint.save(tmp_path / "model.pt", state)
    return tmp_path / "model.pt"


def run(command: Any, parser: Any, *words: object) -> Any:
    return command(options.parse_args_and_arch(parser, runs.words(*words)))


def harness(path: Path, data: Path) -> None:
    pytest.importorskip("lm_eval")
    from fairseq.interop.harness import harness_model

    harness_model()(str(path), str(data))


READERS: dict[str, Callable[[Path, Path], Any]] = {
    "eval-lm": lambda path, data: run(eval_lm.main, get_eval_lm_parser(), data, "--path", path, "--cpu --batch-size 1"),
    "validate": lambda path, data: run(validate.main, get_validation_parser(), data, "--path", path, "--cpu"),
    "generate": lambda path, data: run(generate.main, get_generation_parser(), data, "--path", path, "--cpu"),
    "interactive": lambda path, data: run(
        interactive.main, get_interactive_generation_parser(), data, "--path", path, "--cpu"
    ),
    "from_pretrained": LanguageModel.from_pretrained,
    "from_pretrained of a dict.txt": lambda path, data: LanguageModel.from_pretrained(path, data / "dict.txt"),
    "load_model": load_model,
    "export": lambda path, data: run(
        export_model.main, get_export_parser(), path, "--to hf --data", data, "--out", path.parent / "hf"
    ),
    "export to fairseq": lambda path, data: run(
        export_model.main, get_export_parser(), path, "--to fairseq --data", data, "--out", path.parent / "0x.pt"
    ),
    "fine-tuning": lambda path, data: runs.train(
        path.parent / "tuned", runs.BASELINE, SHORT, 1, "--finetune-from-model", path, data=data
    ),
    "resuming": lambda path, data: runs.train(
        path.parent / "resumed", runs.BASELINE, SHORT, 2, "--restore-file", path, data=data
    ),
    "harness": harness,
}


@pytest.mark.parametrize("reader", READERS)
def test_another_dictionary_of_the_same_size_is_refused(
    reader: str, path: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the\n")))
    message = f"{path}: was trained with another dictionary than {other}/dict.txt; use the data or dict.txt it was"
    with pytest.raises(UserError) as refused:
        READERS[reader](path, other)
    assert str(refused.value).startswith(message)


def test_equal_symbols_with_other_counts_are_the_same_dictionary(trained: Path, tmp_path: Path) -> None:
    dictionary = Dictionary.load(trained / "dict.txt")
    dictionary.count = [count + 1 for count in dictionary.count]
    dictionary.save(tmp_path / "dict.txt")
    LanguageModel.from_pretrained(trained, tmp_path / "dict.txt")
    assert checkpoint.read(trained / "checkpoint_last.pt")["dictionary"] == dictionary.digest()


def test_a_dictionary_that_was_replaced_beside_its_checkpoint_is_noticed(trained: Path, other: Path, tmp_path: Path):
    folder = shutil.copytree(trained, tmp_path / "run")
    shutil.copy(other / "dict.txt", folder)
    with pytest.raises(UserError, match=r"checkpoint_last.pt: was trained with another dictionary than .*run/dict.txt"):
        LanguageModel.from_pretrained(folder)


@pytest.mark.parametrize("flags", ["", "--reset-optimizer", "--restore-file OTHER"])
def test_a_run_never_replaces_the_dictionary_of_the_checkpoints_in_its_folder(
    flags: str, trained: Path, other: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(trained, tmp_path / "run")
    flags = flags.replace("OTHER", str(tmp_path / "other" / "checkpoint_last.pt"))
    if "restore" in flags:
        runs.train(tmp_path / "other", runs.BASELINE, SHORT, 1, data=other)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(UserError, match="another dictionary than"):
        runs.train(folder, runs.BASELINE, SHORT, 2, flags, data=other)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_checkpoints_of_different_dictionaries_are_not_averaged(path: Path, other: Path, tmp_path: Path) -> None:
    runs.train(tmp_path / "other", runs.BASELINE, SHORT, 1, data=other)
    second = tmp_path / "other" / "checkpoint_last.pt"
    parser = get_average_parser()
    with pytest.raises(UserError, match=f"{second}: was trained with another dictionary than {path}; give checkpoints"):
        run(average, parser, "--inputs", path, second, "--output", tmp_path / "average.pt")
    run(average, parser, "--inputs", second, second, "--output", tmp_path / "average.pt")
    with pytest.raises(UserError, match="average.pt: was trained with another dictionary"):
        LanguageModel.from_pretrained(tmp_path / "average.pt", runs.DATA)


def test_an_exported_folder_keeps_the_digest(trained: Path, tmp_path: Path) -> None:
    run(export_model.main, get_export_parser(), trained, "--to hf --out", tmp_path / "hf")
    digest = json.loads((tmp_path / "hf" / "config.json").read_text())["dictionary"]
    assert digest == Dictionary.load(trained / "dict.txt").digest()
    words = [tmp_path / "hf", "--from hf --out", tmp_path / "imported"]
    run(import_model.main, get_import_parser(), *words)
    assert checkpoint.read(tmp_path / "imported" / "checkpoint.pt")["dictionary"] == digest
    other_data(tmp_path / "swapped", tmp_path / "hf")
    with pytest.raises(UserError, match="was trained with another dictionary than .*swapped/dict.txt"):
        run(import_model.main, get_import_parser(), tmp_path / "swapped", "--from hf --out", tmp_path / "again")


def test_a_mask_symbol_that_a_task_adds_is_not_part_of_the_digest() -> None:
    plain, masked = Dictionary.load(runs.DATA / "dict.txt"), Dictionary.load(runs.DATA / "dict.txt")
    masked.add_mask()
    assert len(masked) == len(plain) + 1 and masked.digest() == plain.digest()


def test_a_mask_symbol_fits_whoever_added_it() -> None:
    plain, by_task, by_plugin, other = (Dictionary() for _ in range(4))
    for dictionary, word in ((plain, "a"), (by_task, "a"), (by_plugin, "a"), (other, "b")):
        dictionary.add_symbol(word)
    by_task.add_mask()
    by_plugin.add_symbol("<mask>")
    same = (plain, by_task, by_plugin)
    assert all(one.has_digest(another.digest()) for one in same for another in same)
    assert not any(one.has_digest(other.digest()) or other.has_digest(one.digest()) for one in same)
