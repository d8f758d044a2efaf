"""Random damage to files, and to values in checkpoints."""

from __future__ import annotations

import copy
import io
import random
import zipfile
from collections.abc import Callable
from typing import Any

import torch

NUMBERS = [b"0", b"-1", b"99999999999999999999", b"1e400", b"nan", b"\xff" * 4, b"\xff" * 8, b"\0" * 8, b"\x7f" * 8]
TOKENS = [
    b"\n",
    b"\t",
    b" ",
    b"\r",
    b"\0",
    b"\xc3",
    b"\x80",
    b"\xef\xbb\xbf",
    b"\x1b[2J",
    b":",
    b"- ",
    b"{",
    b"}",
    b"[",
]
WORDS = [b"!!python/object:os.system", b"#specials eos=</s>", b"#fairseq:overwrite", b"&a", b"*a", b"<<: ", b"'", b'"']
VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 3, 2**31, 2**63, 10**30, 0.5, -1e300, float("nan"), float("inf"), "", "x", "\0", b"x"),
    *([], [None], {}, {"x": 1}, (), {1: 2}, [[]], [1, "x"], torch.zeros(0), torch.zeros(3), torch.tensor(float("nan"))),
    *(torch.zeros(2, 3), torch.tensor(3), "x" * 5000, -(2**62), 1e-320),
]


def damaged(content: bytes, chance: random.Random) -> bytes:
    """*content* after one to six random edits."""
    for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
        content = chance.choice(EDITS)(bytearray(content), chance)
    return content


def _flip(data: bytearray, chance: random.Random) -> bytes:
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)


def _overwrite(data: bytearray, chance: random.Random) -> bytes:
    at, part = chance.randrange(len(data) + 1), chance.choice(NUMBERS)
    data[at : at + len(part)] = part
    return bytes(data)


def _insert(data: bytearray, chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    data[at:at] = chance.choice(chance.choice([NUMBERS, TOKENS, WORDS])) * chance.choice((1, 1, 1, 3, 500))
    return bytes(data)


def _delete(data: bytearray, chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    del data[at : at + chance.choice((1, 2, 8, 100))]
    return bytes(data)


def _truncate(data: bytearray, chance: random.Random) -> bytes:
    return bytes(data[: chance.randrange(len(data) + 1)])


def _repeat(data: bytearray, chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    data[at:at] = data[at : at + chance.choice((1, 8, 64))] * chance.choice((1, 2, 300))
    return bytes(data)


def _swap_lines(data: bytearray, chance: random.Random) -> bytes:
    lines = bytes(data).split(b"\n")
    first, second = chance.randrange(len(lines)), chance.randrange(len(lines))
    lines[first], lines[second] = lines[second], lines[first]
    return b"\n".join(lines)


EDITS: list[Callable[[bytearray, random.Random], bytes]] = [
    *(_flip, _flip, _overwrite, _insert, _insert, _delete, _truncate, _repeat, _swap_lines)
]


def damaged_archive(content: bytes, chance: random.Random) -> bytes:
    """A ``torch.save`` file with one record damaged, and its checksum made to fit."""
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(written, "w") as target:
        records = source.infolist()
        pickled = next(record.filename for record in records if record.filename.endswith("/data.pkl"))
        chosen = pickled if chance.random() < 0.8 else chance.choice(records).filename
        for record in records:
            data = source.read(record)
            if record.filename == chosen:
                data = damaged(data, chance)
            target.writestr(record.filename, data)
    return written.getvalue()


def damaged_values(state: Any, chance: random.Random) -> Any:
    """A checkpoint's content with one to three values replaced by odd ones, or removed."""
    state = copy.deepcopy(state)
    for _ in range(chance.choice((1, 1, 2, 3))):
        place = state
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = chance.choice(keys)
            deeper = isinstance(place[key], dict | list) and len(place[key]) > 0
            if deeper and chance.random() < 0.8:
                place = place[key]
                continue
            if isinstance(place, dict) and chance.random() < 0.15:
                del place[key]
            else:
                place[key] = chance.choice(VALUES)
            break
    return state
