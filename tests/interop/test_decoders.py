"""Plug-ins that build language models of this package's decoders and modules, in the way of
fairseq's own models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
import torch.nn.functional as F
from user_folders import user_folder

from fairseq.config import options
from fairseq.errors import UserError
from fairseq_cli import eval_lm
from fairseq_cli.eval_lm import get_eval_lm_parser

PLUGIN = """
import torch.nn as nn
import torch.nn.functional as F
from fairseq import options, utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.models import FairseqDecoder, FairseqLanguageModel, register_model, register_model_architecture
from fairseq.models.lstm import Embedding as LSTMEmbedding, LSTMDecoder
from fairseq.models.transformer import DEFAULT_MAX_TARGET_POSITIONS, Embedding, TransformerDecoder
from fairseq.models.transformer_lm import TransformerLanguageModel, base_lm_architecture
from fairseq.modules import AdaptiveInput


@register_model("own_transformer_lm")
class OwnTransformer(FairseqLanguageModel):
    @staticmethod
    def add_args(parser):
        TransformerLanguageModel.add_args(parser)
        parser.add_argument("--own-cutoff", metavar="EXPR")

    @classmethod
    def build_model(cls, args, task):
        base(args)
        if args.own_cutoff:
            cutoffs = options.eval_str_list(args.own_cutoff, type=int)
            embed = AdaptiveInput(len(task.source_dictionary), task.source_dictionary.pad(), 16, 2, 16, cutoffs, 0, 8)
        else:
            embed = Embedding(len(task.source_dictionary), 16, task.source_dictionary.pad())
        return cls(TransformerDecoder(args, task.target_dictionary, embed, no_encoder_attn=True))


@register_model_architecture("own_transformer_lm", "own_transformer_lm")
def base(args):
    args.own_cutoff = getattr(args, "own_cutoff", None)
    args.decoder_embed_dim = getattr(args, "decoder_embed_dim", 16)
    args.decoder_layers = getattr(args, "decoder_layers", 1)
    args.decoder_attention_heads = getattr(args, "decoder_attention_heads", 2)
    args.max_target_positions = getattr(args, "tokens_per_sample", DEFAULT_MAX_TARGET_POSITIONS)
    base_lm_architecture(args)


@register_model("own_lstm_lm")
class OwnLSTM(FairseqLanguageModel):
    @classmethod
    def build_model(cls, args, task):
        words = task.target_dictionary
        return cls(LSTMDecoder(
            words, embed_dim=8, hidden_size=8, out_embed_dim=8, num_layers=2, attention=False, encoder_output_units=0,
            pretrained_embed=LSTMEmbedding(len(words), 8, words.pad()), share_input_output_embed=True,
        ))


@register_model_architecture("own_lstm_lm", "own_lstm_lm")
def lstm(args):
    pass


class Bidirectional(FairseqDecoder):
    def __init__(self, words):
        super().__init__(words)
        self.embed, self.output = nn.Embedding(len(words), 8), nn.Linear(8, len(words))

    def forward(self, src_tokens, features_only=False, masked_tokens=None, **unused):
        x = self.embed(src_tokens)
        x = x + x.mean(1, keepdim=True)
        return self.output(x if masked_tokens is None else x[masked_tokens]), None

    def max_positions(self):
        return 64


@register_model("own_masked_lm")
class OwnMasked(FairseqLanguageModel):
    @classmethod
    def build_model(cls, args, task):
        return cls(Bidirectional(task.source_dictionary))

    def forward(self, src_tokens, features_only=False, **kwargs):
        return self.decoder(src_tokens, features_only, **kwargs)


@register_model_architecture("own_masked_lm", "own_masked_lm")
def masked(args):
    pass


@register_criterion("own_adaptive_loss")
class OwnAdaptiveLoss(FairseqCriterion):
    def forward(self, model, sample, reduce=True):
        net_output = model(**sample["net_input"])
        logits, targets = model.decoder.adaptive_softmax(net_output[0], model.get_targets(sample, net_output).view(-1))
        loss = sum(F.cross_entropy(a, b, ignore_index=self.padding_idx, reduction="sum")
                   for a, b in zip(logits, targets) if b is not None)
        return loss, sample["ntokens"], {
            "loss": loss.data, "ntokens": sample["ntokens"], "nsentences": len(sample["target"]),
        }
"""
FLAGS = """--cpu --train-subset valid --valid-subset test --max-tokens 64 --tokens-per-sample 16 --log-format json
    --log-interval 1 --required-batch-size-multiple 1 --optimizer adam --lr 0.01"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    with user_folder(tmp_path_factory.mktemp("home"), "decoder_parts", PLUGIN) as flags:
        yield flags


