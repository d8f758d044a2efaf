"""Settings of single commands: what each evaluates, generates or writes, and how."""

from __future__ import annotations

from dataclasses import dataclass

from fairseq.config.fields import flag
from fairseq.errors import UserError


@dataclass(frozen=True)
class ModelPathConfig:
    """Model: the checkpoints to evaluate."""

    path: str | None = flag(None, "checkpoint or its folder, or several of an ensemble", metavar="FILE[:FILE…]")
    model_overrides: str = flag("{}", "checkpoint settings to change, a Python dict", metavar="DICT")


@dataclass(frozen=True)
class ShardConfig(ModelPathConfig):
    """Model: the checkpoints to evaluate, and the part of a split."""

    num_shards: int = flag(1, "parts that a split is divided into", low=1)
    shard_id: int = flag(0, "number of the part to evaluate, from 0", low=0)

    def check(self) -> None:
        """Raise UserError if there is no such part."""
        if self.shard_id >= self.num_shards:
            raise UserError(f"--shard-id {self.shard_id}: --num-shards {self.num_shards} are numbered from 0")


@dataclass(frozen=True)
class SubwordMarkConfig:
    """Subwords: how they are joined to words."""

    remove_bpe: str | None = flag(
        None,
        "subword mark to join words at (without a value: @@)",
        aliases=("--post-process",),
        metavar="MARK",
        const="@@ ",
    )

    def __post_init__(self) -> None:
        if self.remove_bpe == "subword_nmt":  # fairseq's name of the mark
            object.__setattr__(self, "remove_bpe", "@@ ")


@dataclass(frozen=True)
class ValidateConfig(ShardConfig):
    """Model: settings of ``fairseq-validate``."""

    keep_notes: bool = flag(False, "keep and read the notes of rare words, as in training")
    rare_words: bool = flag(False, "also losses over the rare words of notes.txt")


@dataclass(frozen=True)
class TextFormatConfig:
    """Text files: settings of reading them."""

    text_field: str = flag("text", "field with the text in .jsonl files", metavar="NAME")
    join_lines: bool = flag(False, "paragraphs end at blank lines, as in hard-wrapped books")


@dataclass(frozen=True)
class EvalLMConfig(ShardConfig, TextFormatConfig, SubwordMarkConfig):
    """Evaluation: settings of ``fairseq-eval-lm``."""

    text: str | None = flag(None, "file of text to evaluate instead of --gen-subset (-: stdin)", metavar="FILE")
    results_path: str | None = flag(None, "folder for results.json", metavar="DIR")
    score_documents: str | None = flag(None, "JSON lines with a score for each line or row of --text", metavar="FILE")
    save_token_scores: str | None = flag(
        None, "NPZ file for tokens and their log-probabilities, in corpus order", metavar="FILE"
    )
    output_word_probs: bool = flag(False, "print every word's log-probability")
    output_word_stats: bool = flag(False, "print every word's count and mean log-probability")
    context_window: int = flag(0, "context tokens before each block that are not scored", low=0)
    sliding_inf: int = flag(
        -1,
        "1: score token by token with a cache",
        choices=(-1, 0, 1),
        metavar="{1}",
    )
    softmax_batch: int | None = flag(None, "maximum tokens in one softmax, to bound memory", low=1)
    int8: bool = flag(False, "int8 weights, one scale per output; also prints their effect on perplexity")
    sample: str | None = flag(None, "file for a text that the model writes, also printed", metavar="FILE")


@dataclass(frozen=True)
class ReclConfig(ModelPathConfig):
    """Context length: settings of ``fairseq-recl``."""

    path: str | None = flag(None, "checkpoints of the group", metavar="FILE[:FILE…]")
    names: str | None = flag(None, "model names in table and plots (default: their folders)", metavar="NAME,…")
    step: int = flag(50, "increment of the context length, in tokens", low=1)
    max_context: int = flag(500, "maximum context length in tokens, a multiple of --step", low=1)
    threshold: float = flag(0.01, "minimum relative gain in perplexity for a longer context to count", above=0, below=1)
    top_r: list[float] = flag([1.0, 0.5, 0.1], "fractions of hardest positions to measure on", above=0, high=1)
    positions: int = flag(1000, "maximum number of random target positions", low=1)
    whole_windows: bool = flag(
        False,
        "read each window in one pass, also in models with memory",
    )
    results_path: str | None = flag(None, "folder for the report, plots and losses", metavar="DIR")


@dataclass(frozen=True)
class AttentionConfig(ModelPathConfig):
    """Attention plots: settings of ``fairseq-attention``."""

    path: str | None = flag(None, "checkpoint", metavar="FILE")
    results_path: str | None = flag(None, "folder for the report, plots and arrays", metavar="DIR")
    first_tokens: int | None = flag(None, "tokens of the split to read (default: all)", low=1)
    positions: list[int] | None = flag(
        None,
        "predicted tokens to plot separately, from 0 (default: one at random)",
        aliases=("--position",),
        low=0,
    )
    heads: str | None = flag(
        None,
        "heads to plot at these positions (default: the widest of three layers)",
        metavar="LAYER:HEAD,…",
    )
    terms: bool | None = flag(
        None,
        "plot the four terms of relative attention (default: if the model has them)",
        negative=True,
    )


