"""Settings of the commands, one dataclass a concern,
and :class:`Settings`, which holds all of a run's.

A command types its flat namespace once, at its entrance, and hands the parts down.

What a command line leaves open comes from ``--config FILE.yaml``, the architecture, the dataclass,
in that order; no default lives below.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fairseq.config import fields
from fairseq.config.fields import Config, flag
from fairseq.config.registry import CHOICES, EXTENSIONS, TASKS, chosen_part, extensions_of
from fairseq.config.shared import KernelConfig, MeanConfig
from fairseq.errors import SettingError, UserError
from fairseq.system import deferred

logger = logging.getLogger(__name__)

S = TypeVar("S", bound="Settings")

DEFAULT_BATCH_SIZE = 8  # rows, in training without --max-tokens
DDP_BACKENDS = ("c10d", "pytorch_ddp", "no_c10d", "legacy_ddp", "fully_sharded")


@dataclass(frozen=True)
class PrecisionConfig(Config):
    """Precision of matrix products, read by optimizers too."""

    fp16: bool = flag(False, "float16 arithmetic with dynamic loss scaling, float32 parameters")
    bf16: bool = flag(False, "bfloat16 arithmetic (on CPUs where it is faster), float32 parameters")


@dataclass(frozen=True)
class CommonConfig(PrecisionConfig, KernelConfig):
    """Device, precision and logging: read by every command that runs a model."""

    seed: int = flag(1, "random seed", low=0)
    cpu: bool = flag(False, "run on the CPU even if there is a GPU")
    tf32: bool = flag(False, "TF32 instead of float32 matrix products on NVIDIA GPUs")
    deterministic: bool = flag(False, "torch's deterministic algorithms: equal runs on a GPU, slower")
    memory_efficient_fp16: bool = flag(False, "float16 parameters; Adam needs 12 bytes per parameter instead of 16")
    compile: bool = flag(False, "compile each layer with torch.compile, for the shape of the batches")
    fp16_init_scale: float = flag(128.0, "initial loss scale of `fp16`", above=0, training=True, rare=True)
    fp16_scale_window: int | None = flag(
        None,
        "updates without overflow until the loss scale doubles (default: 16384 / processes / update-freq)",
        low=1,
        training=True,
        rare=True,
    )
    fp16_scale_tolerance: float = flag(
        0.0, "fraction of overflows tolerated before the loss scale is halved", low=0, high=1, training=True, rare=True
    )
    min_loss_scale: float = flag(1e-4, "loss scale below which training stops", above=0, training=True, rare=True)
    threshold_loss_scale: float | None = flag(None, "lower bound of the loss scale", above=0, training=True, rare=True)
    log_format: str | None = flag(
        None, "log format (default: tqdm on a terminal, else simple)", choices=("tqdm", "simple", "json", "none")
    )
    log_interval: int = flag(100, "updates between log lines; the first come earlier", low=1)
    no_progress_bar: bool = flag(False, "log lines instead of a progress bar", rare="log_format")
    tensorboard_logdir: str = flag(
        "", "folder for TensorBoard logs (needs the package tensorboard)", metavar="DIR", stored=False, training=True
    )
    metrics_file: str = flag(
        "",
        "JSON Lines file of metrics (default: metrics.jsonl in `save_dir`)",
        metavar="FILE",
        stored=False,
        training=True,
    )
    log_file: str | None = flag(None, "file for a copy of the log", metavar="FILE", stored=False, training=True)
    wandb_project: str | None = flag(
        None, "project of Weights & Biases (needs the package wandb)", metavar="NAME", training=True
    )
    user_dir: str | None = flag(None, "plug-in folder, a Python package", metavar="DIR", stored=False)


@dataclass(frozen=True)
class StreamConfig(Config):
    """Data and batches: the split that an evaluation reads as one stream of tokens."""

    max_tokens: int | None = flag(None, "maximum tokens in a batch, per process", low=1)
    batch_size: int | None = flag(
        None,
        f"maximum rows in a batch, per process (training without `max_tokens`: {DEFAULT_BATCH_SIZE})",
        aliases=("--max-sentences",),
        low=1,
    )
    gen_subset: str = flag("test", "split to evaluate", metavar="SPLIT")


@dataclass(frozen=True)
class DataConfig(StreamConfig):
    """Data and batches: splits, and how they are cut into batches."""

    num_workers: int = flag(1, "batches prepared in the background for a GPU (0: none)", low=0, high=1024)
    required_batch_size_multiple: int = flag(
        8, "round batches above this many rows down to a multiple", low=1, rare=True
    )
    skip_invalid_size_inputs_valid_test: bool = flag(
        False, "skip blocks longer than the model's positions when evaluating", rare=True
    )
    train_subset: str = flag("train", "training split", metavar="SPLIT")
    valid_subset: str = flag("valid", "validation splits", metavar="SPLIT,…")
    # None in fairseq's checkpoints.
    combine_valid_subsets: bool | None = flag(
        None, "validate on valid, valid1, valid2, … as one split", aliases=("--combine-val",), rare=True
    )
    ignore_unused_valid_subsets: bool = flag(
        False, "leave out validation splits that `valid_subset` does not name", rare=True
    )
    max_tokens_valid: int | None = flag(None, "maximum tokens in a validation batch (default: `max_tokens`)", low=1)
    batch_size_valid: int | None = flag(
        None, "maximum rows in a validation batch (default: `batch_size`)", aliases=("--max-sentences-valid",), low=1
    )
    max_valid_steps: int | None = flag(
        None, "maximum batches per validation", aliases=("--nval",), low=1, training=True
    )
    curriculum: int = flag(0, "first epochs that keep the same order of batches", low=0, training=True)


@dataclass(frozen=True)
class DistributedConfig(Config):
    """Processes: number, rendezvous, restarts and gradient reduction."""

    distributed_world_size: int | None = flag(
        None, "total number of processes (default: one per GPU; 1 with `cpu`)", low=1
    )
    nprocs_per_node: int | None = flag(
        None,
        "processes on this machine (default: one per GPU; all with `cpu`)",
        aliases=("--distributed-num-procs",),
        low=1,
        rare=True,
    )
    distributed_backend: str | None = flag(
        None, "communication backend (default: nccl on GPUs, gloo on CPUs)", choices=("nccl", "gloo"), rare=True
    )
    distributed_port: int = flag(-1, "port of the rendezvous (-1: a free one)", low=-1, high=65535, rare=True)
    distributed_timeout: float = flag(
        600.0, "seconds without a response before a process ends the job (files: a day)", above=0, high=10_000_000
    )
    max_restarts: int = flag(0, "restarts of all processes after one has failed", low=0)
    local_rank: int = flag(0, "GPU of this process", aliases=("--local_rank", "--device-id"), low=0, rare=True)
    ddp_backend: str = flag(
        "c10d",
        "c10d: overlapped gradient reduction; no_c10d: one after it; fully_sharded: parameters in parts",
        choices=DDP_BACKENDS,
        training=True,
    )
    shard_group_size: int | None = flag(
        None, "fully_sharded: processes that share one copy of the parameters (default: a node's)", low=2, training=True
    )
    cpu_offload: bool = flag(False, "fully_sharded: parameters and optimizer state in host memory", training=True)
    checkpoint_activations: bool = flag(False, "recompute each layer's activations in the backward pass", training=True)
    checkpoint_policy: str = flag(
        "full",
        "recompute full layers, or with selective all but matrix products and attention",
        choices=("full", "selective"),
        training=True,
    )
    bucket_cap_mb: int = flag(25, "gradient bucket size in MB", low=1, training=True, rare=True)
    find_unused_parameters: bool = flag(
        False, "allow parameters that get no gradient in DistributedDataParallel", training=True, rare=True
    )


def whole_share(total: int, share: float) -> int:
    """The whole updates in a *share* of *total*;
    shares with the sum 1 have no more than *total* together."""
    return int(total * share + 1e-6)  # 0.29 of 100 is less than 29 in binary


@dataclass(frozen=True)
class RateConfig(Config):
    """Learning rate and number of updates, read by optimizers and schedules too."""

    lr: list[float] = flag([0.25], "learning rate, or one for each epoch", aliases=("--learning-rate",), low=0)
    max_update: int = flag(0, "maximum number of updates (0: no limit; an epoch if the schedule ends)", low=0)
    min_lr: float = flag(-1.0, "stop training at this rate; minimum of cosine without `max_lr`")
    stop_min_lr: float | None = flag(None, "stop training after an epoch at this rate (default: `min_lr`)", rare=True)

    @property
    def needs_max_update(self) -> bool:
        """Whether the learning rate depends on the number
        of updates of training, which is left open."""
        return False

    def updates_of(self, setting: str, share: float) -> int:
        """The updates that are a *share* of training,
        the value of *setting*; SettingError without `max_update`."""
        # Not in check(): the length of training may come from a stage, or from the data.
        if self.max_update <= 0:
            raise SettingError(f"`{setting}` {share:g}: a share of `max_update`; give it")
        return whole_share(self.max_update, share)


@dataclass(frozen=True)
class OptimizationConfig(MeanConfig, RateConfig):
    """Training: length, learning rate and gradients."""

    max_epoch: int = flag(0, "maximum number of epochs (0: no limit)", low=0)
    stop_time_hours: float = flag(0.0, "maximum training time in hours (0: no limit)", low=0)
    clip_norm: float = flag(0.0, "maximum gradient norm (0: no clipping)", low=0)
    no_decay_on_norms_and_biases: bool = flag(False, "weight decay of matrices only, not of norms and biases")
    average_weights_from: int | None = flag(
        None, "validate and save the average of weights from this update on", low=1, metavar="UPDATE"
    )
    ema_decay: float | None = flag(
        None, "validate and save an exponential moving average of weights, e.g. 0.999", low=0, below=1, metavar="DECAY"
    )
    skip_nonfinite: int = flag(0, "maximum updates to skip for an infinite or NaN loss or gradient", low=0)
    update_freq: list[int] = flag([1], "batches accumulated per update, or one number for each epoch", low=1)
    batch_chunk: int = flag(1, "passes per batch, each with a share of its rows and of their memory", low=1)
    stages: str | None = flag(
        None,
        "staged training: LENGTH[+MEMORY]:LAST_UPDATE[:MAX_TOKENS[:LR]] of each stage, e.g. 128:140100,512:286000",
        metavar="L[+M]:U[:T[:LR]],…",
    )


@dataclass(frozen=True)
class CheckpointConfig(Config):
    """Checkpoints and validation: what is saved, when, and where a run resumes."""

    save_dir: str = flag("checkpoints", "checkpoint folder", aliases=("--out",), metavar="DIR", stored=False)
    restore_file: str = flag(
        "checkpoint_last.pt", "checkpoint to resume from, in `save_dir` or elsewhere", metavar="FILE", stored=False
    )
    continue_once: str | None = flag(
        None,
        "checkpoint to resume from while `save_dir` has no checkpoint_last.pt",
        metavar="FILE",
        stored=False,
        rare=True,
    )
    finetune_from_model: str | None = flag(
        None, "checkpoint, or its folder, to initialize weights from", metavar="FILE", stored=False
    )
    reset_optimizer: bool = flag(False, "ignore the checkpoint's optimizer state", rare="reset")
    reset_lr_scheduler: bool = flag(False, "ignore the checkpoint's learning-rate schedule state", rare="reset")
    reset_dataloader: bool = flag(False, "start at the beginning of the data", rare="reset")
    reset_meters: bool = flag(False, "ignore the checkpoint's best score and times", rare="reset")
    optimizer_overrides: str = flag(
        "{}", "optimizer settings to change when resuming, as a Python dict", metavar="DICT"
    )
    save_interval: int = flag(1, "epochs between checkpoints", low=1, rare="save_every")
    save_interval_minutes: float = flag(
        30.0, "minutes between saves of checkpoint_last.pt (0: never by time)", low=0, rare="save_every"
    )
    save_interval_updates: int = flag(0, "updates between checkpoints (0: only after epochs)", low=0, rare="save_every")
    save_interval_words: str | None = flag(
        None, "words of raw text between checkpoints, e.g. 1M:10,10M", metavar="EVERY[:TIMES],…", rare="save_every"
    )
    save_interval_tokens: str | None = flag(
        None, "tokens between checkpoints, e.g. 1M:10,10M", metavar="EVERY[:TIMES],…", rare="save_every"
    )
    keep_interval_updates: int = flag(
        -1, "number of `save_interval_updates` checkpoints to keep (-1: all)", low=-1, rare="keep"
    )
    keep_interval_updates_pattern: int = flag(
        -1, "keep checkpoints at multiples of this update for good (-1: none)", low=-1, rare=True
    )
    keep_best_checkpoints: int = flag(-1, "number of best checkpoints to keep (-1: one)", low=-1, rare="keep")
    keep_last_epochs: int = flag(-1, "number of epoch checkpoints to keep (-1: all)", low=-1, rare="keep")
    no_save: bool = flag(False, "save no checkpoints", rare="save_every")
    async_save: bool = flag(False, "write checkpoints in the background, from a copy in host memory")
    no_epoch_checkpoints: bool = flag(False, "save only the last and best checkpoints", rare="save_every")
    no_last_checkpoints: bool = flag(False, "do not save checkpoint_last.pt", rare=True)
    no_save_optimizer_state: bool = flag(False, "save checkpoints without optimizer state", rare=True)
    validate_interval: int = flag(1, "epochs between validations", low=1, rare="validate_every")
    validate_interval_updates: int | None = flag(
        None,
        "updates between validations (0: only after epochs; default: ten or five in a run)",
        low=0,
        rare="validate_every",
    )
    validate_after_updates: int = flag(0, "updates before the first validation", low=0, rare=True)
    disable_validation: bool = flag(False, "no validation", rare="validate_every")
    no_sample: bool = flag(False, "no line of text by a model of raw text after a validation")
    best_checkpoint_metric: str = flag("loss", "validation metric that selects the best checkpoint")
    maximize_best_checkpoint_metric: bool = flag(False, "larger is better", rare=True)
    patience: int = flag(-1, "validations without improvement before training stops (-1: no limit)", low=-1)


RESETS = {
    "optimizer": "reset_optimizer",
    "lr-scheduler": "reset_lr_scheduler",
    "dataloader": "reset_dataloader",
    "meters": "reset_meters",
}
_UNITS = {  # of the intervals of a short form: the setting
    "save_every": {
        "u": "save_interval_updates",
        "ep": "save_interval",
        "min": "save_interval_minutes",
        "w": "save_interval_words",
        "t": "save_interval_tokens",
    },
    "validate_every": {"u": "validate_interval_updates", "ep": "validate_interval"},
    "keep": {"u": "keep_interval_updates", "ep": "keep_last_epochs", "best": "keep_best_checkpoints"},
}
_MAY_BE_ZERO = ("save_interval_updates", "save_interval", "save_interval_minutes", "validate_interval_updates")
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
_INTERVAL = re.compile(r"(\d{1,9})([KMB]?)(u|ep|min|w|t|best)((?::\d{1,9})?)")


@dataclass(frozen=True)
class ShortForms(Config):
    """Checkpoints and validation: one flag for what fairseq says in several."""

    save_every: str | None = flag(
        None,
        "checkpoints each so many updates, epochs, minutes, words or tokens, or never (default: 1ep,30min)",
        metavar="1000u,1ep,30min,10Mw",
    )
    validate_every: str | None = flag(
        None,
        "validations each so many updates or epochs, or never (default: 1ep; ten or five in a run)",
        metavar="1000u,1ep",
    )
    keep: str | None = flag(
        None,
        "checkpoints to keep: of updates, of epochs, best ones (default: all, and the best)",
        metavar="3u,5ep,2best",
    )
    reset: str | None = flag(
        None,
        "parts of the checkpoint to ignore when resuming: optimizer, lr-scheduler, dataloader, meters; or all",
        metavar="PART,…",
    )

    def meaning(self) -> dict[str, dict[str, object]]:
        """The settings that each given form stands for; what it does not name keeps its default."""
        given = {name: text for name, text in vars(self).items() if text is not None}
        return {name: _resets(text) if name == "reset" else _intervals(name, text) for name, text in given.items()}


def _resets(text: str) -> dict[str, object]:
    parts = list(RESETS) if text == "all" else [part.strip() for part in text.split(",")]
    for part in parts:
        if part not in RESETS:
            raise SettingError(f"`reset` {text}: {part!r} is none of {', '.join(RESETS)}, all")
    return {RESETS[part]: True for part in parts}


def _intervals(name: str, text: str) -> dict[str, object]:
    units, off = _UNITS[name], {"save_every": "no_save", "validate_every": "disable_validation"}.get(name)
    if text == "never" and off is not None:
        return {off: True}
    found: dict[str, Any] = {off: False} if off is not None else {}
    for item in text.split(","):
        match = _INTERVAL.fullmatch(item.strip())
        number = int(match[1]) * _FACTORS[match[2]] if match else 0
        of_text = match is not None and match[3] in "wt"
        if match is None or match[3] not in units or (match[4] and not of_text):
            known = ", ".join(f"N{unit}" for unit in units) + (" (or never, alone)" if off is not None else "")
            raise SettingError(f"`{name}` {text}: {item!r} is none of {known}")
        setting = units[match[3]]
        if not number and setting not in _MAY_BE_ZERO:
            # Of checkpoints to keep, fairseq's flags mean all by 0.
            raise SettingError(f"`{name}` {text}: {item!r} must be greater than 0, or left out")
        if of_text:  # 1Mw:10,10Mw: every million words ten times, then every ten million
            found[setting] = ",".join([*filter(None, [found.get(setting)]), match[1] + match[2] + match[4]])
        elif setting in found or (setting == "save_interval" and "no_epoch_checkpoints" in found):
            raise SettingError(f"`{name}` {text}: two numbers of {match[3]}; give one")
        else:
            if setting == "save_interval":
                found["no_epoch_checkpoints"] = number == 0
            if setting != "save_interval" or number:
                found[setting] = number
    return found


@dataclass(frozen=True)
class ProfileConfig(Config):
    """Profiling: the updates of a run that are traced."""

    profile: str | None = flag(
        None, "updates to profile, FROM exclusive (without a value: 10:20)", metavar="FROM:TO", const="10:20"
    )


@dataclass(frozen=True)
class MemoryConfig(Config):
    """Memory: settings that may differ at evaluation, because no parameter depends on them."""

    mem_len: int = flag(0, "Transformer-XL: memory length in tokens (0: no recurrence)", low=0)
    clamp_len: int = flag(-1, "Transformer-XL: maximum distinct distance in tokens (-1: no maximum)", low=-1)
    same_length: bool = flag(False, "Transformer-XL: every query sees the last `mem_len` keys", negative=True)


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
    """All settings of a task and a model, of a command line or a checkpoint."""

    common: CommonConfig
    data: DataConfig
    data_path: str  # the data folder
    chosen: ChosenParts
    # Typed settings of the chosen parts; None for a plug-in without a dataclass.
    task: Any
    model: Any
    criterion: Any
    extensions: Mapping[str, Any]  # typed settings of the task's extensions that are switched on, by name
    flat: dict[str, Any]  # all settings by name, plug-ins' too: what a checkpoint stores

    def changed(self: S, **values: Any) -> S:
        """A copy in which the fields called as *values* have
        these values, in every part and in :attr:`flat`."""

        def changed(part: Any) -> Any:
            names = {field.name for field in dataclasses.fields(part)} & values.keys()
            return dataclasses.replace(part, **{name: values[name] for name in names})

        current = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        # A setting may be in several parts, such as `tokens_per_sample` in task and model: all of
        # them change together.
        parts = {name: changed(part) for name, part in current.items() if dataclasses.is_dataclass(part)}
        parts["extensions"] = {name: changed(cfg) for name, cfg in self.extensions.items()}
        return dataclasses.replace(self, **parts, flat={**self.flat, **values})


@dataclass(frozen=True)
class TrainingSettings(Settings):
    """All settings of a training run."""

    distributed: DistributedConfig
    optimization: OptimizationConfig
    checkpoint: CheckpointConfig
    profiling: ProfileConfig
    optimizer: Any
    lr_scheduler: Any
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)  # where each setting comes from, by name


def without_paths(args: Mapping[str, Any], source: object) -> dict[str, Any]:
    """The settings *args* of the checkpoint *source* without files and folders: whoever made it
    could name any of the user's. A warning names those that task and criterion would have read."""
    deferred.declare_parts()  # whose dataclasses say which settings are paths
    of_runs = fields.defaults(CommonConfig).keys() | fields.defaults(CheckpointConfig).keys()
    if lost := [name for name in sorted(fields.UNSTORED & args.keys() - of_runs) if args[name]]:
        text = ", ".join(f"`{name}` {fields.truncate(args[name])}" for name in lost)
        logger.warning("%s: %s: paths in a checkpoint have no effect; give your own", source, text)
    return {name: value for name, value in args.items() if name not in fields.UNSTORED}


