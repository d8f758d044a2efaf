"""Settings are checked where they are made: in Python in the names of fields, on a command line in
those of flags."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import fairseq.inference.writer  # noqa: F401  the settings of generation
from fairseq.config import fields
from fairseq.config.command_settings import ShardConfig
from fairseq.config.fields import Config
from fairseq.config.registry import CRITERIONS, LR_SCHEDULERS, MODELS, OPTIMIZERS, TASKS
from fairseq.config.settings import CommonConfig
from fairseq.data import glue
from fairseq.distributed import launch
from fairseq.errors import SettingError, UserError
from fairseq.models.encoder_settings import BertConfig, ElectraConfig
from fairseq.models.transformer_lm_settings import TransformerLMConfig
from fairseq.models.transformer_xl_settings import TransformerXLConfig
from fairseq.optim.lr_scheduler.settings import CosineConfig, WSDConfig
from fairseq.optim.settings import AdafactorConfig, AdamConfig
from fairseq.system import files, plugins, terminal
from fairseq.system.program import as_program
from fairseq.tasks.settings import MaskedLMTaskConfig
from fairseq.training import stages
from fairseq_cli import analyze, eval_lm, finetune, generate, preprocess, train  # noqa: F401  their settings


def registered() -> Iterator[type]:
    for registry in (MODELS, TASKS, CRITERIONS, OPTIMIZERS, LR_SCHEDULERS):
        for name in registry:
            if registry[name].__module__.startswith("fairseq."):  # not a plug-in of another test
                config = getattr(registry[name], "config_class", None)
                if config is not None:
                    yield config


def all_configs(base: type = Config) -> Iterator[type]:
    for config in base.__subclasses__():
        if config.__module__.startswith(("fairseq.", "fairseq_cli.")):
            yield config
            yield from all_configs(config)


def refused(field: dataclasses.Field[Any]) -> Iterator[Any]:
    """Values that the field does not take, from Python or from a command line."""
    if field.metadata["choices"] is not None:
        yield "nonsense" if isinstance(field.metadata["choices"][0], str) else max(field.metadata["choices"]) + 1
    low, high, above, below = field.metadata["bounds"]
    limits = ((low, -1), (high, 1), (above, 0), (below, 0))  # the last two are open
    yield from (limit + beyond for limit, beyond in limits if limit is not None)


def refusal(config: type, **values: Any) -> str:
    with pytest.raises(SettingError) as error:
        config(**values)
    return str(error.value)


def refusal_on_command_line(config: type, *argv: str) -> str:
    parser = argparse.ArgumentParser()
    fields.add_flags(parser, config)
    with pytest.raises(SettingError) as error:
        fields.checked(config, vars(parser.parse_args(argv)))
    return error.value.with_flags


def test_every_registered_part_has_checked_settings():
    assert all(issubclass(config, Config) for config in registered())
    assert len(set(registered())) > 20


def test_settings_of_several_parts_are_declared_once():
    declared: dict[str, list[str]] = {}
    for config in dict.fromkeys(all_configs()):
        for name in vars(config).get("__annotations__", {}):
            declared.setdefault(name, []).append(config.__name__)
    for name in ("sentence_avg", "no_apex", "max_target_positions", "lr", "fp16", "mem_len", "model_overrides"):
        assert len(declared[name]) == 1, declared[name]
    # rows of an encoder, with bounds of their own
    other_lengths = {"MaskedLMTaskConfig", "SentencePredictionTaskConfig"}
    assert set(declared["tokens_per_sample"]) == {"BlockConfig", *other_lengths}


def test_values_out_of_range_are_refused_in_the_name_of_the_field_and_of_the_flag():
    tried = 0
    for config in dict.fromkeys([*registered(), *all_configs()]):
        for field in dataclasses.fields(config):
            for value in refused(field):
                tried += 1
                shown = refusal(config, **{field.name: [value] if "list" in str(field.type) else value})
                flag = fields.flag_name(field.name)
                on_command_line = refusal_on_command_line(config, f"{flag}={value}")
                assert on_command_line.startswith(f"{flag} "), config
                assert shown.startswith(f"{field.name} "), config
                assert on_command_line == flag + shown.removeprefix(field.name), config
    assert tried > 300


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dropout": 7.0}, "dropout 7.0: must be less than 1"),
        ({"dropout": "0.5"}, "dropout: expected a number, got '0.5'"),
        ({"decoder_layers": 2.5}, "decoder_layers: expected a whole number, got 2.5"),
        ({"decoder_layers": True}, "decoder_layers: expected a whole number, got True"),
        ({"decoder_layers": None}, "decoder_layers: a value is needed"),
        ({"tie_adaptive_proj": "no"}, "tie_adaptive_proj: expected true or false, got 'no'"),
        ({"activation_fn": "gulu"}, "activation_fn gulu: choose from relu, "),
        ({"activation_fn": 3}, "activation_fn: expected text, got 3"),
        ({"adaptive_softmax_cutoff": ["5"]}, "adaptive_softmax_cutoff: expected a whole number, got "),
        ({"tokens_from_prev": "5"}, "tokens_from_prev: expected a whole number, got '5'"),
        ({"decoder_embed_dim": 10, "decoder_attention_heads": 3}, "decoder_attention_heads 3: must divide decoder_emb"),
        ({"tie_adaptive_weights": True}, "tie_adaptive_weights: needs adaptive_input and adaptive_softmax_cutoff"),
        ({"adaptive_input": True}, "adaptive_input: needs adaptive_input_cutoff"),
        ({"adaptive_softmax_cutoff": [9, 4]}, "adaptive_softmax_cutoff 9,4: cutoffs must be positive and ascending"),
    ],
)
def test_a_model_s_settings_are_refused_where_they_are_made(values: dict[str, Any], message: str):
    assert refusal(TransformerLMConfig, **values).startswith(message)
    with pytest.raises(SettingError) as error:
        dataclasses.replace(TransformerLMConfig(), **values)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (TransformerXLConfig, {"d_model": 10, "n_head": 3}, "n_head 3: must divide d_model 10, or give d_head"),
        (BertConfig, {"encoder_embed_dim": 10}, "encoder_attention_heads 12: must divide encoder_embed_dim 10"),
        (ElectraConfig, {"generator_size": 0.3}, "generator_size 0.3: 4 heads do not divide a generator of width 230"),
        (AdamConfig, {"adam_betas": [0.9]}, "adam_betas 0.9: expected two numbers"),
        (AdafactorConfig, {"warmup_init": True}, "warmup_init: needs relative_step; give both or neither"),
        (WSDConfig, {"warmup_updates": 90, "max_update": 100}, "warmup_updates 90: warmup and the decay's 20 updates"),
        (CosineConfig, {"lr": 0.1, "max_lr": 0.1, "max_update": 9}, "max_lr 0.1: must be greater than lr 0.1"),
        (
            MaskedLMTaskConfig,
            {"random_token_prob": 0.95},
            "random_token_prob 0.95: with leave_unmasked_prob 0.1 the sum",
        ),
        (ShardConfig, {"shard_id": 3, "num_shards": 3}, "shard_id 3: num_shards 3 are numbered from 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused_where_they_are_made(config: type, values: dict[str, Any], message: str):
    assert refusal(config, **values).startswith(message)


def test_numbers_are_converted_to_the_field_s_type():
    config = TransformerXLConfig(dropout=0, cutoffs=(5, 9))
    assert isinstance(config.dropout, float)
    assert config.cutoffs == [5, 9]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fields.typed(AdamConfig, {"adam_eps": "x"}), "adam_eps: expected a number, got 'x'"),
        (lambda: glue.layout_of("mlni"), "glue_task mlni: no such task; known: "),
        (lambda: stages.parse_stages("8:5,9:4"), "stages 8:5,9:4: updates count from the start of training"),
        (lambda: plugins.import_user_module("/none"), "user_dir /none: folder not found"),
        (lambda: files.prepare_folder("`save_dir`", "/dev/null"), "save_dir /dev/null: cannot be written"),
        (lambda: fields.parse_dict("`model_overrides`", "3"), "model_overrides 3: expected a dict"),
    ],
)
def test_the_library_names_arguments_and_settings_and_a_command_their_flags(call: Callable[[], Any], message: str):
    with pytest.raises(UserError) as error:
        call()
    assert str(error.value).startswith(message) and "--" not in str(error.value)
    name = message.split()[0].removesuffix(":")
    assert error.value.with_flags.startswith(f"--{name.replace('_', '-')}")


def test_a_command_s_log_shows_flags_for_settings_in_backticks():
    record = logging.LogRecord("x", logging.INFO, "x.py", 1, "use `max_tokens` %d; not `a b`", (3,), None)
    for formatter in (terminal.Formatter(), terminal.FileFormatter()):
        assert formatter.format(record).endswith(" | INFO | use --max-tokens 3; not `a b`")


def test_a_command_prints_the_flag_of_a_setting_that_it_finds_wrong_later(capsys):
    with pytest.raises(SystemExit), as_program():
        CommonConfig(log_interval=0)
    assert "error: --log-interval 0: must be at least 1" in capsys.readouterr().err


def test_a_rank_reports_a_mistake_with_flags():
    error = SettingError("`n_head` 3: must divide `d_model` 10")
    assert str(launch._mistake(error)) == "--n-head 3: must divide --d-model 10"


def test_an_error_that_another_process_raised_still_knows_fields_and_flags():
    error = pickle.loads(pickle.dumps(SettingError("`n_head` 3: must divide `d_model` 10")))
    assert (str(error), error.with_flags) == (
        "n_head 3: must divide d_model 10",
        "--n-head 3: must divide --d-model 10",
    )
