"""Settings of the commands, one dataclass a concern, and :class:`Settings`, which holds all of a command's.

A command types its flat namespace once, at its entrance (:func:`fairseq.tasks.typed.typed_settings`), and hands the
parts down. Below, only plug-ins read the namespace.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar

from fairseq.config import flag
from fairseq.registry import Registry, is_plugin

S = TypeVar("S", bound="Settings")

BREAK_MODES = ("none", "complete", "complete_doc", "eos")
DDP_BACKENDS = ("c10d", "pytorch_ddp", "no_c10d", "legacy_ddp")


@dataclass(frozen=True)
class KernelConfig:
    """Kernels of other packages: read by models and optimizers, too."""

    no_apex: bool = flag(False, "leave NVIDIA apex's fused kernels aside even where they are importable")


@dataclass(frozen=True)
class CommonConfig(KernelConfig):
    """Device, precision, randomness and logging: read by every command that runs a model."""

    seed: int = flag(1, "seed of every random choice", low=0)
    cpu: bool = flag(False, "run on the CPU even where a GPU is there")
    fp16: bool = flag(False, "half precision: float16 arithmetic, float32 parameters, dynamic loss scaling")
    bf16: bool = flag(False, "half precision: bfloat16 arithmetic, float32 parameters, no loss scaling needed")
    memory_efficient_fp16: bool = flag(False, "float16 parameters too: with Adam 12 bytes a parameter, not 16")
    compile: bool = flag(False, "compile the model with torch.compile: slow to start, fast afterwards")
    fp16_init_scale: float = flag(128.0, "first loss scale of --fp16", above=0)
    fp16_scale_window: int | None = flag(
        None,
        "updates without overflow before the scale is doubled (default: 16384 / processes / update-freq)",
        low=1,
    )
    fp16_scale_tolerance: float = flag(
        0.0,
        "share of overflowing updates since the last change that is borne before the scale is lowered",
        low=0,
        high=1,
    )
    min_loss_scale: float = flag(1e-4, "training stops when the loss scale falls below this", above=0)
    threshold_loss_scale: float | None = flag(None, "lowest value that the loss scale is lowered to", above=0)
    log_format: str | None = flag(
        None,
        "how progress is shown (default: tqdm on a terminal, simple elsewhere)",
        choices=("tqdm", "simple", "json", "none"),
    )
    log_interval: int = flag(100, "updates between two lines of the log", low=1)
    no_progress_bar: bool = flag(False, "plain lines instead of a bar")
    tensorboard_logdir: str = flag("", "folder for TensorBoard's logs (needs the [tensorboard] extra)", metavar="DIR")
    metrics_file: str = flag("", "file for the log's figures as JSON lines", metavar="FILE")
    user_dir: str | None = flag(None, "folder with a Python package of your own parts", metavar="DIR")


@dataclass(frozen=True)
class DataConfig:
    """Which splits are read, and how they are cut into batches."""

    num_workers: int = flag(1, "batches prepared ahead of a GPU, in the background (0: none)", low=0)
    max_tokens: int | None = flag(None, "most tokens in a batch, on one process", low=1)
    batch_size: int | None = flag(None, "most rows in a batch, on one process", aliases=("--max-sentences",), low=1)
    required_batch_size_multiple: int = flag(8, "batches of this many rows or more are cut to a multiple of it", low=1)
    dataset_impl: str | None = flag(None, "format of the data (there is one)", choices=("mmap",))
    skip_invalid_size_inputs_valid_test: bool = flag(
        False, "leave out blocks of the validation and test sets that are too long, instead of stopping"
    )
    train_subset: str = flag("train", "split to train on", metavar="SPLIT")
    valid_subset: str = flag("valid", "comma-separated splits to validate on", metavar="SPLIT,…")
    gen_subset: str = flag("test", "split to evaluate", metavar="SPLIT")
    max_tokens_valid: int | None = flag(None, "most tokens in a validation batch (default: --max-tokens)", low=1)
    batch_size_valid: int | None = flag(
        None, "most rows in a validation batch (default: --batch-size)", aliases=("--max-sentences-valid",), low=1
    )
    curriculum: int = flag(0, "epochs at the start in which the batches keep one order", low=0)


@dataclass(frozen=True)
class StreamConfig:
    """Which split an evaluation reads as one stream of tokens, and how much of it at once."""

    max_tokens: int | None = flag(None, "most tokens in a batch", low=1)
    batch_size: int | None = flag(None, "most rows in a batch", aliases=("--max-sentences",), low=1)
    gen_subset: str = flag("test", "split to evaluate", metavar="SPLIT")


@dataclass(frozen=True)
class DistributedConfig:
    """How many processes train together, and how they talk."""

    distributed_world_size: int | None = flag(
        None, "processes in all (default: one for each visible GPU; 1 with --cpu)", low=1
    )
    distributed_rank: int = flag(0, "rank of this node's first process, started by hand", low=0)
    nprocs_per_node: int | None = flag(
        None,
        "processes on this machine (default: one a GPU; all with --cpu)",
        aliases=("--distributed-num-procs",),
        low=1,
    )
    distributed_backend: str | None = flag(
        None, "communication backend (default: nccl on GPUs, gloo on CPUs)", choices=("nccl", "gloo")
    )
    distributed_init_method: str | None = flag(None, "address of the rendezvous, e.g. tcp://host:port", metavar="URL")
    distributed_port: int = flag(-1, "port of the rendezvous (-1: a free one)", low=-1, high=65535)
    distributed_timeout: float = flag(600.0, "seconds without response after which a process ends the job", above=0)
    distributed_no_spawn: bool = flag(False, "this process is one rank and starts no others")
    local_rank: int = flag(0, "GPU of this process", aliases=("--local_rank", "--device-id"), low=0)
    ddp_backend: str = flag(
        "c10d",
        "who sums gradients: torch's DistributedDataParallel (c10d, pytorch_ddp: during the backward pass) "
        "or one reduction at the end (no_c10d, legacy_ddp: layers may go unused)",
        choices=DDP_BACKENDS,
    )
    bucket_cap_mb: int = flag(25, "size of the pieces in which gradients are summed, in MB", low=1)
    find_unused_parameters: bool = flag(False, "let DistributedDataParallel look for parameters without a gradient")


@dataclass(frozen=True)
class RateConfig:
    """Learning rate and length of training: what optimizers and schedules read, too."""

    lr: list[float] = flag([0.25], "learning rate; a list: one for each epoch", aliases=("--learning-rate",), above=0)
    max_update: int = flag(0, "stop after this many updates (0: no such limit)", low=0)
    min_lr: float = flag(-1.0, "training stops at this rate; minimum of a cosine without --max-lr")
    stop_min_lr: float | None = flag(None, "training stops after an epoch at this rate (default: --min-lr)")


@dataclass(frozen=True)
class OptimizationConfig(RateConfig):
    """How long and how to train."""

    max_epoch: int = flag(0, "stop after this many epochs (0: no such limit)", low=0)
    stop_time_hours: float = flag(0.0, "stop after this many hours of training (0: no such limit)", low=0)
    clip_norm: float = flag(0.0, "largest gradient norm (0: no clipping)", low=0)
    no_decay_on_norms_and_biases: bool = flag(False, "apply --weight-decay to matrices only, not to norms and biases")
    average_weights_from: int | None = flag(
        None,
        "from this update on, validate and save the average of the weights after each update",
        low=1,
        metavar="UPDATE",
    )
    sentence_avg: bool = flag(False, "divide the gradient by the number of rows, not of tokens")
    update_freq: list[int] = flag([1], "batches added up before each update; a list gives one for each epoch", low=1)
    stages: str | None = flag(
        None,
        "staged training in one run, tokens per sample : up to this many updates, e.g. 128:140100,512:286000",
        metavar="L:U,…",
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, when, and what a run starts from."""

    save_dir: str = flag("checkpoints", "folder of the checkpoints", metavar="DIR")
    restore_file: str = flag(
        "checkpoint_last.pt", "checkpoint to go on from, in --save-dir or elsewhere", metavar="FILE"
    )
    finetune_from_model: str | None = flag(
        None, "checkpoint of initial weights where they fit; all else starts afresh", metavar="FILE"
    )
    reset_optimizer: bool = flag(False, "leave the restored optimizer's state aside")
    reset_lr_scheduler: bool = flag(False, "leave the restored schedule's state aside")
    reset_dataloader: bool = flag(False, "start at the first batch of the data")
    reset_meters: bool = flag(False, "leave the restored best score and times aside")
    optimizer_overrides: str = flag("{}", "settings of the restored optimizer to change", metavar="DICT")
    save_interval: int = flag(1, "epochs between two checkpoints", low=1)
    save_interval_updates: int = flag(0, "updates between two checkpoints (0: only at epochs' ends)", low=0)
    keep_interval_updates: int = flag(-1, "checkpoints of --save-interval-updates to keep (-1: all)", low=-1)
    keep_last_epochs: int = flag(-1, "epochs' checkpoints to keep (-1: all)", low=-1)
    no_save: bool = flag(False, "save nothing")
    no_epoch_checkpoints: bool = flag(False, "save only the last and the best checkpoint")
    no_last_checkpoints: bool = flag(False, "do not save checkpoint_last.pt")
    no_save_optimizer_state: bool = flag(False, "save the model without the optimizer's state")
    validate_interval: int = flag(1, "epochs between two validations", low=1)
    validate_interval_updates: int = flag(0, "updates between two validations (0: only at epochs' ends)", low=0)
    disable_validation: bool = flag(False, "never validate")
    best_checkpoint_metric: str = flag("loss", "figure of the validation that decides which checkpoint is the best")
    maximize_best_checkpoint_metric: bool = flag(False, "the largest such figure is the best, not the smallest")
    patience: int = flag(-1, "stop after this many validations without a better one (-1: never)", low=-1)


