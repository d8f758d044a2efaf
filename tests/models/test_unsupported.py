"""Settings that would change a checkpoint's result, and that nothing here reads, are refused by
name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from mistakes import logged, user_error

from fairseq.errors import UserError
from fairseq.hub import LanguageModel
from fairseq.inference.loading import load_models
from fairseq_cli.eval_lm import get_eval_lm_parser

BASELINE = runs.GOLDEN / "baseline.pt"


def with_settings(folder: Path, **settings: Any) -> Path:
    """The golden checkpoint of fairseq's as it would be with other *settings*."""
    state = runs.checkpoint.load(BASELINE)
    torch.save({**state, "args": {**state["args"], **settings}}, folder / "c.pt")
    return folder / "c.pt"


@pytest.mark.parametrize(
    "name, value",
    [
        ("character_embeddings", True),
        ("quant_noise_pq", 0.1),
        ("quant_noise_scalar", 0.5),
        ("base_layers", 1),
        ("scale_fc", True),
        ("scale_heads", True),
        ("decoder_xformers_att_config", "{'name': 'linformer'}"),
        ("past_target", True),
        ("output_dictionary_size", 1000),
        ("shorten_method", "truncate"),
    ],
)
def test_a_setting_that_changes_the_result_is_refused_in_evaluation_and_training(
    name: str, value: Any, tmp_path: Path
) -> None:
    path = with_settings(tmp_path, **{name: value})
    with pytest.raises(UserError, match=f"c.pt: {name}=.*is not implemented and changes the result"):
        LanguageModel.from_pretrained(path, runs.DATA)
    flags = """--arch transformer_lm_wiki103 --decoder-layers 2 --decoder-attention-heads 4 --decoder-embed-dim 64
        --decoder-ffn-embed-dim 128 --adaptive-softmax-cutoff 200,600 --adaptive-input-cutoff 200,600 --cpu
        --criterion adaptive_loss --tokens-per-sample 64 --max-tokens 128 --train-subset valid --valid-subset test"""
    with pytest.raises(UserError, match=f"{name}=.*is not implemented"):
        runs.train(tmp_path / "run", flags, "--reset-optimizer --max-update 1 --restore-file", path)


def test_settings_that_change_no_result_are_read_past(tmp_path: Path) -> None:
    harmless = {"checkpoint_activations": True, "offload_activations": True, "quant_noise_pq_block_size": 4}
    harmless |= {"future_target": True, "min_params_to_wrap": 3, "pad_to_fixed_length": True, "log_format": "x"}
    exact = LanguageModel.from_pretrained(BASELINE, runs.DATA).score("a b c")[1]
    model = LanguageModel.from_pretrained(with_settings(tmp_path, **harmless), runs.DATA)
    assert torch.equal(model.score("a b c")[1], exact)


def test_an_override_can_take_such_a_setting_back(tmp_path: Path) -> None:
    path = with_settings(tmp_path, quant_noise_pq=0.1)
    LanguageModel.from_pretrained(path, runs.DATA, overrides={"quant_noise_pq": 0})


@pytest.mark.parametrize(
    "name, hint",
    [
        ("decoder_layer", "did you mean decoder_layers"),
        ("droput", "did you mean dropout"),
        ("mem_len", "no such setting of transformer_lm_wiki103"),
        ("lr", "no such setting"),
        ("quant_noise_pq_block_size", "did you mean quant_noise_pq"),
    ],
)
def test_an_override_that_nothing_reads_is_refused(name: str, hint: str) -> None:
    with user_error(f"--model-overrides {name}: .*{hint}"):
        LanguageModel.from_pretrained(BASELINE, runs.DATA, overrides={name: 1})


@pytest.mark.parametrize(
    "name, value",
    [
        ("arch", "none"), ("arch", "bert_tiny"), ("decoder_layers", 3), ("decoder_layers", "x"), ("task", "masked_lm"),
        ("tokens_per_sample", "x"), ("dropout", 2), ("alibi", True),
    ],
)  # fmt: skip
def test_an_override_that_does_not_fit_is_named_not_the_file_that_does(name: str, value: object) -> None:
    with user_error(f"^--model-overrides {{'{name}': {value!r}}}: "):
        LanguageModel.from_pretrained(BASELINE, runs.DATA, overrides={name: value})


def test_an_override_of_data_that_a_command_reads_from_its_flags_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    overrides = {"max_tokens": 64, "data": "x", "max_sentences": 2, "batch_size": 3, "num_workers": 0}
    given = {"max_tokens": None, "num_workers": 1}
    [_], _, trained = load_models([BASELINE], runs.DATA, overrides, given)
    assert (trained.data.max_tokens, trained.data.batch_size, trained.data_path) == (None, 3, str(runs.DATA))
    flags = {"max_tokens": "--max-tokens", "data": "DATA", "max_sentences": "--max-sentences"}
    flags["num_workers"] = "--num-workers"
    assert logged(caplog) == [f"--model-overrides {name}: no effect; give {flag}" for name, flag in flags.items()]


def test_an_override_of_what_a_flag_decides_names_the_flag() -> None:
    from fairseq.config import options
    from fairseq_cli import eval_lm

    words = runs.words(runs.DATA, "--cpu --batch-size 1 --path", BASELINE)
    args = options.parse_args_and_arch(get_eval_lm_parser(), [*words, "--model-overrides", "{'bf16': True}"])
    with user_error("--model-overrides bf16: not a setting of the model; give --bf16"):
        eval_lm.main(args)
