"""More plug-ins as in :mod:`plugin_sources`: tasks that compose datasets."""

from __future__ import annotations

from plugin_sources import BERT, LM

TASKS = {
    "blocks_of_9": (
        """
import os
from fairseq.data import Dictionary, MonolingualDataset, TokenBlockDataset, data_utils
from fairseq.tasks import FairseqTask, register_task

@register_task("blocks_of_9")
class Blocks(FairseqTask):
    @staticmethod
    def add_args(parser):
        parser.add_argument("data", help="path to data directory")
        parser.add_argument("--tokens-per-sample", default=16, type=int)

    def __init__(self, args, dictionary):
        super().__init__(args)
        self.dictionary = dictionary

    @classmethod
    def setup_task(cls, args, **kwargs):
        return cls(args, Dictionary.load(os.path.join(args.data, "dict.txt")))

    def load_dataset(self, split, epoch=0, combine=False, **kwargs):
        path = os.path.join(self.args.data, split)
        dataset = data_utils.load_indexed_dataset(path, self.dictionary, self.args.dataset_impl, combine=combine)
        dataset = TokenBlockDataset(
            dataset, dataset.sizes, self.args.tokens_per_sample, pad=self.dictionary.pad(),
            eos=self.dictionary.eos(), break_mode="none", include_targets=True,
        )
        self.datasets[split] = MonolingualDataset(
            dataset, dataset.sizes, self.dictionary, self.dictionary, add_eos_for_other_targets=False, shuffle=True,
            targets=["future"], add_bos_token=False,
        )

    @property
    def source_dictionary(self):
        return self.dictionary
""",
        f"{LM} --task blocks_of_9",
    ),
    "masking_of_10": (
        """
import os
import numpy as np
from fairseq.data import (
    IdDataset, MaskTokensDataset, NestedDictionaryDataset, NumelDataset, NumSamplesDataset, PrependTokenDataset,
    RightPadDataset, SortDataset, TokenBlockDataset, data_utils,
)
from fairseq.tasks import FairseqTask, register_task
from fairseq.tasks.masked_lm import MaskedLMTask

@register_task("masking_of_10")
class Masking(MaskedLMTask):
    @classmethod
    def setup_task(cls, args, **kwargs):
        return cls(args, cls.load_dictionary(os.path.join(args.data, "dict.txt")))

    def __init__(self, args, dictionary):
        super().__init__(args, dictionary)
        self.mask_idx = dictionary.add_symbol("<mask>")

    def load_dataset(self, split, epoch=1, combine=False, **kwargs):
        words = self.source_dictionary
        dataset = data_utils.load_indexed_dataset(os.path.join(self.args.data, split), words, combine=combine)
        dataset = TokenBlockDataset(dataset, dataset.sizes, 15, pad=words.pad(), eos=words.eos(), break_mode="complete")
        dataset = PrependTokenDataset(dataset, words.bos())
        src, tgt = MaskTokensDataset.apply_mask(
            dataset, words, pad_idx=words.pad(), mask_idx=self.mask_idx, seed=self.args.seed, mask_prob=0.3,
        )
        with data_utils.numpy_seed(self.args.seed + epoch):
            shuffle = np.random.permutation(len(src))
        self.datasets[split] = SortDataset(
            NestedDictionaryDataset(
                {
                    "id": IdDataset(),
                    "net_input": {
                        "src_tokens": RightPadDataset(src, pad_idx=words.pad()),
                        "src_lengths": NumelDataset(src, reduce=False),
                    },
                    "target": RightPadDataset(tgt, pad_idx=words.pad()),
                    "nsentences": NumSamplesDataset(),
                    "ntokens": NumelDataset(src, reduce=True),
                },
                sizes=[src.sizes],
            ),
            sort_order=[shuffle, src.sizes],
        )
""",
        f"{BERT} --task masking_of_10",
    ),
    "config_task_of_12": (
        """
from dataclasses import dataclass, field
from typing import Optional
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask

@dataclass
class Config(LanguageModelingConfig):
    domain: Optional[str] = field(default=None, metadata={"help": "domain"})

@register_task("config_task_of_12", dataclass=Config)
class Task(LanguageModelingTask):
    @classmethod
    def setup_task(cls, cfg, **kwargs):
        task = super().setup_task(cfg, **kwargs)
        assert task.cfg.domain == "news" and task.cfg.tokens_per_sample == 16
        return task
""",
        f"{LM} --task config_task_of_12 --domain news",
    ),
    "targets_of_9": (
        """
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingTask

class Base(LanguageModelingTask):
    def __init__(self, args, dictionary, output_dictionary, targets):
        super().__init__(args, dictionary, output_dictionary=output_dictionary, targets=targets)
        assert self.targets == ["future"] and self.target_dictionary is self.output_dictionary is dictionary

@register_task("targets_of_9")
class Task(Base):
    @staticmethod
    def add_args(parser):
        parser.add_argument("--every", type=int, default=2)
        LanguageModelingTask.add_args(parser)

    def __init__(self, args, dictionary, output_dictionary=None, targets=None):
        super().__init__(args, dictionary, output_dictionary, targets)
        assert args.every == 2 and type(self).setup_dictionary(args)[1] == dictionary
""",
        f"{LM} --task targets_of_9",
    ),
    "questions_of_9": (
        """
import torch, torch.nn as nn, torch.nn.functional as F
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.data import (
    IdDataset, ListDataset, NestedDictionaryDataset, NumelDataset, NumSamplesDataset, RawLabelDataset, RightPadDataset,
)
from fairseq.models import BaseFairseqModel, register_model, register_model_architecture
from fairseq.tasks import FairseqTask, register_task
from fairseq.data import Dictionary

@register_task("questions_of_9")
class Questions(FairseqTask):
    @staticmethod
    def add_args(parser):
        parser.add_argument("data", help="path to data directory")
        parser.add_argument("--num-classes", type=int, default=2)

    def __init__(self, args, vocab):
        super().__init__(args)
        self.vocab = vocab

    @classmethod
    def setup_task(cls, args, **kwargs):
        vocab = cls.load_dictionary(args.data + "/dict.txt")
        vocab.add_symbol("<mask>")
        return cls(args, vocab)

    def load_dataset(self, split, epoch=0, combine=False, **kwargs):
        lines = [f"the {word} was old" for word in self.vocab.symbols[4:24]]
        tokens = [self.vocab.encode_line(line, add_if_not_exist=False).long() for line in lines]
        src = ListDataset(tokens, [len(line) for line in tokens])
        self.datasets[split] = NestedDictionaryDataset(
            {
                "id": IdDataset(), "nsentences": NumSamplesDataset(), "ntokens": NumelDataset(src, reduce=True),
                "net_input": {"src_tokens": RightPadDataset(src, pad_idx=self.vocab.pad())},
                "target": RawLabelDataset([index % 2 for index in range(len(lines))]),
            },
            sizes=[[len(line) for line in tokens]],
        )

    @property
    def source_dictionary(self):
        return self.vocab

@register_criterion("ranking_of_9")
class Ranking(FairseqCriterion):
    def forward(self, model, sample, reduce=True):
        logits = model(**sample["net_input"])
        loss = F.cross_entropy(logits, sample["target"], reduction="sum")
        return loss, len(logits), {"loss": loss.data, "ntokens": sample["ntokens"], "nsentences": len(logits)}

@register_model("bag_of_9")
class Bag(BaseFairseqModel):
    def __init__(self, words, classes):
        super().__init__()
        self.embed, self.out = nn.Embedding(words, 8), nn.Linear(8, classes)

    @classmethod
    def build_model(cls, args, task):
        return cls(len(task.source_dictionary), args.num_classes)

    def forward(self, src_tokens, **unused):
        return self.out(self.embed(src_tokens).mean(1))

@register_model_architecture("bag_of_9", "bag_of_9")
def base(args):
    pass
""",
        "--task questions_of_9 --arch bag_of_9 --criterion ranking_of_9",
    ),
    "wrapped_of_12": (
        """
from fairseq.data import (
    AppendTokenDataset, BaseWrapperDataset, ConcatDataset, IdDataset, LeftPadDataset, NestedDictionaryDataset,
    NumelDataset, NumSamplesDataset, PrependTokenDataset, RightPadDataset, StripTokenDataset, TruncateDataset,
    data_utils,
)
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingTask

class Same(BaseWrapperDataset):
    def __getitem__(self, index):
        return self.dataset[index].clone()

@register_task("wrapped_of_12")
class Wrapped(LanguageModelingTask):
    def load_dataset(self, split, epoch=1, combine=False, **kwargs):
        words = self.dictionary
        lines = data_utils.load_indexed_dataset(self.args.data + "/" + split, words)
        line = TruncateDataset(StripTokenDataset(ConcatDataset([lines, lines]), words.eos()), 12)
        src, tgt = PrependTokenDataset(Same(line), words.eos()), AppendTokenDataset(line, words.eos())
        self.datasets[split] = NestedDictionaryDataset({
            "id": IdDataset(), "nsentences": NumSamplesDataset(), "ntokens": NumelDataset(tgt, reduce=True),
            "net_input": {"src_tokens": RightPadDataset(src, words.pad())},
            "target": RightPadDataset(tgt, words.pad()),
        }, sizes=[src.sizes])
""",
        f"{LM} --task wrapped_of_12 --sample-break-mode eos",
    ),
    "steps_of_10": (
        """
import torch
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingTask

@register_task("steps_of_10")
class Steps(LanguageModelingTask):
    def train_step(self, sample, model, criterion, optimizer, update_num, ignore_grad=False):
        model.train()
        model.set_num_updates(update_num) if hasattr(model, "set_num_updates") else None
        loss, sample_size, logging_output = criterion(model, sample)
        if ignore_grad:
            loss *= 0
        optimizer.backward(loss)
        return loss, sample_size, logging_output

    def valid_step(self, sample, model, criterion):
        model.eval()
        with torch.no_grad():
            return criterion(model, sample)
""",
        f"{LM} --task steps_of_10",
    ),
    "built_by_task_of_12": (
        """
from fairseq import models, search
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingTask

@register_task("built_by_task_of_12")
class Built(LanguageModelingTask):
    def build_model(self, args, from_checkpoint=False):
        model = super().build_model(args)
        self.generator = SequenceGenerator([model], self.target_dictionary, beam_size=2, max_len_b=5,
                                           search_strategy=search.BeamSearch(self.target_dictionary))
        return model

    def valid_step(self, sample, model, criterion):
        loss, size, log = super().valid_step(sample, model, criterion)
        if "id" in sample:
            first = {"net_input": {"src_tokens": sample["net_input"]["src_tokens"][:1, :3]}}
            log["best"] = float(self.inference_step(self.generator, [model], first)[0][0]["score"])
        return loss, size, log
""",
        f"{LM} --task built_by_task_of_12",
    ),
}

