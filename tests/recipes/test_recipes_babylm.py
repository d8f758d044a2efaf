"""The recipe of the BabyLM challenge runs end to end when small, and transformers gives its
numbers."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import runs
from exports import keep_code_in

transformers = pytest.importorskip("transformers")  # before the recipe's commands are forked from this process
ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples" / "babylm"
MODELS = ("shortformer", "transformer_xl", "electra")
SETTINGS = "TRAIN VALID OUT MODELS PAIRS TABLE EPOCHS SHORT_SHARE SHORT LONG WORDS BPE LAYERS WIDTH BATCH LR SEED NOTES"


def run(*arguments: object, script: str = "babylm.sh", **variables: object) -> subprocess.CompletedProcess[str]:
    names = {*SETTINGS.split(), "NOTE_COUNTS", "ONE_BY_ONE", "PRECISION", "EXTRA", "TOTAL", "DRY_RUN", "SMALL"}
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {name: str(value) for name, value in variables.items()}
    command = ["bash", str(RECIPE / script), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=runs.TIMEOUT)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of raw texts of 4,000 and 500 words, and a table whose labels are the first words of
    its sentences."""
    folder = tmp_path_factory.mktemp("texts")
    chance = random.Random(1)
    words = ["".join(chance.choices("abdeiklmnorstué", k=chance.randint(1, 7))) for _ in range(500)]
    weights = [1 / (rank + 1) for rank in range(500)]

    def sentence() -> str:
        return " ".join(chance.choices(words, weights, k=10)).capitalize() + "."

    for split, sizes in {"train": (250, 150), "valid": (50,)}.items():
        (folder / split).mkdir()
        for number, lines in enumerate(sizes):
            (folder / split / f"{number}.txt").write_text("\n".join(sentence() for _ in range(lines)))
    (folder / "table").mkdir()
    for split in ("train", "dev"):
        rows = (f"{label} {sentence()}\t{label}\n" for label in ("yes", "no") for _ in range(12))
        (folder / "table" / f"{split}.tsv").write_text("sentence\tlabel\n" + "".join(rows))
    return {name.upper(): folder / name for name in ("train", "valid", "table")}


@pytest.fixture(scope="module")
def evaluation() -> dict[str, Any]:
    """What evaluate.py defines."""
    return runpy.run_path(str(RECIPE / "evaluate.py"))


