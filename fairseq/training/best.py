"""The best validation metric of a run, how long ago it was,
and which validations it can be compared with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fairseq.config import fields
from fairseq.config.fields import differ, shown
from fairseq.config.settings import MemoryConfig, TrainingSettings
from fairseq.data.iterator import EpochIterator

MEASURED = (
    *("tokens_per_sample", "sample_break_mode", "add_bos_token"),
    *("mask_prob", "leave_unmasked_prob", "random_token_prob", "mask_whole_words", "freq_weighted_replacement"),
    *("init_token", "separator_token", "shorten_method", "max_option_length"),
    *("label_smoothing", "discriminator_weight"),
    *fields.defaults(MemoryConfig),
)
"""Settings of tasks, criterions and models that change what a validation measures."""


@dataclass(frozen=True)
class Best:
    """The best metric so far, as a value: each validation gives a new one; ``checkpoint_best.pt``
    is of its update.

    Attributes:
        maximize: the largest value is the best, not the smallest.
        value: the best of all validations, None before the first.
        without_improvement: validations since then.
    """

    maximize: bool = False
    value: float | None = None
    without_improvement: int = 0

    def improved_by(self, metric: float | None) -> bool:
        """Return whether *metric* is better than all before;
        NaN and None never are, an equal one is not."""
        # As in fairseq, an equal metric is no improvement for --patience.
        if metric is None or math.isnan(metric):
            return False
        return self.value is None or (metric > self.value if self.maximize else metric < self.value)

    def is_worth_saving(self, metric: float | None) -> bool:
        """Return whether a checkpoint with *metric* becomes
        ``checkpoint_best.pt``: ties do, as in fairseq."""
        return self.improved_by(metric) or (metric is not None and metric == self.value)

    def validated(self, metric: float) -> Best:
        """The value after a validation that gave *metric*."""
        if self.improved_by(metric):
            return replace(self, value=metric, without_improvement=0)
        return replace(self, without_improvement=self.without_improvement + 1)

    def better(self, metric: float) -> float:
        """The better one of *metric* and the best so far."""
        return metric if self.value is None or self.improved_by(metric) else self.value

    def state_dict(self) -> dict[str, Any]:
        """Entries of a checkpoint's ``extra_state``."""
        return {"best": self.value, "without_improvement": self.without_improvement}

    def restored(self, extra: Mapping[str, Any]) -> Best:
        """The value that ``extra_state`` holds; checkpoints of fairseq have ``best`` alone."""
        return replace(self, value=extra.get("best"), without_improvement=int(extra.get("without_improvement") or 0))


def fingerprint(settings: TrainingSettings, split: str, batches: EpochIterator) -> dict[str, object]:
    """Everything that decides what a validation of *split* measures,
    by setting; metrics of two are not compared.

    Its *batches* may be of any number of processes, and of any size unless their number is limited.
    """
    common, data = settings.common, settings.data
    measured = {
        "best_checkpoint_metric": settings.checkpoint.best_checkpoint_metric,
        "maximize_best_checkpoint_metric": settings.checkpoint.maximize_best_checkpoint_metric,
        "valid_subset": split,
        # By content: a folder that was moved is the same.
        "data": batches.data_checksum() or len(batches.dataset),
        "max_valid_steps": data.max_valid_steps,
        "precision": "bf16" if common.bf16 else "fp16" if common.fp16 or common.memory_efficient_fp16 else "fp32",
    }
    of_parts = {name: settings.flat.get(name) for name in MEASURED}
    if of_parts["mask_prob"] is not None or of_parts["shorten_method"] == "random_crop":
        of_parts["seed"] = common.seed  # of the masks, and of the places where rows are cut
    if data.max_valid_steps:
        of_parts["batch"] = batches.sampler.layout.step
    return {**measured, **{name: value for name, value in of_parts.items() if value is not None}}


def changes(now: Mapping[str, object], before: Mapping[str, object] | None, args: Mapping[str, object]) -> str:
    """Return which parts of a fingerprint differ, as text for the log; empty if none does.

    What a checkpoint's own, *before*, lacks is compared with its settings *args*; fairseq's have
    these alone.
    """
    # MEASURED also has settings that this run does not use.
    stored = {name: args[name] for name in {*now, *MEASURED} - {"data"} if args.get(name) is not None}
    stored["best_checkpoint_metric"] = args.get("best_checkpoint_metric") or "loss"
    stored["valid_subset"] = str(args.get("valid_subset", "valid")).partition(",")[0].strip()
    # Other settings of fairseq's may have other defaults.
    names = now.keys() & stored.keys() if before is None else now.keys() | before.keys() | stored.keys()
    before = {**stored, **(before or {})}
    changed = [name for name in sorted(names) if differ(now.get(name), before.get(name))]
    return ", ".join(f"`{n}` {shown(now.get(n))} (was {shown(before.get(n))})" for n in changed)
