"""A run with a plug-in's model, task or criterion goes under fairseq's order of calls."""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import runs
import torch
from mistakes import user_error

from fairseq import checkpoint
from fairseq.config import options, registry
from fairseq.data.folders import open_corpus
from fairseq.errors import UserError
from fairseq.inference.loading import load_models
from fairseq.interop.fairseq.logged import Logged, LoggedFigures, LoggingSums
from fairseq.logging import metrics
from fairseq.logging.figures import NamedSums, RunningSums
from fairseq.text.dictionary import Dictionary
from fairseq_cli import eval_lm

FLAGS = """--cpu --train-subset valid --valid-subset test --max-tokens 64 --required-batch-size-multiple 1 --lr 0.05
    --seed 3 --log-format json --log-interval 1 --max-valid-steps 1 --optimizer sgd --lr-scheduler fixed"""
LM = """--arch transformer_lm --decoder-layers 1 --decoder-embed-dim 16 --decoder-input-dim 16 --decoder-output-dim 16
    --decoder-ffn-embed-dim 16 --decoder-attention-heads 2"""
ENCODER = """--encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 --encoder-attention-heads 2
    --task masked_lm --criterion masked_lm --tokens-per-sample 16 --sample-break-mode none --max-positions 16"""

CALLS = """
import os, torch
from fairseq.data import Dictionary, MonolingualDataset, TokenBlockDataset, data_utils
from fairseq.tasks import LegacyFairseqTask, register_task
from fairseq.models import FairseqDecoder, FairseqLanguageModel, register_model, register_model_architecture
from fairseq import metrics

CALLS = []

@register_task("called")
class Called(LegacyFairseqTask):
    @staticmethod
    def add_args(parser):
        parser.add_argument("data")
        parser.add_argument("--tokens-per-sample", default=16, type=int)

    def __init__(self, args, dictionary):
        super().__init__(args)
        self.dictionary, self.seen = dictionary, 0
        assert args.shorten_method == "none" and args.self_target is False and args.quant_noise_pq == 0
        assert args.no_cross_attention is False and args.skip_remainder_batch is False

    @classmethod
    def setup_task(cls, args, **kwargs):
        return cls(args, Dictionary.load(os.path.join(args.data, "dict.txt")))

    source_dictionary = target_dictionary = property(lambda self: self.dictionary)

    def load_dataset(self, split, epoch=1, combine=False, **kwargs):
        CALLS.append(("load_dataset", split))
        data = data_utils.load_indexed_dataset(os.path.join(self.args.data, split), self.dictionary, combine=combine)
        data = TokenBlockDataset(data, data.sizes, 16, pad=1, eos=2, break_mode="none", include_targets=True)
        self.datasets[split] = MonolingualDataset(
            data, data.sizes, self.dictionary, self.dictionary, add_eos_for_other_targets=False, shuffle=True,
            targets=["future"],
        )

    def filter_indices_by_size(self, indices, dataset, max_positions=None, ignore_invalid_inputs=False):
        CALLS.append(("filter_indices_by_size", max_positions))
        return super().filter_indices_by_size(indices, dataset, max_positions, ignore_invalid_inputs)

    def max_positions(self):
        return 16

    def begin_epoch(self, epoch, model):
        CALLS.append(("begin_epoch", epoch))

    def begin_valid_epoch(self, epoch, model):
        CALLS.append(("begin_valid_epoch", epoch))

    def train_step(self, sample, model, criterion, optimizer, update_num, ignore_grad=False):
        CALLS.append(("train_step", update_num))
        assert "src_lengths" in sample["net_input"]
        self.seen += 1
        return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)

    def valid_step(self, sample, model, criterion):
        CALLS.append(("valid_step", model.training))
        return super().valid_step(sample, model, criterion)

    def reduce_metrics(self, logging_outputs, criterion):
        CALLS.append(("reduce_metrics", len(logging_outputs)))
        super().reduce_metrics(logging_outputs, criterion)
        metrics.log_scalar("seen", self.seen)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


@register_model("called_lm")
class Model(FairseqLanguageModel):
    @classmethod
    def build_model(cls, args, task):
        return cls(Decoder(task.source_dictionary))

    def set_num_updates(self, num_updates):
        CALLS.append(("set_num_updates", num_updates))
        super().set_num_updates(num_updates)

    def forward(self, src_tokens, src_lengths):
        assert src_lengths.shape == src_tokens.shape[:1]
        return self.decoder(src_tokens)


class Decoder(FairseqDecoder):
    def __init__(self, dictionary):
        super().__init__(dictionary)
        # Names that checkpoints of fairseq's former versions are renamed by.
        self.sentence_encoder = torch.nn.Embedding(len(dictionary), 8)
        self.layer_norms = torch.nn.ModuleList([torch.nn.LayerNorm(8)])
        self.out = torch.nn.Linear(8, len(dictionary))

    def extract_features(self, prev_output_tokens, encoder_out=None, **kwargs):
        return self.layer_norms[0](self.sentence_encoder(prev_output_tokens)), {}

    def output_layer(self, features, **kwargs):
        return self.out(features)


@register_model_architecture("called_lm", "called_lm")
def called_lm(args):
    pass
"""