TASKS["ids_of_10"] = (
    """
import torch
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingTask

@register_task("ids_of_10")
class Ids(LanguageModelingTask):
    def load_dataset(self, split, epoch=1, combine=False, **kwargs):
        super().load_dataset(split, combine=combine)
        dataset = self.datasets[split]
        batch = dataset.collater([dataset[0], dataset[1]])
        assert batch["net_input"]["src_tokens"].shape == (2, 16)
        batches = self.get_batch_iterator(dataset, max_tokens=64, max_positions=16, seed=2)
        samples = list(batches.next_epoch_itr(shuffle=False))
        assert torch.equal(samples[0]["target"][:2], batch["target"]) and batches.end_of_epoch()
""",
    f"{LM} --task ids_of_10",
)

TASKS["batches_of_10"] = (
    """
from fairseq.data import data_utils, iterators
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingTask

@register_task("batches_of_10")
class Batches(LanguageModelingTask):
    def get_batch_iterator(
        self, dataset, max_tokens=None, max_sentences=None, max_positions=None, ignore_invalid_inputs=False,
        required_batch_size_multiple=1, seed=1, num_shards=1, shard_id=0, num_workers=0, epoch=1,
    ):
        if self.can_reuse_epoch_itr(dataset) and dataset in self.dataset_to_epoch_iter:
            return self.dataset_to_epoch_iter[dataset]
        with data_utils.numpy_seed(seed):
            indices = dataset.ordered_indices()
        indices = self.filter_indices_by_size(indices, dataset, max_positions, ignore_invalid_inputs)
        batches = data_utils.batch_by_size(indices, dataset.num_tokens, max_tokens=max_tokens, max_sentences=2)
        assert max_tokens == 64 and {len(batch) for batch in batches} <= {1, 2}
        iterator = iterators.EpochBatchIterator(
            dataset=dataset, collate_fn=dataset.collater, batch_sampler=batches, seed=seed, num_shards=num_shards,
            shard_id=shard_id, num_workers=num_workers, epoch=epoch,
        )
        self.dataset_to_epoch_iter[dataset] = iterator
        return iterator

    def train_step(self, sample, *rest, **options):
        assert len(sample["target"]) <= 2
        return super().train_step(sample, *rest, **options)
""",
    f"{LM} --task batches_of_10",
)

