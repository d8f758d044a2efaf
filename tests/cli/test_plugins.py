"""Parts of a user's own, written as for fairseq 0.x, in the folder that ``--user-dir`` names."""

from __future__ import annotations

import sys

import pytest
import runs
import torch

from fairseq.config.settings import training_settings
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.errors import UserError
from fairseq.tasks import setup_task
from fairseq.training.state import TrainingState

PLUGIN = '''
import torch
import torch.nn as nn
import torch.nn.functional as F

from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.models import FairseqDecoder, FairseqLanguageModel, register_model, register_model_architecture
from fairseq.models.transformer_lm import TransformerLanguageModel, base_lm_architecture
from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingTask


@register_model("rnn_lm")
class RNNLanguageModel(FairseqLanguageModel):
    @staticmethod
    def add_args(parser):
        parser.add_argument("--rnn-dim", type=int, metavar="N", help="width")
        parser.add_argument("--rnn-dropout", type=float, default="0.0", metavar="D", help="dropout")
        parser.add_argument("--rnn-tied", action="store_true", help="one matrix of words")

    @classmethod
    def build_model(cls, args, task):
        base_architecture(args)
        return cls(RNNDecoder(task.source_dictionary, args.rnn_dim, args.rnn_dropout, args.rnn_tied))


class RNNDecoder(FairseqDecoder):
    def __init__(self, dictionary, dim, dropout, tied):
        super().__init__(dictionary)
        self.embed = nn.Embedding(len(dictionary), dim, dictionary.pad())
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, len(dictionary))
        self.dropout = dropout
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, prev_output_tokens, **kwargs):
        x, _ = self.rnn(F.dropout(self.embed(prev_output_tokens), self.dropout, self.training))
        return self.out(x), None

    def max_positions(self):
        return int(1e5)


@register_model_architecture("rnn_lm", "rnn_lm_base")
def base_architecture(args):
    args.rnn_dim = getattr(args, "rnn_dim", 24)
    args.rnn_tied = getattr(args, "rnn_tied", True)


@register_model_architecture("rnn_lm", "rnn_lm_small")
def small(args):
    args.rnn_dim = getattr(args, "rnn_dim", 12)
    base_architecture(args)


@register_model("scaled_transformer_lm")
class ScaledTransformer(TransformerLanguageModel):
    @staticmethod
    def add_args(parser):
        TransformerLanguageModel.add_args(parser)
        parser.add_argument("--output-scale", type=float, default=1.0)

    @classmethod
    def build_model(cls, args, task):
        model = super().build_model(args, task)
        model.output_scale = args.output_scale
        return model


@register_model_architecture("scaled_transformer_lm", "scaled_transformer_lm")
def scaled(args):
    args.decoder_layers = getattr(args, "decoder_layers", 1)
    base_lm_architecture(args)


@register_criterion("smoothed")
class Smoothed(FairseqCriterion):
    def __init__(self, task, sentence_avg, label_smoothing):
        super().__init__(task)
        self.sentence_avg = sentence_avg
        self.eps = label_smoothing

    @staticmethod
    def add_args(parser):
        parser.add_argument("--label-smoothing", default=0.0, type=float, metavar="D")

    def forward(self, model, sample, reduce=True):
        net_output = model(**sample["net_input"])
        lprobs = model.get_normalized_probs(net_output, log_probs=True)
        lprobs = lprobs.view(-1, lprobs.size(-1))
        target = model.get_targets(sample, net_output).view(-1)
        nll = F.nll_loss(lprobs, target, ignore_index=self.padding_idx, reduction="sum")
        loss = (1 - self.eps) * nll - self.eps * lprobs.mean(-1).sum()
        sample_size = sample["target"].size(0) if self.sentence_avg else sample["ntokens"]
        return loss, sample_size, {
            "loss": loss.data, "nll_loss": nll.data, "ntokens": sample["ntokens"],
            "nsentences": sample["target"].size(0), "sample_size": sample_size,
        }

    @staticmethod
    def logging_outputs_can_be_summed():
        return True


@register_optimizer("sign_sgd")
class SignSGD(FairseqOptimizer):
    def __init__(self, args, params):
        super().__init__(args)
        params = list(params)
        for p in params:
            p.register_hook(lambda grad: grad.sign() * args.sign_strength)
        self._optimizer = torch.optim.SGD(params, **self.optimizer_config)

    @staticmethod
    def add_args(parser):
        parser.add_argument("--sign-strength", type=float, default=1.0)

    @property
    def optimizer_config(self):
        return {"lr": self.args.lr[0]}


@register_lr_scheduler("halving")
class Halving(FairseqLRScheduler):
    """Halves the rate at the end of an epoch whose validation is not better."""

    def __init__(self, args, optimizer):
        super().__init__(args, optimizer)
        self.losses = []
        self.optimizer.set_lr(args.lr[0])

    @staticmethod
    def add_args(parser):
        parser.add_argument("--halving-margin", type=float, default=0.0)

    def state_dict(self):
        return {"losses": self.losses}

    def load_state_dict(self, state):
        self.losses = state["losses"]

    def step(self, epoch, val_loss=None):
        if self.losses and val_loss is not None and val_loss > min(self.losses) - self.args.halving_margin:
            self.optimizer.set_lr(self.optimizer.get_lr() / 2)
        self.losses.append(val_loss)
        return self.optimizer.get_lr()


@register_task("noisy_language_modeling")
class NoisyTask(LanguageModelingTask):
    @staticmethod
    def add_args(parser):
        LanguageModelingTask.add_args(parser)
        parser.add_argument("--noise", type=float, default=0.0)
        parser.add_argument("--noise-kind")

    @classmethod
    def setup_task(cls, args, **kwargs):
        task = super().setup_task(args, **kwargs)
        assert isinstance(task, cls) and args.noise_kind is None
        task.noise = args.noise
        return task
'''


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home") / "my_parts"
    folder.mkdir()
    (folder / "__init__.py").write_text("from . import parts\n")
    (folder / "parts.py").write_text(PLUGIN)
    yield ["--user-dir", folder]
    for name in [name for name in sys.modules if name.split(".")[0] == "my_parts"]:
        del sys.modules[name]