ENCODERS = """
import torch
from fairseq.models import register_model, register_model_architecture
from fairseq.models.roberta import RobertaEncoder, RobertaModel, roberta_base_architecture
from fairseq.models.transformer import TransformerEncoder
from fairseq.modules import MultiheadAttention, TransformerEncoderLayer

class Halved(TransformerEncoderLayer):
    def build_self_attention(self, embed_dim, args):
        assert args.quant_noise_pq == 0 and args.factor == 0.5
        return MultiheadAttention(embed_dim, args.encoder_attention_heads, self_attention=True, add_bias_kv=True)

    def residual_connection(self, x, residual):
        return residual + self.args.factor * x

class Layers(TransformerEncoder):
    def build_encoder_layer(self, args):
        return Halved(args)

class Encoder(RobertaEncoder):
    def build_encoder(self, args, dictionary, embed_tokens):
        return Layers(args, dictionary, embed_tokens)

@register_model("halved")
class Model(RobertaModel):
    @staticmethod
    def add_args(parser):
        RobertaModel.add_args(parser)
        parser.add_argument("--factor", type=float)

    @classmethod
    def build_model(cls, args, task):
        halved(args)
        args.max_positions = getattr(args, "max_positions", args.tokens_per_sample)
        model = cls(args, Encoder(args, task.source_dictionary))
        model.register_classification_head("a", num_classes=3)
        return model

@register_model_architecture("halved", "halved")
def halved(args):
    args.factor = getattr(args, "factor", None) or 0.5
    roberta_base_architecture(args)
"""

KEPT = """
from dataclasses import dataclass, field
from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.dataclass import FairseqDataclass
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer_lm import TransformerLanguageModel, base_lm_architecture

@dataclass
class Reset(FairseqDataclass):
    sentence_avg: bool = field(default=False)
    reset: int = field(default=0, metadata={"help": "updates between resets"})

@register_criterion("resetting", dataclass=Reset)
class Criterion(CrossEntropyCriterion):
    def __init__(self, task, sentence_avg, reset):
        super().__init__(task, sentence_avg)
        assert reset == 5

@register_model("keeping")
class Model(TransformerLanguageModel):
    @staticmethod
    def add_args(parser):
        parser.add_argument("--keep", type=float, help="share of the layers to keep")
        TransformerLanguageModel.add_args(parser)

    @classmethod
    def build_model(cls, args, task):
        assert args.keep == 0.5
        return super().build_model(args, task)

@register_model_architecture("keeping", "keeping")
def keeping(args):
    base_lm_architecture(args)
"""