@dataclass(frozen=True)
class MemoryConfig:
    """What may be chosen anew at evaluation: nothing in it changes a parameter."""

    mem_len: int = flag(0, "Transformer-XL: tokens of memory before each segment (0: no recurrence)", low=0)
    clamp_len: int = flag(-1, "Transformer-XL: distances beyond this count as this (-1: none do)", low=-1)
    same_length: bool = flag(
        False, "Transformer-XL: every query sees the same number of keys, the last --mem-len", negative=True
    )


@dataclass(frozen=True)
class ModelPathConfig:
    """Which checkpoints are evaluated."""

    path: str | None = flag(None, "checkpoint, or several joined by colons: an ensemble", metavar="FILE[:FILE…]")
    model_overrides: str = flag("{}", "settings of the checkpoint to change, as a Python dict", metavar="DICT")


@dataclass(frozen=True)
class ValidateConfig(ModelPathConfig):
    """What ``fairseq-validate`` validates."""

    keep_notes: bool = flag(False, "notes of rare words kept and read, as in training")


@dataclass(frozen=True)
class EvalLMConfig(ModelPathConfig):
    """What ``fairseq-eval-lm`` evaluates, how, and what it reports."""

    results_path: str | None = flag(None, "folder for results.json: figures, command, versions", metavar="DIR")
    save_token_scores: str | None = flag(
        None, "NPZ file for each token and its natural-log probability, in the corpus's order", metavar="FILE"
    )
    output_word_probs: bool = flag(False, "print every word with its log-probability")
    output_word_stats: bool = flag(False, "print every word's count and mean log-probability")
    remove_bpe: str | None = flag(
        None,
        "join subwords that end in this mark (without a value: @@) before words are counted",
        metavar="MARK",
        const="@@ ",
    )
    context_window: int = flag(0, "tokens before each block that are read as context, not scored", low=0)
    sliding_inf: int = flag(
        -1,
        "1: token by token, as in generation, with the cache (Shortformer); with as many rows the numbers are those of "
        "non-overlapping inference",
        choices=(-1, 0, 1),
        metavar="{1}",
    )
    softmax_batch: int | None = flag(
        None, "most tokens whose output distribution is computed at once: bounds memory", low=1
    )
    int8: bool = flag(False, "int8 weights, one scale an output; also prints their cost in perplexity")