@pytest.mark.parametrize("model", ["own_transformer_lm", "own_transformer_lm --own-cutoff [200,600]", "own_lstm_lm"])
def test_models_around_our_decoders_train(plugin: list[Any], model: str, tmp_path: Path) -> None:
    log = runs.train(tmp_path, plugin, FLAGS, f"--arch {model} --criterion cross_entropy --max-update 25 --no-save")
    assert sum(runs.losses(log)[-5:]) < sum(runs.losses(log)[:5]) - 1


def test_a_language_model_whose_decoder_takes_masked_tokens_is_a_masked_model(
    plugin: list[Any], tmp_path: Path
) -> None:
    masked = "--arch own_masked_lm --task masked_lm --criterion masked_lm"
    log = runs.train(tmp_path, plugin, FLAGS, masked, "--mask-prob 0.5 --max-update 60 --no-save")
    assert sum(runs.losses(log)[-5:]) < sum(runs.losses(log)[:5]) - 1


def test_a_masked_model_of_a_plugin_is_read_with_the_task_it_was_trained_with(
    plugin: list[Any], tmp_path: Path
) -> None:
    masked = "--arch own_masked_lm --task masked_lm --criterion masked_lm --max-update 1 --disable-validation"
    runs.train(tmp_path, plugin, FLAGS, masked)
    words = runs.words([plugin, "--cpu --path", tmp_path / "checkpoint_last.pt", "--gen-subset test"])
    args = options.parse_args_and_arch(get_eval_lm_parser(), [str(runs.DATA), *words], task_defaults=False)
    with pytest.raises(UserError, match="OwnMasked"):  # not its dictionary, which has a mask symbol
        eval_lm.main(args)


def test_a_plugins_model_may_say_that_it_does_not_predict_the_next_token() -> None:
    from fairseq.models import BaseFairseqModel

    model: Any = BaseFairseqModel()
    assert model.predicts_next_token
    model = BaseFairseqModel()
    model.predicts_next_token = False
    assert not model.predicts_next_token


def test_a_model_around_our_decoder_scores_and_samples(plugin: list[Any], tmp_path: Path) -> None:
    from fairseq.hub import LanguageModel

    runs.train(tmp_path, plugin, FLAGS, "--arch own_lstm_lm --max-update 2")
    lm = LanguageModel.from_pretrained(tmp_path / "checkpoint_last.pt", runs.DATA)
    tokens = torch.tensor([[2, 5, 9, 11]])
    logits = F.linear(lm.model(tokens[:, :-1])[0], lm.model.decoder.embed_tokens.weight)
    loss = F.cross_entropy(logits[0], tokens[0, 1:], reduction="none")
    torch.testing.assert_close(lm.score_tokens(tokens, 3)[0], loss)


def test_an_adaptive_loss_of_a_plugin_equals_ours(plugin: list[Any], tmp_path: Path) -> None:
    # One batch an epoch: plug-ins read blocks in another order.
    flags = [runs.BASELINE, runs.NO_DROPOUT, "--max-tokens 4000 --max-update 2 --no-save", plugin]
    own = runs.train(tmp_path, *flags, "--criterion own_adaptive_loss")
    ours = runs.train(tmp_path, *flags, "--criterion adaptive_loss --adaptive-loss-legacy-padding")
    assert runs.losses(own) == pytest.approx(runs.losses(ours), rel=1e-5)


def test_a_copied_adaptive_softmax_is_called_as_in_fairseq() -> None:
    from fairseq.models.fairseq_decoder import FairseqDecoder
    from fairseq.modules.adaptive_softmax import AdaptiveSoftmax
    from fairseq.text.dictionary import Dictionary

    ours = AdaptiveSoftmax(50, 8, [10, 30])
    decoder: Any = FairseqDecoder(Dictionary())
    decoder.adaptive_softmax = Copied(ours)
    layer = decoder.output_distribution
    hidden, target = torch.randn(9, 8), torch.tensor([1, 2, 11, 31, 9, 10, 49, 5, 1])
    # Words 11 and 31 are the second of their bands, which fairseq does not train.
    torch.testing.assert_close(
        layer.loss(hidden, layer.partition(target, 1)), ours.loss(hidden, ours.partition(target, 1, True))
    )
    torch.testing.assert_close(layer.target_log_probs(hidden, target), ours.target_log_probs(hidden, target))


class Copied(torch.nn.Module):
    """The methods of fairseq's softmax around another one."""

    cutoff = (10, 30, 50)

    def __init__(self, softmax: Any) -> None:
        super().__init__()
        self.softmax = softmax

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> Any:
        return self.softmax(hidden, target)

    def get_log_prob(self, hidden: torch.Tensor, target: None) -> Any:
        assert hidden.dim() == 3 and target is None
        return self.softmax.get_log_prob(hidden)
