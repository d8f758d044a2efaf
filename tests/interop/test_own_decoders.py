"""Plug-ins' models that extend ``TransformerLanguageModel``, with this package's decoder, or with
one of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from user_folders import user_folder

from fairseq import checkpoint
from fairseq.hub import LanguageModel

PLUGIN = """
import torch.nn as nn
from fairseq.models import FairseqModel, register_model, register_model_architecture
from fairseq.models.transformer import TransformerDecoder
from fairseq.models.transformer_lm import TransformerLanguageModel, base_gpt3_architecture, base_lm_architecture
from fairseq.modules.transformer_layer import TransformerDecoderLayer


class Halved(TransformerDecoderLayer):
    def __init__(self, args, no_encoder_attn=False):
        super().__init__(args)
        self.scale = nn.Parameter(self.final_layer_norm.weight.new_tensor(0.5))

    def forward(self, x, *args, **options):
        out, *rest = super().forward(x, *args, **options)
        return (x + self.scale * (out - x), *rest)


class HalvedDecoder(TransformerDecoder):
    def build_decoder_layer(self, args, no_encoder_attn=False):
        return Halved(args, no_encoder_attn)


@register_model("halved_lm")
class HalvedLM(TransformerLanguageModel):
    @classmethod
    def build_model(cls, args, task):
        base_lm_architecture(args)
        args.max_target_positions = args.max_target_positions or args.tokens_per_sample
        embed = cls.build_embedding(args, task.source_dictionary, args.decoder_input_dim)
        return cls(HalvedDecoder(args, task.target_dictionary, embed, no_encoder_attn=True))


@register_model_architecture("halved_lm", "halved_lm_tiny")
def tiny(args):
    args.decoder_layers, args.decoder_embed_dim, args.decoder_attention_heads = 2, 16, 2
    base_gpt3_architecture(args)


@register_model("same_lm")
class SameLM(TransformerLanguageModel):
    @classmethod
    def build_model(cls, args, task):
        model = super().build_model(args, task)
        assert isinstance(model, FairseqModel)
        return model


@register_model_architecture("same_lm", "same_lm_tiny")
def same(args):
    args.decoder_layers, args.decoder_embed_dim, args.decoder_attention_heads = 2, 16, 2
    base_lm_architecture(args)
"""
FLAGS = """--cpu --train-subset valid --valid-subset test --max-tokens 64 --tokens-per-sample 16 --log-format json
    --log-interval 1 --required-batch-size-multiple 1 --optimizer adam --lr 0.01"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    with user_folder(tmp_path_factory.mktemp("home"), "own_decoders", PLUGIN) as flags:
        yield flags


@pytest.mark.parametrize("model", ["halved_lm", "same_lm"])
def test_a_model_trains_resumes_and_scores(plugin: list[Any], model: str, tmp_path: Path) -> None:
    flags = [plugin, FLAGS, f"--arch {model}_tiny --criterion cross_entropy"]
    whole = runs.losses(runs.train(tmp_path / "whole", *flags, "--max-update 14 --no-save"))
    assert sum(whole[-4:]) < sum(whole[:4]) - 1
    runs.train(tmp_path / "cut", *flags, "--max-update 7")
    rest = runs.losses(runs.train(tmp_path / "cut", *flags, "--max-update 14"))
    assert rest == whole[7:]
    saved = tmp_path / "cut" / "checkpoint_last.pt"
    assert ("decoder.layers.0.scale" in checkpoint.read(saved)["model"]) == (model == "halved_lm")
    lm = LanguageModel.from_pretrained(saved, runs.DATA)
    tokens = torch.tensor([[2, 5, 9, 11]])
    logits = lm.model(tokens[:, :-1])[0] if model == "halved_lm" else None
    scores = lm.score_tokens(tokens, 3)[0]
    if logits is not None:
        expected = torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:], reduction="none")
        torch.testing.assert_close(scores, expected)
    assert lm.model.can_generate == (model == "same_lm")
