"""The recipes in examples/language_model print the Shortformer authors' commands, and run end to
end when small."""

from __future__ import annotations

import os
import random
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import runs
import warm

from fairseq.config import options
from fairseq_cli.common import get_training_parser
from fairseq_cli.eval_lm import get_eval_lm_parser
from fairseq_cli.interactive import get_interactive_generation_parser
from fairseq_cli.preprocess import get_preprocessing_parser

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "language_model"

SHARED_FLAGS = """--task language_modeling data-bin/wikitext-103 --arch transformer_lm_wiki103 --max-lr 1.0 --t-mult 2
    --lr-period-updates 270000 --lr-scheduler cosine --lr-shrink 0.75 --warmup-updates 16000 --warmup-init-lr 1e-07
    --min-lr 1e-09 --optimizer nag --lr 0.0001 --clip-norm 0.1 --criterion adaptive_loss --seed 1 --fp16
    --sample-break-mode none --skip-invalid-size-inputs-valid-test --ddp-backend=no_c10d"""
EVALUATION = "fairseq-eval-lm data-bin/wikitext-103 --sample-break-mode none --gen-subset valid --max-sentences 1"

# The commands of the Shortformer's README, one list a system, in the order in which they are run.
COMMANDS = {
    "shortformer.sh": [
        f"python train.py {SHARED_FLAGS} --save-dir checkpoints128e100/ --max-update 140100 --max-tokens 9216"
        " --update-freq 1 --tokens-per-sample 128 --max-tokens-valid 128 --tokens-from-prev 128 --curriculum 1000"
        " --required-batch-size-multiple 1 --save-interval 100",
        f"python train.py {SHARED_FLAGS} --save-dir shortformer/ --restore-file checkpoints128e100/checkpoint100.pt"
        " --max-update 286000 --max-tokens 9216 --update-freq 1 --tokens-per-sample 512 --max-tokens-valid 512"
        " --tokens-from-prev 512 --curriculum 1000 --required-batch-size-multiple 1 --no-epoch-checkpoints",
        f"{EVALUATION} --path shortformer/checkpoint_best.pt",
        f"{EVALUATION} --path shortformer/checkpoint_best.pt --sliding-inf 1 --context-window 511 --max-tokens 512",
    ],
    "shortformer-no-staged.sh": [
        f"python train.py {SHARED_FLAGS} --save-dir shortformer-no-st/ --max-update 286000 --max-tokens 9216"
        " --update-freq 1 --tokens-per-sample 512 --max-tokens-valid 512 --tokens-from-prev 512 --curriculum 1000"
        " --required-batch-size-multiple 1 --no-epoch-checkpoints",
        f"{EVALUATION} --path shortformer-no-st/checkpoint_best.pt",
        f"{EVALUATION} --path shortformer-no-st/checkpoint_best.pt --sliding-inf 1 --context-window 511"
        " --max-tokens 512",
    ],
    "staged-baseline.sh": [
        f"python train.py {SHARED_FLAGS} --save-dir checkpoints-st-128e50/ --max-update 70050 --max-tokens 9216"
        " --update-freq 1 --tokens-per-sample 128 --required-batch-size-multiple 1 --save-interval 50",
        f"python train.py {SHARED_FLAGS} --save-dir st/ --restore-file checkpoints-st-128e50/checkpoint50.pt"
        " --max-update 286000 --max-tokens 3072 --update-freq 3 --tokens-per-sample 3072 --no-epoch-checkpoints",
        f"{EVALUATION} --path st/checkpoint_best.pt",
        f"{EVALUATION} --path st/checkpoint_best.pt --context-window 2560",
    ],
    "baseline.sh": [
        f"python train.py {SHARED_FLAGS} --save-dir baseline/ --max-update 286000 --max-tokens 3072 --update-freq 3"
        " --tokens-per-sample 3072 --no-epoch-checkpoints",
        f"{EVALUATION} --path baseline/checkpoint_best.pt",
        f"{EVALUATION} --path baseline/checkpoint_best.pt --context-window 2560",
    ],
}
EVERY_RECIPE = pytest.mark.parametrize("recipe", COMMANDS)