@pytest.fixture(scope="module")
def finished(texts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a whole run, two passes through the texts, ELECTRA with notes, and what it
    printed."""
    out = tmp_path_factory.mktemp("babylm")
    result = run(SMALL=1, NOTES=1, WORDS="3K", OUT=out, HF_MODULES_CACHE=out / "modules", OMP_NUM_THREADS=1, **texts)
    assert result.returncode == 0, result.stdout + result.stderr
    return out, result.stdout


def test_the_seconds_of_each_step_are_printed_at_the_end(finished: tuple[Path, str]) -> None:
    head, *steps, whole = finished[1].splitlines()[-18:]
    assert head == "step\tseconds\tof CPU time" and re.fullmatch(r"whole: \d+ s", whole)
    names = [re.fullmatch(r"(.+)\t[\d.]+\t[\d.]+", step) for step in steps]
    want = {f"{model} {step}" for model in MODELS for step in ("training", "export", "pairs", "in transformers")}
    want |= {"subwords", "electra-generator export", "electra classifier", "electra-classifier export"}
    assert {name[1] for name in names if name} == want


def test_an_electra_with_notes_is_exported_without_notes(finished: tuple[Path, str]) -> None:
    out, printed = finished
    notes = int(re.findall(r"^Notes: (\d+) words", printed, flags=re.MULTILINE)[0])
    assert notes > 10 and "--arch tnf_electra" in printed
    assert json.loads((out / "exported" / "electra" / "config.json").read_text())["model_type"] == "electra"


def test_checkpoints_by_words_are_exported_as_revisions(finished: tuple[Path, str]) -> None:
    out, _ = finished
    for model in (*MODELS, "electra-generator"):
        names = {path.name for path in (out / "exported" / model).iterdir() if path.is_dir()}
        assert names == {"chck_3K", "chck_6K"}, "8,000 words are read"


def test_transformers_and_the_harness_find_the_same_pairs_right(finished: tuple[Path, str]) -> None:
    out, printed = finished
    found = dict(re.findall(r"^(\S+)\tpairs\t(\S+)\tparadigms\t\S+$", printed, flags=re.MULTILINE))
    for model, exported in zip(MODELS, (*MODELS[:2], "electra-generator"), strict=True):
        results = json.loads((out / "pairs" / model / "results.json").read_text())
        assert results["phenomena"]["all"]["pairs"] == 18
        folder = out / "exported" / exported
        assert float(found[str(folder)]) == pytest.approx(results["phenomena"]["all"]["acc"], abs=1e-4)
        assert {f"{folder}/chck_3K", f"{folder}/chck_6K"} < found.keys()


def test_classifiers_are_fine_tuned(finished: tuple[Path, str]) -> None:
    out, printed = finished
    scores = dict(re.findall(r"^(\S+)\tclassifier\t(\S+)$", printed, flags=re.MULTILINE))
    assert scores.keys() == {str(out / "exported" / model) for model in MODELS}
    assert all(0 <= float(score) <= 1 for score in scores.values())
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(out / "exported/electra-classifier")
    assert set(classifier.config.id2label.values()) == {"yes", "no"}


def test_exports_are_evaluated_without_this_package(
    finished: tuple[Path, str],
    texts: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keep_code_in(tmp_path, monkeypatch)
    folders = [str(finished[0] / "exported" / name) for name in (*MODELS, "electra-generator")]
    flags = ["--pairs", str(RECIPE / "pairs.jsonl"), "--table", str(texts["TABLE"])]
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *folders, *flags])
    monkeypatch.setitem(sys.modules, "fairseq", None)
    runpy.run_path(str(RECIPE / "evaluate.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12 and set(lines) < set(finished[1].splitlines()), "three pairs of three, three classifiers"


def test_a_second_run_prepares_and_exports_nothing_again(finished: tuple[Path, str]) -> None:
    result = run(SMALL=1, NOTES=1, DRY_RUN=1, OUT=finished[0])
    assert result.returncode == 0, result.stderr
    programs = ["train.py", "fairseq_cli.harness", "examples/babylm/evaluate.py"] * len(MODELS)
    assert re.findall(r"^python (?:-m )?(\S+)", result.stdout, flags=re.MULTILINE) == programs


def test_a_longer_training_moves_former_exports_aside(finished: tuple[Path, str], tmp_path: Path) -> None:
    out = shutil.copytree(finished[0], tmp_path / "out")
    (out / "electra" / "checkpoint_last.pt").touch()
    result = run(SMALL=1, NOTES=1, DRY_RUN=1, OUT=out)
    assert result.returncode == 0, result.stderr
    moved = re.findall(r"^mv (\S+) \1\.until-[\d-]+$", result.stdout, flags=re.MULTILINE)
    assert moved == [f"{out}/exported/electra", f"{out}/exported/electra-generator"]


def test_data_of_other_texts_or_subwords_are_not_used(
    finished: tuple[Path, str], texts: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "0.txt").write_text("Other words.")
    (tmp_path / "links").mkdir()
    for text in texts["TRAIN"].iterdir():  # the same text is no other one where it is a link
        (tmp_path / "links" / text.name).symlink_to(text)
    for name, value in {"VALID": tmp_path / "other", "BPE": 300}.items():
        result = run(SMALL=1, NOTES=1, OUT=finished[0], **{**texts, "TRAIN": tmp_path / "links", name: value})
        what = f"{finished[0]}/data-bin-notes was made with other {name}; give another OUT, or what it was made with"
        assert (result.returncode, result.stdout, result.stderr) == (2, "", f"OUT={finished[0]}: {what}\n")


def test_a_model_that_is_still_in_training_is_one_line(finished: tuple[Path, str]) -> None:
    folder = os.open(finished[0] / "shortformer", os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)  # as a training holds it that outlives the script, after kill -9
    result = run(SMALL=1, NOTES=1, OUT=finished[0], MODELS="shortformer", WORDS="3K")
    os.close(folder)
    assert result.returncode == 2
    assert re.fullmatch(r"train.py: error: .*shortformer: .* another .*\n", result.stderr), result.stderr


def test_two_scripts_do_not_work_in_one_folder(finished: tuple[Path, str], texts: dict[str, Path]) -> None:
    with open(finished[0] / ".lock", "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = run(SMALL=1, NOTES=1, OUT=finished[0], **texts)
    message = f"OUT={finished[0]}: another babylm.sh, or what one started, is at work here\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", message)


def test_a_folder_in_a_folder_of_texts_is_named(texts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "in" / "more").mkdir(parents=True)
    result = run(DRY_RUN=1, OUT=tmp_path / "out", **{**texts, "TRAIN": tmp_path / "in"})
    what = f"{tmp_path}/in/more is not a file; give a folder with nothing but texts"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"TRAIN={tmp_path}/in: {what}\n")


def test_the_rules_of_the_challenge_are_the_defaults(texts: dict[str, Path], tmp_path: Path) -> None:
    lines = run(DRY_RUN=1, OUT=tmp_path, PRECISION="fp32", **texts).stdout.splitlines()
    assert f"--trainpref {texts['TRAIN']}/0.txt,{texts['TRAIN']}/1.txt" in lines[0] and "--bpe hf" in lines[0]
    training = [line for line in lines if " train.py " in line]
    assert len(training) == 3
    assert all("--max-epoch 10 " in line and "--save-interval-words 1M:10,10M:10,100M" in line for line in training)
    assert list(tmp_path.iterdir()) == [], "a dry run writes nothing"


def test_a_million_words_are_the_first_of_a_text_and_read_once(texts: dict[str, Path], tmp_path: Path) -> None:
    whole = (texts["TRAIN"] / "0.txt").read_text()
    (tmp_path / "train.gz").write_bytes(gzip.compress(whole.encode()))
    paths = tmp_path / "train.gz", texts["VALID"] / "0.txt", texts["TABLE"], tmp_path / "out"
    result = run(*paths, script="million.sh", TOTAL=2000, DRY_RUN=1)
    assert result.returncode == 0, result.stderr
    sizes = {file.name: len(file.read_text().splitlines()) for file in (tmp_path / "out").rglob("*.t*")}
    assert sizes == {"train.txt": 200, "valid.txt": 4, "train.tsv": 5, "dev.tsv": 2}, "lines have ten words"
    assert (tmp_path / "out/texts/train.txt").read_text() == "".join(whole.splitlines(keepends=True)[:200])
    training = [line for line in result.stdout.splitlines() if " train.py " in line]
    assert len(training) == 3
    assert all("--max-epoch 1 " in line and "--save-interval-words 1000 " in line for line in training)
    refused = run(texts["TRAIN"], *paths[1:], script="million.sh")
    assert refused.stderr == f"{texts['TRAIN']}: file not found; give TRAIN, VALID and TABLE\n"


def test_folder_that_datasets_saved_is_one_text(tmp_path: Path) -> None:
    for name in ("state.json", "data-00000-of-00001.arrow"):
        (tmp_path / name).touch()
    result = run(DRY_RUN=1, SMALL=1, OUT=tmp_path / "out", TRAIN=tmp_path, VALID=tmp_path)
    assert f"--trainpref {tmp_path} --validpref {tmp_path} --bpe hf" in result.stdout


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"TRAIN": "nowhere"}, "TRAIN=nowhere: file or folder not found; give raw texts"),
        ({"TRAIN": ""}, "TRAIN=: file or folder not found; give raw texts"),
        ({"EPOCHS": 0}, "EPOCHS=0: must be a whole number above 0"),
        ({"SHORT_SHARE": 100}, "SHORT_SHARE=100: must be below 100 per cent"),
        ({"MODELS": "gpt"}, "MODELS=gpt: choose shortformer, transformer_xl or electra"),
        ({"PRECISION": "fp8"}, "PRECISION=fp8: choose fp32, bf16 or fp16"),
        ({"PAIRS": "nowhere"}, "PAIRS=nowhere: file or folder not found; give JSON lines in BLiMP's format"),
        ({"TABLE": "nowhere"}, "TABLE=nowhere: has no train.tsv and dev.tsv"),
        (
            {"NOTES": 1, "NOTE_COUNTS": "100:10"},
            "NOTE_COUNTS=100:10: must be two whole numbers, the fewest and the most occurrences, such as 10:100",
        ),
        ({"DRY_RUN": "", "OUT": "-o"}, "OUT=-o: cannot be written; give another folder"),
        ({"DRY_RUN": "", "OUT": "/dev/null"}, "OUT=/dev/null: cannot be written; give another folder"),
    ],
)
def test_a_wrong_setting_is_one_line(
    variables: dict[str, object], message: str, texts: dict[str, Path], tmp_path: Path
) -> None:
    result = run(**{**texts, "DRY_RUN": 1, "OUT": tmp_path / "out", **variables})
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"{message}\n")


HEADER = "sentence\tlabel\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("pairs.jsonl", "", "pairs.jsonl: no pairs; give JSON lines with sentence_good and sentence_bad"),
        ("pairs.jsonl", '\n{"sentence_good": ', "pairs.jsonl: line 2: not JSON; give one object in each line"),
        ("pairs.jsonl", '{"good": 1}', "pairs.jsonl: line 1: has no texts sentence_good and sentence_bad"),
        ("pairs.jsonl", "[" * 10**5, "pairs.jsonl: line 1: not JSON; give one object in each line"),
        ("train.tsv", "text\tclass\n", "train.tsv: no column label and no column sentence; tabs divide columns"),
        ("train.tsv", HEADER, "train.tsv: no examples; the file needs lines after its header"),
        (
            "train.tsv",
            HEADER + "One\tyes\nTwo\n",
            "train.tsv: line 3: no sentence or no label; correct or remove the line",
        ),
        ("train.tsv", HEADER + "One\ta,b\n", "train.tsv: line 2: label 'a,b' has a comma; correct or remove the line"),
        ("train.tsv", HEADER + "One\tyes\n", "train.tsv: all examples have the label yes; give two or more"),
        ("dev.tsv", HEADER + "One\tmaybe\n", "dev.tsv: label maybe is not in train.tsv"),
    ],
)
def test_mistakes_in_files_are_one_line(
    name: str,
    content: str,
    message: str,
    evaluation: dict[str, Any],
    texts: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for file in (*texts["TABLE"].iterdir(), RECIPE / "pairs.jsonl"):
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["evaluate.py", "--pairs", str(tmp_path / "pairs.jsonl"), "--table", str(tmp_path)]
    )
    evaluation["main"]()
    (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit) as end:
        evaluation["main"]()
    printed = capsys.readouterr()
    assert (end.value.code, printed.out, printed.err) == (2, "", f"{tmp_path}/{message}\n")


def test_separators_of_unicode_do_not_end_a_line(evaluation: dict[str, Any], tmp_path: Path) -> None:
    sentence = "One\u2028two\u0085 \x0cthree."
    pair = json.dumps({"sentence_good": sentence, "sentence_bad": sentence}, ensure_ascii=False)
    (tmp_path / "pairs.jsonl").write_text(f"\ufeff{pair}\r\n\n")
    assert evaluation["read_pairs"](tmp_path / "pairs.jsonl") == [(sentence, sentence, "pairs")]
    (tmp_path / "train.tsv").write_text(f"{HEADER}{sentence}\tyes\n")
    assert evaluation["read_table"](tmp_path / "train.tsv") == [(sentence, "yes")]


def test_files_are_read_before_training(texts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text("{")
    result = run(SMALL=1, OUT=tmp_path / "out", PAIRS=tmp_path / "pairs.jsonl", **texts)
    message = f"{tmp_path}/pairs.jsonl: line 1: not JSON; give one object in each line\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", message)
    assert not (tmp_path / "out").exists()
