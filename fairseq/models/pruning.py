"""Some layers of a trained model, kept and renumbered: LayerDrop's pruning (Fan et al. 2020, §3.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from fairseq.errors import SettingError


def check_layers(keep: Sequence[int], setting: str) -> None:
    """Check the numbers of layers to keep.

    Raises:
        SettingError: there are none, or a number is negative or given twice; the message names *setting*.
    """
    if not keep or len(set(keep)) < len(keep) or min(keep) < 0:
        raise SettingError(f"`{setting}` {','.join(map(str, keep))}: give different numbers of layers, from 0")


def keep_layers(state: Mapping[str, Tensor], prefix: str, keep: Sequence[int], setting: str) -> dict[str, Tensor]:
    """*state* with only the layers *keep* of those named ``{prefix}{number}.``, renumbered from 0 in their order.

    A state with no more layers than *keep* names has been pruned before and stays as it is.

    Raises:
        SettingError: *keep* names a layer that *state* lacks; the message names *setting*.
    """
    layers = {int(name.removeprefix(prefix).split(".")[0]) for name in state if name.startswith(prefix)}
    if len(layers) <= len(keep):
        return dict(state)
    if missing := sorted(set(keep) - layers):
        raise SettingError(
            f"`{setting}` {','.join(map(str, keep))}: the checkpoint has layers 0 to {max(layers)}, no {missing[0]}"
        )
    renumbered = {number: place for place, number in enumerate(sorted(keep))}
    kept = {}
    for name, value in state.items():
        if not name.startswith(prefix):
            kept[name] = value
            continue
        number, rest = name.removeprefix(prefix).split(".", 1)
        if int(number) in renumbered:
            kept[f"{prefix}{renumbered[int(number)]}.{rest}"] = value
    return kept