TASKS["choices_of_9"] = (
    """
import os
from fairseq import models
from fairseq.data import (
    Dictionary, IdDataset, ListDataset, NestedDictionaryDataset, NumelDataset, NumSamplesDataset, RawLabelDataset,
    RightPadDataset, encoders,
)
from fairseq.tasks import FairseqTask, register_task

@register_task("choices_of_9")
class Choices(FairseqTask):
    @staticmethod
    def add_args(parser):
        parser.add_argument("data", help="path to data directory")
        parser.add_argument("--num-classes", type=int, default=5)

    def __init__(self, args, vocab):
        super().__init__(args)
        self.vocab, self.mask, self.bpe = vocab, vocab.add_symbol("<mask>"), encoders.build_bpe(args)

    @classmethod
    def setup_task(cls, args, **kwargs):
        assert args.criterion == "sentence_ranking"
        vocab = cls.load_dictionary(os.path.join(args.data, "dict.txt"))
        for letter in "abcdefghijklmnopqrstuvwxyz?":
            vocab.add_symbol(letter)
        return cls(args, vocab)

    def load_dataset(self, split, epoch=0, combine=False, data_path=None, return_only=False, **kwargs):
        def binarize(text, start):
            tokens = self.vocab.encode_line(self.bpe.encode(text), append_eos=True, add_if_not_exist=False).long()
            return tokens if start is None else tokens.new_tensor([start, *tokens])

        words = [word for word in self.vocab.symbols[4:] if word.isalpha() and len(word) > 2]
        rows = [words[start : 4 * self.args.num_classes : 4] for start in range(4)]
        sources = []
        for number in range(self.args.num_classes):
            texts = [binarize(f"which of them? {row[number]}", self.vocab.bos()) for row in rows]
            sources.append(ListDataset(texts, [len(text) for text in texts]))
        sample = {"id": IdDataset(), "nsentences": NumSamplesDataset()}
        sample["ntokens"] = NumelDataset(sources[0], reduce=True)
        for number, source in enumerate(sources, 1):
            sample[f"net_input{number}"] = {
                "src_tokens": RightPadDataset(source, pad_idx=self.vocab.pad()),
                "src_lengths": NumelDataset(source, reduce=False),
            }
        sample["target"] = RawLabelDataset([number % self.args.num_classes for number in range(len(rows))])
        self.datasets[split] = NestedDictionaryDataset(sample, sizes=[source.sizes for source in sources])
        return self.datasets[split]

    def build_model(self, args):
        model = models.build_model(args, self)
        model.register_classification_head("choices", num_classes=1)
        return model

    @property
    def source_dictionary(self):
        return self.vocab

    @property
    def target_dictionary(self):
        return self.vocab
""",
    "--arch roberta_base --encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 "
    "--encoder-attention-heads 2 --task choices_of_9 --criterion sentence_ranking --ranking-head-name choices "
    "--num-classes 3 "
    "--bpe characters",
)

