"""Every flag that takes a file or folder, with a special file, another kind, or another flag's
source."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fuzz.classes.lines import lines
from fuzz.commands import Case

# Inputs and outputs of each command: a flag, or the place of a word of the valid command line.
INPUTS: dict[str, tuple[str | int, ...]] = {
    "train": (0, "--config", "--user-dir", "--restore-file", "--finetune-from-model"),
    "eval_lm": (0, "--path", "--text", "--config", "--user-dir", "--word-counts", "--baseline"),
    "validate": (0, "--path", "--word-counts"),
    "interactive": (0, "--path", "--input"),
    "generate": (0, "--path", "--text"),
    "recl": (0, "--path"),
    "attention": (0, "--path"),
    "preprocess": ("--trainpref", "--validpref", "--testpref", "--srcdict", "--config"),
    "tokenize": (0, "--data"),
    "symbols": (0,),
    "plot": (0,),
    "notes": (0, 1),
    "export_model": (0, "--data", "--results", "--user-dir"),
    "import_model": (0, "--config"),
    "average_checkpoints": ("--inputs",),
    "merge_checkpoint": (0,),
    "finetune": (0, "--path", "--data-bin"),
    "classify": (0, 1, "--data"),
    "harness": (0, "--data", "--include-path", "--user-dir"),
}
OUTPUTS: dict[str, tuple[str | int, ...]] = {
    "train": ("--save-dir", "--metrics-file", "--log-file", "--tensorboard-logdir"),
    "eval_lm": ("--results-path", "--save-token-scores", "--sample"),
    "validate": ("--results-path",),
    "generate": ("--results-path",),
    "recl": ("--results-path",),
    "attention": ("--results-path",),
    "preprocess": ("--destdir",),
    "tokenize": ("--output",),
    "symbols": (1,),
    "plot": ("--results-path",),
    "notes": ("--results-path",),
    "export_model": ("--out",),
    "import_model": ("--out",),
    "average_checkpoints": ("--output",),
    "merge_checkpoint": (1,),
    "finetune": ("--save-dir",),
    "harness": ("--results-path",),
    "demo_corpus": (0,),
    "demo": ("--output",),
}
FIRST = {
    "merge_checkpoint": ("checkpoint_last.pt",),
    "finetune": ("dev.tsv", "train.tsv"),
}  # inputs that are refused before outputs
REPLACED = ("--sample", "--output", "--results-path", "--log-file")  # text and pictures, of no kind that can be told


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # its path may be longer than an address
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


Make = Callable[[Path], Any]
SPECIAL: dict[str, Make] = {
    "pipe": os.mkfifo,
    "socket": _socket,
    "dangling": lambda path: path.symlink_to("nothing"),
    "loop": lambda path: path.symlink_to(path.name),
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "null": lambda path: path.symlink_to("/dev/null"),
    "full": lambda path: path.symlink_to("/dev/full"),
}
BAD_INPUTS: dict[str, Make] = {
    **SPECIAL,
    "missing": lambda path: None,
    "folder": lambda path: path.mkdir(),
    "empty": lambda path: path.write_bytes(b""),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 40),
    "utf16": lambda path: path.write_bytes("\ufeffax by\n".encode("utf-16")),
}
BAD_OUTPUTS: dict[str, Make] = {
    **{kind: SPECIAL[kind] for kind in ("socket", "loop", "full", "zeros", "null")},
    "file": lambda path: path.write_bytes(b"mine\n"),
    "folder": lambda path: (path.mkdir(), (path / "mine").write_bytes(b"mine\n")),
}
ODD_NAMES = {
    "long": "x" * 5000,
    "surrogate": "bad\udcff",
    "nothing": "",
    "under a file": "file/below",
    "proc": "/proc/nope",
}


def cases(base: Path) -> Iterator[Case]:
    """The cases."""
    for command, words in lines(base).items():
        for flag in INPUTS.get(command, ()):
            yield from _cases(command, words, flag, BAD_INPUTS)
            yield from _odd_names(command, words, flag)
        for flag in OUTPUTS.get(command, ()):
            yield from _cases(command, words, flag, BAD_OUTPUTS)
            yield from _odd_names(command, words, flag)
            yield from _over_inputs(command, words, flag)
    yield from closed_folders(base)


def closed_folders(base: Path) -> Iterator[Case]:
    """Each path in a folder that may be listed and not entered, as another user's."""
    for command, words in lines(base).items():
        for flag in (*INPUTS.get(command, ()), *OUTPUTS.get(command, ())):
            target = f"closed/x{_suffix(command, flag, True)}"
            yield Case(
                f"closed {command} {flag}",
                (command, *replaced(words, flag, target)),
                (str(flag), "closed"),
                lambda folder: (folder / "closed").mkdir(0o600),
            )