DATA_FLAGS = """--cpu --train-subset valid --valid-subset test --tokens-per-sample 16 --max-tokens 64 --seed 3
    --log-format json --log-interval 1 --required-batch-size-multiple 1"""


def test_a_whole_set_of_parts_trains_and_resumes(plugin, tmp_path):
    flags = f"""{DATA_FLAGS} --arch rnn_lm_small --criterion smoothed --optimizer sign_sgd --lr-scheduler halving
        --task noisy_language_modeling --noise 0.5 --label-smoothing 0.1 --sign-strength 1 --lr 0.5
        --rnn-dropout 0.1 --max-epoch 2"""
    log = runs.train(tmp_path / "a", plugin, flags)
    losses = [line["loss"] for line in runs.updates(log)]
    assert losses[-1] < losses[0] - 0.3
    assert all(line["nll_loss"] != line["loss"] for line in runs.updates(log)), "the criterion's own figures are logged"
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "checkpoint_last.pt").write_bytes((tmp_path / "a" / "checkpoint1.pt").read_bytes())
    again = runs.train(tmp_path / "b", plugin, flags)
    assert runs.updates(again) == runs.updates(log)[42:]
    ends = [runs.content(tmp_path / name / "checkpoint_last.pt") for name in ("a", "b")]
    assert runs.difference(*ends) is None