@dataclass(frozen=True)
class GenerationConfig(ModelPathConfig, SubwordMarkConfig):
    """Generation: settings of ``fairseq-interactive`` and ``fairseq-generate``."""

    max_new_tokens: int = flag(100, "maximum tokens to generate, line ends included", low=1, high=10_000_000)
    beam: int = flag(1, "beam width (1: greedy)", low=1, high=10_000)
    sampling: bool = flag(False, "sample from the distribution instead of searching")
    sampling_topk: int = flag(0, "with --sampling: only the K most probable tokens (0: all)", low=0, metavar="K")
    sampling_topp: float = flag(
        1.0,
        "with --sampling: only the most probable tokens with this total probability",
        above=0,
        high=1,
        metavar="P",
    )
    temperature: float = flag(1.0, "with --sampling: softmax temperature", above=0)
    batch_size: int = flag(
        16,
        "maximum texts generated at once; each beam counts",
        aliases=("--max-sentences",),
        low=1,
    )
    int8: bool = flag(False, "int8 weights, one scale per output")
    results_format: str | None = flag(
        None,
        "text, or fairseq's S- H- P- lines (default: fairseq with one of the flags below)",
        choices=("text", "fairseq"),
    )
    prefix_size: int | None = flag(None, "tokens of a line that hypotheses begin with (0: all)", low=0)
    nbest: int | None = flag(None, "hypotheses to print, of --beam", low=1)
    max_len_a: float | None = flag(None, "maximum tokens of a hypothesis per token of its line", low=0, high=1000)
    max_len_b: int | None = flag(None, "maximum tokens of a hypothesis, added to that (200)", low=1, high=10_000_000)
    min_len: int | None = flag(None, "minimum tokens of a hypothesis (1)", low=0)
    lenpen: float | None = flag(None, "length penalty: exponent of the length in scores (1)", low=-10, high=10)
    no_repeat_ngram_size: int | None = flag(None, "length of n-grams that are not repeated (0: any are)", low=0)

    @property
    def finds_hypotheses(self) -> bool:
        """Whether texts end at ``</s>`` and are printed in fairseq's lines."""
        asked = (self.prefix_size, self.nbest, self.max_len_a, self.max_len_b, self.min_len, self.lenpen)
        given = any(value is not None for value in (*asked, self.no_repeat_ngram_size))
        return self.results_format == "fairseq" or (self.results_format is None and given)


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
        None, "file of text to take contexts from instead of --gen-subset (-: stdin)", metavar="FILE"
    )
    max_new_tokens: int = flag(500, "maximum tokens to generate, line ends included", low=1, high=10_000_000)
    gen_subset: str = flag("test", "split to take contexts from", metavar="SPLIT")
    context_tokens: int = flag(512, "context length in tokens", low=1)
    num_samples: int = flag(1, "total number of continuations", low=1, high=1_000_000)
    num_contexts: int | None = flag(None, "different contexts to draw (default: --num-samples)", low=1, high=1_000_000)
    results_path: str | None = flag(None, "folder for generate.json and generate.html", metavar="DIR")


@dataclass(frozen=True)
class NotesConfig:
    """Notes: settings of ``fairseq-notes``."""

    words: str | None = flag(None, "space-separated words to show (default: those taken most often)", metavar="WORDS")
    top: int = flag(10, "number of words to show without --words", low=1)
    nearest: int = flag(8, "nearest neighbours to list per word", low=1)
    map_words: int = flag(500, "number of words on the map", low=1)
    results_path: str | None = flag(None, "folder for notes.json, notes.html and notes.png", metavar="DIR")


@dataclass(frozen=True)
class PlotConfig:
    """Curves: settings of ``fairseq-plot``."""

    figure: str = flag("loss", "figure of the log to draw", metavar="NAME")
    split: str = flag("valid", "validation splits, train_inner or train, joined by commas", metavar="NAME,…")
    over: str = flag("updates", "horizontal axis", choices=("updates", "tokens", "hours"))
    reach: float | None = flag(None, "report when each run reaches this value of the figure")
    results_path: str | None = flag(None, "picture to write: .png, .svg or .pdf", metavar="FILE")


@dataclass(frozen=True)
class HarnessConfig:
    """Evaluation harness: settings of ``fairseq-harness``."""

    data: str | None = flag(None, "data folder or dict.txt (default: beside the checkpoint)", metavar="DATA")
    tasks: str | None = flag(None, "comma-separated names of tasks", metavar="NAME,…")
    include_path: str | None = flag(None, "folder with task files of one's own", metavar="DIR")
    num_fewshot: int | None = flag(None, "examples in the prompt (default: the task's)", low=0)
    limit: int | None = flag(None, "examples per task (default: all)", low=1)
    batch_size: int = flag(8, "rows read at once", low=1)
    max_gen_toks: int = flag(256, "most generated tokens where the task names none", low=1)
    bootstrap_iters: int = flag(1000, "samples for standard errors (0: none)", low=0)
    cpu: bool = flag(False, "use the CPU even if a GPU is available")
    results_path: str | None = flag(None, "folder for results.json", metavar="DIR")


