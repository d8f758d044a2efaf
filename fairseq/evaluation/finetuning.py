"""Fine-tune a model with several seeds and learning rates, and choose the rate by the
development score."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq import checkpoint, distributed
from fairseq.checkpoint.manager import DICTIONARY, find_checkpoint
from fairseq.config import fields, options
from fairseq.config.command_settings import FinetuneConfig
from fairseq.config.parser import Parser
from fairseq.config.registry import ARCHITECTURES, MODELS
from fairseq.config.settings import CommonConfig, DistributedConfig, training_settings
from fairseq.config.shared import BlockConfig
from fairseq.data.folders import data_folders, load_dictionary
from fairseq.data.sentence_folders import input_folders
from fairseq.errors import UserError, nearest
from fairseq.evaluation.classifier import FinetunedRun, as_table, best_rate, predict, summarize
from fairseq.inference.loading import load_models
from fairseq.models.loading import strip_for_inference
from fairseq.models.sentence import SentenceModel
from fairseq.modules import devices
from fairseq.modules.precision import Precision
from fairseq.system.files import prepare_folder
from fairseq.system.json_files import finite, read_json, write_json
from fairseq.system.provenance import about_run
from fairseq.tasks.dictionary_digest import check_dictionary
from fairseq.tasks.fairseq_task import setup_task
from fairseq.tasks.sentence_prediction import SentencePredictionTask, folder_beside
from fairseq.tasks.settings import SentencePredictionTaskConfig
from fairseq.training import training_job
from fairseq.training.length import total_updates

BEST = "checkpoint_best.pt"
RESULT = "result.json"


def finetune(
    data: str,
    cfg: FinetuneConfig,
    task_cfg: SentencePredictionTaskConfig,
    common: CommonConfig,
    processes: DistributedConfig,
    training_parser: Callable[[], Parser],
) -> dict[str, object]:
    """Train every learning rate with every seed, print a table,
    and write ``results.json`` to ``cfg.save_dir``.

    A run equals ``fairseq-train``, whose *training_parser* reads its flags. Runs that are complete
    in the folder are not repeated, unless the checkpoint or the data have changed since.

    Returns:
        The settings, runs and scores, as in ``results.json``.
    """
    if not cfg.path:
        raise UserError("`path`: give the checkpoint of pre-training")
    if common.seed != CommonConfig().seed:
        raise UserError(f"`seed` {common.seed}: give `seeds` {common.seed}, one run for each seed")
    # All checks up to the task: what can be wrong is found before the first of many runs begins.
    _check_runs(cfg)
    task_cfg = _completed(task_cfg, data, cfg.path)
    state = checkpoint.load(find_checkpoint(cfg.path), only="model")
    arch = str(state["args"].get("arch"))
    if arch not in ARCHITECTURES:
        raise UserError(f"`path` {cfg.path}: unknown architecture {arch}; {nearest(arch, ARCHITECTURES)}")
    stored, parameters = strip_for_inference(state["args"], state["model"])
    if stored.get("add_bos_token") and task_cfg.init_token is None:
        folder = data_folders(data)[0]
        dictionary = load_dictionary(next(iter(input_folders(folder)), task_cfg.data_bin or folder))
        task_cfg = dataclasses.replace(task_cfg, init_token=dictionary.begin())
    sweep = Sweep(cfg, task_cfg, common, processes, data, stored, training_parser)
    task, updates = sweep.checked_task(parameters)
    check_dictionary(state, cfg.path, task.source_dictionary)
    prepare_folder("`save_dir`", Path(cfg.save_dir))
    runs = [sweep.run(lr, seed, updates, task) for lr in cfg.lrs for seed in cfg.seeds]
    summaries = summarize(runs)
    best = best_rate(summaries)
    report: dict[str, object] = {
        "task": task_cfg.glue_task,
        "data": data,
        "checkpoint": cfg.path,
        "from_scratch": cfg.from_scratch,
        "updates": updates,
        "best_lr": best.lr,
        "score": best.mean["score"],
        "deviation": best.deviation["score"],
        "rates": [dataclasses.asdict(summary) for summary in summaries],
        "runs": [dataclasses.asdict(run) for run in runs],
    }
    report = dict(finite(report))  # the deviation of one run is NaN, which JSON does not have
    write_json(Path(cfg.save_dir) / "results.json", {**report, **about_run()}, "`save_dir`")
    print(as_table(summaries))
    return report


def _check_runs(cfg: FinetuneConfig) -> None:
    """Raise UserError for runs that would be the same, or flags that are no command line."""
    for name, values in (("`seeds`", list(map(str, cfg.seeds))), ("`lrs`", [f"{lr:g}" for lr in cfg.lrs])):
        if len(set(values)) < len(values):
            raise UserError(f"{name} {','.join(values)}: one value twice; give each once")
    try:
        shlex.split(cfg.train_flags)
    except ValueError as error:
        raise UserError(f"`train_flags` {cfg.train_flags}: {str(error).lower()}; correct the quotes") from None


def _completed(cfg: SentencePredictionTaskConfig, data: str, path: str) -> SentencePredictionTaskConfig:
    """*cfg* with the classes in the training data, and the folder next to the checkpoint *path*
    as its data."""
    folder = data_folders(data)[0]
    cfg = cfg.completed(folder)
    if cfg.data_bin is None and not os.path.exists(folder / DICTIONARY):
        return dataclasses.replace(cfg, data_bin=folder_beside(path))
    return cfg


@dataclass(frozen=True)
class Sweep:
    """Runs of ``fairseq-train`` that differ in learning rate and seed."""

    cfg: FinetuneConfig
    # Settings that are flags of ``fairseq-train``, too.
    task_cfg: SentencePredictionTaskConfig
    common: CommonConfig
    processes: DistributedConfig
    data: str
    stored: Mapping[str, Any]  # settings of the pre-trained model
    training_parser: Callable[[], Parser]

    @property
    def splits(self) -> list[str]:
        """Splits that predictions are written for; the first is the development file, whose score
        chooses the rate."""
        return list(dict.fromkeys(["valid", *(name.strip() for name in self.cfg.predict.split(",") if name.strip())]))

    @property
    def world_size(self) -> int:
        default = 1 if self.common.cpu else max(1, devices.count())
        return self.processes.distributed_world_size or default

    def flags(self, lr: float, seed: int, updates: int) -> list[str]:
        """The command line of ``fairseq-train``, without DATA and ``--save-dir``."""
        cfg, arch = self.cfg, self.stored["arch"]
        flags = f"""--task sentence_prediction --criterion sentence_prediction --arch {arch} --optimizer adam
            --lr-scheduler polynomial_decay --no-decay-on-norms-and-biases --lr {lr:g} --seed {seed}
            --no-epoch-checkpoints --no-last-checkpoints --no-save-optimizer-state --best-checkpoint-metric score
            --required-batch-size-multiple 1 --maximize-best-checkpoint-metric --max-epoch {cfg.max_epoch}
            --weight-decay {cfg.weight_decay:g} --clip-norm {cfg.clip_norm:g}
            --warmup-updates {int(cfg.warmup_ratio * updates)} --total-num-update {max(updates, 1)}""".split()
        if not cfg.from_scratch:
            flags += ["--finetune-from-model", str(cfg.path)]
        model = MODELS[ARCHITECTURES[arch].model].config_class
        assert model is not None
        chosen = {name: self.stored[name] for name in fields.defaults(model) if self.stored.get(name) is not None}
        for part in (self.task_cfg, self.common, self.processes):
            defaults = fields.defaults(type(part))
            chosen |= {name: value for name, value in vars(part).items() if value != defaults[name] and name != "seed"}
        if issubclass(model, BlockConfig):
            # Of a decoder, learned positions limit the rows; the blocks of pre-training do not.
            positions = chosen.pop("max_target_positions", None) or self.stored["tokens_per_sample"]
            chosen["tokens_per_sample"] = self.task_cfg.tokens_per_sample
            # Imported models have none, as wide as the model; `arch` may have other defaults.
            for name in ("decoder_input_dim", "decoder_output_dim"):
                if name in self.stored and self.stored[name] is None:
                    chosen[name] = self.stored["decoder_embed_dim"]
            if chosen.get("decoder_learned_pos"):
                chosen["max_target_positions"] = positions
                chosen["tokens_per_sample"] = min(positions, self.task_cfg.tokens_per_sample)
        for name, value in chosen.items():
            if isinstance(value, bool):
                flags += [fields.flag_name(name)] if value else []
            else:
                text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
                # As one word: a value that begins with a dash would be read as a flag.
                flags.append(f"{fields.flag_name(name)}={text}")
        return [*flags, *shlex.split(cfg.train_flags)]

    def parse(self, flags: list[str], save_dir: Path | str) -> argparse.Namespace:
        """The flat settings of a run; ``--batch-size`` is divided among the processes."""
        if self.cfg.batch_size % self.world_size:
            raise UserError(
                f"`batch_size` {self.cfg.batch_size}: must be a multiple of the {self.world_size} processes"
            )
        sizes = ["--batch-size", str(self.cfg.batch_size // self.world_size), "--save-dir", str(save_dir)]
        # Through the parser of fairseq-train, so that a run equals that command.
        return options.parse_args_and_arch(self.training_parser(), [self.data, *sizes, *flags])

    def checked_task(self, parameters: Mapping[str, Tensor]) -> tuple[SentencePredictionTask, int]:
        """The task with its splits encoded, and the updates of a run.

        Raises:
            UserError: data or weights are invalid; raised before any training.
        """
        # With 0 updates: how many there are, which the schedule
        # needs, is known only once the data are encoded.
        args = self.parse(self.flags(self.cfg.lrs[0], self.cfg.seeds[0], 0), self.cfg.save_dir)
        if not args.max_epoch and not args.max_update:  # 0 is no limit to fairseq-train
            raise UserError(
                "`train_flags` `max_epoch` 0: the run would never end; give `max_epoch` N or `max_update` N"
            )
        settings = training_settings(args)
        task = setup_task(settings)
        model, criterion = task.build_model(settings), task.build_criterion(settings)
        assert isinstance(task, SentencePredictionTask) and isinstance(model, SentenceModel)
        model.check_init(parameters, str(self.cfg.path))
        for split in self.splits:
            limit = model.max_positions()
            long = 0 if limit is None else int((task.dataset(split).sizes > limit).sum())
            if long:
                raise UserError(
                    f"`shorten_method` none: {long} rows of {split} are too long for the model; use truncate"
                )
        batches = task.iterator("train", model, criterion, training=True, world_size=self.world_size)
        # `train_flags` may have limits of their own.
        updates = total_updates(settings.optimization, 0, batches)
        assert updates is not None
        return task, updates

    def run(self, lr: float, seed: int, updates: int, task: SentencePredictionTask) -> FinetunedRun:
        """Train one model, unless its result exists, and write its predictions."""
        folder, flags = Path(self.cfg.save_dir) / f"lr{lr:g}-seed{seed}", self.flags(lr, seed, updates)
        files = _versions(find_checkpoint(self.cfg.path or ""), *data_folders(self.data))
        made_by = [self.data, *flags, *self.splits, *files]
        metrics = _finished(folder, made_by)
        if metrics is None:
            # Left by a run with other settings. First the result: it says that the other is there.
            for name in (RESULT, BEST):
                (folder / name).unlink(missing_ok=True)
            distributed.run(training_job(training_settings(self.parse(flags, folder))))
            metrics = self.predict(task, folder)
            # Written last: a run with this file is complete.
            write_json(folder / RESULT, {"flags": made_by, "figures": metrics}, "`save_dir`")
        return FinetunedRun(lr, seed, metrics, str(folder))

    def predict(self, task: SentencePredictionTask, folder: Path) -> dict[str, float]:
        """Return the metrics of the best checkpoint on the development file, and write
        ``predictions.SPLIT.tsv``."""
        (model,), _, _ = load_models([folder / BEST], self.data)
        Precision(self.common).move(model, distributed.device_of(self.common))
        metrics: dict[str, float] = {}
        for split in self.splits:
            predictions = predict(model, task, split, self.cfg.batch_size)
            predictions.write(folder / f"predictions.{split}.tsv")
            # Of the first split, the development file: only its score may choose the learning rate.
            metrics = metrics or predictions.metrics()
        return metrics


def _versions(*paths: str | Path) -> Iterator[str]:
    """Size and time of change of each file, or of the files of each folder: another file at the
    same path makes another result."""
    for path in map(Path, paths):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            yield f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}"


def _finished(folder: Path, flags: list[str]) -> dict[str, float] | None:
    """The metrics of a complete run with the same *flags* in *folder*."""
    if not os.path.exists(folder / RESULT):
        return None
    result = read_json(folder / RESULT, "remove it to train again")
    return result["figures"] if result.get("flags") == flags else None
