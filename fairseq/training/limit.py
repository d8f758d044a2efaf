"""The reason why a run ends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    """A *setting*, flag and value, that ends training, and the *remedy* that lets training go on.

    The next stage, if there is one, follows the limit that *ends_stage*.
    """

    setting: str
    remedy: str = "raise"
    ends_stage: bool = False

    def describe_nothing_to_do(self, updates: int) -> str:
        """Return the message of a run that is complete before its first update."""
        return f"nothing to do: {self.setting} is reached after {updates} updates; {self.remedy} it to train on"