def run(script: str, *arguments: str, **variables: object) -> subprocess.CompletedProcess[str]:
    names = (
        *("DATA", "SAVE_DIR", "EXTRA", "DRY_RUN", "SMALL", "UPDATE_FREQ", "GPUS", "PRECISION"),
        *("GEN_SUBSET", "WIKITEXT_URL"),
    )
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {name: str(value) for name, value in variables.items()}
    command = ["bash", str(RECIPES / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=runs.TIMEOUT)


def flags(command: str) -> tuple[str, set[tuple[str, str | None]]]:
    """The program of a command, and the set of its flags with their values; what belongs to no flag
    has the flag ""."""
    program, *rest = shlex.split(command)
    found: set[tuple[str, str | None]] = set()
    if program == "python":
        program = rest.pop(0)
    while rest:
        word = rest.pop(0)
        if "=" in word and word.startswith("--"):
            name, _, value = word.partition("=")
            found.add((name, value))
        elif word.startswith("--"):
            switch = word in {
                "--fp16",
                "--skip-invalid-size-inputs-valid-test",
                "--no-epoch-checkpoints",
                "--only-source",
            }
            found.add((word, None if switch else rest.pop(0)))
        else:
            found.add(("", word))
    return program, found


def printed(result: subprocess.CompletedProcess[str]) -> list[str]:
    assert result.returncode == 0, result.stderr
    return [line for line in result.stdout.splitlines() if line.startswith(("python ", "fairseq-eval-lm "))]


@EVERY_RECIPE
def test_a_dry_run_prints_the_authors_commands_and_nothing_else(recipe: str) -> None:
    result = run(recipe, DRY_RUN=1, PRECISION="fp16")
    assert [flags(line) for line in printed(result)] == [flags(command) for command in COMMANDS[recipe]]
    assert len(printed(result)) == len(result.stdout.splitlines())


@EVERY_RECIPE
def test_a_dry_run_writes_nothing(recipe: str, tmp_path: Path) -> None:
    printed(run(recipe, DRY_RUN=1, SMALL=1, SAVE_DIR=tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("chunks", [2, 3])
def test_the_memory_saving_variants_keep_the_global_batch(chunks: int) -> None:
    for line in printed(run("shortformer.sh", DRY_RUN=1, UPDATE_FREQ=chunks))[:2]:
        wanted = {("--batch-chunk", str(chunks)), ("--max-tokens", "9216"), ("--update-freq", "1")}
        assert wanted <= flags(line)[1], "as many rows continue"


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_any_number_of_gpus_makes_the_authors_updates(gpus: int) -> None:
    _, baseline = flags(printed(run("baseline.sh", DRY_RUN=1, GPUS=gpus))[0])
    assert {("--update-freq", str(24 // gpus)), ("--max-tokens", "3072")} <= baseline
    _, shortformer = flags(printed(run("shortformer.sh", DRY_RUN=1, GPUS=gpus))[0])
    chunks = {("--batch-chunk", str(8 // gpus))} if gpus < 8 else set()
    assert {("--update-freq", "1"), ("--max-tokens", str(9216 * 8 // gpus))} | chunks <= shortformer
    assert ("--distributed-world-size", str(gpus)) in baseline & shortformer


@pytest.mark.parametrize(("gpu", "small"), [(True, False), (False, False), (True, True)])
def test_precision_is_the_authors_where_a_gpu_runs_the_recipe(gpu: bool, small: bool, tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n{'echo GPU 0: a GPU' if gpu else 'exit 9'}\n")
    smi.chmod(0o755)
    variables = {"DRY_RUN": 1, "PATH": f"{tmp_path}:{os.environ['PATH']}", **({"SMALL": 1} if small else {})}
    commands = [line for line in printed(run("shortformer.sh", **variables)) if "train.py" in line]
    assert all(("--fp16" in line) is (gpu and not small) for line in commands)


def test_the_baseline_takes_its_batch_whole_where_memory_allows() -> None:
    _, found = flags(printed(run("baseline.sh", DRY_RUN=1, UPDATE_FREQ=1))[0])
    assert {("--update-freq", "1"), ("--max-tokens", "9216")} <= found


@pytest.mark.parametrize(
    ("variable", "value"), [("UPDATE_FREQ", "2"), ("UPDATE_FREQ", "x"), ("PRECISION", "fp8"), ("GPUS", "5")]
)
def test_an_impossible_setting_is_refused_in_one_line(variable: str, value: str) -> None:
    result = run("baseline.sh", DRY_RUN=1, **{variable: value})
    assert result.returncode == 2
    assert result.stdout == ""
    assert re.fullmatch(rf"{variable}={value}: .*\n", result.stderr)


def test_the_variables_reach_the_commands() -> None:
    result = run(
        "staged-baseline.sh",
        DRY_RUN=1,
        DATA="my/data",
        SAVE_DIR="out/",
        EXTRA="--log-interval 5 --seed 3",
        PRECISION="bf16",
    )
    first, second, evaluation, _ = (flags(line)[1] for line in printed(result))
    assert {("", "my/data"), ("--save-dir", "out/checkpoints-st-128e50/"), ("--seed", "3")} <= first
    assert ("--fp16", None) not in first
    assert ("--restore-file", "out/checkpoints-st-128e50/checkpoint50.pt") in second
    assert {("", "my/data"), ("--path", "out/st/checkpoint_best.pt")} <= evaluation


@pytest.mark.parametrize(("recipe", "stage"), [("shortformer.sh", "shortformer"), ("staged-baseline.sh", "st")])
def test_a_stage_that_has_begun_goes_on_from_its_own_checkpoint(recipe: str, stage: str, tmp_path: Path) -> None:
    (tmp_path / stage).mkdir()
    (tmp_path / stage / "checkpoint_last.pt").touch()
    second = printed(run(recipe, PYTHON="true", SAVE_DIR=tmp_path))[1]
    assert "--restore-file" not in second


def test_a_command_that_fails_ends_the_recipe() -> None:
    result = run("shortformer.sh", PYTHON="false")
    assert result.returncode != 0
    assert len(result.stdout.splitlines()) == 1


@EVERY_RECIPE
def test_every_command_of_the_authors_is_understood(recipe: str) -> None:
    for command in COMMANDS[recipe]:
        program, *arguments = shlex.split(command.removeprefix("python "))
        training = program == "train.py"
        parser = get_training_parser() if training else get_eval_lm_parser()
        args = options.parse_args_and_arch(parser, arguments)
        assert args.data == "data-bin/wikitext-103"
        if training:
            assert (args.arch, args.criterion, args.optimizer) == ("transformer_lm_wiki103", "adaptive_loss", "nag")
            assert args.max_tokens * args.update_freq[0] == 9216
            assert args.adaptive_softmax_cutoff == [20000, 60000]
        else:
            assert (args.gen_subset, args.batch_size) == ("valid", 1)


@pytest.fixture(scope="module")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A preprocessed corpus of made-up words, more than 400 of them, with Zipf's frequencies."""
    folder = tmp_path_factory.mktemp("tiny")
    generator = random.Random(0)
    words = [f"w{i}" for i in range(600)]
    weights = [1 / (i + 1) for i in range(600)]
    for split, lines in (("train", 1000), ("valid", 40), ("test", 40)):
        text = "".join(" ".join(generator.choices(words, weights, k=12)) + "\n" for _ in range(lines))
        (folder / f"{split}.txt").write_text(text)
    words = [word for split in ("train", "valid", "test") for word in (f"--{split}pref", str(folder / f"{split}.txt"))]
    assert warm.command("preprocess.py", "--only-source --destdir", folder / "data-bin", words).returncode == 0
    return folder / "data-bin"


# tests/cli/test_seed_commands.py runs the commands of the others.
def test_a_recipe_runs_end_to_end_when_small(tiny_data: Path, tmp_path: Path) -> None:
    result = run("shortformer.sh", SMALL=1, DATA=tiny_data, SAVE_DIR=tmp_path, OMP_NUM_THREADS=1)
    assert result.returncode == 0, result.stdout + result.stderr
    output = result.stdout + result.stderr
    whole, other = (float(number) for number in re.findall(r"Perplexity: ([\d.]+)", output))
    validation = float(re.findall(r"valid on 'valid' subset .* ppl (\S+)", output)[-1])
    assert whole == pytest.approx(validation, rel=0.01), "the best checkpoint is evaluated as it was validated"
    assert whole == other, "segment by segment and token by token must agree"


def test_wikitext_103_without_a_network_is_one_line(tmp_path: Path) -> None:
    result = run("prepare-wikitext-103.sh", str(tmp_path), WIKITEXT_URL="http://127.0.0.1:9/wikitext-103-v1.zip")
    assert result.returncode == 1
    assert re.fullmatch(r"prepare-wikitext-103.sh: the download failed; .*\n", result.stderr)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_wikitext_103_archive_is_refused_and_removed(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.zip"
    wrong.write_bytes(b"no archive")
    result = run("prepare-wikitext-103.sh", str(tmp_path / "corpus"), WIKITEXT_URL=wrong.as_uri())
    assert result.returncode == 1
    assert "wrong sha256" in result.stderr
    assert list((tmp_path / "corpus").iterdir()) == []


def test_a_dry_run_downloads_nothing(tmp_path: Path) -> None:
    result = run(
        "prepare-wikitext-103.sh", str(tmp_path / "corpus"), DRY_RUN=1, WIKITEXT_URL="http://127.0.0.1:9/a.zip"
    )
    assert (result.returncode, result.stderr) == (0, "") and not (tmp_path / "corpus").exists()
    assert "http://127.0.0.1:9/a.zip" in result.stdout.splitlines()[0]


def test_wikitext_103_is_not_downloaded_twice(tmp_path: Path) -> None:
    (tmp_path / "wikitext-103").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / "wikitext-103" / f"wiki.{split}.tokens").touch()
    result = run("prepare-wikitext-103.sh", str(tmp_path), WIKITEXT_URL="http://127.0.0.1:9/wikitext-103-v1.zip")
    assert result.returncode == 0
    assert "there already" in result.stdout


def test_every_command_of_the_demo_is_understood() -> None:
    parsers = {
        "preprocess.py": get_preprocessing_parser,
        "train.py": get_training_parser,
        "fairseq-eval-lm": get_eval_lm_parser,
        "interactive.py": get_interactive_generation_parser,
    }
    script = ["bash", str(ROOT / "examples" / "demo.sh"), "out"]
    result = subprocess.run(script, env={**os.environ, "DRY_RUN": "1"}, capture_output=True, text=True)
    commands = [line.removeprefix("python ").split() for line in result.stdout.splitlines()]
    assert [command[0] for command in commands if command[0] in parsers] == [
        *("preprocess.py", "train.py", "fairseq-eval-lm", "fairseq-eval-lm", "interactive.py")
    ]
    for program, *words in commands:
        if program in parsers:
            options.parse_args_and_arch(parsers[program](), words)