@dataclass(frozen=True)
class ReclConfig(ModelPathConfig):
    """What ``fairseq-recl`` measures."""

    path: str | None = flag(None, "the group: checkpoints joined by colons", metavar="FILE[:FILE…]")
    names: str | None = flag(
        None, "what the table and pictures call the models (default: their folders)", metavar="NAME,…"
    )
    step: int = flag(50, "tokens Δ by which the context grows", low=1)
    max_context: int = flag(500, "longest context, in tokens (rounded down to a multiple of --step)", low=1)
    threshold: float = flag(
        0.01, "relative gain in perplexity below which a longer context no longer helps", above=0, below=1
    )
    top_r: list[float] = flag(
        [1.0, 0.5, 0.1], "shares of positions, the hardest with the short context, that count", above=0, high=1
    )
    positions: int = flag(1000, "most target positions, drawn at random", low=1)
    whole_windows: bool = flag(
        False,
        "models with memory read a window at once, too (default: in segments of --tokens-per-sample, with memory)",
    )
    results_path: str | None = flag(None, "folder for table, figures, losses and pictures", metavar="DIR")


@dataclass(frozen=True)
class AttentionConfig(ModelPathConfig):
    """What ``fairseq-attention`` draws."""

    path: str | None = flag(None, "checkpoint", metavar="FILE")
    results_path: str | None = flag(None, "folder for the pictures and the numbers", metavar="DIR")
    first_tokens: int | None = flag(None, "read only this many tokens of the split (default: all)", low=1)
    position: int | None = flag(
        None, "number of the token, from 0, whose prediction is looked at by itself (default: at random)", low=0
    )
    heads: str | None = flag(
        None,
        "heads that are drawn there, layers and heads numbered from 0 (default: of the first, a middle and the last "
        "layer the one that looks farthest)",
        metavar="LAYER:HEAD,…",
    )
    terms: bool | None = flag(
        None,
        "the four terms of relative attention apart (default: where the model has them)",
        negative=True,
    )


