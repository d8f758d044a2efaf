"""A plug-in in the manner of fairseq's ``commonsense_qa`` and ``wsc`` tunes an encoder, resumes,
and answers in Python."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from sentences import NO_DROPOUT, SIZES, WORDS, write_dictionary, write_pretrained

from fairseq.config import registry
from fairseq.data import NumelDataset, encoders
from fairseq.errors import UserError
from fairseq.models.roberta import RobertaModel

TASK = """
import os
import numpy as np, torch
from fairseq.data import (
    Dictionary, IdDataset, ListDataset, NestedDictionaryDataset, NumelDataset, NumSamplesDataset, RawLabelDataset,
    RightPadDataset,
)
from fairseq.tasks import LegacyFairseqTask, register_task

@register_task("choices")
class Choices(LegacyFairseqTask):
    @staticmethod
    def add_args(parser):
        parser.add_argument("data")
        parser.add_argument("--num-classes", type=int, default=2)

    def __init__(self, args, vocab):
        super().__init__(args)
        self.vocab = vocab
        self.mask = vocab.add_symbol("<mask>")

    @classmethod
    def setup_task(cls, args, **kwargs):
        assert args.criterion == "sentence_ranking"
        return cls(args, Dictionary.load(os.path.join(args.data, "dict.txt")))

    def load_dataset(self, split, epoch=1, combine=False, **kwargs):
        rows = [line.split("|") for line in open(os.path.join(self.args.data, split + ".txt"))]
        columns = [[self.line(f"{row[1]} </s> {row[2 + n]}") for row in rows] for n in range(2)]
        lengths = np.array([[len(line) for line in column] for column in columns])
        self.datasets[split] = NestedDictionaryDataset(
            {
                "id": IdDataset(), "nsentences": NumSamplesDataset(),
                "ntokens": NumelDataset(ListDataset(columns[0], lengths[0]), reduce=True),
                "target": RawLabelDataset([int(row[0]) for row in rows]),
                **{
                    f"net_input{n + 1}": {"src_tokens": RightPadDataset(ListDataset(columns[n], lengths[n]), pad_idx=1)}
                    for n in range(2)
                },
            },
            sizes=[lengths.max(0)],
        )

    def line(self, text):
        return torch.cat([torch.tensor([0]), self.vocab.encode_line(text, add_if_not_exist=False).long()])

    def build_model(self, args, from_checkpoint=False):
        from fairseq import models
        model = models.build_model(args, self)
        model.register_classification_head("choice", num_classes=1)
        return model

    def disambiguate_pronoun(self, model, sentence, use_cuda=False):
        assert not model.training
        logits, _ = model(src_tokens=self.line(sentence.replace("[it]", "<mask>"))[None])
        return self.vocab[int(logits[0, 1].argmax())], logits.shape[-1] == len(self.vocab)

    source_dictionary = target_dictionary = property(lambda self: self.vocab)
"""
FLAGS = f"""--cpu --task choices --criterion sentence_ranking --ranking-head-name choice --arch roberta_base {SIZES}
    {NO_DROPOUT} --batch-size 4 --optimizer adam --lr 0.01 --log-format json --log-interval 1 --no-epoch-checkpoints
    --best-checkpoint-metric accuracy --maximize-best-checkpoint-metric"""
START = "--reset-optimizer --reset-dataloader --reset-meters"


def test_an_encoder_is_tuned_resumes_and_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.TASKS, "_parts", {**registry.TASKS.parts()})
    monkeypatch.delitem(sys.modules, "choices", raising=False)
    data, plugin = write_dictionary(tmp_path / "data"), tmp_path / "choices"
    plugin.mkdir()
    (plugin / "__init__.py").write_text(TASK)
    questions = [(n % 2, WORDS[n], WORDS[n + 1], WORDS[19 - n]) for n in range(8)]
    for split in ("train", "valid"):
        (data / f"{split}.txt").write_text("".join("|".join(map(str, row)) + "\n" for row in questions))
    encoder = write_pretrained(tmp_path / "encoder.pt", data, "--arch roberta_base")
    every = [FLAGS, "--user-dir", plugin]
    through = runs.losses(
        runs.train(tmp_path / "a", *every, START, "--restore-file", encoder, "--max-update 3", data=data)
    )
    runs.train(
        tmp_path / "b", *every, START, "--restore-file", encoder, "--max-update 2 --no-last-checkpoints", data=data
    )
    best = tmp_path / "b" / "checkpoint_best.pt"
    log = runs.train(tmp_path / "b", *every, "--restore-file", best, "--max-update 3", data=data)
    assert runs.losses(log) == pytest.approx(through[2:], abs=1e-5) and len(through) == 3

    roberta = RobertaModel.from_pretrained(str(tmp_path / "b"), "checkpoint_last.pt", str(data), bpe=None)
    answers = [
        torch.cat([roberta.predict("choice", roberta.encode(stem, text, no_separator=True), True) for text in texts])
        for _, stem, *texts in questions
    ]
    right = sum(int(scores.argmax()) == row[0] for scores, row in zip(answers, questions, strict=True))
    assert runs.summaries(log, "valid")[-1]["accuracy"] == pytest.approx(100 * right / 8)
    layers = roberta.extract_features(roberta.encode("w1 w2"), return_all_hiddens=True)
    assert torch.equal(layers[-1], roberta.extract_features(roberta.encode("w1 w2"))) and len(layers) == 2
    word, whole = roberta.disambiguate_pronoun("w3 [it] w4")
    assert word in roberta.task.source_dictionary and whole
    roberta.register_classification_head("other", 3)
    assert roberta.predict("other", roberta.encode("w1")).shape == (1, 3)


def test_what_a_task_lacks_is_one_line() -> None:
    roberta: Any = RobertaModel.from_pretrained(
        str(runs.GOLDEN.parent / "fairseq_0_12"),
        "roberta.pt",
        str(runs.GOLDEN.parent / "fairseq_variants" / "data-bin"),
    )
    with pytest.raises(UserError, match="the checkpoint's task has no such method; give one trained with wsc"):
        roberta.disambiguate_pronoun("[it]")


def test_subwords_of_a_bare_name_are_read_at_first_use_and_none_has_one_element() -> None:
    """As criterions of fairseq build them, of ``args.bpe``, and candidates without a query."""
    bpe: Any = encoders.build_bpe("gpt2")
    with pytest.raises(UserError, match=r"encoder\.json: file not found; give GPT-2's"):
        bpe.encode("a")
    with pytest.raises(UserError, match=r"encoder\.json: file not found; give GPT-2's"):
        encoders.build_bpe(Namespace(bpe="gpt2"))
    assert [*NumelDataset([None, torch.zeros(2, 3)])] == [1, 6]