STREAM = """
import os, torch
from fairseq.data import Dictionary, data_utils, iterators
from fairseq.tasks import FairseqTask, register_task
from fairseq.dataclass import FairseqDataclass
from dataclasses import dataclass, field
from omegaconf import II

@dataclass
class Config(FairseqDataclass):
    data: str = field(default="???")
    tokens_per_sample: int = field(default=16)
    batch_size: int = II("dataset.batch_size")

class Pairs(torch.utils.data.Dataset):
    def __init__(self, tokens):
        self.tokens = tokens

    def __len__(self):
        return len(self.tokens) // 16

    def __getitem__(self, index):
        return index, self.tokens[16 * index : 16 * index + 16]

@register_task("truncated_bptt_lm", dataclass=Config)
class Stream(FairseqTask):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.dictionary = Dictionary.load(os.path.join(cfg.data, "dict.txt"))

    def load_dataset(self, split, epoch=1, combine=False, **kwargs):
        lines = data_utils.load_indexed_dataset(os.path.join(self.cfg.data, split), self.dictionary)
        self.datasets[split] = Pairs(torch.cat([lines[i] for i in range(len(lines))]))

    def get_batch_iterator(self, dataset, num_workers=0, epoch=1, data_buffer_size=0, **kwargs):
        return iterators.EpochBatchIterator(
            dataset=dataset, collate_fn=self.collate, batch_sampler=[[i] for i in range(len(dataset))],
            disable_shuffling=True, buffer_size=data_buffer_size, epoch=epoch, num_workers=num_workers,
        )

    def collate(self, items):
        [(index, tokens)] = items
        ORDER.append(index)
        return {
            "id": torch.tensor([index]), "net_input": {"src_tokens": tokens[None, :-1]}, "target": tokens[None, 1:],
            "nsentences": 1, "ntokens": 15,
        }

    def eval_lm_dataloader(self, dataset, context_window=0, **kwargs):
        return self.get_batch_iterator(dataset, **kwargs).next_epoch_itr(shuffle=False)

    source_dictionary = target_dictionary = property(lambda self: self.dictionary)

ORDER = []
"""


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a test registers stays."""
    for name in ("MODELS", "ARCHITECTURES", "TASKS", "CRITERIONS"):
        parts = getattr(registry, name)
        monkeypatch.setattr(parts, "_parts", {**parts.parts()})


def written(tmp_path: Path, name: str, source: str) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text(source)
    return folder


def test_a_plugins_methods_are_called_in_fairseqs_order(tmp_path: Path) -> None:
    folder = written(tmp_path, "called_plugin", CALLS)
    flags = ["--user-dir", folder, FLAGS, "--task called --arch called_lm --criterion cross_entropy"]
    lines = runs.updates(runs.train(tmp_path / "run", *flags, "--max-update 2"))
    calls: list[Any] = sys.modules["called_plugin"].CALLS
    assert calls[:2] == [("load_dataset", "valid"), ("filter_indices_by_size", 16)]
    steps = [call for call in calls if call[0] not in ("load_dataset", "filter_indices_by_size")]
    assert steps == [
        ("begin_epoch", 1),
        ("train_step", 0),
        ("reduce_metrics", 1),
        ("set_num_updates", 1),
        ("train_step", 1),
        ("reduce_metrics", 1),
        ("set_num_updates", 2),
        ("begin_valid_epoch", 1),
        ("valid_step", False),
        ("reduce_metrics", 1),
    ]
    assert [line["seen"] for line in lines] == [1, 2]
    # The names of its parameters are its own, and so is what it saves beside them.
    [third] = runs.updates(runs.train(tmp_path / "run", *flags, "--max-update 3"))
    assert third["seen"] == 3
    names = checkpoint.load(tmp_path / "run" / "checkpoint_last.pt")["model"]
    assert {"decoder.sentence_encoder.weight", "decoder.layer_norms.0.weight"} <= names.keys()
    # The built-in task reads the same blocks in the same order, fairseq's.
    flags += ["--task language_modeling --tokens-per-sample 16 --max-update 2 --no-save --disable-validation"]
    built_in = runs.updates(runs.train(tmp_path / "built_in", *flags))
    assert [line["loss"] for line in built_in] == pytest.approx([line["loss"] for line in lines], abs=1e-5)


def test_layers_of_an_encoder_are_built_by_the_plugins_methods(tmp_path: Path) -> None:
    folder = written(tmp_path, "halved_plugin", ENCODERS)
    flags = ["--user-dir", folder, FLAGS, ENCODER, "--arch halved --dropout 0 --attention-dropout 0"]
    through = runs.updates(runs.train(tmp_path / "through", *flags, "--max-update 2 --no-save"))
    runs.train(tmp_path / "run", *flags, "--max-update 1")
    [second] = runs.updates(runs.train(tmp_path / "run", *flags, "--max-update 2"))
    assert second["loss"] == pytest.approx(through[1]["loss"], abs=1e-4)
    names = checkpoint.load(tmp_path / "run" / "checkpoint_last.pt")["model"]
    assert {"encoder.sentence_encoder.layers.0.self_attn.bias_k", "classification_heads.a.dense.weight"} <= names.keys()


def test_a_plugins_flags_may_have_names_of_short_forms_and_its_run_is_repeated_from_its_file(tmp_path: Path) -> None:
    folder = written(tmp_path, "kept_plugin", KEPT)
    flags = ["--user-dir", folder, FLAGS, LM, "--tokens-per-sample 16 --arch keeping --criterion resetting"]
    runs.train(tmp_path / "run", *flags, "--keep 0.5 --reset 5 --save-every 1u --max-update 1")
    again = ["--config", tmp_path / "run" / "settings.yaml", "--save-dir", tmp_path / "again"]
    args = runs.arguments(*again)
    assert (args.keep, args.reset, args.save_interval_updates, args.keep_last_epochs) == (0.5, 5, 1, -1)


def test_a_plugin_takes_a_name_that_fairseq_does_not_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = written(tmp_path, "stream_plugin", STREAM)
    with caplog.at_level(logging.WARNING):
        flags = ["--user-dir", folder, FLAGS, LM, "--task truncated_bptt_lm --batch-size 4 --max-update 2 --no-save"]
        lines = runs.updates(runs.train(tmp_path / "run", *flags, "--disable-validation"))
    assert [message for message in caplog.messages if "replaces" in message] == [
        "task truncated_bptt_lm: the plug-in's replaces the built-in one"
    ]
    # A dataset without a collater, and batches in the order that the task gave them.
    assert len(lines) == 2 and sys.modules["stream_plugin"].ORDER[:2] == [0, 1]


def test_a_tasks_own_batches_are_those_of_an_evaluation(tmp_path: Path) -> None:
    folder = written(tmp_path, "scored_plugin", STREAM)
    flags = ["--user-dir", folder, FLAGS, LM, "--task truncated_bptt_lm --batch-size 4 --max-update 2"]
    runs.train(tmp_path / "run", *flags)
    words = [str(runs.DATA), "--path", str(tmp_path / "run"), "--user-dir", str(folder), "--cpu"]
    words += ["--gen-subset", "test", "--task", "truncated_bptt_lm"]
    results = eval_lm.main(options.parse_args_and_arch(eval_lm.get_eval_lm_parser(), words))
    order = sys.modules["scored_plugin"].ORDER
    corpus = open_corpus(runs.DATA, "test", Dictionary.load(runs.DATA / "dict.txt"))
    # Blocks of 16 tokens, of which the first is no target; the rest at the end is in no block.
    assert results["tokens"] == 15 * (len(corpus.tokens) // 16)
    assert order[-(len(corpus.tokens) // 16) :] == list(range(len(corpus.tokens) // 16))
    [model], task, _ = load_models([str(tmp_path / "run" / "checkpoint_best.pt")], str(runs.DATA))
    task.load_dataset("test")  # type: ignore[attr-defined]
    assert len(task.dataset("test")) == len(corpus.tokens) // 16
    blocks = torch.from_numpy(np.asarray(corpus.tokens).astype(np.int64))[: len(corpus.tokens) // 16 * 16].view(-1, 16)
    with torch.no_grad():
        hidden = model.eval()(blocks[:, :-1])[0].flatten(0, 1)
        loss = -model.output_layer.target_log_probs(hidden, blocks[:, 1:].flatten(), None).mean()
    assert results["loss_base2"] == pytest.approx(float(loss) / math.log(2), abs=1e-4)
    with user_error("--int8: Stream makes its batches"):
        eval_lm.main(options.parse_args_and_arch(eval_lm.get_eval_lm_parser(), [*words, "--int8"]))


def test_a_plugin_may_not_take_a_name_that_fairseq_has(tmp_path: Path) -> None:
    source = STREAM.replace("truncated_bptt_lm", "masked_lm")
    with pytest.raises(UserError, match="masked_lm' is registered already"):
        runs.train(tmp_path / "run", "--user-dir", written(tmp_path, "masked_plugin", source), FLAGS, LM)


def test_a_hook_that_is_not_called_is_refused_by_name(tmp_path: Path) -> None:
    hook = (
        "    def optimizer_step(self, optimizer, model, update_num):\n        optimizer.step()\n\n    def max_positions"
    )
    folder = written(tmp_path, "hook_plugin", CALLS.replace("    def max_positions", hook, 1))
    with user_error("--task called: optimizer_step is not called here"):
        runs.train(tmp_path / "run", "--user-dir", folder, FLAGS, "--task called --arch called_lm")


def _first_of_two(steps: Any) -> Any:
    """The first of two processes, the other of which made *steps*."""
    return SimpleNamespace(size=2, is_first=True, gather=lambda value, everywhere: [value, steps])


def _sums(outputs: Any, graph: Any) -> LoggingSums:
    log = Logged.of(outputs, torch.tensor(1.0), {"ntokens": 3, "nsentences": 1}, graph)
    sums = NamedSums.of(log, 3, torch.device("cpu"))
    assert isinstance(sums, LoggingSums)
    return sums


def test_names_that_differ_between_processes_and_batches_stay_apart() -> None:
    def reduce(outputs: Any, criterion: Any) -> None:
        for name in ("odd", "even"):
            values = [output[name] for output in outputs if name in output]
            if values:
                metrics.log_scalar(f"n_{name}", sum(values) / len(values), len(values))

    task = SimpleNamespace(reduce_metrics=reduce)
    graph = SimpleNamespace(task=task, criterion=None, training=True)
    meter = RunningSums(torch.device("cpu"))
    meter.add(_sums({"even": 1}, graph).gathered(_first_of_two((({"odd": 100},),))))
    meter.add(_sums({"odd": 10}, graph).gathered(_first_of_two((({"odd": 50},),))))
    report = meter.report(LoggedFigures())
    assert report["n_even"] == 1
    # fairseq's mean over updates, each with its weight: (100 · 1 + 30 · 2) / 3.
    assert report["n_odd"] == pytest.approx(160 / 3)


def test_settings_in_groups_train(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from fairseq import distributed_utils, options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq_cli import train

    words = [str(runs.DATA), "--save-dir", str(tmp_path), *runs.words(FLAGS, LM, "--max-update 5 --disable-validation")]
    words += ["--tokens-per-sample", "16", "--log-format", "json"]
    args = options.parse_args_and_arch(options.get_training_parser(), words)
    cfg: Any = convert_namespace_to_omegaconf(args)
    cfg.optimization.max_update = 2
    with caplog.at_level("INFO"):
        distributed_utils.call_main(cfg, train.main)
    # A script that has set up logging finds the metrics there.
    lines = [json.loads(record.message) for record in caplog.records if record.name == "train_inner"]
    assert [line["num_updates"] for line in lines] == [1, 2]
    assert checkpoint.load(tmp_path / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] == 2


def test_names_of_translation_are_refused_when_one_is_made() -> None:
    from fairseq.criterions import MoECriterion
    from fairseq.data import TransformEosDataset
    from fairseq.models.transformer import TransformerModel
    from fairseq.modules import BaseLayer

    for part in (TransformEosDataset, TransformerModel, BaseLayer, MoECriterion):
        with pytest.raises(UserError, match=part.__name__):
            part(argparse.Namespace())
