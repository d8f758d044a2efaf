"""The named sets of defaults of ``transformer_xl``: the systems of Dai et al. 2019, and small ones for tests.

Sizes, dropout and lengths are the authors', and so is what is tied: weights always, on WikiText-103 the projections of
all bands but the first.
"""

from __future__ import annotations

import argparse

from fairseq.config.registry import register_model_architecture
from fairseq.models.architectures.transformer_lm import set_defaults
from fairseq.models.transformer_xl import BY_DISTANCE

WORDS_WIKI103, WORDS_LM1B = [20000, 40000, 200000], [60000, 100000, 640000]


def _sizes(args: argparse.Namespace, layers: int, model: int, heads: int, head: int, inner: int, length: int) -> None:
    """Sizes of the network, and segments and memory of *length* tokens."""
    set_defaults(args, n_layer=layers, d_model=model, n_head=heads, d_head=head, d_inner=inner)
    _lengths(args, length)


def _lengths(args: argparse.Namespace, length: int) -> None:
    """Segments and memory of *length* tokens; no memory where positions forbid one."""
    encoding = getattr(args, "position_encoding", "relative")
    set_defaults(args, tokens_per_sample=length, mem_len=length if encoding in BY_DISTANCE else 0)


def _words(args: argparse.Namespace, cutoffs: list[int], div_val: int, dropout: float, dropatt: float) -> None:
    """An adaptive input and softmax over words."""
    set_defaults(args, cutoffs=cutoffs, div_val=div_val, dropout=dropout, dropatt=dropatt)


@register_model_architecture("transformer_xl", "transformer_xl")
def transformer_xl(args: argparse.Namespace) -> None:
    """A model of middling size; with the task of fairseq's example ``truncated_bptt`` that of the example.

    The example's is Hugging Face's: separate u and v for each layer, tied tails, memory that begins with zeros.
    """
    if getattr(args, "task", None) == "truncated_bptt_lm":
        set_defaults(args, d_model=500, n_head=10, d_head=50, d_inner=1000, dropout=0.0, cutoffs=WORDS_WIKI103)
        set_defaults(args, untie_r=True, tie_projs="tails", memory_start="zeros", mem_len=0)
    else:
        _lengths(args, 128)


@register_model_architecture("transformer_xl", "transformer_xl_wiki103_base")
def transformer_xl_wiki103_base(args: argparse.Namespace) -> None:
    """WikiText-103, 151 M parameters: perplexity 24.0 on the test set (table 1)."""
    _sizes(args, 16, 410, 10, 41, 2100, 150)
    _words(args, WORDS_WIKI103, 1, 0.1, 0.0)
    set_defaults(args, tie_projs="tails")


@register_model_architecture("transformer_xl", "transformer_xl_wiki103_large")
def transformer_xl_wiki103_large(args: argparse.Namespace) -> None:
    """WikiText-103: perplexity 18.3 on the test set (table 1). 285 M parameters, of which the paper counts 257 M."""
    _sizes(args, 18, 1024, 16, 64, 4096, 384)
    _words(args, WORDS_WIKI103, 4, 0.2, 0.2)
    set_defaults(args, tie_projs="tails")


@register_model_architecture("transformer_xl", "transformer_xl_enwik8_base")
@register_model_architecture("transformer_xl", "transformer_xl_text8_base")
def transformer_xl_enwik8_base(args: argparse.Namespace) -> None:
    """enwik8 and text8, 41 M parameters: 1.06 bits per character on enwik8's test set (table 2)."""
    _sizes(args, 12, 512, 8, 64, 2048, 512)
    set_defaults(args, dropout=0.1, dropatt=0.0)


@register_model_architecture("transformer_xl", "transformer_xl_enwik8_medium")
def transformer_xl_enwik8_medium(args: argparse.Namespace) -> None:
    """enwik8, 88 M parameters in 18 layers: 1.03 bits per character on the test set (table 2; the widths are ours)."""
    _sizes(args, 18, 640, 10, 64, 2208, 768)
    set_defaults(args, dropout=0.15, dropatt=0.15)


@register_model_architecture("transformer_xl", "transformer_xl_enwik8_large")
@register_model_architecture("transformer_xl", "transformer_xl_text8_large")
def transformer_xl_enwik8_large(args: argparse.Namespace) -> None:
    """enwik8 and text8, 277 M parameters: 0.99 and 1.08 bits per character on the test sets (tables 2 and 3)."""
    _sizes(args, 24, 1024, 8, 128, 3072, 768)
    set_defaults(args, dropout=0.15, dropatt=0.15)


@register_model_architecture("transformer_xl", "transformer_xl_lm1b_base")
def transformer_xl_lm1b_base(args: argparse.Namespace) -> None:
    """One Billion Word: perplexity 23.5 on the test set (table 4). 357 M parameters; the paper counts 0.46 B."""
    _sizes(args, 18, 1024, 8, 128, 4096, 32)
    _words(args, WORDS_LM1B, 4, 0.0, 0.0)


@register_model_architecture("transformer_xl", "transformer_xl_lm1b_large")
def transformer_xl_lm1b_large(args: argparse.Namespace) -> None:
    """One Billion Word, 0.84 B parameters: perplexity 21.8 on the test set (table 4)."""
    _sizes(args, 24, 1280, 16, 80, 8192, 32)
    _words(args, WORDS_LM1B, 4, 0.05, 0.05)


@register_model_architecture("transformer_xl", "transformer_xl_wiki103_ablation")
def transformer_xl_wiki103_ablation(args: argparse.Namespace) -> None:
    """WikiText-103, 128 M parameters, the size of tables 6 and 10 (how they are spent is ours)."""
    _sizes(args, 16, 360, 10, 36, 1840, 128)
    _words(args, WORDS_WIKI103, 1, 0.1, 0.0)
    set_defaults(args, tie_projs="tails")


@register_model_architecture("transformer_xl", "transformer_xl_lm1b_ablation")
def transformer_xl_lm1b_ablation(args: argparse.Namespace) -> None:
    """One Billion Word, 20 layers, 0.3 B parameters, the size of table 7 (the inner width is ours)."""
    _sizes(args, 20, 1024, 8, 128, 2048, 32)
    _words(args, WORDS_LM1B, 4, 0.0, 0.0)


@register_model_architecture("transformer_xl", "transformer_xl_ptb")
def transformer_xl_ptb(args: argparse.Namespace) -> None:
    """Penn Treebank, 24 M parameters (table 5 gives the number; how they are spent, and the dropout, is ours)."""
    _sizes(args, 16, 360, 10, 36, 900, 70)
    set_defaults(args, dropout=0.5, dropatt=0.2, variational_dropout=True)


@register_model_architecture("transformer_xl", "transformer_xl_tiny")
def transformer_xl_tiny(args: argparse.Namespace) -> None:
    """Seconds on a CPU: for tests and small corpora."""
    set_defaults(args, n_layer=2, d_model=32, n_head=2, d_inner=64)
    _lengths(args, 16)
