"""Settings of single commands: what each evaluates, generates or writes, and how."""

from __future__ import annotations

import itertools
import shlex
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

    num_shards: int = flag(1, "parts of a split; its loss is the mean of theirs, weighted by their tokens", low=1)
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


@dataclass(frozen=True)
class PreprocessConfig(TextConfig):
    """Preprocessing: settings of ``fairseq-preprocess``."""

    learn_bpe: int | None = flag(None, "merges or symbols of `bpe` (or of hf) to learn", low=1, high=10**6)

    only_source: bool = flag(False, "text in one language; always on")
    source_lang: str | None = flag(None, "suffix of the text files: FILE.SRC", aliases=("-s",), metavar="SRC")
    trainpref: str | None = flag(None, "training texts or folders: train, train1, …", several=True, metavar="FILE")
    validpref: str | None = flag(None, "validation texts or folders: valid, valid1, …", several=True, metavar="FILE")
    testpref: str | None = flag(None, "test texts or folders: test, test1, …", several=True, metavar="FILE")
    valid_fraction: float | None = flag(None, "share of the training text held out for validation", above=0, below=1)
    test_fraction: float | None = flag(None, "share of the training text held out as test split", above=0, below=1)
    destdir: str = flag("data-bin", "output folder", aliases=("--out",), metavar="DIR")
    overwrite: bool = flag(False, "replace splits of other texts in the output folder")
    workers: int = flag(1, "processes, at most one a core", low=1)
    srcdict: str | None = flag(None, "existing dictionary to use", metavar="FILE")
    nwordssrc: int = flag(-1, "maximum dictionary size, special symbols included (-1: no limit)", low=-1)
    thresholdsrc: int = flag(0, "minimum count of a word in the dictionary", low=-1)
    padding_factor: int = flag(8, "pad dictionary to multiples of this (0: no)", low=0, high=65536)
    dict_only: bool = flag(False, "write only the dictionary")
    dataset_impl: str = flag("mmap", "data format; only mmap is supported", choices=("mmap",))
    notes: bool = flag(False, "write the positions of rare words, for models with notes")
    note_min_count: int = flag(100, "minimum occurrences of a word with a note", low=1)
    note_max_count: int = flag(500, "maximum occurrences of a word with a note", low=1)
    joined_dictionary: bool = flag(False, "no effect: one language has one dictionary")

    def __post_init__(self) -> None:
        super().__post_init__()
        # Byte-level subwords: they know every text.
        if self.learn_bpe is not None and self.bpe is None:
            object.__setattr__(self, "bpe", "hf")


@dataclass(frozen=True)
class TokenizeConfig(TextConfig):
    """Tokenisation: settings of ``fairseq-tokenize``."""

    data: str | None = flag(None, "data or checkpoint folder whose tokenizer is used", metavar="DIR")
    undo: bool = flag(False, "symbols to text instead of text to symbols")
    workers: int = flag(1, "processes", low=1)
    output: str | None = flag(None, "output file (default: stdout)", aliases=("--out",), metavar="FILE")


@dataclass(frozen=True)
class AttentionConfig(ModelPathConfig):
    """Attention plots: settings of ``fairseq-analyze attention``."""

    path: str | None = flag(None, "checkpoint", metavar="FILE")
    results_path: str | None = flag(None, "folder for results, plots and arrays", aliases=("--out",), metavar="DIR")
    first_tokens: int | None = flag(None, "tokens of the split to read (default: all)", low=1)
    positions: list[int] | None = flag(
        None, "predicted tokens to plot separately, from 0 (default: one at random)", aliases=("--position",), low=0
    )
    heads: str | None = flag(
        None, "heads to plot at these positions (default: the widest of three layers)", metavar="LAYER:HEAD,…"
    )
    terms: bool | None = flag(
        None, "plot the four terms of relative attention (default: if the model has them)", negative=True
    )


@dataclass(frozen=True)
class ReclConfig(ModelPathConfig):
    """Context length: settings of ``fairseq-analyze recl``."""

    path: str | None = flag(None, "checkpoints of the group", metavar="FILE[:FILE…]")
    names: str | None = flag(None, "model names in table and plots (default: their folders)", metavar="NAME,…")
    step: int = flag(50, "increment of the context length, in tokens", low=1)
    max_context: int = flag(500, "maximum context length in tokens, a multiple of `step`", low=1)
    threshold: float = flag(0.01, "minimum relative gain in perplexity for a longer context to count", above=0, below=1)
    top_r: list[float] = flag([1.0, 0.5, 0.1], "fractions of hardest positions to measure on", above=0, high=1)
    positions: int = flag(1000, "maximum number of random target positions", low=1)
    results_path: str | None = flag(None, "folder for results, plots and losses", aliases=("--out",), metavar="DIR")

    def check(self) -> None:
        """Raise SettingError if there are fewer than two context lengths to compare, or a part of a
        step is left."""
        super().check()
        if self.max_context < 2 * self.step:
            raise SettingError(
                f"`max_context` {self.max_context}: fewer than two steps of `step` {self.step}; "
                f"give {2 * self.step} or more"
            )
        # Not rounded: the longest context measured would
        # be another than the one that was asked for.
        if rest := self.max_context % self.step:
            below = self.max_context - rest
            raise SettingError(
                f"`max_context` {self.max_context}: not a multiple of `step` {self.step}; "
                f"give {below} or {below + self.step}"
            )


