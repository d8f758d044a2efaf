"""Every field of a checkpoint with a value of another type, or that contains itself, doubles, or is
huge."""

from __future__ import annotations

import argparse
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fuzz.classes.lines import TRAIN
from fuzz.commands import Case


def endless_list() -> Any:
    """A list that contains itself."""
    value: list[Any] = []
    value += [value, value]
    return value


def endless_dict() -> Any:
    """A dict that contains itself."""
    value: dict[str, Any] = {}
    value["x"] = value["y"] = value
    return value


def doubling(make: Callable[[Any], Any], levels: int = 40) -> Any:
    """A value that doubles at each of *levels* levels."""
    value: Any = "x"
    for _ in range(levels):
        value = make(value)
    return value


class DoublingKey:
    """A dict whose key is a tuple that doubles at each level, which is pickled without being
    hashed."""

    def __init__(self, is_filled: bool) -> None:
        self.items = [(doubling(lambda value: (value, value)), 1)]
        self.is_filled = is_filled  # item by item, or made from a list of them

    def __reduce__(self) -> tuple[Any, ...]:
        if self.is_filled:
            return OrderedDict, (), None, None, iter(self.items)
        return OrderedDict, (self.items,)


def deep(levels: int) -> Any:
    """A list in a list in a list."""
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


BAD: dict[str, Callable[[], Any]] = {
    "endless list": endless_list,
    "endless dict": endless_dict,
    "doubling lists": lambda: doubling(lambda value: [value, value]),
    "doubling tuples": lambda: doubling(lambda value: (value, value)),
    "doubling dicts": lambda: doubling(lambda value: {"a": value, "b": value}),
    "doubling namespaces": lambda: doubling(lambda value: argparse.Namespace(a=value, b=value)),
    "doubling key": lambda: DoublingKey(True),
    "doubling key of a list": lambda: DoublingKey(False),
    "deep": lambda: deep(300),
    "huge": lambda: 10**400,
    "digits": lambda: 10**6000,
    "negative": lambda: -1,
    "nan": lambda: float("nan"),
    "infinite": lambda: float("inf"),
    "text": lambda: "x",
    "surrogates": lambda: "\ud800\0\x1b[2J",
    "long": lambda: "y" * 300_000,
    "none": lambda: None,
    "list": lambda: [None, "x"],
    "dict": lambda: {1: 2},
    "bytes": lambda: b"x",
    "tensor": lambda: torch.zeros(2, 3),
}
CYCLES = tuple(kind for kind in BAD if kind.startswith(("endless", "doubling")))


def readers(base: Path) -> dict[str, tuple[str, ...]]:
    """The commands that read a checkpoint."""
    data = f"{base}/data"
    model = (data, "--path", "c.pt", "--cpu")
    return {
        "eval_lm": ("eval_lm", *model, "--gen-subset", "valid"),
        "interactive": ("interactive", *model, "--input", f"{base}/prompts.txt", "--max-new-tokens", "1"),
        "resume": ("train", data, *TRAIN, "--restore-file", "c.pt", "--max-update", "3"),
        "average": ("average_checkpoints", "--inputs", "c.pt", "c.pt", "--output", "out.pt"),
        "export": ("export_model", "c.pt", "--to", "hf", "--out", "out", "--data", data),
        "fairseq": ("export_model", "c.pt", "--to", "fairseq", "--out", "out.pt", "--data", data),
        "notes": ("notes", "c.pt", data),
        "finetune": ("train", data, *TRAIN, "--finetune-from-model", "c.pt", "--max-update", "1"),
    }


def cases(base: Path) -> Iterator[Case]:
    """The cases."""
    commands = readers(base)
    file = {name: base / ("tnf" if name == "notes" else "lm") / "checkpoint_last.pt" for name in commands}
    states = {path: torch.load(path, weights_only=True) for path in set(file.values())}
    tops: list[tuple[Any, ...]] = [
        *(("args", name) for name in ("new", "arch", "dropout")),
        *(("cfg",), ("new",), ("model", "new"), ("optimizer_history",), ("optimizer_history", 0, "new")),
        *(("extra_state", name) for name in ("new", "train_iterator", "carried")),
        ("extra_state", "train_iterator", "new"),
        ("last_optimizer_state", "param_groups", 0, "new"),
    ]
    for reader, words in commands.items():
        for place in tops:
            for kind in CYCLES:
                yield _case(reader, words, states[file[reader]], place, kind)
    eval_places = [("args", key) for key in states[file["eval_lm"]]["args"]]
    state = states[file["resume"]]
    resume_places = list(_places(state))
    for reader, places in (("eval_lm", eval_places), ("resume", resume_places)):
        for number, place in enumerate(places):
            for kind in list(BAD)[number % 2 :: 2] if reader == "eval_lm" else BAD:
                if not (kind in CYCLES and place in tops):
                    yield _case(reader, commands[reader], state, place, kind)


def _places(state: Any) -> Iterator[tuple[Any, ...]]:
    """The places of a checkpoint beside its weights and settings."""
    left: list[tuple[tuple[Any, ...], Any]] = [((), state)]
    while left:
        place, value = left.pop(0)
        keys = (
            list(value)[:40]
            if isinstance(value, dict)
            else list(range(min(len(value), 2)))
            if isinstance(value, list)
            else []
        )
        for key in keys:
            if (*place, key) in (("args",), ("model",)) or (
                place == ("last_optimizer_state", "state") and key != keys[0]
            ):
                continue
            yield (*place, key)
            left.append(((*place, key), value[key]))


def _case(reader: str, words: tuple[str, ...], state: Any, place: tuple[Any, ...], kind: str) -> Case:
    def write(folder: Path) -> None:
        value = copy.copy(state)
        inner = value
        for key in place[:-1]:
            child = copy.copy(inner[key])
            inner[key] = child
            inner = child
        inner[place[-1]] = BAD[kind]()
        torch.save(value, folder / "c.pt")

    shown = ".".join(map(str, place))[-80:]
    name = f"checkpoints {reader} {shown} {kind}"
    is_cycle = kind in CYCLES and place[:1] != ("model",)
    return Case(name, words, ("c.pt", "--"), write, is_valid=not is_cycle)
