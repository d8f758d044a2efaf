"""What is due after an update: a validation, a checkpoint; a value, so that a resumed run can do
what was left."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