@dataclass(frozen=True)
class GenerationConfig(ModelPathConfig):
    """How ``fairseq-interactive`` and ``fairseq-generate`` continue a text."""

    max_new_tokens: int = flag(100, "tokens that each text goes on for; an end of line counts as one", low=1)
    beam: int = flag(1, "width of the beam search for the most probable text; 1: always the most probable token", low=1)
    sampling: bool = flag(False, "draw tokens at random, by their probability")
    sampling_topk: int = flag(0, "with --sampling: only among the K most probable tokens (0: all)", low=0, metavar="K")
    sampling_topp: float = flag(
        1.0,
        "with --sampling: only among the most probable tokens that together have this probability",
        above=0,
        high=1,
        metavar="P",
    )
    temperature: float = flag(1.0, "with --sampling: below 1 favours probable tokens, above 1 improbable ones", above=0)
    batch_size: int = flag(
        16,
        "most texts that are continued together; a beam search counts each of its beams",
        aliases=("--max-sentences",),
        low=1,
    )
    remove_bpe: str | None = flag(
        None, "join subwords that end in this mark (without a value: @@)", metavar="MARK", const="@@ "
    )
    int8: bool = flag(False, "int8 weights, one scale an output")


@dataclass(frozen=True)
class InteractiveConfig(GenerationConfig):
    """What ``fairseq-interactive`` continues."""

    input: str = flag(
        "-", "file of prompts, one a line, continued in batches (-: each line of stdin as it comes)", metavar="FILE"
    )
    num_samples: int = flag(1, "continuations of each prompt", low=1)
    json: bool = flag(False, "print one JSON object a line for each continuation, not text")


@dataclass(frozen=True)
class GenerateConfig(GenerationConfig):
    """What ``fairseq-generate`` continues, and where the result goes."""

    max_new_tokens: int = flag(500, "tokens that each context is continued by; an end of line counts as one", low=1)
    gen_subset: str = flag("test", "split that contexts are taken from", metavar="SPLIT")
    context_tokens: int = flag(512, "tokens of each context, drawn from the split with --seed", low=1)
    num_samples: int = flag(1, "continuations in all", low=1)
    num_contexts: int | None = flag(None, "different contexts (default: one for each of --num-samples)", low=1)
    results_path: str | None = flag(None, "folder for generate.json and generate.html", metavar="DIR")


@dataclass(frozen=True)
class NotesConfig:
    """What ``fairseq-notes`` shows."""

    words: str | None = flag(None, "words to show, with spaces between (default: the most taken)", metavar="WORDS")
    top: int = flag(10, "number of words shown where --words is not given", low=1)
    nearest: int = flag(8, "number of neighbours of a word", low=1)
    map_words: int = flag(500, "number of words on the map", low=1)
    results_path: str | None = flag(None, "folder for notes.json, notes.html and notes.png", metavar="DIR")


@dataclass(frozen=True)
class FinetuneConfig:
    """What ``fairseq-finetune`` trains, and how often."""

    path: str | None = flag(None, "checkpoint of pre-training", metavar="FILE")
    from_scratch: bool = flag(False, "random initial weights, for comparison; --path gives the sizes")
    seeds: list[int] = flag([1, 2, 3], "seeds, one run each", low=0)
    lrs: list[float] = flag([1e-5, 3e-5, 5e-5], "learning rates to choose from", above=0)
    max_epoch: int = flag(10, "epochs of each run", low=1)
    batch_size: int = flag(16, "rows of an update, over all processes", aliases=("--max-sentences",), low=1)
    warmup_ratio: float = flag(0.06, "share of the updates in which the rate rises", low=0, below=1)
    weight_decay: float = flag(0.01, "weight decay of matrices", low=0)
    clip_norm: float = flag(1.0, "largest gradient norm (0: no clipping)", low=0)
    predict: str = flag("valid", "comma-separated splits whose predictions are written", metavar="SPLIT,…")
    save_dir: str = flag("finetuned", "folder of checkpoints, predictions and results.json", metavar="DIR")
    train_flags: str = flag("", "further flags of fairseq-train, as one argument", metavar="TEXT")