@dataclass(frozen=True)
class HarnessConfig(Config):
    """Minimal pairs: settings of ``fairseq-harness``."""

    data: str | None = flag(None, "data folder or dict.txt (default: next to the checkpoint)", metavar="DATA")
    pairs: str | None = flag(None, "minimal pairs: JSON lines, or a folder of them such as BLiMP", metavar="PATH")
    known_words: str | None = flag(None, "also average pairs whose words are all in this text", metavar="FILE")
    no_start: bool = flag(
        False, "decoders: no </s> before a sentence, whose first token is context (with --add-bos-token, its <s>)"
    )
    within_words: bool = flag(False, "encoders: also mask the rest of a token's word")
    limit: int | None = flag(None, "pairs per file (default: all)", low=1)
    batch_size: int = flag(8, "rows read at once", low=1)
    cpu: bool = flag(False, "use the CPU even if a GPU is available")
    results_path: str | None = flag(None, "folder for results.json", aliases=("--out",), metavar="DIR")


@dataclass(frozen=True)
class InteractiveConfig(GenerationConfig):
    """Generation: settings of ``fairseq-interactive``."""

    input: str = flag("-", "file of prompts, one per line (-: stdin)", metavar="FILE")
    num_samples: int = flag(1, "continuations of each prompt", low=1, high=1_000_000)
    json: bool = flag(False, "print JSON lines instead of text")


@dataclass(frozen=True)
class GenerateConfig(GenerationConfig, ShardConfig, TextFormatConfig):
    """Generation: settings of ``fairseq-generate``."""

    text: str | None = flag(
        None, "file of text to take contexts from instead of `gen_subset` (-: stdin)", metavar="FILE"
    )
    gen_subset: str = flag("test", "split to take contexts from", metavar="SPLIT")
    context_tokens: int | None = flag(
        None, "context length in tokens (default: what the model reads, at most 512)", low=1
    )
    num_samples: int = flag(1, "total number of continuations", low=1, high=1_000_000)
    num_contexts: int | None = flag(None, "different contexts to draw (default: `num_samples`)", low=1, high=1_000_000)
    results_path: str | None = flag(None, "folder for generate.json", aliases=("--out",), metavar="DIR")


@dataclass(frozen=True)
class ValidateConfig(ShardConfig, FrequencyConfig):
    """Model: settings of ``fairseq-validate``."""

    keep_notes: bool = flag(False, "read notes of rare words; print losses by distance and two controls")
    rare_words: bool = flag(False, "losses of rare words in notes.txt, by distance, and with the words hidden")
    check_data: bool = flag(False, "first compare all data files with checksums.txt and the dictionary")
    results_path: str | None = flag(
        None, "folder for results.json, and plots of `by_frequency`", aliases=("--out",), metavar="DIR"
    )


