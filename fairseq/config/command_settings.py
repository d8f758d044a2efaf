"""Settings of single commands: what each evaluates, generates or writes, and how."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from fairseq.config.fields import Config, defaults, flag, parse_dict
from fairseq.errors import SettingError

_BANDS = [1, 10, 100, 1000, 10_000, 100_000]
LONGEST_TEXT = 200  # tokens of a hypothesis, unless `max_len_b` says
# Settings that only fairseq's hypotheses have; that is why their defaults are None.
_OF_HYPOTHESES = ("prefix_size", "nbest", "max_len_a", "max_len_b", "min_len", "lenpen", "no_repeat_ngram_size")
_OF_CONTINUATIONS = ("max_new_tokens", "num_samples", "num_contexts", "context_tokens", "json")


@dataclass(frozen=True)
class ModelPathConfig(Config):
    """Model: the checkpoints to evaluate."""

    path: str | None = flag(None, "checkpoint or its folder, or several of an ensemble", metavar="FILE[:FILE…]")
    model_overrides: str = flag("{}", "checkpoint settings to change, as a Python dict", metavar="DICT")

    @property
    def overrides(self) -> dict[str, object]:
        """The checkpoint settings to change, by name."""
        return parse_dict("`model_overrides`", self.model_overrides)


@dataclass(frozen=True)
class ShardConfig(ModelPathConfig):
    """Model: the checkpoints to evaluate, and the part of a split."""

    num_shards: int = flag(1, "parts that a split is divided into", low=1)
    shard_id: int = flag(0, "number of the part to evaluate, from 0", low=0)

    @property
    def part(self) -> str:
        """Suffix of a part's file names, before the extension:
        parts of one evaluation may share a folder."""
        return f".{self.shard_id}-of-{self.num_shards}" if self.num_shards > 1 else ""

    def check(self) -> None:
        """Raise SettingError if there is no such part."""
        super().check()
        if self.shard_id >= self.num_shards:
            raise SettingError(f"`shard_id` {self.shard_id}: `num_shards` {self.num_shards} are numbered from 0")


@dataclass(frozen=True)
class FrequencyConfig(Config):
    """Rare words: losses by the count of a word in the training text."""

    by_frequency: bool = flag(False, "losses of whole words by their counts in the training split")
    word_counts: str | None = flag(
        None, "counts for `by_frequency`: file of lines `word count`, or another data folder", metavar="PATH"
    )
    frequency_bands: list[int] = flag(_BANDS, "lowest count of each band of `by_frequency` but the first", low=1)

    def check(self) -> None:
        """Raise SettingError if the bands do not rise."""
        super().check()
        if any(low >= high for low, high in itertools.pairwise(self.frequency_bands)):
            raise SettingError(f"`frequency_bands` {','.join(map(str, self.frequency_bands))}: must rise")
        if not self.by_frequency and (self.word_counts is not None or self.frequency_bands != _BANDS):
            name = "word_counts" if self.word_counts is not None else "frequency_bands"
            raise SettingError(f"`{name}`: needs `by_frequency`; add it, or leave this out")


@dataclass(frozen=True)
class SubwordMarkConfig(Config):
    """Subwords: how they are joined to words."""

    remove_bpe: str | None = flag(
        None,
        "join subwords: the mark at their ends (without a value: @@), or sentencepiece",
        aliases=("--post-process",),
        metavar="MARK",
        const="@@ ",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.remove_bpe == "subword_nmt":  # fairseq's name of the mark
            object.__setattr__(self, "remove_bpe", "@@ ")


@dataclass(frozen=True)
class TextFormatConfig(Config):
    """Text files: settings of reading them."""

    text_field: str = flag("text", "field of .jsonl files, column of tables, with the text", metavar="NAME")
    join_lines: bool = flag(False, "paragraphs end at blank lines, as in hard-wrapped books")


@dataclass(frozen=True)
class GenerationConfig(ModelPathConfig, SubwordMarkConfig):
    """Generation: settings of ``fairseq-interactive`` and ``fairseq-generate``."""

    max_new_tokens: int = flag(100, "maximum tokens to generate, line ends included", low=1, high=10_000_000)
    beam: int | None = flag(None, "search with a beam of this width (1: greedy; default: sample)", low=1, high=10_000)
    sampling: bool = flag(False, "sample from the distribution, also for fairseq's lines")
    sampling_topk: int = flag(0, "when sampling: only the K most probable tokens (0: all)", low=0, metavar="K")
    sampling_topp: float = flag(
        1.0, "when sampling: only the most probable tokens with this total probability", above=0, high=1, metavar="P"
    )
    temperature: float = flag(1.0, "when sampling: softmax temperature", above=0)
    batch_size: int | None = flag(  # scripts written for fairseq leave it None
        None, "maximum texts generated at once; each beam counts (default: 16)", aliases=("--max-sentences",), low=1
    )
    int8: bool = flag(False, "int8 weights, one scale per output")
    results_format: str | None = flag(
        None,
        "text, or fairseq's S- H- P- lines (default: fairseq with one of the flags below)",
        choices=("text", "fairseq"),
    )
    prefix_size: int | None = flag(None, "number of tokens of a line to force at the start (0: all)", low=0)
    nbest: int | None = flag(None, "hypotheses to print, of `beam`", low=1)
    max_len_a: float | None = flag(None, "maximum tokens of a hypothesis per token of its line", low=0, high=1000)
    max_len_b: int | None = flag(
        None, f"maximum tokens of a hypothesis, added to `max_len_a` ({LONGEST_TEXT})", low=1, high=10_000_000
    )
    min_len: int | None = flag(None, "minimum tokens of a hypothesis (1)", low=0)
    lenpen: float | None = flag(None, "length penalty: exponent of the length in scores (1)", low=-10, high=10)
    no_repeat_ngram_size: int | None = flag(None, "length of n-grams that may not repeat (0: all may)", low=0)

    def check(self) -> None:
        """Raise SettingError if no text is long enough."""
        super().check()
        longest = LONGEST_TEXT if self.max_len_b is None else self.max_len_b
        if not self.max_len_a and (self.min_len or 0) > longest:
            raise SettingError(f"`min_len` {self.min_len}: texts have at most {longest} tokens; raise `max_len_b`")

    @property
    def finds_hypotheses(self) -> bool:
        """Whether texts end at ``</s>`` and are printed in fairseq's lines."""
        is_search = bool(self._changed(_OF_HYPOTHESES))
        return self.results_format == "fairseq" or (self.results_format is None and is_search)

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled; else they are searched for."""
        return self.sampling or (self.beam is None and not self.finds_hypotheses)

    @property
    def without_effect(self) -> list[str]:
        """Settings that were changed, and that the chosen format does not read."""
        return self._changed(_OF_CONTINUATIONS if self.finds_hypotheses else _OF_HYPOTHESES)

    def _changed(self, names: Sequence[str]) -> list[str]:
        """Those of *names* that are settings of the command and differ from their defaults."""
        unchanged = defaults(type(self))
        return [name for name in names if name in unchanged and getattr(self, name) != unchanged[name]]


@dataclass(frozen=True)
class TextConfig(TextFormatConfig):
    """Raw text: settings of reading and tokenising it."""

    tokenizer: str | None = flag(None, "word tokenizer of raw text: moses or space", metavar="NAME")
    moses_source_lang: str = flag("en", "language of `tokenizer` moses", metavar="LANG")
    bpe: str | None = flag(None, "subword encoding of raw text: subword_nmt, sentencepiece, gpt2, hf", metavar="NAME")
    bpe_codes: str | None = flag(None, "codes, model, merges or tokenizer.json of `bpe`", metavar="FILE")