def test_schedule_is_told_of_each_epochs_validation(plugin, tmp_path):
    flags = f"{DATA_FLAGS} --arch rnn_lm_small --criterion cross_entropy --optimizer sgd --lr 0.4 --max-epoch 3"
    log = runs.train(tmp_path, plugin, flags, "--lr-scheduler halving --halving-margin 100 --no-save")
    rates = {line["epoch"]: line["lr"] for line in runs.updates(log)}
    assert rates == {1: 0.4, 2: 0.4, 3: 0.2}


def test_architecture_fills_what_the_command_line_and_the_file_leave_open(plugin, tmp_path):
    (tmp_path / "c.yaml").write_text("rnn_dim: 8\nrnn_dropout: 0.3\n")
    parse = [plugin, "--arch rnn_lm_small --max-tokens 64"]
    assert runs.arguments(*parse).rnn_dim == 12
    assert runs.arguments(*parse).rnn_dropout == 0.0, "a default written as text is converted"
    assert runs.arguments(*parse, "--rnn-dim 5").rnn_dim == 5
    args = runs.arguments(*parse, "--config", tmp_path / "c.yaml")
    assert (args.rnn_dim, args.rnn_dropout) == (8, 0.3)


def test_model_that_extends_ours_has_our_flags_and_its_own(plugin, tmp_path):
    args = runs.arguments(plugin, "--arch scaled_transformer_lm --decoder-embed-dim 32 --output-scale 0.5")
    assert (args.decoder_layers, args.decoder_embed_dim, args.output_scale) == (1, 32, 0.5)
    flags = f"{DATA_FLAGS} --arch scaled_transformer_lm --decoder-embed-dim 32 --decoder-attention-heads 2"
    log = runs.train(tmp_path, plugin, flags, "--criterion smoothed --max-update 2 --no-save")
    assert len(runs.losses(log)) == 2


def test_help_shows_the_flags_of_a_plugin_and_those_of_ours_that_it_extends(plugin, capsys):
    with pytest.raises(SystemExit):
        runs.arguments(plugin, "--arch scaled_transformer_lm --help")
    text = capsys.readouterr().out
    assert all(f"\n  {flag} " in text for flag in ("--output-scale", "--decoder-layers", "--max-target-positions"))


def test_importing_twice_is_the_same_as_once_and_a_taken_name_is_refused(plugin):
    runs.arguments(plugin, "--arch rnn_lm_base --max-tokens 64")
    runs.arguments(plugin, "--arch rnn_lm_base --max-tokens 64")
    from fairseq.criterions import register_criterion

    with pytest.raises(ValueError, match="registered already"):

        @register_criterion("smoothed")
        class Another:
            pass


def test_unknown_architecture_offers_the_plugins_too(plugin):
    with pytest.raises(UserError, match="rnn_lm_smal: no such architecture; did you mean rnn_lm_small"):
        runs.arguments(plugin, "--arch rnn_lm_smal --max-tokens 64")


def test_criterion_without_compute_loss_is_refused_beside_a_cache(plugin, tmp_path):
    with pytest.raises(UserError, match="--criterion: Smoothed overrides forward.*compute_loss"):
        runs.train(tmp_path, plugin, runs.SHORTFORMER, "--criterion smoothed --max-update 2 --no-save")


def test_parameters_of_a_criterion_are_saved_and_restored(tmp_path):
    class Offset(CrossEntropyCriterion):
        def __init__(self, task, sentence_avg):
            super().__init__(task, sentence_avg)
            self.offset = torch.nn.Parameter(torch.zeros(()))

        def compute_loss(self, model, net_output, sample):
            loss, size, log = super().compute_loss(model, net_output, sample)
            return loss + (self.offset - 1) ** 2, size, log

    args = runs.arguments(runs.BASELINE)
    task = setup_task(args)
    trainers = [
        TrainingState(training_settings(args), task, task.build_model(args), Offset(task, False)) for _ in range(2)
    ]
    trainers[0].criterion.offset.data.fill_(0.25)
    trainers[1].load_state_dict(trainers[0].state_dict(), "the first")
    assert trainers[1].criterion.offset.item() == 0.25
