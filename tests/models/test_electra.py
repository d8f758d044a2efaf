"""ELECTRA: what the generator writes, what the discriminator reads, and what of it is trained."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from runs import arguments
from torch import Tensor

from fairseq.models.electra import ElectraModel
from fairseq.tasks import setup_task

FLAGS = """--cpu --task masked_lm --criterion electra --arch electra_tiny --encoder-layers 1 --encoder-embed-dim 16
    --encoder-ffn-embed-dim 32 --encoder-attention-heads 2 --encoder-input-dim 12 --max-positions 32
    --tokens-per-sample 24 --max-tokens 240 --sample-break-mode none --seed 3"""
SPECIAL = [0, 1, 2, -1]  # <s>, <pad>, </s> and <mask>, the last symbol


@pytest.fixture
def trained() -> tuple[ElectraModel, torch.nn.Module, dict[str, Tensor]]:
    """A model in evaluation mode with large random weights, the criterion, and a batch."""
    args = arguments(FLAGS)
    torch.manual_seed(1)
    task = setup_task(args)
    model, criterion = task.build_model(args).eval(), task.build_criterion(args)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model, criterion, next(iter(task.iterator("valid", model, criterion, training=True)))


def test_embeddings_are_shared_and_the_generator_is_smaller(trained) -> None:  # type: ignore[no-untyped-def]
    model, *_ = trained
    ours, theirs = model.encoder.sentence_encoder, model.generator.sentence_encoder
    assert ours.embed_tokens.weight is theirs.embed_tokens.weight is model.generator.lm_head.weight
    assert ours.embed_positions is theirs.embed_positions and ours.emb_layer_norm is theirs.emb_layer_norm
    cfg = theirs.cfg
    assert (cfg.encoder_embed_dim, cfg.encoder_ffn_embed_dim, cfg.encoder_attention_heads) == (8, 16, 1)


def test_the_loss_is_that_of_both_halves_written_out(trained) -> None:  # type: ignore[no-untyped-def]
    model, criterion, sample = trained
    tokens, target, noise = sample["net_input"]["src_tokens"], sample["target"], sample["noise"]
    chosen, real = target.ne(1), tokens.ne(1)
    logits = model.generator.lm_head(model.generator.sentence_encoder(tokens))[chosen]
    generator = F.cross_entropy(logits, target[chosen], reduction="sum")
    text_only = logits.clone()
    text_only[:, SPECIAL] = -math.inf
    written = [
        int((row.softmax(-1).double().cumsum(0) <= u).sum()) for row, u in zip(text_only, noise.double(), strict=True)
    ]
    text = torch.where(chosen, target, tokens)
    corrupted = text.masked_scatter(chosen, torch.tensor(written))
    assert corrupted.ne(text).sum() > 5
    judged = model(corrupted)[0]
    discriminator = F.binary_cross_entropy_with_logits(judged[real], corrupted.ne(text)[real].float(), reduction="sum")
    loss, size, sums = criterion(model, sample)
    assert size == int(real.sum()) and sums["chosen"] == int(chosen.sum())
    assert sums["replaced"] == corrupted.ne(text).sum()
    torch.testing.assert_close(loss, generator / 0.15 + 50 * discriminator, rtol=1e-5, atol=1e-4)


def test_the_discriminators_loss_trains_no_part_of_the_generator_but_the_embeddings(trained) -> None:  # type: ignore[no-untyped-def]
    model, criterion, sample = trained
    logits, _ = model(**sample["net_input"])
    logits.sum().backward()
    own = [p for name, p in model.generator.named_parameters() if "emb" not in name and name != "lm_head.weight"]
    assert own and all(p.grad is None for p in own)
    assert model.encoder.sentence_encoder.embed_tokens.weight.grad is not None


@torch.no_grad()
@pytest.mark.parametrize("noise", [0.0, 0.5, 1.0])
def test_a_generator_that_prefers_special_symbols_writes_others(trained, noise: float) -> None:  # type: ignore[no-untyped-def]
    model, _, sample = trained
    model.generator.lm_head.bias[SPECIAL] = 50.0
    net_input, target = sample["net_input"], sample["target"]
    drawn = torch.full_like(sample["noise"], noise)
    read = []
    model.encoder.sentence_encoder.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    model(**{**net_input, "noise": drawn})
    chosen = target.ne(1)
    assert torch.equal(read[0].eq(1), net_input["src_tokens"].eq(1))
    assert not torch.isin(read[0][chosen], torch.tensor(SPECIAL) % len(model.generator.lm_head.bias)).any()


@torch.no_grad()
def test_tokens_are_drawn_with_the_generators_probabilities(trained) -> None:  # type: ignore[no-untyped-def]
    model, *_ = trained
    hidden = torch.randn(1, 8).expand(20_000, 8)
    drawn = model._sample(hidden, torch.rand(20_000, generator=torch.Generator().manual_seed(2)))
    logits = model.generator.lm_head(hidden[0])
    logits[SPECIAL] = -math.inf
    probabilities = logits.softmax(-1)
    share = torch.bincount(drawn, minlength=len(probabilities)) / len(drawn)
    assert (share - probabilities).abs().max() < 4 * math.sqrt(0.25 / 20_000)
    assert 3 <= model._sample(hidden[:1], torch.ones(1)).item() < len(probabilities) - 1
    assert model._sample(hidden[:0], torch.ones(0)).shape == (0,)
