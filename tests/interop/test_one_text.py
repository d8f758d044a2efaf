"""One text of two lines, scored by every way in and out, with each kind of vocabulary: one
log-probability."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import preprocessing
import pytest
import runs
import torch
from exports import BASE, exported, keep_code_in
from subword_encodings import TEXT

from fairseq.config import options
from fairseq.hub import LanguageModel
from fairseq.interop.harness import harness_model
from fairseq.interop.harness.requests import Requests
from fairseq.text.dictionary import Dictionary
from fairseq_cli import eval_lm, validate

VOCABULARIES: dict[str, dict[str, Any]] = {
    "words": {},
    "moses": {"tokenizer": "moses"},
    "subword_nmt": {"bpe": "subword_nmt", "learn_bpe": 20},
    "sentencepiece": {"bpe": "sentencepiece", "learn_bpe": 24},
    "bytes": {"bpe": "hf", "learn_bpe": 270},
}
LINES = "the lower river , the low\nthe newest riverbed isn't wide\n"
MODEL = f"--arch transformer_lm {BASE.replace('--tokens-per-sample 8', '--tokens-per-sample 128')} --max-tokens 512"
MODEL += " --criterion cross_entropy --cpu"


class Scored:
    """A checkpoint of a random model whose validation text is *text*, and what each command makes
    of that text."""

    def __init__(self, folder: Path, text: str, **flags: Any) -> None:
        training = preprocessing.text_file(folder, TEXT + text, "train.txt")
        self.text, self.path = text, preprocessing.text_file(folder, text, "valid.txt")
        self.data, self.folder = folder / "data-bin", folder / "checkpoints"
        preprocessing.run(self.data, trainpref=training, validpref=self.path, **flags)
        self.folder.mkdir()
        self.checkpoint = runs.saved(self.folder / "checkpoint.pt", MODEL, data=self.data)
        for file in ("dict.txt", "tokenization.json"):
            if (self.data / file).exists():
                (self.folder / file).write_bytes((self.data / file).read_bytes())

    def validated(self) -> float:
        argv = [str(self.data), "--path", str(self.checkpoint), "--valid-subset", "valid", "--cpu"]
        results = validate.main(
            options.parse_args_and_arch(validate.get_validation_parser(), argv, task_defaults=False)
        )
        figures = results[str(self.checkpoint)]["valid"]
        return -figures["loss"] * figures["ntokens"]

    def evaluated(self, *more: str) -> float:
        split = [] if "--text" in more else ["--gen-subset", "valid"]
        argv = [str(self.data), "--path", str(self.checkpoint), *split, "--cpu", *more]
        report = eval_lm.main(options.parse_args_and_arch(eval_lm.get_eval_lm_parser(), argv))
        return float(-report["loss_base2"] * report["tokens"])

    def in_transformers(self) -> tuple[Any, Any]:
        transformers = pytest.importorskip("transformers")
        out = exported(self.checkpoint, self.folder.parent / "hf")
        tokenizer = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=True)
        return tokenizer, transformers.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)


@pytest.fixture(params=VOCABULARIES)
def scored(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scored]:
    keep_code_in(tmp_path / "modules", monkeypatch)
    pytest.importorskip(request.param if request.param == "sentencepiece" else "tokenizers")
    yield Scored(tmp_path, LINES, **VOCABULARIES[request.param])


def log2(lprobs: torch.Tensor) -> float:
    return float(lprobs.double().sum()) / math.log(2)


@torch.no_grad()
def test_two_lines_have_one_score_by_every_way(scored: Scored) -> None:
    model = LanguageModel.from_pretrained(scored.checkpoint)
    want = scored.evaluated()
    found = {
        "validate": scored.validated(),
        "eval-lm of the text": scored.evaluated("--text", scored.path),
        "hub": log2(model.score(LINES)[1]),
        "harness": Requests(model).rolling([LINES])[0] / math.log(2),
    }
    tokenizer, theirs = scored.in_transformers()
    row = torch.tensor([[tokenizer.bos_token_id, *tokenizer(LINES)["input_ids"]]])
    found["export"] = log2(theirs(row).logits.log_softmax(-1)[0, :-1].gather(-1, row[0, 1:, None]))
    assert found == {name: pytest.approx(want, rel=1e-5) for name in found}
    assert "".join(tokenizer.decode(row[0, 1:]).split()) == "".join(LINES.split())
    assert tokenizer.decode(row[0, 1:]).count("\n") == 2 and row[0].tolist().count(2) == 3


REQUESTS = [("the lower river\nthe", " low"), ("", "the newest"), ("the river ", "low\nthe wide"), ("the\n", "low")]


@torch.no_grad()
def test_continuations_score_as_by_the_rule_of_the_harness_for_transformers(scored: Scored) -> None:
    """That rule: no symbol but the tokenizer's, which adds none; the first one only where there is
    no context."""
    found = Requests(LanguageModel.from_pretrained(scored.checkpoint)).log_likelihoods(REQUESTS)
    tokenizer, model = scored.in_transformers()
    for (context, continuation), (lprob, greedy) in zip(REQUESTS, found, strict=True):
        ids = tokenizer(context + continuation)["input_ids"]
        before = tokenizer(context.rstrip())["input_ids"] or [tokenizer.bos_token_id]
        row = torch.tensor([before + ids[len(before) if context else 0 :]])
        lprobs = model(row).logits.log_softmax(-1)[0, len(before) - 1 : -1]  # (T, V)
        target = row[0, len(before) :]
        assert lprob == pytest.approx(float(lprobs.gather(-1, target[:, None]).sum()), rel=1e-5)
        assert greedy is bool((lprobs.argmax(-1) == target).all())


def test_the_harness_and_its_own_model_class_agree_by_default(scored: Scored) -> None:
    pytest.importorskip("lm_eval", reason="the [eval] extra is not installed")
    pytest.importorskip("accelerate", reason="which the harness's class for transformers needs")
    from lm_eval.models.huggingface import HFLM

    ours = harness_model()(str(scored.checkpoint), device="cpu")
    tokenizer, model = scored.in_transformers()
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=1, device="cpu")
    pairs = [types.SimpleNamespace(args=pair) for pair in REQUESTS]
    answers = [lm.loglikelihood(pairs, disable_tqdm=True) for lm in (ours, theirs)]
    np.testing.assert_allclose(*([lprob for lprob, _ in answer] for answer in answers), rtol=1e-5)
    assert [greedy for _, greedy in answers[0]] == [greedy for _, greedy in answers[1]]
    texts = [types.SimpleNamespace(args=(text,)) for text in (LINES, "the low", "\nthe")]
    totals = [lm.loglikelihood_rolling(texts, disable_tqdm=True) for lm in (ours, theirs)]
    np.testing.assert_allclose(*totals, rtol=1e-5)


@torch.no_grad()
def test_padding_as_a_word_is_unknown_in_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_code_in(tmp_path / "modules", monkeypatch)
    text = "the <pad> <pad> river\n<pad> low <pad>\n"
    scored = Scored(tmp_path, text)
    assert "4 of these words are <pad>, which stands for padding in rows" in capsys.readouterr().out
    model = LanguageModel.from_pretrained(scored.checkpoint)
    assert model.encode(text).tolist() == model.encode(text.replace("<pad>", "<unk>")).tolist()
    want = scored.evaluated()
    found = {
        "validate": scored.validated(),
        "eval-lm of the text": scored.evaluated("--text", scored.path),
        "harness": Requests(model).rolling([text])[0] / math.log(2),
    }
    tokenizer, theirs = scored.in_transformers()
    row = torch.tensor([[tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]])
    found["export"] = log2(theirs(row).logits.log_softmax(-1)[0, :-1].gather(-1, row[0, 1:, None]))
    assert found == {name: pytest.approx(want, rel=1e-5) for name in found}


def test_padding_in_the_corpus_of_another_program_is_not_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Dictionary, "text_index", Dictionary.index)  # as fairseq does
        scored = Scored(tmp_path, "the <pad> <pad> river\n<pad> low <pad>\n")
    assert scored.evaluated() == pytest.approx(scored.validated(), rel=1e-5)
    assert "Evaluated 5 tokens" in capsys.readouterr().out
