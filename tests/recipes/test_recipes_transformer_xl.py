"""The recipes in examples/transformer_xl print commands with the authors' settings, and run end to
end when small."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import runs
import warm

from fairseq.config import options
from fairseq_cli.common import get_training_parser
from fairseq_cli.eval_lm import get_eval_lm_parser
from fairseq_cli.preprocess import get_preprocessing_parser

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "transformer_xl"
VARIABLES = (
    "DATA", "SAVE_DIR", "EXTRA", "DRY_RUN", "SMALL", "BATCH_CHUNK", "GPUS", "ROWS", "CUDA_VISIBLE_DEVICES",
    "PRECISION", "GEN_SUBSET", "SYSTEM", "ENWIK8_URL", "TEXT8_URL", "LM1B_URL", "PTB_URL",
)  # fmt: skip
NOWHERE = "http://127.0.0.1:9"


@dataclass
class Settings:
    """A row of the authors' settings: batch, updates, warmup; segment, memory and clamp of the
    evaluation."""

    corpus: str
    rows: int
    updates: int
    warmup: int
    segment: int
    memory: int
    clamp: int | None
    length: int  # of segments and memory in training
    words: bool = True
    shuffled: bool = False


AUTHORS = {
    "wiki103-base": Settings("wikitext-103", 60, 200_000, 0, 64, 640, 400, 150),
    "wiki103-large": Settings("wikitext-103", 128, 4_000_000, 16_000, 128, 1600, 1000, 384),
    "enwik8-base": Settings("enwik8", 22, 400_000, 0, 80, 2100, 820, 512, words=False),
    "enwik8-medium": Settings("enwik8", 64, 400_000, 4_000, 128, 3800, 1000, 768, words=False),  # sizes: ours
    "enwik8-large": Settings("enwik8", 64, 400_000, 4_000, 128, 3800, 1000, 768, words=False),
    "text8-base": Settings("text8", 22, 400_000, 0, 80, 2100, 820, 512, words=False),
    "text8-large": Settings("text8", 64, 400_000, 0, 128, 3800, 1000, 768, words=False),
    "lm1b-base": Settings("lm1b", 224, 500_000, 20_000, 32, 128, None, 32, shuffled=True),
    "lm1b-large": Settings("lm1b", 512, 1_200_000, 30_000, 32, 128, None, 32, shuffled=True),
    "ptb": Settings("ptb", 20, 60_000, 0, 64, 256, 200, 70),  # ours: the authors give none
}
FULL, SHAW = {"loss_positions": "full"}, {"position_encoding": "shaw"}
HALF = {"loss_positions": "half"}
ABLATIONS = [
    ("wiki103-ablation", "recurrence", FULL | {"tokens_per_sample": 128, "mem_len": 128}, [(64, 128), (64, 500)]),
    ("wiki103-ablation", "recurrence-shaw", FULL | SHAW | {"mem_len": 128}, [(64, 128), (64, 256)]),
    ("wiki103-ablation", "recurrence-half", HALF | {"position_encoding": "relative"}, [(64, 128), (64, 460)]),
    ("wiki103-ablation", "no-recurrence", FULL | {"mem_len": 0, "streams": True}, [(128, 64), (260, 196)]),
    ("wiki103-ablation", "no-recurrence-half", HALF | {"position_encoding": "relative"}, [(128, 64), (120, 56)]),
    ("wiki103-ablation", "no-recurrence-shaw", FULL | SHAW, [(128, 64), (120, 56)]),
    ("wiki103-ablation", "no-recurrence-shaw-half", HALF | SHAW, [(128, 64), (120, 56)]),
    *(
        (
            "wiki103-ablation",
            f"no-recurrence-{encoding}-half",
            HALF | {"position_encoding": encoding},
            [(128, 64), (120, 56)],
        )  # fmt: skip
        for encoding in ("absolute", "learned")
    ),
    ("wiki103-ablation", "same-memory", FULL | {"tokens_per_sample": 176}, [(176, 112), (400, 336)]),
    ("wiki103-ablation", "same-memory-half", HALF | {"tokens_per_sample": 172}, [(172, 108), (120, 56)]),
    ("lm1b-ablation", "relative", {"mem_len": 32, "max_update": 400_000, "shuffle_lines": True}, [(32, 128)]),
    ("lm1b-ablation", "shaw", {"mem_len": 32, "position_encoding": "shaw"}, [(32, 128)]),
    ("lm1b-ablation", "no-recurrence", {"mem_len": 0, "streams": True}, [(64, 32)]),
]  # settings of training, and (tokens, memory or context) of each evaluation
EVERY_RECIPE = pytest.mark.parametrize("recipe", AUTHORS)
PREPARED = ("enwik8", "text8", "lm1b", "ptb")


def run(script: str, *arguments: str | Path, **variables: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment |= {"OMP_NUM_THREADS": "1"}
    environment |= {name: str(value) for name, value in variables.items()}
    command = ["bash", str(RECIPES / f"{script}.sh"), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=runs.TIMEOUT)


def printed(result: subprocess.CompletedProcess[str]) -> list[str]:
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()


def parsed(command: str) -> Any:
    """The settings of a printed command, as the program that it starts understands them."""
    program, *words = shlex.split(command.removeprefix("python "))
    parsers = {"train.py": get_training_parser, "fairseq-eval-lm": get_eval_lm_parser}
    parsers["preprocess.py"] = get_preprocessing_parser
    return options.parse_args_and_arch(parsers[program](), words)


# --- the commands


@EVERY_RECIPE
def test_training_and_evaluation_have_the_authors_settings(recipe: str) -> None:
    command, evaluation = printed(run(recipe, DRY_RUN=1))
    args, authors = parsed(command), AUTHORS[recipe]
    assert args.arch == f"transformer_xl_{recipe.replace('-', '_')}"
    assert (args.data, args.save_dir) == (f"data-bin/{authors.corpus}", f"{recipe}/")
    assert (args.tokens_per_sample, args.mem_len) == (authors.length, authors.length)
    assert (args.batch_size * args.distributed_world_size, args.update_freq) == (authors.rows, [1])
    assert args.required_batch_size_multiple == 1
    assert (args.max_update, args.warmup_updates) == (authors.updates, authors.warmup)
    assert (args.optimizer, args.lr_scheduler, args.clip_norm) == ("adam", "cosine", 0.25)
    assert args.max_lr == 0.00025 and args.lr[0] < 1e-8
    assert args.shuffle_lines == authors.shuffled
    assert bool(args.cutoffs) == (authors.words and recipe != "ptb")
    args = parsed(evaluation)
    assert (args.data, args.path) == (f"data-bin/{authors.corpus}", f"{recipe}/checkpoint_best.pt")
    assert (args.tokens_per_sample, args.mem_len, args.same_length) == (authors.segment, authors.memory, True)
    assert getattr(args, "clamp_len", None) == authors.clamp
    assert (args.gen_subset, args.batch_size, args.required_batch_size_multiple) == ("test", 10, 1)


@pytest.mark.parametrize(("recipe", "system", "settings", "lengths"), ABLATIONS)
def test_an_ablation_has_its_settings(
    recipe: str, system: str, settings: dict[str, Any], lengths: list[tuple[int, int]]
) -> None:
    training, *evaluations = map(parsed, printed(run(recipe, DRY_RUN=1, SYSTEM=system)))
    assert training.arch == f"transformer_xl_{recipe.replace('-', '_')}"
    assert {name: getattr(training, name) for name in settings} == settings
    assert (training.mem_len > 0) == (system in ("relative", "shaw") or system.startswith("recurrence"))
    context = "mem_len" if training.mem_len else "context_window"
    assert [(each.tokens_per_sample, getattr(each, context)) for each in evaluations] == lengths
    for each in evaluations:
        assert each.path == f"{training.save_dir}checkpoint_best.pt" == f"{recipe}-{system}/checkpoint_best.pt"
        assert getattr(each, "same_length", False) == (training.mem_len > 0)


@pytest.mark.parametrize("recipe", ["wiki103-ablation", "lm1b-ablation"])
def test_an_unknown_system_is_refused_in_one_line(recipe: str) -> None:
    result = run(recipe, DRY_RUN=1, SYSTEM="attention")
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(r"SYSTEM=attention: choose .*\n", result.stderr)


def test_the_readmes_flags_turn_a_script_into_the_tensorflow_one() -> None:
    table = r"^\| `([\w-]+)\.sh` \| `(-[^`]*)` \| (\d*)"
    found = re.findall(table, (RECIPES / "README.md").read_text(), re.MULTILINE)
    flags = {recipe: (extra, rows) for recipe, extra, rows in found}
    assert flags.keys() == AUTHORS.keys() - {"ptb", "enwik8-medium"}
    for recipe, (extra, rows) in flags.items():
        here, there = (
            parsed(printed(run(recipe, DRY_RUN=1, **more))[0]) for more in ({}, {"EXTRA": extra, "ROWS": rows})
        )
        assert there.batch_size == int(rows or AUTHORS[recipe].rows)
        assert here.max_lr == 0.00025 and there.max_lr == (0.0001 if recipe == "lm1b-large" else 0.00025)
        assert there.lr[0] == pytest.approx(there.max_lr * (0.01 if recipe.endswith("large") else 0.004))
        assert there.untie_r == AUTHORS[recipe].words
        assert there.init_std == (0.005 if AUTHORS[recipe].words and recipe.endswith("large") else 0.02)
        given = {word.removeprefix("--").replace("-", "_") for word in extra.split() if word.startswith("--")}
        assert all(getattr(here, name) != getattr(there, name) for name in given), "no flag without effect"


def test_penn_treebank_is_regularised() -> None:
    args = parsed(printed(run("ptb", DRY_RUN=1))[0])
    assert args.variational_dropout and 0 < args.average_weights_from < args.max_update


@EVERY_RECIPE
def test_a_small_dry_run_is_understood_and_writes_nothing(recipe: str, tmp_path: Path) -> None:
    prepare, *commands = printed(run(recipe, DRY_RUN=1, SMALL=1, SAVE_DIR=tmp_path / "out"))
    assert prepare.startswith("bash examples/transformer_xl/prepare-")
    assert len([parsed(command) for command in commands]) == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("recipe, chunks, gpus, rows", [("wiki103-base", 2, 3, 20), ("lm1b-large", 8, 4, 128)])
def test_a_batch_can_be_cut_into_pieces(recipe: str, chunks: int, gpus: int, rows: int) -> None:
    """Of its rows: with batches of fewer rows, an update would read several segments of each."""
    args = parsed(printed(run(recipe, DRY_RUN=1, BATCH_CHUNK=chunks, GPUS=gpus))[0])
    assert (args.batch_size, args.batch_chunk, args.distributed_world_size) == (rows, chunks, gpus)
    assert args.update_freq == [1]


@pytest.mark.parametrize(
    ("recipe", "count", "visible", "gpus"),
    [("enwik8-large", 8, None, 8), ("wiki103-base", 8, None, 6), ("enwik8-base", 4, "1,3", 2), ("ptb", 8, "", 1)],
)
def test_all_gpus_share_the_rows_or_as_many_as_divide_them(
    recipe: str, count: int, visible: str | None, gpus: int, tmp_path: Path
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\n" + "".join(f"echo 'GPU {number}: a GPU'\n" for number in range(count)))
    smi.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | (
        {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    )
    result = run(recipe, DRY_RUN=1, **variables)
    args = parsed(printed(result)[0])
    assert (args.distributed_world_size, args.batch_size) == (gpus, AUTHORS[recipe].rows // gpus)
    assert result.stderr == ("" if gpus != 6 else "8 GPUs do not divide the 60 rows of an update; 6 of them train\n")


def test_a_number_of_gpus_that_does_not_divide_the_rows_is_told_those_that_do() -> None:
    result = run("ptb", DRY_RUN=1, GPUS=8)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.endswith("cannot be divided by it; choose one of 1 2 4 5 10 20\n")
    args = parsed(printed(run("ptb", DRY_RUN=1, GPUS=8, ROWS=24))[0])
    assert (args.distributed_world_size, args.batch_size) == (8, 3)


@pytest.mark.parametrize("variable, value", [("GPUS", "7"), ("BATCH_CHUNK", "x"), ("GPUS", "0"), ("PRECISION", "fp8")])
def test_an_impossible_setting_is_refused_in_one_line(variable: str, value: str) -> None:
    result = run("enwik8-base", DRY_RUN=1, **{variable: value})
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(rf"{variable}={value}\b.*\n", result.stderr)


def test_the_variables_reach_the_commands() -> None:
    variables = {"DATA": "my/data", "SAVE_DIR": "out/", "EXTRA": "--log-interval 5 --seed 3", "PRECISION": "bf16"}
    training, evaluation = map(parsed, printed(run("text8-base", DRY_RUN=1, GEN_SUBSET="valid", **variables)))
    assert (training.data, training.save_dir, training.seed) == ("my/data", "out/text8-base/", 3)
    assert training.bf16 and training.log_interval == 5
    assert (evaluation.data, evaluation.path) == ("my/data", "out/text8-base/checkpoint_best.pt")
    assert evaluation.gen_subset == "valid"


# --- small runs


@pytest.fixture(scope="module")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus of words."""
    folder = tmp_path_factory.mktemp("small")
    printed(run("prepare-ptb", folder / "ptb", SMALL=1))
    flags = [[f"--{split}pref", folder / "ptb" / f"{split}.txt"] for split in ("train", "valid", "test")]
    done = warm.command("preprocess.py", "--only-source --destdir", folder / "ptb-bin", flags)
    assert done.returncode == 0, done.stderr
    return folder / "ptb-bin"


