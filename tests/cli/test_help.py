"""``--help`` is short, complete and named for people; a flag in the wrong place says where it
belongs."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from typing import Any

import pytest
import runs

from fairseq.config import options
from fairseq.config.foreign_flags import flags_with_other_names
from fairseq.errors import UserError
from fairseq.models import ARCHITECTURES
from fairseq_cli.common import get_training_parser
from scripts.reference_pages import COMMANDS

PARSERS = {
    name: getattr(importlib.import_module(f"fairseq_cli.{module}"), function)
    for name, (module, function) in COMMANDS.items()
}
EVALUATION = ("fairseq-eval-lm", "fairseq-validate", "fairseq-analyze recl", "fairseq-interactive")


def shown(make: Any, *flags: Any, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        options.parse_args_and_arch(make(), [*runs.words(*flags), "--help-all"])
    return capsys.readouterr().out


@pytest.fixture
def train_help(capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda *flags: shown(get_training_parser, *flags, capsys=capsys)


@pytest.mark.parametrize("name", PARSERS)
def test_help_has_one_line_of_usage_examples_and_no_default_twice(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(PARSERS[name], capsys=capsys)
    usage, rest = text.split("\n", 1)
    assert usage.startswith("usage: ") and usage.endswith("[flags]") and rest.startswith("\n")
    examples = text.split("examples:\n")[1].split("\n\n")[0].splitlines()
    assert 2 <= len(examples) <= 3 and all(line.startswith(f"  {name} ") for line in examples)
    entries = re.split(r"\n  (?=-)", text)
    assert [entry for entry in entries if entry.count("(default") > 1] == []
    assert not re.search(r"^Fairseq|Config\b|``", text, flags=re.MULTILINE)


@pytest.mark.parametrize("name", PARSERS)
def test_the_examples_parse(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for line in shown(PARSERS[name], capsys=capsys).split("examples:\n")[1].split("\n\n")[0].splitlines():
        assert options.parse_args_and_arch(PARSERS[name](), shlex.split(line)[len(name.split()) :])


def test_training_help_begins_with_what_one_needs_and_ends_with_names(train_help: Any) -> None:
    text = train_help()
    heads = [
        "usage: ",
        "\nexamples:",
        "\nmost used:",
        "\n  DATA ",
        "\n  --max-tokens",
        "\n  --fp16-init-scale",
        "\n--arch:",
    ]
    places = [text.index(head) for head in heads]
    assert places == sorted(places) and text.count("\n  --max-tokens ") == 1


def test_choices_list_their_values(train_help: Any) -> None:
    text = " ".join(train_help().split())
    for names in (ARCHITECTURES, ("language_modeling", "adaptive_loss", "nag", "inverse_sqrt")):
        assert [name for name in names if not re.search(rf"\W{name}\W", text)] == []


def test_groups_have_names_for_people(train_help: Any) -> None:
    text = train_help("--arch transformer_xl_tiny --lr-scheduler cosine")
    titles = re.findall(r"^(\S.*):$", text, flags=re.MULTILINE)
    assert {"Adam (adam)", "Transformer-XL (transformer_xl_tiny)"} <= set(titles)
    assert {"Device, precision and logging", "Cosine annealing with warm restarts (cosine)"} <= set(titles)


def test_help_shows_the_chosen_architectures_flags_and_defaults(train_help: Any) -> None:
    small, large = (" ".join(train_help("--arch", arch).split()) for arch in ("transformer_xl_tiny", "transformer_xl"))
    assert "number of layers (default: 2)" in small and "number of layers (default: 12)" in large
    assert "--adaptive-input-cutoff" not in small
    wiki = " ".join(train_help("--arch transformer_lm_wiki103").split())
    assert "(default: 20000,60000)" in wiki and "adaptive input embeddings (default: on)" in wiki


def test_the_short_help_of_an_architecture_has_its_flags_and_its_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options.parse_args_and_arch(get_training_parser(), ["--arch", "transformer_xl_wiki103_base", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--mem-len N" in text and "--n-layer N number of layers (default: 16)" in text
    assert "Recipe of transformer_xl_wiki103_base, unless you choose: optimizer adam" in text
    assert "max-update 200000" in text and "--fp16-init-scale" not in text


@pytest.mark.parametrize("name", EVALUATION)
def test_evaluation_shows_only_what_acts_and_takes_fairseqs_other_flags(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(PARSERS[name], capsys=capsys)
    for flag in ("--fp16-init-scale", "--tensorboard-logdir", "--train-subset", "--curriculum", "--dataset-impl"):
        assert flag not in text
    options.parse_args_and_arch(PARSERS[name](), ["d", "--fp16-init-scale", "4"])
    assert capsys.readouterr().err == "note: --fp16-init-scale: no effect here\n"


@pytest.mark.parametrize("name", ["fairseq-analyze attention", "fairseq-analyze recl"])
def test_analyses_list_no_flag_without_an_effect(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(PARSERS[name], capsys=capsys)
    assert "--batch-size N" in text and "--max-tokens N" in text
    absent = ("size-multiple", "skip-invalid", "train-subset", "valid-subset", "curriculum", "-valid ", "num-workers")
    assert [flag for flag in absent if flag in text] == []


@pytest.mark.parametrize(
    "flag, line",
    [
        ("--n-layer", "--n-layer: belongs to --arch transformer_xl, transformer_xl_enwik8_base, "),
        ("--adam-eps", "--adam-eps: belongs to --optimizer adam, muon, not to --optimizer nag"),
        ("--max-lr", "--max-lr: belongs to --lr-scheduler cosine, triangular, not to"),
    ],
)
def test_a_flag_of_another_part_says_whose_it_is(flag: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        runs.arguments("--arch transformer_lm_tiny --optimizer nag", flag, "2")
    assert str(error.value).startswith(line)


@pytest.mark.parametrize("name", PARSERS)
def test_help_fits_a_terminal_and_a_screen(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    everything = shown(PARSERS[name], capsys=capsys)
    with pytest.raises(SystemExit):
        options.parse_args_and_arch(PARSERS[name](), ["--help"])
    text = capsys.readouterr().out
    assert [line for line in (text + everything).splitlines() if len(line) > 80 and " {" not in line] == []
    assert "examples:" in text and text.count("\n") <= 56
    if "most used" in text:
        assert "--help-all shows all" in text and everything.count("\n") > text.count("\n")


def test_architectures_are_listed_with_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options.parse_args_and_arch(get_training_parser(), ["--list-archs"])
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines]  # columns are wider where a test has registered longer names
    assert ["transformer_lm_fast_demo", "transformer_lm", "4", "256", "3.15", "M"] in rows
    assert ["transformer_lm_gpt3_175", "transformer_lm", "96", "12288", "174", "B"] in rows
    assert [name for name in ARCHITECTURES if not any(line.startswith(f"{name} ") for line in lines)] == []
    assert max(map(len, lines)) <= 80


def test_a_family_names_its_sizes() -> None:
    with pytest.raises(UserError, match="did you mean gpt2_xl or gpt2_tiny or gpt2_small"):
        runs.arguments("--arch gpt2")
    with pytest.raises(UserError, match="did you mean transformer_lm_gpt3_13 or .* or transformer_lm_gpt3_large"):
        runs.arguments("--arch gpt3")


@pytest.mark.parametrize("name", PARSERS)
def test_the_place_of_results_has_one_name_beside_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(PARSERS[name], capsys=capsys)
    others = re.findall(
        r"^  --(?:results-path|save-dir|destdir|output) (?:DIR|FILE)(?:, --out)?", text, flags=re.MULTILINE
    )
    assert all(other.endswith(", --out") for other in others if "\n" not in other)


def test_optional_arguments_are_in_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        shown(PARSERS["fairseq-analyze notes"], capsys=capsys).partition("\n")[0].endswith("CHECKPOINT [DATA] [flags]")
    )


def test_a_default_with_a_meaning_is_said_once() -> None:
    action = next(a for _, a in get_training_parser().arguments if a.dest == "max_epoch")
    assert isinstance(action, argparse.Action) and str(action.help).endswith("epochs (default: 0, no limit)")


def test_every_flag_that_is_suggested_for_a_name_of_another_program_exists(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [shown(get_training_parser, "--arch", arch, capsys=capsys) for arch in ("llama_tiny", "bert_tiny")]
    texts.append(shown(get_training_parser, "--arch transformer_xl", capsys=capsys))
    texts.append(shown(PARSERS["fairseq-generate"], capsys=capsys))
    assert {f"--{name}" for name in flags_with_other_names()} <= set(re.findall(r"--[a-z0-9-]+", "".join(texts)))
