"""What is due after an update: a validation, a checkpoint; a value, so that a resumed run can do
what was left."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairseq.config.settings import CheckpointConfig, OptimizationConfig

SHORTEST = 1000
"""Updates between validations that nobody asked for, at least."""


@dataclass(frozen=True)
class Due:
    """What is due after the last update.

    Attributes:
        epoch: of the update, from 1.
        end_of_epoch: the update was the last of it.
        validate: on all splits.
        save: whatever the validation gives.
        milestone: name of the checkpoint that is due by words or tokens; empty: none is.
    """

    epoch: int
    end_of_epoch: bool = False
    validate: bool = False
    save: bool = False
    milestone: str = ""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds that was saved before the validation."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Due:
        """The value of :meth:`state_dict`."""
        return cls(**{field.name: state[field.name] for field in dataclasses.fields(cls)})


def validation_interval(saving: CheckpointConfig, cfg: OptimizationConfig, epoch_updates: int) -> int:
    """Updates between validations within epochs of *epoch_updates*; 0: none.

    A long run is validated and saved ten times, if its epochs do not end more often and the user
    asks for no interval.
    """
    if saving.validate_interval_updates is not None:
        return saving.validate_interval_updates
    if saving.save_interval_updates or saving.save_interval_words or saving.save_interval_tokens:
        return 0
    interval = max(SHORTEST, math.ceil((cfg.max_update or (cfg.max_epoch or 1) * epoch_updates) / 10))
    return interval if interval < epoch_updates else 0