def replaced(words: list[str], flag: str | int, value: str) -> list[str]:
    """*words* with *value* at a place, or behind a flag."""
    if flag == "--save-dir":
        words = [word for word in words if word != "--no-save"]
    if isinstance(flag, int):
        return [*words[:flag], value, *words[flag + 1 :]]
    if flag in words:
        at = words.index(flag)
        return [*words[: at + 1], value, *words[at + 2 :]]
    more = {"--path": ["--cpu"]}.get(flag, [])
    return [*words, flag, value, *more] if flag != "--data" else [*words[:1], flag, value]


def _name(value: str, suffix: str) -> str:
    return f"{value}{suffix}"


def _suffix(command: str, flag: str | int, is_output: bool) -> str:
    return ".png" if (command, flag) == ("plot", "--results-path") else ""


def _cases(command: str, words: list[str], flag: str | int, kinds: dict[str, Make]) -> Iterator[Case]:
    is_output = kinds is BAD_OUTPUTS
    for kind, make in kinds.items():
        if command.startswith("demo") and kind == "folder":
            continue  # which is no mistake
        target = f"bad{_suffix(command, flag, is_output)}"
        name = f"paths {command} {flag} {kind}"

        def write(folder: Path, make: Make = make, target: str = target) -> None:
            make(folder / target)

        valid = (
            (is_output and kind in ("null", "zeros", "folder", "file"))
            or (not is_output and kind in ("null", "empty") and flag == "--config")
            or (command == "symbols" and kind in ("binary", "utf16"))
            or (flag == "--include-path" and kind == "folder")
        )
        flags = (str(flag), target, "DIR", *FIRST.get(command, ()))
        # A folder that is there is added to; a file of the kind that is written is replaced.
        output = target if is_output and kind == "file" and flag in REPLACED else ""
        yield Case(name, (command, *replaced(words, flag, target)), flags, write, is_valid=valid, output=output)


def _odd_names(command: str, words: list[str], flag: str | int) -> Iterator[Case]:
    for kind, value in ODD_NAMES.items():
        if command.startswith("demo") and kind == "surrogate":
            continue  # nor is this
        target = value + (_suffix(command, flag, True) if kind != "nothing" else "")
        yield Case(
            f"paths {command} {flag} {kind}",
            (command, *replaced(words, flag, target)),
            (str(flag), value[:20] or "an empty value", "bad", "FILE", *FIRST.get(command, ())),
            lambda folder: (folder / "file").write_bytes(b"mine\n"),
            is_valid=kind == "surrogate" or (kind == "nothing" and flag in ("--tensorboard-logdir", "--metrics-file")),
        )


def _over_inputs(command: str, words: list[str], flag: str | int) -> Iterator[Case]:
    """The output is one of the inputs: copies of them, so that a change is seen."""
    for source in INPUTS.get(command, ()):
        if isinstance(source, int):
            original = Path(words[source])
        elif source in words:
            original = Path(words[words.index(source) + 1])
        else:
            continue
        if original.is_dir():
            continue
        name = f"paths {command} {flag} over {source}"
        target = f"copy{_suffix(command, flag, True)}"

        def write(folder: Path, original: Path = original, target: str = target) -> None:
            (folder / target).write_bytes(original.read_bytes())

        changed = replaced(replaced(words, source, target), flag, target)
        yield Case(name, (command, *changed), (str(flag), target), write, is_valid=True)
