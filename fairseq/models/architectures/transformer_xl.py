"""The named sets of defaults of ``transformer_xl``:
the systems of Dai et al. 2019, and small ones for tests.

Sizes, dropout and lengths are the authors', and so is what is tied: weights always, on WikiText-103
the projections of all bands but the first.
"""

from __future__ import annotations

from collections.abc import Mapping

from fairseq.config.registry import Complete, completed
from fairseq.models.transformer_xl_settings import BY_DISTANCE

WORDS_WIKI103, WORDS_LM1B = [20000, 40000, 200000], [60000, 100000, 640000]


def _lengths(length: int) -> dict[str, object]:
    """Segments and memory of *length* tokens; no memory where positions forbid one."""

    def mem_len(settings: Mapping[str, object]) -> int:
        return length if settings.get("position_encoding", "relative") in BY_DISTANCE else 0

    return {"tokens_per_sample": length, "mem_len": mem_len}


def _sizes(layers: int, model: int, heads: int, head: int, inner: int, length: int) -> dict[str, object]:
    """Sizes of the network, and segments and memory of *length* tokens."""
    sizes = {"n_layer": layers, "d_model": model, "n_head": heads, "d_head": head, "d_inner": inner}
    return {**sizes, **_lengths(length)}


def _dropout(dropout: float, dropatt: float) -> dict[str, object]:
    return {"dropout": dropout, "dropatt": dropatt}


def _words(cutoffs: list[int], div_val: int, dropout: float, dropatt: float) -> dict[str, object]:
    """An adaptive input and softmax over words."""
    return {"cutoffs": cutoffs, "div_val": div_val, **_dropout(dropout, dropatt)}


# fairseq's example ``truncated_bptt``, whose model is Hugging Face's: separate u and v for each
# layer, tied tails, memory that begins with zeros.
EXAMPLE = {
    "d_model": 500,
    "n_head": 10,
    "d_head": 50,
    "d_inner": 1000,
    "dropout": 0.0,
    "cutoffs": WORDS_WIKI103,
    "untie_r": True,
    "tie_projs": "tails",
    "memory_start": "zeros",
    "mem_len": 0,
}


def _transformer_xl(settings: Mapping[str, object]) -> dict[str, object]:
    """A model of middling size; with the task of fairseq's example the example's."""
    # fairseq has this name for the model of its example only; here it is the family's.
    return completed(EXAMPLE if settings.get("task") == "truncated_bptt_lm" else _lengths(128), settings)


ENWIK8_BASE = {**_sizes(12, 512, 8, 64, 2048, 512), **_dropout(0.1, 0.0)}
ENWIK8_LARGE = {**_sizes(24, 1024, 8, 128, 3072, 768), **_dropout(0.15, 0.15)}

TRANSFORMER_XL: dict[str, Mapping[str, object] | Complete] = {
    "transformer_xl": _transformer_xl,
    # WikiText-103, 151 M parameters: perplexity 24.0 on the test set (table 1).
    "transformer_xl_wiki103_base": {
        **_sizes(16, 410, 10, 41, 2100, 150),
        **_words(WORDS_WIKI103, 1, 0.1, 0.0),
        "tie_projs": "tails",
    },
    # Perplexity 18.3 on the test set (table 1). 285 M parameters, of which the paper counts 257 M.
    "transformer_xl_wiki103_large": {
        **_sizes(18, 1024, 16, 64, 4096, 384),
        **_words(WORDS_WIKI103, 4, 0.2, 0.2),
        "tie_projs": "tails",
    },
    # enwik8 and text8, 41 M parameters: 1.06 bits per character on enwik8's test set (table 2).
    "transformer_xl_enwik8_base": ENWIK8_BASE,
    "transformer_xl_text8_base": ENWIK8_BASE,
    # 88 M parameters in 18 layers: 1.03 bits per character
    # on the test set (table 2; the widths are ours).
    "transformer_xl_enwik8_medium": {**_sizes(18, 640, 10, 64, 2208, 768), **_dropout(0.15, 0.15)},
    # 277 M parameters: 0.99 bits per character on enwik8's
    # test set, 1.08 on text8's (tables 2 and 3).
    "transformer_xl_enwik8_large": ENWIK8_LARGE,
    "transformer_xl_text8_large": ENWIK8_LARGE,
    # One Billion Word: perplexity 23.5 on the test set (table 4). 357 M parameters; the paper
    # counts 0.46 B.
    "transformer_xl_lm1b_base": {**_sizes(18, 1024, 8, 128, 4096, 32), **_words(WORDS_LM1B, 4, 0.0, 0.0)},
    # 0.84 B parameters: perplexity 21.8 on the test set (table 4).
    "transformer_xl_lm1b_large": {**_sizes(24, 1280, 16, 80, 8192, 32), **_words(WORDS_LM1B, 4, 0.05, 0.05)},
    # WikiText-103, 128 M parameters, the size of tables 6 and 10 (how they are spent is ours).
    "transformer_xl_wiki103_ablation": {
        **_sizes(16, 360, 10, 36, 1840, 128),
        **_words(WORDS_WIKI103, 1, 0.1, 0.0),
        "tie_projs": "tails",
    },
    # 20 layers, 0.3 B parameters, the size of table 7 (the inner width is ours).
    "transformer_xl_lm1b_ablation": {**_sizes(20, 1024, 8, 128, 2048, 32), **_words(WORDS_LM1B, 4, 0.0, 0.0)},
    # Penn Treebank, 24 M parameters (table 5 gives the number;
    # how they are spent, and the dropout, is ours).
    "transformer_xl_ptb": {
        **_sizes(16, 360, 10, 36, 900, 70),
        **_dropout(0.5, 0.2),
        "variational_dropout": True,
    },
    # Seconds on a CPU: for tests and small corpora.
    "transformer_xl_tiny": {"n_layer": 2, "d_model": 32, "n_head": 2, "d_inner": 64, **_lengths(16)},
}
