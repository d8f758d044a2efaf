"""Rows of several documents: each is read as if it stood alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import runs
import torch
from evaluations import evaluate
from mistakes import user_error
from torch import Tensor

from fairseq.data.indexed_dataset import IndexedCorpus, IndexedWriter
from fairseq.data.token_blocks import document_positions
from fairseq.modules.ngram_notes import CONTINUES, STANDS_ALONE

EOS = 2
SMALL = "--decoder-layers 2 --decoder-embed-dim 32 --decoder-ffn-embed-dim 64 --decoder-attention-heads 2 --dropout 0"
MODELS = {
    "sinusoids": "--arch transformer_lm_tiny",
    "learned positions, window": "--arch gpt2_tiny --attention-window 5 --tokens-per-sample 40",
    "rotations": "--arch llama_tiny --decoder-kv-heads 1",
    "infused positions": "--arch transformer_lm_tiny --position-infused-attention",
    "shift and notes": "--arch transformer_lm_fast_tiny --token-shift 2 --ngram-notes 500 --word-notes 500",
}


def pieces(tokens: Tensor) -> list[tuple[int, int]]:
    """Where the documents of a row begin and end, one token at a time: ``</s>`` after ``</s>`` is a
    blank line, with which a document begins."""
    begins = [0]
    for at in range(1, len(tokens)):
        if int(tokens[at]) == EOS and int(tokens[at - 1]) == EOS:
            begins.append(at)
    return list(zip(begins, [*begins[1:], len(tokens)], strict=True))


def rows() -> Tensor:
    """Five rows of 40 tokens: blank lines, two in succession, at both ends; one row without."""
    tokens = torch.randint(4, 1000, (5, 40), generator=torch.Generator().manual_seed(1))
    for row, blanks in enumerate([[12, 30], [3, 4, 20], [1, 39], [], [7, 17, 27]]):
        for at in blanks:
            tokens[row, at - 1 : at + 1] = EOS
    tokens[3, 10] = EOS  # a line that ends within a document
    return tokens


def test_positions_in_documents_count_from_the_blank_line() -> None:
    tokens = rows()
    expected = [[at - begin for begin, end in pieces(row) for at in range(begin, end)] for row in tokens]
    assert document_positions(tokens, EOS).tolist() == expected


@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
def test_each_document_is_read_as_if_it_stood_alone(flags: str) -> None:
    model = runs.model_of(f"{flags} {SMALL} --cpu --max-update 1").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    if (notes := getattr(model.decoder, "word_notes", None)) is not None:
        notes.parts[500:], notes.parts[EOS] = CONTINUES, STANDS_ALONE
    tokens = rows()

    def read_alone() -> Tensor:
        read = [[model(row[None, begin:end])[0][0] for begin, end in pieces(row)] for row in tokens]
        return torch.stack([torch.cat(documents) for documents in read])

    together, alone = model(tokens, document_positions=document_positions(tokens, EOS))[0], read_alone()
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    assert (model(tokens)[0] - alone).abs().max() > 0.1, "without it documents read one another"
    weights = torch.randn(alone.shape)
    parameters = [p for p in model.parameters() if p.requires_grad]
    found, expected = (
        [
            None if g is None else g.to_dense()
            for g in torch.autograd.grad((x * weights).sum(), parameters, allow_unused=True)
        ]
        for x in (together, alone)
    )
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_training_and_both_evaluations_read_documents_apart(tmp_path: Path) -> None:
    log = runs.train(tmp_path, f"{runs.BASELINE} --document-mask --max-update 20 --max-valid-steps 99")
    trained = runs.summaries(log, "test")[-1]["nll_loss"]
    flags = f"--path {tmp_path}/checkpoint_last.pt --max-tokens 640"
    assert evaluate(flags)["loss_base2"] == pytest.approx(trained, abs=1e-5)
    across = evaluate(flags, ["--model-overrides", "{'document_mask': False}"])
    assert abs(across["loss_base2"] - trained) > 1e-4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--arch shortformer_tiny", "--document-mask: needs a transformer_lm, .* architecture, no memory"),
        ("--arch transformer_xl_tiny", "--document-mask: needs a transformer_lm, .* architecture, no memory"),
        ("--arch lstm_lm", "--document-mask: needs a transformer_lm, .* architecture, no memory"),
        (
            "--arch llama_tiny --train-subset test1",
            "--document-mask: {data}/test1 has no blank lines, which separate documents; .*",
        ),
        (
            "--arch llama_tiny --stages 16:1,16+16:2",
            "--stages: a memory cannot be used with --document-mask; leave .MEMORY out",
        ),
    ],
)
def test_models_and_texts_without_documents_in_a_row_are_refused(flags: str, message: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(runs.DATA, data)
    corpus = IndexedCorpus(str(data / "test"))
    with IndexedWriter(data / "test1", corpus.tokens.dtype) as writer:
        writer.add(corpus.tokens[:90], np.array([90]))
    with user_error(message.format(data=data)):
        runs.train(tmp_path, "--cpu --document-mask --train-subset valid --valid-subset test", flags, data=data)