TASKS["sentences_of_12"] = (
    """
import os
from dataclasses import dataclass
from omegaconf import II
from fairseq import models
from fairseq.data import (
    BaseWrapperDataset, IdDataset, NestedDictionaryDataset, NumelDataset, NumSamplesDataset, RightPadDataset,
    data_utils,
)
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import FairseqTask, register_task

@dataclass
class Config(FairseqDataclass):
    data: str = "???"
    num_classes: int = 2
    classification_head_name: str = II("criterion.classification_head_name")

class Label(BaseWrapperDataset):
    def __getitem__(self, index):
        return self.dataset[index][:1] % 2

@register_task("sentences_of_12", dataclass=Config)
class Sentences(FairseqTask):
    def __init__(self, cfg, dictionary):
        super().__init__(cfg)
        self.dictionary = dictionary
        dictionary.add_symbol("<mask>")

    @classmethod
    def setup_task(cls, cfg, **kwargs):
        return cls(cfg, cls.load_dictionary(os.path.join(cfg.data, "dict.txt")))

    def load_dataset(self, split, combine=False, **kwargs):
        rows = data_utils.load_indexed_dataset(os.path.join(self.cfg.data, split), self.dictionary)
        inputs = {"src_tokens": RightPadDataset(rows, 1), "src_lengths": NumelDataset(rows)}
        sample = {"id": IdDataset(), "net_input": inputs, "target": Label(rows), "nsentences": NumSamplesDataset()}
        sample["ntokens"] = NumelDataset(rows, reduce=True)
        self.datasets[split] = NestedDictionaryDataset(sample, sizes=[rows.sizes])

    def build_model(self, cfg, from_checkpoint=False):
        cfg.max_positions = 512
        model = models.build_model(cfg, self, from_checkpoint)
        model.register_classification_head(self.cfg.classification_head_name, num_classes=self.cfg.num_classes)
        return model

    @property
    def source_dictionary(self):
        return self.dictionary
""",
    "--arch roberta_base --task sentences_of_12 --criterion sentence_prediction --max-tokens 256 --encoder-layers 1 "
    "--encoder-embed-dim 8 --encoder-ffn-embed-dim 8 --encoder-attention-heads 1 --best-checkpoint-metric accuracy",
)