# Lines, and below streams with and without memory; the others differ in numbers, which the tests of
# their commands read.
def test_a_recipe_of_lines_runs_end_to_end_when_small(small_data: Path, tmp_path: Path) -> None:
    result = run("lm1b-base", SMALL=1, DATA=small_data, SAVE_DIR=tmp_path)
    output = "\n".join(printed(result)) + result.stderr
    loss = float(re.findall(r"Loss \(base 2\): ([\d.]+), Perplexity: [\d.]+\n", output)[0])
    validation = float(re.findall(r"valid on 'valid' subset.* \| loss (\S+)", output)[-1])
    assert loss == pytest.approx(validation, rel=0.1), "another text, the same kind"
    assert "Bits per character" not in output
    assert (tmp_path / "lm1b-base" / "checkpoint_best.pt").is_file()


def test_an_ablation_runs_end_to_end_when_small(small_data: Path, tmp_path: Path) -> None:
    system = "no-recurrence-learned-half"
    result = run("wiki103-ablation", SMALL=1, SYSTEM=system, DATA=small_data, SAVE_DIR=tmp_path)
    perplexities = re.findall(r"Loss \(base 2\): [\d.]+, Perplexity: [\d.]+\n", "\n".join(printed(result)) + "\n")
    assert len(perplexities) == 2
    assert (tmp_path / f"wiki103-ablation-{system}" / "checkpoint_best.pt").is_file()