@dataclass(frozen=True)
class FinetuneConfig:
    """Fine-tuning: settings of ``fairseq-finetune``."""

    path: str | None = flag(None, "pre-trained checkpoint", metavar="FILE")
    from_scratch: bool = flag(False, "random initial weights, as a baseline; sizes from --path")
    seeds: list[int] = flag([1, 2, 3], "seeds, one run each", low=0)
    lrs: list[float] = flag([1e-5, 3e-5, 5e-5], "learning rates to choose from", above=0)
    max_epoch: int = flag(10, "epochs of each run", low=1)
    batch_size: int = flag(16, "rows per update, over all processes", aliases=("--max-sentences",), low=1)
    warmup_ratio: float = flag(0.06, "fraction of updates in which the learning rate warms up", low=0, below=1)
    weight_decay: float = flag(0.01, "weight decay of matrices", low=0)
    clip_norm: float = flag(1.0, "maximum gradient norm (0: no clipping)", low=0)
    predict: str = flag("valid", "comma-separated splits to write predictions for", metavar="SPLIT,…")
    save_dir: str = flag("finetuned", "folder for checkpoints, predictions and results.json", metavar="DIR")
    train_flags: str = flag("", "additional flags of fairseq-train, as one quoted string", metavar="TEXT")


@dataclass(frozen=True)
class ClassifyConfig:
    """Classification: settings of ``fairseq-classify``."""

    data: str | None = flag(None, "data folder or dict.txt (default: beside the checkpoint)", metavar="DATA")
    format: str = flag("json", "output: JSON lines, or a table with a column for each class", choices=("json", "tsv"))
    batch_size: int = flag(32, "texts at once", low=1, high=1_000_000)
    cpu: bool = flag(False, "use the CPU even if a GPU is available")


@dataclass(frozen=True)
class TextConfig(TextFormatConfig):
    """Raw text: settings of reading and tokenising it."""

    tokenizer: str | None = flag(None, "word tokenizer of raw text: moses or space", metavar="NAME")
    moses_source_lang: str = flag("en", "language of --tokenizer moses", metavar="LANG")
    bpe: str | None = flag(None, "subword encoding of raw text: subword_nmt, sentencepiece, gpt2, hf", metavar="NAME")
    bpe_codes: str | None = flag(None, "codes, model, merges or tokenizer.json of --bpe", metavar="FILE")


@dataclass(frozen=True)
class TokenizeConfig(TextConfig):
    """Tokenisation: settings of ``fairseq-tokenize``."""

    data: str | None = flag(None, "data or checkpoint folder whose tokenizer is used", metavar="DIR")
    undo: bool = flag(False, "symbols to text instead of text to symbols")
    workers: int = flag(1, "processes", low=1)
    output: str | None = flag(None, "output file (default: stdout)", metavar="FILE")


@dataclass(frozen=True)
class PreprocessConfig(TextConfig):
    """Preprocessing: settings of ``fairseq-preprocess``."""

    learn_bpe: int | None = flag(None, "merges or pieces of --bpe to learn from the training text", low=1, high=10**6)

    only_source: bool = flag(False, "text in one language; always on")
    source_lang: str | None = flag(None, "suffix of the text files: FILE.SRC", aliases=("-s",), metavar="SRC")
    trainpref: str | None = flag(None, "training text; additional files become train1, …", metavar="FILE[,FILE…]")
    validpref: str | None = flag(None, "validation text; additional files become valid1, …", metavar="FILE[,FILE…]")
    testpref: str | None = flag(None, "test text; additional files become test1, …", metavar="FILE[,FILE…]")
    destdir: str = flag("data-bin", "output folder", metavar="DIR")
    workers: int = flag(1, "number of processes", low=1)
    srcdict: str | None = flag(None, "existing dictionary to use", metavar="FILE")
    nwordssrc: int = flag(-1, "maximum dictionary size, special symbols included (-1: no limit)", low=-1)
    thresholdsrc: int = flag(0, "minimum count of a word in the dictionary", low=-1)
    padding_factor: int = flag(8, "pad the dictionary to a multiple of this size (0: no padding)", low=0, high=65536)
    dict_only: bool = flag(False, "write only the dictionary")
    dataset_impl: str = flag("mmap", "data format; only mmap is supported", choices=("mmap",))
    notes: bool = flag(False, "write the positions of rare words, for models with notes")
    note_min_count: int = flag(100, "minimum occurrences of a word with a note", low=1)
    note_max_count: int = flag(500, "maximum occurrences of a word with a note", low=1)
    joined_dictionary: bool = flag(False, "no effect: one language has one dictionary")
