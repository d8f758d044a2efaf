"""``docs/compatibility.md`` says which parts of fairseq there are, and lists its flags."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

import pytest
import runs
import torch

from fairseq.config import fields, options
from fairseq.config.foreign_flags import TRAINING, foreign_flags
from fairseq.config.registry import is_outside
from fairseq.criterions import CRITERIONS
from fairseq.errors import UserError
from fairseq.models import ARCHITECTURES
from fairseq.models.loading import check_supported
from fairseq.models.transformer_lm import TransformerDecoder
from fairseq.models.transformer_lm_settings import TransformerLMConfig
from fairseq.optim import OPTIMIZERS
from fairseq.optim.lr_scheduler import LR_SCHEDULERS
from fairseq.tasks import TASKS
from fairseq_cli.common import get_training_parser
from fairseq_cli.eval_lm import get_eval_lm_parser
from fairseq_cli.generate import get_generation_parser
from fairseq_cli.interactive import get_interactive_generation_parser
from fairseq_cli.preprocess import get_preprocessing_parser
from fairseq_cli.validate import get_validation_parser
from scripts import reference_pages

PAGE = (runs.ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
PARTS = PAGE.split("## Parts")[1].split("## Checkpoints")[0]
LISTED = set(re.findall(r"`(--[\w-]+)`", PAGE.split("## Flags")[1]))


REGISTRIES = {
    "task": TASKS,
    "criterion": CRITERIONS,
    "optimizers": OPTIMIZERS,
    "schedules": LR_SCHEDULERS,
    "": ARCHITECTURES,
}


def parts() -> list[tuple[str, str, bool]]:
    """Kind and name of every part in the page's table, and whether it is there; models have no
    kind."""
    found = []
    rows = re.findall(r"^\| (\w* ?)(`.*?) \| (same|different|refused) \|", PARTS, flags=re.MULTILINE)
    for kind, names, status in rows:
        for name in re.findall(r"`([\w.…]+)`", names.partition(" of ")[0]):
            found.append((kind.strip(), f"transformer_lm{name}" if name.startswith("_") else name, status != "refused"))
    return found


@pytest.mark.parametrize(("kind", "name", "there"), parts())
def test_every_part_is_there_or_not_as_the_page_says(kind: str, name: str, there: bool) -> None:
    registry: Any = REGISTRIES[kind]
    ours = [part for part in registry if kind == "" or not is_outside(registry[part])]
    assert any(part == name or ("…" in name and part.startswith(name.rstrip("…."))) for part in ours) == there


def test_the_page_names_the_parameters_of_transformer_lm() -> None:
    [numbers] = re.findall(r"\(([\d,]+) parameters with ([\d,]+) words", PARTS)
    count, words = (int(number.replace(",", "")) for number in numbers)
    args = argparse.Namespace()
    ARCHITECTURES["transformer_lm"].fill(args)
    with torch.device("meta"):
        decoder = TransformerDecoder(fields.typed(TransformerLMConfig, args), words, padding_idx=1)
    assert sum(parameter.numel() for parameter in decoder.parameters()) == count


def test_layer_norm_stands_where_the_page_says() -> None:
    assert "off in `transformer_lm`, on in the other architectures" in PAGE
    for name in ARCHITECTURES:
        if name.startswith(("transformer_lm", "shortformer")):
            args = argparse.Namespace()
            ARCHITECTURES[name].fill(args)
            assert fields.typed(TransformerLMConfig, args).decoder_normalize_before == (name != "transformer_lm"), name


def test_a_checkpoint_with_the_setting_alibi_is_refused_and_one_without_is_not() -> None:
    assert "checkpoint with the setting `alibi` is refused" in PAGE.replace("\n", " ")
    check_supported({"alibi": False, "arch": "transformer_lm"}, "model.pt")
    with pytest.raises(UserError, match=r"model\.pt: alibi=True"):
        check_supported({"alibi": True, "arch": "transformer_lm"}, "model.pt")


def test_the_page_lists_every_flag_that_is_not_read() -> None:
    unread = {f"--{name}" for name in foreign_flags(TRAINING)}
    elsewhere = {"--bpe", "--tokenizer", "--scoring", "--combine-val", "--save-async"}  # or aliases
    assert unread - LISTED - elsewhere == set()
    assert len(LISTED) > 350


def test_the_page_shows_how_a_parser_treats_a_flag() -> None:
    flags = ["--max-tokens", "--lazy-load", "--amp", "--dataset-impl"]
    assert reference_pages._treatment("train", flags) == {
        "--max-tokens": ("same", ""),
        "--lazy-load": ("no effect", ""),
        "--amp": ("refused", "use --fp16, which keeps float32 parameters"),
        "--dataset-impl": ("refused", "data are mapped files; use mmap"),
    }
    assert reference_pages._treatment("generate", ["--dataset-impl", "--beam"])["--beam"] == ("same", "")


PARSERS: dict[str, Any] = {
    "eval-lm": get_eval_lm_parser,
    "generate": get_generation_parser,
    "interactive": get_interactive_generation_parser,
    "preprocess": get_preprocessing_parser,
    "train": get_training_parser,
    "validate": get_validation_parser,
}
IN_FAIRSEQ = json.loads((runs.GOLDEN.parent / "fairseq_0_12" / "flags.json").read_text())
EARLIER = "--raw-text --lazy-load --tbmf-wrapper"  # 0.9 to 0.11


@pytest.mark.parametrize("command", PARSERS)
def test_a_command_knows_every_flag_of_fairseqs(command: str) -> None:
    parser, flags = PARSERS[command](), IN_FAIRSEQ[command]
    options.parse_args_and_arch(parser, [] if command == "preprocess" else ["data"])
    switches = f"{flags['switches']} {EARLIER if command != 'preprocess' else ''}".split()
    known = parser.by_flag
    assert {*switches, *flags["values"].split()} <= known.keys()
    assert [flag for flag in switches if known[flag].nargs not in (0, "?")] == []
    assert [flag for flag in flags["values"].split() if known[flag].nargs == 0] == []


@pytest.mark.parametrize(
    ("command", "unread"),
    [
        ("eval-lm", "--num-workers 1 --criterion x --max-target-positions 9 --optimizer adam"),
        ("validate", "--max-target-positions 9 --gen-subset valid --remove-bpe --fp16-init-scale 4 --bpe-codes x"),
        ("generate", "--max-tokens 64 -a x --restore-file x --reset-optimizer --skip-invalid-size-inputs-valid-test"),
        ("interactive", "--distributed-world-size 2 --results-path x --num-workers 0 --update-epoch-batch-itr True"),
    ],
)
def test_flags_without_an_effect_are_named_in_one_note(
    command: str, unread: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [word for word in unread.split() if word.startswith("-")]
    options.parse_args_and_arch(PARSERS[command](), ["data", *unread.split(), "--cpu", "--tpu=false"])
    assert capsys.readouterr().err == f"note: {', '.join(names)}: no effect here\n"


@pytest.mark.parametrize("command", ["eval-lm", "validate"])
def test_evaluation_knows_no_flags_of_training_that_fairseqs_does_not(command: str) -> None:
    with pytest.raises(UserError, match="--arch: no such flag"):
        options.parse_args_and_arch(PARSERS[command](), ["data", "--arch", "transformer_lm"])