def test_a_small_text8_has_its_27_letters(tmp_path: Path) -> None:
    printed(run("prepare-text8", tmp_path, SMALL=1))
    for split in ("train", "valid", "test"):
        assert {*(tmp_path / f"{split}.txt").read_text().split()} <= {*"abcdefghijklmnopqrstuvwxyz_"}


def test_a_small_recipe_makes_its_corpus_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first, second = (run("enwik8-base", SMALL=1, SAVE_DIR=tmp_path) for _ in range(2))
    assert [line.split()[1] for line in printed(first) if line.startswith(("bash", "python"))] == [
        "examples/transformer_xl/prepare-enwik8.sh", "-m", "-m", "preprocess.py", "train.py",
    ]  # fmt: skip
    bits = [line for line in printed(second) if line.startswith("Bits per character: ")]
    assert bits == [line for line in printed(first) if line.startswith("Bits per character: ")] != []
    assert "nothing to do: --max-update 12 is reached after 12 updates" in second.stdout + second.stderr
    assert "prepare-enwik8.sh" not in second.stdout


# --- corpora


@pytest.mark.parametrize("corpus", PREPARED)
def test_without_a_network_is_one_line(corpus: str, tmp_path: Path) -> None:
    result = run(f"prepare-{corpus}", tmp_path, **{f"{corpus.upper()}_URL": f"{NOWHERE}/archive"})
    assert result.returncode == 1
    assert re.fullmatch(rf"prepare-{corpus}.sh: the download failed; .*\n", result.stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("corpus", PREPARED)
def test_what_is_not_the_corpus_is_refused_and_removed(corpus: str, tmp_path: Path) -> None:
    names = ["wrong", *(f"ptb.{split}.txt" for split in ("train", "valid", "test"))]
    for name in names:
        (tmp_path / name).write_bytes(b"no archive")
    url = tmp_path.as_uri() if corpus == "ptb" else (tmp_path / "wrong").as_uri()
    result = run(f"prepare-{corpus}", tmp_path / "out", **{f"{corpus.upper()}_URL": url})
    assert result.returncode == 1
    assert re.fullmatch(
        rf"prepare-{corpus}.sh: what came from .* \(wrong (sha256|md5) checksum; removed\); .*{corpus.upper()}_URL\n",
        result.stderr,
    )
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("corpus", PREPARED)
def test_nothing_is_downloaded_twice(corpus: str, tmp_path: Path) -> None:
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").touch()
    result = run(f"prepare-{corpus}", tmp_path, **{f"{corpus.upper()}_URL": f"{NOWHERE}/archive"})
    assert "there already" in "".join(printed(result))


@pytest.mark.parametrize("corpus", PREPARED)
def test_a_dry_run_of_the_preparation_writes_nothing(corpus: str, tmp_path: Path) -> None:
    for small in ({}, {"SMALL": 1}):
        lines = printed(run(f"prepare-{corpus}", tmp_path / "out", DRY_RUN=1, **small))
        assert lines[0].startswith("python -m fairseq_cli.corpus pydoc" if small else ("curl", "wget"))
    assert list(tmp_path.iterdir()) == []


def with_checksums(folder: Path, **checksums: Path) -> str:
    """A copy of the scripts in *folder* that expects the files given, in the place of the published
    ones."""
    copy = folder / "examples" / "transformer_xl"
    copy.mkdir(parents=True)
    (copy.parent / "common.sh").symlink_to(RECIPES.parent / "common.sh")
    for name in ("scripts", "fairseq"):
        (folder / name).symlink_to(ROOT / name)
    for script in ("common.sh", "download.sh", *(f"prepare-{corpus}.sh" for corpus in PREPARED)):
        (copy / script).write_text((RECIPES / script).read_text())
    for corpus, file in checksums.items():
        path = copy / f"prepare-{corpus}.sh"
        checksum = hashlib.sha256(file.read_bytes()).hexdigest()
        path.write_text(re.sub(r"sha256:[0-9a-f]{64}", f"sha256:{checksum}", path.read_text()))
    return str(copy)


@pytest.mark.parametrize("corpus, text", [("enwik8", b"a line\nand more\n" * 20), ("text8", b" two words" * 20)])
def test_an_interrupted_download_goes_on_and_becomes_symbols(corpus: str, text: bytes, tmp_path: Path) -> None:
    archive = tmp_path / f"{corpus}.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr(corpus, text)
    scripts = with_checksums(tmp_path / "copy", **{corpus: archive})
    out = tmp_path / "out"
    out.mkdir()
    (out / f"{corpus}.zip.part").write_bytes(archive.read_bytes()[:50])
    command = ["bash", f"{scripts}/prepare-{corpus}.sh", str(out)]
    environment = {**os.environ, f"{corpus.upper()}_URL": archive.as_uri()}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=runs.TIMEOUT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert sorted(path.name for path in out.iterdir()) == ["dict.txt", "test.txt", "train.txt", "valid.txt"]
    first, end = text[: len(text) * 9 // 10], b"\n" if corpus == "enwik8" else b" "
    written = (out / "train.txt").read_text()
    symbols = [str(byte) if corpus == "enwik8" else chr(byte) for byte in first if bytes([byte]) != end]
    assert written.split() == symbols
    assert written.count("\n") == first.count(end) + (not first.endswith(end))


def test_one_billion_words_pieces_become_three_texts(tmp_path: Path) -> None:
    name = "1-billion-word-language-modeling-benchmark-r13output"
    pieces = {f"training-monolingual.tokenized.shuffled/news.en-{i:05}-of-00100": i for i in range(1, 100)}
    pieces |= {f"heldout-monolingual.tokenized.shuffled/news.en.heldout-{i:05}-of-00050": 500 + i for i in range(3)}
    archive = tmp_path / f"{name}.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        for piece, number in pieces.items():
            (tmp_path / "piece").write_text(f"sentence {number}\n")
            file.add(tmp_path / "piece", f"{name}/{piece}")
    scripts = with_checksums(tmp_path / "copy", lm1b=archive)
    command = ["bash", f"{scripts}/prepare-lm1b.sh", str(tmp_path / "out")]
    environment = {**os.environ, "LM1B_URL": archive.as_uri()}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=runs.TIMEOUT)
    assert result.returncode == 0, result.stdout + result.stderr
    texts = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert texts == {
        "train.txt": "".join(f"sentence {i}\n" for i in range(1, 100)),
        "test.txt": "sentence 500\n",
        "valid.txt": "sentence 501\n",
    }