@dataclass(frozen=True)
class EvalLMConfig(ShardConfig, FrequencyConfig, TextFormatConfig, SubwordMarkConfig):
    """Evaluation: settings of ``fairseq-eval-lm``."""

    text: str | None = flag(None, "file of text to evaluate instead of `gen_subset` (-: stdin)", metavar="FILE")
    results_path: str | None = flag(
        None, "folder for results.json, and the plot of `by_frequency`", aliases=("--out",), metavar="DIR"
    )
    score_documents: str | None = flag(None, "JSON lines with a score for each line or row of `text`", metavar="FILE")
    surprisal: str | None = flag(
        None, "tab-separated file of every word of `text`: characters, surprisal in bits", metavar="FILE"
    )
    save_token_scores: str | None = flag(
        None, "NPZ file for tokens and their log-probabilities, in corpus order", metavar="FILE"
    )
    output_word_probs: bool = flag(False, "print every word's log-probability")
    output_word_stats: bool = flag(False, "print every word's count and mean log-probability")
    context_window: int = flag(0, "context tokens before each block that are not scored", low=0)
    sliding_inf: int = flag(-1, "1: score token by token with a cache", choices=(-1, 0, 1), metavar="{1}")
    cache_pointer: int = flag(
        0,
        "states M of a pointer over a cache: tokens that followed similar states are expected again",
        low=0,
        metavar="M",
    )
    pointer: list[float] | None = flag(
        None, "sharpness and weight of `cache_pointer` (default: fitted on the split valid)", low=0, metavar="S,W"
    )
    softmax_batch: int | None = flag(None, "maximum tokens in one softmax, to bound memory", low=1)
    int8: bool = flag(False, "int8 weights, one scale per output; also prints their effect on perplexity")
    sample: str | None = flag(None, "file for a text that the model writes, also printed", metavar="FILE")
    within_words: bool = flag(False, "encoders: also mask the rest of a token's word")
    baseline: str | None = flag(None, "checkpoint to compare with in `by_frequency`", metavar="FILE")

    def check(self) -> None:
        """Raise SettingError if flags of the table of losses by frequency contradict each other."""
        super().check()
        if self.baseline is not None and not self.by_frequency:
            raise SettingError("`baseline`: is compared in `by_frequency`; add it, or leave this out")
        if self.pointer is not None and (len(self.pointer) != 2 or not self.cache_pointer or self.pointer[1] >= 1):
            raise SettingError("`pointer`: two numbers, the second below 1, with `cache_pointer`; such as 20,0.2")
        if self.cache_pointer and (self.num_shards > 1 or self.score_documents is not None):
            raise SettingError("`cache_pointer`: reads one text in order; excludes `num_shards` and `score_documents`")
        for name, value in (("score_documents", self.score_documents), ("surprisal", self.surprisal)):
            if self.by_frequency and value is not None:
                raise SettingError(f"`by_frequency`: excludes `{name}`; run one after the other")


@dataclass(frozen=True)
class FinetuneConfig(Config):
    """Fine-tuning: settings of ``fairseq-finetune``."""

    path: str | None = flag(None, "pre-trained checkpoint", metavar="FILE")
    from_scratch: bool = flag(False, "random initial weights, as a baseline; sizes from `path`")
    seeds: list[int] = flag([1, 2, 3], "seeds, one run each", low=0)
    lrs: list[float] = flag([1e-5, 3e-5, 5e-5], "learning rates to choose from", above=0)
    max_epoch: int = flag(10, "epochs of each run", low=1)
    batch_size: int = flag(16, "rows per update, over all processes", aliases=("--max-sentences",), low=1)
    warmup_ratio: float = flag(0.06, "fraction of updates in which the learning rate warms up", low=0, below=1)
    weight_decay: float = flag(0.01, "weight decay of matrices", low=0)
    clip_norm: float = flag(1.0, "maximum gradient norm (0: no clipping)", low=0)
    predict: str = flag("valid", "comma-separated splits to write predictions for", metavar="SPLIT,…")
    save_dir: str = flag(
        "finetuned", "folder for checkpoints, predictions and results.json", aliases=("--out",), metavar="DIR"
    )
    train_flags: str = flag("", "additional flags of fairseq-train, as one quoted string", metavar="TEXT")


@dataclass(frozen=True)
class CompareConfig(Config):
    """Comparison: settings of ``fairseq-compare``."""

    out: str = flag("compared", "folder for runs: OUT/SETTING/SEED", metavar="DIR")
    seconds: float | None = flag(None, "training time of each run; updates follow from its speed", above=0)
    updates: int | None = flag(None, "updates of each run, instead of `seconds`", low=1)
    seeds: list[int] = flag([1, 2, 3], "seeds, one run each", low=0)
    only: str | None = flag(None, "settings to train (default: all)", metavar="NAME,…")
    processes: int = flag(1, "runs at a time, each with its share of the cores", low=1)
    eval_flags: str = flag("", "flags of fairseq-eval-lm, as one quoted string", metavar="TEXT")
    pairs: str | None = flag(None, "minimal pairs to score, too", metavar="FILE")
    known_words: str | None = flag(None, "with `pairs`: also those whose words are all in this text", metavar="FILE")
    keep: bool = flag(False, "keep checkpoints when all is measured")
    against: str | None = flag(None, "setting to compare with (default: the first)", metavar="NAME")

    def check(self) -> None:
        if (self.seconds is None) == (self.updates is None):
            raise SettingError("`seconds`, `updates`: give one of them, the budget of each run")
        if len(set(self.seeds)) < len(self.seeds):
            raise SettingError(f"`seeds` {','.join(map(str, self.seeds))}: one value twice; give each once")
        try:
            shlex.split(self.eval_flags)
        except ValueError as error:
            raise SettingError(f"`eval_flags` {self.eval_flags}: {str(error).lower()}; correct the quotes") from None
