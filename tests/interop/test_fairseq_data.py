"""Datasets, dictionary, iterators and modules under fairseq's names compute what their names
say."""

from __future__ import annotations

import numpy as np
import pytest
import runs
import torch

from fairseq import data
from fairseq.data import data_utils, iterators
from fairseq.data.samplers import Batching
from fairseq.errors import UserError
from fairseq.models.encoder import TransformerEncoder
from fairseq.models.encoder_settings import BertConfig
from fairseq.tasks import setup_task
from fairseq.text.dictionary import Dictionary


@pytest.fixture
def words() -> Dictionary:
    dictionary = Dictionary()
    for word in ["the", "old", "tower"]:
        dictionary.add_symbol(word, 2)
    return dictionary


@pytest.mark.parametrize("task", ["language_modeling", "masked_lm"])
def test_examples_of_our_datasets_collate_to_their_batches(task: str) -> None:
    flags = f"--arch bert_tiny --task {task} --criterion cross_entropy --tokens-per-sample 16"
    dataset = setup_task(runs.arguments(flags)).dataset("valid")
    batch, theirs = dataset.batch(np.array([2, 5])), dataset.collater([dataset[2], dataset[5]])
    for one, other in zip((batch["id"], batch["target"]), (theirs["id"], theirs["target"]), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(batch["net_input"]["src_tokens"], theirs["net_input"]["src_tokens"])
    assert batch["ntokens"] == theirs["ntokens"] and dataset.num_tokens(2) == dataset.sizes[2]


def lines() -> data.ListDataset:
    rows = [torch.arange(4, 4 + size) for size in (3, 1, 5, 2)]
    return data.ListDataset(rows, [3, 1, 5, 2])


@pytest.mark.parametrize("mode", ["none", "eos", "complete"])
def test_token_blocks_are_shifted_by_one_and_hold_every_token(mode: str) -> None:
    blocks = data.TokenBlockDataset(lines(), [3, 1, 5, 2], 4, pad=1, eos=2, break_mode=mode, include_targets=True)
    every = torch.cat([lines()[index] for index in range(4)])
    assert torch.equal(torch.cat([target for _, target, _ in blocks]), every)
    assert torch.equal(torch.cat([source for source, _, _ in blocks]), torch.cat([torch.tensor([2]), every[:-1]]))
    past = torch.cat([past for _, _, past in blocks])
    assert torch.equal(past, torch.cat([torch.tensor([1, 2]), every[:-2]]))


def test_a_window_holds_the_tokens_before_a_block_as_far_as_there_is_room(words: Dictionary) -> None:
    lines = [torch.arange(4, 4 + length) for length in (3, 4, 9, 7, 2)]
    sizes = [len(line) for line in lines]
    rows = data.TokenBlockDataset(data.ListDataset(lines, sizes), sizes, 4, 1, 2, "eos", include_targets=True)
    blocks = data.MonolingualDataset(rows, rows.sizes, words, words, targets=["future"], shuffle=False)
    windows = data.LMContextWindowDataset(blocks, tokens_per_sample=4, context_window=3, pad_idx=1)
    read: list[int] = []
    for index, line in enumerate(lines):
        batch, source = windows.collater([windows[index]]), blocks[index]["source"].tolist()
        room = max(min(3, 4 + 3 - len(source)), 0)
        context = read[-room:] if room else []
        tokens, [start] = batch["net_input"]["src_tokens"][0], batch["start_indices"]
        assert tokens[: len(context) + len(source)].tolist() == [*context, *source] and start == len(context)
        assert batch["target"][0, start : start + len(line)].tolist() == line.tolist()
        assert int((batch["target"] != 1).sum()) == len(line)
        read += source


def test_masking_hides_a_share_and_keeps_its_choice(words: Dictionary) -> None:
    words.add_symbol("<mask>")
    rows = data.ListDataset([torch.full((1000,), 5)], [1000])
    source, target = data.MaskTokensDataset.apply_mask(rows, words, pad_idx=1, mask_idx=7, mask_prob=0.2)
    chosen = target[0] != 1
    assert chosen.sum() in (200, 201) and (target[0][chosen] == 5).all() and (source[0][~chosen] == 5).all()
    assert 0.7 < (source[0][chosen] == 7).float().mean() < 0.95
    assert torch.equal(source[0], source[0])
    before = source[0]
    source.set_epoch(2)
    assert not torch.equal(source[0], before)
    whole = torch.tensor([1] * 5 + [0, 1, 1])  # the symbol 5 continues a word
    words_of_two = data.ListDataset([torch.tensor([0, *[4, 5] * 50, 2])])
    source, target = data.MaskTokensDataset.apply_mask(
        words_of_two,
        words,
        pad_idx=1,
        mask_idx=7,
        mask_prob=0.5,
        random_token_prob=1.0,
        leave_unmasked_prob=0.0,
        mask_whole_words=whole,
        freq_weighted_replacement=True,
    )
    chosen = target[0] != 1
    assert not chosen[0] and not chosen[-1] and torch.equal(chosen[1:-1:2], chosen[2:-1:2]) and chosen.sum() == 50
    assert set(source[0][chosen].tolist()) <= {index for index, count in enumerate(words.count) if count}


def test_batches_by_size_keep_to_their_limits_and_hold_every_example() -> None:
    sizes = np.random.default_rng(1).integers(1, 20, 50)
    batches = data_utils.batch_by_size(np.argsort(sizes), lambda i: sizes[i], max_tokens=60, max_sentences=7)
    assert sorted(index for batch in batches for index in batch) == list(range(50))
    assert all(max(sizes[batch]) * len(batch) <= 60 and len(batch) <= 7 for batch in batches)
    by_four = data_utils.batch_by_size(range(50), lambda i: 1, max_tokens=7, required_batch_size_multiple=4)
    assert [len(batch) for batch in by_four] == [4] * 12 + [2]
    with pytest.raises(UserError, match="max_tokens 10: example"):
        data_utils.batch_by_size(range(50), lambda i: sizes[i], max_tokens=10)
    assert data_utils.filter_by_size(np.arange(4), lines(), 3).tolist() == [0, 1, 3]
    fits, others = lines().filter_indices_by_size(np.arange(4), 3)
    assert fits.tolist() == [0, 1, 3] and others == [2]


def test_processes_share_the_batches_of_an_iterator() -> None:
    iterator = iterators.EpochBatchIterator(lines(), lines().collater, [[0, 2], [3], [1], [2]], seed=5)

    def read(rank: int, epoch: int, start: int = 0) -> list[list[int]]:
        batching = Batching(64, None, seed=5, rank=rank, world_size=2)
        sampler = iterators.IteratorSampler(iterator, batching)
        return [batch.tolist() for batch in sampler.epoch(epoch, start)]

    orders = [read(0, epoch) + read(1, epoch) for epoch in range(1, 6)]
    assert all(sorted(order) == [[0, 2], [1], [2], [3]] for order in orders) and len(set(map(str, orders))) > 1
    assert read(1, 1, start=2) == read(1, 1)[1:] and len(read(0, 1)) == len(read(1, 1)) == 2


def test_the_sentence_encoder_computes_what_our_encoder_does() -> None:
    from fairseq.modules import TransformerSentenceEncoder

    torch.manual_seed(1)
    sizes = {"encoder_embed_dim": 8, "encoder_ffn_embed_dim": 16, "encoder_layers": 2, "encoder_attention_heads": 2}
    ours = TransformerEncoder(BertConfig(**sizes, max_positions=10, activation_fn="relu"), 20, 1)
    theirs = TransformerSentenceEncoder(
        1, 20, 2, 8, 16, 2, max_seq_len=10, num_segments=0, encoder_normalize_before=True
    )
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.tensor([[0, 5, 6, 2], [0, 7, 2, 1]])
    states, first = theirs.eval()(tokens)
    hidden = ours.eval()(tokens)
    torch.testing.assert_close(states[-1].transpose(0, 1)[0], hidden[0])
    torch.testing.assert_close(first, hidden[:, 0])
    assert len(states) == 3


def test_layers_of_encoders_and_decoders_are_ours_of_pre_norm() -> None:
    from argparse import Namespace

    from fairseq.modules import TransformerDecoderLayer, TransformerEncoderLayer
    from fairseq.modules.attention import SelfAttention
    from fairseq.modules.transformer_layer import TransformerLayer

    torch.manual_seed(1)
    ours = TransformerLayer(SelfAttention(8, 2), 8, 16).eval()
    sizes = {"embed_dim": 8, "ffn_embed_dim": 16, "attention_heads": 2, "normalize_before": True}
    args = Namespace(
        dropout=0.1, attention_dropout=0.1, **{f"{p}_{n}": v for n, v in sizes.items() for p in ("encoder", "decoder")}
    )
    x = torch.randn(5, 3, 8)
    mask = torch.full((5, 5), -torch.inf).triu(1)
    expected = ours(x.transpose(0, 1))[0].transpose(0, 1)
    for part in (TransformerEncoderLayer(args).eval(), TransformerDecoderLayer(args, no_encoder_attn=True).eval()):
        part.load_state_dict(ours.state_dict())
        output = part(x, None, mask) if part.__class__ is TransformerEncoderLayer else part(x, self_attn_mask=mask)[0]
        torch.testing.assert_close(output, expected)


def test_groups_of_a_configuration_are_read_only() -> None:
    from argparse import Namespace

    from fairseq.models.transformer import TransformerConfig

    cfg = TransformerConfig.from_namespace(Namespace(decoder_embed_dim=8, dropout=0.1))
    assert (cfg.decoder.embed_dim, cfg.decoder["embed_dim"], cfg.dropout, cfg.quant_noise.pq) == (8, 8, 0.1, 0.0)
    with pytest.raises(UserError, match=r"decoder\.embed_dim: read-only; set decoder_embed_dim of the configuration"):
        cfg.decoder.embed_dim = 4
    cfg.decoder_embed_dim = 4
    assert cfg.decoder.embed_dim == 4