def typed_settings(args: argparse.Namespace | Mapping[str, Any] | Settings | Any) -> Settings:
    """Return typed settings from *args*: a parsed command line, a checkpoint's, or one part; typed
    ones as they are.

    Missing settings get their defaults.

    Raises:
        UserError: a value has the wrong type or is out of range, or the architecture is unknown.
    """
    if isinstance(args, Settings):
        return args
    return Settings(**_parts(_flat(args)))


def _flat(args: object) -> dict[str, object]:
    if isinstance(args, Mapping):
        return dict(args)
    # Scripts written for fairseq have settings in groups.
    return vars(args.flattened() if hasattr(args, "flattened") else args)


def training_settings(args: argparse.Namespace | TrainingSettings) -> TrainingSettings:
    """Return :func:`typed_settings` with the parts that training needs in addition."""
    if isinstance(args, TrainingSettings):
        return args
    flat = _flat(args)
    settings = TrainingSettings(
        **_parts(flat),
        distributed=fields.typed(DistributedConfig, flat),
        optimization=fields.typed(OptimizationConfig, flat),
        checkpoint=fields.typed(CheckpointConfig, flat),
        profiling=fields.typed(ProfileConfig, flat),
        optimizer=_typed_part("optimizer", flat),
        lr_scheduler=_typed_part("lr_scheduler", flat),
        origins=getattr(args, "origins", {}),
    )
    if 0 in settings.optimization.lr and not flat.get("max_lr"):
        raise UserError("--lr 0: must be greater than 0, unless --max-lr is given and --lr is the minimum")
    return settings


def _parts(settings: dict[str, object]) -> dict[str, Any]:
    names = {name: str(settings.get(name) or "") for name in CHOICES}
    task = chosen_part("task", names["task"]) if names["task"] in TASKS else None
    extensions = [name for name in extensions_of(task) if settings.get(name)]
    return {
        "common": fields.typed(CommonConfig, settings),
        "data": fields.typed(DataConfig, settings),
        "data_path": str(settings.get("data", "")),
        "chosen": ChosenParts(**names),
        "task": _typed_part("task", settings),
        "model": _typed_part("arch", settings),
        "criterion": _typed_part("criterion", settings),
        "extensions": {name: fields.typed(EXTENSIONS.declaration(name).config_class, settings) for name in extensions},
        "flat": settings,
    }


def _typed_part(choice: str, settings: Mapping[str, object]) -> Any:
    """The settings of the part that *settings* choose as *choice*; None without one, or where it
    has no dataclass."""
    name = str(settings.get(choice) or "")
    # Of parts a checkpoint may name ones that are not here;
    # without its architecture there is no model.
    if not name or (choice != "arch" and name not in CHOICES[choice]):
        return None
    cls = getattr(chosen_part(choice, name), "config_class", None)
    return None if cls is None else fields.typed(cls, settings)