@dataclass(frozen=True)
class PreprocessConfig:
    """What ``fairseq-preprocess`` reads and writes."""

    only_source: bool = flag(False, "text in one language (the only kind there is here)")
    source_lang: str | None = flag(None, "read PREF.SRC; output names stay plain", aliases=("-s",), metavar="SRC")
    trainpref: str | None = flag(None, "training text; further files become train1, …", metavar="FILE[,FILE…]")
    validpref: str | None = flag(None, "validation text; further files become valid1, …", metavar="FILE[,FILE…]")
    testpref: str | None = flag(None, "test text; further files become test1, …", metavar="FILE[,FILE…]")
    destdir: str = flag("data-bin", "folder for the dictionary and the binary data", metavar="DIR")
    workers: int = flag(1, "processes that share the work; the result is the same for any number", low=1)
    srcdict: str | None = flag(None, "dictionary to use instead of making one", metavar="FILE")
    nwordssrc: int = flag(-1, "most words in the dictionary, special symbols counted (-1: no limit)", low=-1)
    thresholdsrc: int = flag(0, "words that occur less often than this become <unk>", low=-1)
    padding_factor: int = flag(8, "factor of the dictionary's size, rounded up (0: any size)", low=0)
    dict_only: bool = flag(False, "make the dictionary and stop")
    dataset_impl: str = flag("mmap", "format of the data (there is one)", choices=("mmap",))
    notes: bool = flag(False, "write the places of rare words, for models with notes")
    note_min_count: int = flag(100, "fewest occurrences of a whole word that has a note", low=1)
    note_max_count: int = flag(500, "most occurrences of a whole word that has a note", low=1)
    joined_dictionary: bool = flag(False, "accepted for fairseq's sake: with one language there is one dictionary")


@dataclass(frozen=True)
class ChosenParts:
    """Names of the registered parts; empty where a command has no such part."""

    task: str = ""
    arch: str = ""
    criterion: str = ""
    optimizer: str = ""
    lr_scheduler: str = ""


@dataclass(frozen=True)
class Settings:
    """All settings of a command that reads data with a model.

    Attributes:
        data_path: the data folder.
        chosen: names of the registered parts.
        task, model, criterion: their typed settings; None for a plug-in without a dataclass.
        command: the command's own settings, such as :class:`EvalLMConfig`; None in training.
        namespace: everything in fairseq's flat form, for plug-ins and for checkpoints.
    """

    common: CommonConfig
    data: DataConfig
    data_path: str
    chosen: ChosenParts
    task: Any
    model: Any
    criterion: Any
    command: Any
    namespace: argparse.Namespace

    def changed(self: S, **values: Any) -> S:
        """A copy in which the fields called as *values* have these values, in every part and in the namespace."""
        parts: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            part = getattr(self, field.name)
            if dataclasses.is_dataclass(part):
                names = {own.name for own in dataclasses.fields(part)} & values.keys()
                parts[field.name] = dataclasses.replace(part, **{name: values[name] for name in names})  # type: ignore
        return dataclasses.replace(self, **parts, namespace=argparse.Namespace(**{**vars(self.namespace), **values}))

    def given_to(self, cls: type, part: Any) -> Any:
        """*part* for a class of this package, the namespace for a plug-in."""
        return self.namespace if is_plugin(cls) else part


@dataclass(frozen=True)
class TrainingSettings(Settings):
    """All settings of a training run."""

    distributed: DistributedConfig
    optimization: OptimizationConfig
    checkpoint: CheckpointConfig
    optimizer: Any
    lr_scheduler: Any


def chosen_part(registry: Registry[Any], kind: str, settings: Settings | argparse.Namespace) -> tuple[Any, Any]:
    """The registered class that *settings* choose for *kind*, and what its constructor is given.

    A class of this package is given its typed settings, a plug-in the namespace; where *settings* are a namespace,
    both are given that.

    Raises:
        UserError: no part has that name.
    """
    if isinstance(settings, argparse.Namespace):
        return registry[vars(settings)[kind]], settings
    cls = registry[getattr(settings.chosen, kind)]
    return cls, settings.given_to(cls, getattr(settings, kind))
