"""The recipes in examples/tnf print commands that the parsers accept, and run end to end when
small."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import runs

from fairseq.config import options
from fairseq_cli.common import get_training_parser
from fairseq_cli.finetune import get_finetune_parser
from fairseq_cli.preprocess import get_preprocessing_parser

RECIPES = runs.ROOT / "examples" / "tnf"
VARIABLES = (
    "CHECKPOINT", "DATA_BIN", "BPE_CODES", "GLUE", "TASKS", "SAVE_DIR", "SEEDS", "LRS", "EPOCHS", "GPUS", "PRECISION",
    "EXTRA", "DRY_RUN", "SMALL", "GLUE_URL", "DATA", "SIZE", "UPDATES", "UPDATE_FREQ", "OUT", "TRAIN", "VALID",
    "WORKERS", "NOTE_LAMBDA", "NOTE_GAMMA", "NOTE_HALF_WINDOW", "NOTE_MIN_COUNT", "NOTE_MAX_COUNT", "BPE_MERGES",
    "MODEL", "FORMS", "NOTE_FORM", "TYPES", "UNTIL", "KEEP_EVERY", "EVERY", "MODELS",
)  # fmt: skip


def run(script: str, *arguments: str, **variables: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment |= {"OMP_NUM_THREADS": "1"}
    environment |= {name: str(value) for name, value in variables.items()}
    command = ["bash", str(RECIPES / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=runs.TIMEOUT)


def commands(result: subprocess.CompletedProcess[str], script: str) -> list[argparse.Namespace]:
    """The parsed commands of *script* in the output of a dry run."""
    assert result.returncode == 0, result.stderr
    parser = {"train.py": get_training_parser, "preprocess.py": get_preprocessing_parser}[script]
    lines = [shlex.split(line) for line in result.stdout.splitlines()]
    return [options.parse_args_and_arch(parser(), line[2:]) for line in lines if line[1] == script]


@pytest.mark.parametrize("backbone", ["bert", "electra"])
def test_models_with_and_without_notes_have_the_same_settings(backbone: str) -> None:
    variables = {"DRY_RUN": 1, "PRECISION": "bf16", "GPUS": 4, "UPDATE_FREQ": 2}
    (plain,) = commands(run(f"pretrain-{backbone}.sh", **variables), "train.py")
    (noted,) = commands(run(f"pretrain-tnf-{backbone}.sh", **variables, NOTE_GAMMA=0.2), "train.py")
    assert (plain.task, plain.arch) == ("masked_lm", f"{backbone}_base")
    assert (noted.task, noted.arch) == ("tnf_masked_lm", f"tnf_{backbone}_base")
    assert (noted.note_lambda, noted.note_gamma, noted.note_half_window) == (0.5, 0.2, 16)
    assert (noted.note_form, getattr(noted, "note_readers", "generator")) == ("centred", "generator")
    different = {name for name in vars(plain) if vars(plain)[name] != vars(noted)[name]}
    assert different <= {"arch", "task", "save_dir"}
    assert plain.batch_size * plain.update_freq[0] * plain.distributed_world_size == 256
    assert plain.bf16 and plain.total_num_update == plain.max_update == 1_000_000
    assert plain.keep_interval_updates_pattern == 100_000


def test_a_corpus_is_read_in_one_command() -> None:
    result = run("prepare-corpus.sh", DRY_RUN=1, TRAIN="wiki.txt,books.txt", VALID="valid.txt", NOTE_MIN_COUNT=25)
    (args,) = commands(result, "preprocess.py")
    assert (args.trainpref, args.validpref) == ("wiki.txt,books.txt", "valid.txt")
    assert (args.tokenizer, args.bpe, args.learn_bpe) == ("moses", "subword_nmt", 32000)
    assert (args.notes, args.note_min_count, args.note_max_count) == (True, 25, 500)


def test_the_commands_are_those_of_fairseq_finetune() -> None:
    result = run(
        "finetune-glue.sh", DRY_RUN=1, CHECKPOINT="c.pt", DATA_BIN="bin", BPE_CODES="codes", TASKS="RTE MNLI", GPUS=4,
        PRECISION="bf16", EXTRA="--weight-decay 0.1",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    lines = [shlex.split(line) for line in result.stdout.splitlines()]
    assert [line[0] for line in lines] == ["fairseq-finetune"] * 2
    args = options.parse_args_and_arch(get_finetune_parser(), lines[1][1:])
    assert (args.data, args.glue_task, args.path, args.data_bin) == ("examples/tnf/glue/MNLI", "MNLI", "c.pt", "bin")
    assert (args.bpe_codes, args.distributed_world_size, args.bf16, args.weight_decay) == ("codes", 4, True, 0.1)
    assert (len(args.seeds), args.lrs, args.batch_size) == (5, [1e-5, 3e-5, 5e-5], 32)


def test_preparing_prints_a_download_for_each_task_and_names_those_without() -> None:
    result = run("prepare-glue.sh", "there", DRY_RUN=1, GLUE_URL="http://127.0.0.1:9")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("curl ") == 8 and "http://127.0.0.1:9/QNLIv2.zip" in result.stdout
    result = run("prepare-glue.sh", "there", DRY_RUN=1, TASKS="MRPC")
    assert result.returncode == 2 and "MRPC cannot be downloaded; put its train.tsv" in result.stderr


@pytest.mark.parametrize(("gpus", "passes"), [(1, 8), (4, 2), (8, 1), (16, 1)])
def test_any_number_of_gpus_reads_the_same_batches(gpus: int, passes: int) -> None:
    (args,) = commands(run("pretrain-bert.sh", DRY_RUN=1, GPUS=gpus, PRECISION="fp32"), "train.py")
    assert (args.distributed_world_size, args.update_freq) == (gpus, [passes])
    assert args.batch_size * args.update_freq[0] * gpus == 256


def test_few_updates_shorten_the_warm_up() -> None:
    for updates, warmup in ((50, 5), (5000, 500), (200_000, 10_000), (1_000_000, 10_000)):
        (args,) = commands(run("pretrain-bert.sh", DRY_RUN=1, UPDATES=updates, PRECISION="fp32"), "train.py")
        assert (args.max_update, args.total_num_update, args.warmup_updates) == (updates, updates, warmup)


def test_wrong_variables_are_one_line() -> None:
    for script, variables, message in [
        ("finetune-glue.sh", {}, "CHECKPOINT, DATA_BIN: name"),
        ("finetune-glue.sh", {"GPUS": "two"}, "GPUS=two: must be"),
        ("finetune-glue.sh", {"PRECISION": "fp8"}, "PRECISION=fp8: choose"),
        ("prepare-corpus.sh", {}, "TRAIN, VALID: name"),
        ("pretrain-bert.sh", {"SIZE": "huge"}, "SIZE=huge: choose"),
        (
            "pretrain-bert.sh",
            {"GPUS": "3"},
            "GPUS=3: the 256 rows of an update cannot be divided by it; choose",
        ),
        ("pretrain-bert.sh", {"GPUS": "8", "UPDATE_FREQ": "3"}, "UPDATE_FREQ=3: each GPU has 32 rows"),
        ("finetune-glue.sh", {"GPUS": "3"}, "GPUS=3: the 32 rows of an update"),
        ("pretrain-bert.sh", {"KEEP_EVERY": "15000"}, "KEEP_EVERY=15000: must be a multiple of 10000"),
        ("glue-over-updates.sh", {"MODELS": "nothing"}, "MODELS, EVERY: no nothing/checkpoint_*_100000.pt"),
        ("compare-notes.sh", {"MODEL": "gpt"}, "MODEL=gpt: choose"),
        ("documentation.sh", {"MODEL": "gpt"}, "MODEL=gpt: choose"),
        ("compare-notes.sh", {"UPDATES": "2000"}, "UPDATES=2000: must be more than 2500"),
        ("entities.sh", {"TYPES": "many"}, "TYPES=many: must be"),
        ("entities.sh", {"UNTIL": "700"}, "UNTIL=700, UPDATES=700: notes must end"),
    ]:
        result = run(script, **variables)
        assert result.returncode == 2 and result.stderr.startswith(message) and result.stderr.count("\n") == 1


def test_the_small_recipe_runs_from_text_to_results(tmp_path: Path) -> None:
    result = run("finetune-glue.sh", SMALL=1, SAVE_DIR=tmp_path, SEEDS="1", EXTRA="--log-format none")
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "MR" / "results.json").read_text())
    assert len(report["runs"]) == 1 and 0 <= report["score"] <= 100


def test_the_small_recipes_go_from_pretraining_to_glue_over_updates(tmp_path: Path) -> None:
    for script in ("pretrain-bert.sh", "pretrain-tnf-electra.sh"):
        result = run(script, SMALL=1, SAVE_DIR=tmp_path, PRECISION="fp32", EXTRA="--log-format none")
        assert result.returncode == 0, result.stderr
        assert (tmp_path / script.removeprefix("pretrain-").replace(".sh", "-tiny") / "checkpoint_best.pt").is_file()
    variables = {"SMALL": 1, "DATA_BIN": tmp_path / "data-bin" / "tnf-small", "SEEDS": 1, "EXTRA": "--log-format none"}
    variables |= {"MODELS": tmp_path / "tnf-electra-tiny", "OUT": tmp_path / "glue"}
    result = run("glue-over-updates.sh", **variables)
    assert result.returncode == 0, result.stderr
    runs_done = {path: path.stat().st_mtime_ns for path in (tmp_path / "glue").rglob("result.json")}
    assert len(runs_done) == 2
    assert run("glue-over-updates.sh", **variables).stdout.splitlines()[-2:] == result.stdout.splitlines()[-2:]
    assert all(path.stat().st_mtime_ns == time for path, time in runs_done.items()), "complete runs are not repeated"
    report = json.loads((tmp_path / "glue" / "results.json").read_text())
    rows = report["models"]["tnf-electra-tiny"]
    assert [row["updates"] for row in rows] == [3, 6] and report["tasks"] == ["MR"]
    for row in rows:
        folder = tmp_path / "glue" / "tnf-electra-tiny" / str(row["updates"])
        glue = json.loads((folder / "MR" / "results.json").read_text())
        assert row["scores"] == {"MR": glue["score"]} and row["average"] == glue["score"]
        assert glue["checkpoint"].endswith(f"_{row['updates']}.pt")
        assert f"| tnf-electra-tiny | {row['updates']} | {glue['score']:.1f} | {glue['score']:.1f} |" in result.stdout


def test_scores_of_glue_over_updates_are_averaged_and_compared(tmp_path: Path) -> None:
    scores = {
        "bert": {100_000: {"RTE": 50.0, "CoLA": 30.0}, 200_000: {"RTE": 60.0, "CoLA": 50.0}},
        "tnf-bert": {100_000: {"RTE": 70.0, "CoLA": 40.0}, 200_000: {"RTE": 70.0}},
    }
    for model, checkpoints in scores.items():
        for updates, tasks in checkpoints.items():
            for task, score in tasks.items():
                folder = tmp_path / model / str(updates) / task
                folder.mkdir(parents=True)
                (folder / "results.json").write_text(json.dumps({"score": score}))
    command = [sys.executable, RECIPES / "glue_table.py", tmp_path / "bert", tmp_path / "tnf-bert"]
    result = subprocess.run([*command, "--output", tmp_path / "all.json"], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [
        "| model | updates | CoLA | RTE | average |",
        "|---|---:|---:|---:|---:|",
        "| bert | 100,000 | 30.0 | 50.0 | 40.0 |",
        "| bert | 200,000 | 50.0 | 60.0 | 55.0 |",
        "| tnf-bert | 100,000 | 40.0 | 70.0 | 55.0 |",
        "| tnf-bert | 200,000 | – | 70.0 | – |",
        "",
        "tnf-bert reaches 55.0, the average of bert after 200,000 updates: after 100,000",
    ]
    averages = [row["average"] for row in json.loads((tmp_path / "all.json").read_text())["models"]["tnf-bert"]]
    assert averages == [55.0, None]


@pytest.mark.parametrize("model, criterion", [("bert", "masked_lm"), ("electra", "electra")])
def test_a_comparison_differs_in_notes_and_seeds_only(model: str, criterion: str) -> None:
    result = run("compare-notes.sh", DRY_RUN=1, MODEL=model, SEEDS="1 2", UPDATES=6400, PRECISION="fp32")
    trained = commands(result, "train.py")
    assert [(each.arch, each.seed) for each in trained] == [
        (f"{name}_tiny", seed) for seed in (1, 2) for name in (model, f"tnf_{model}")
    ]
    assert {each.distributed_world_size for each in trained} == {1}, "so many tokens an update"
    assert {each.criterion for each in trained} == {criterion} and trained[0].stages == "32:2500,128:6400"
    different = {name for name in vars(trained[0]) for each in trained if vars(each)[name] != vars(trained[0])[name]}
    assert different <= {"arch", "seed", "save_dir", "metrics_file"}


def test_the_small_comparison_ends_with_losses_and_a_picture(tmp_path: Path) -> None:
    result = run("compare-notes.sh", SMALL=1, SAVE_DIR=tmp_path, SEEDS="1", PRECISION="fp32", EXTRA="--log-format none")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("| rare_loss ") == 3 and "| with notes | 1 |" in result.stdout
    assert (tmp_path / "compare-notes" / "rare_loss.png").stat().st_size > 1000


def test_the_models_of_entities_differ_in_seeds_and_notes_which_end_before_the_training_does() -> None:
    forms = {"FORMS": "none literal:0.1", "TYPES": 16, "SUBWORDS": 9}
    result = run("entities.sh", DRY_RUN=1, SEEDS="1 2", UPDATES=70, UNTIL=30, **forms)
    assert " --entities 1500 --types 16 --subwords 9\n" in result.stdout
    trained = commands(result, "train.py")
    assert [(each.arch, each.seed, each.max_update) for each in trained] == [
        (arch, seed, updates) for seed in (1, 2) for arch in ("bert_tiny", "tnf_bert_tiny") for updates in (30, 70)
    ]
    noted = [each for each in trained if each.arch == "tnf_bert_tiny"]
    assert [(each.note_form, each.note_lambda, each.note_until) for each in noted] == [
        ("literal", 0.1, until) for until in (None, 30, None, 30)
    ]
    assert {(each.note_half_window, each.note_context) for each in noted} == {(1, True)}
    names = {name for name in vars(trained[0]) for each in trained if vars(each).get(name) != vars(trained[0])[name]}
    assert names <= {"arch", "seed", "save_dir", "metrics_file", "max_update"}


@pytest.mark.parametrize(("model", "arch"), [("bert", "tnf_bert_tiny"), ("shortformer", "transformer_lm_wiki103")])
def test_the_models_of_documentation_read_notes_for_three_fifths_of_the_updates(model: str, arch: str) -> None:
    result = run("documentation.sh", DRY_RUN=1, MODEL=model, SEEDS="1", UPDATES=100)
    trained = commands(result, "train.py")
    assert [each.max_update for each in trained] == [60, 100] * 3
    assert {each.distributed_world_size for each in trained} == {1}, "so many tokens an update"
    assert [getattr(each, "note_until", None) for each in trained] == [None, None, None, 60, None, 60]
    assert trained[-1].note_form == "literal" and {each.arch for each in trained[2:]} == {arch}
    (corpus,) = commands(result, "preprocess.py")
    assert (corpus.notes, corpus.note_min_count, corpus.note_max_count) == (True, 4, 20)


def test_the_small_entities_end_with_losses_beside_rare_words(tmp_path: Path) -> None:
    result = run("entities.sh", SMALL=1, OUT=tmp_path / "out", FORMS="none centred", EXTRA="--log-format none")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("| note_1_loss ") == 4 and result.stdout.count("permuted_note_1_loss") == 1
