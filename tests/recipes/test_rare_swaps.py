"""Minimal pairs of rare words: two held-out sentences whose words, equally rare, change places."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import runs

SCRIPT = runs.ROOT / "examples" / "tenmillion" / "rare_swaps.py"


def made(folder: Path, train: str, held_out: str, *flags: str) -> list[dict[str, Any]]:
    for name, text in {"train": train, "held_out": held_out}.items():
        (folder / name).write_text(text)
    argv = [os.environ["PYTHON"], SCRIPT, "train", "held_out", "--out", "swaps.jsonl", *flags]
    subprocess.run(argv, cwd=folder, check=True, capture_output=True)
    return [json.loads(line) for line in (folder / "swaps.jsonl").read_text().splitlines()]


def test_two_words_that_the_training_text_never_has_change_places(tmp_path: Path) -> None:
    # Not paired: a word of another ending, of two places, of another frequency, after another word.
    held_out = """They went over there to quell the crowd. She had no wish to tame the horse at all.
        He wanted to glisten in the sun. You said we would bellow over there. A walrus ate the other walrus there."""
    [pair] = made(tmp_path, "A horse and a crowd, the crowd, glisten over there and in the sun.", held_out)
    good = ["They went over there to quell the crowd.", "She had no wish to tame the horse at all."]
    bad = ["They went over there to tame the crowd.", "She had no wish to quell the horse at all."]
    order = 1 if pair["words"] == ["quell", "tame"] else -1
    assert pair["sentence_good"] == " ".join(good[::order]) and pair["sentence_bad"] == " ".join(bad[::order])
    assert pair["UID"] == "seen 000"


def test_words_of_a_pair_are_in_one_range_of_frequencies_and_in_no_other_pair(tmp_path: Path) -> None:
    chance = random.Random(1)
    frequencies = {"".join(chance.choices("bdklmnopu", k=7)): chance.randrange(9) for _ in range(120)}
    train = " ".join(word for word, count in frequencies.items() for _ in range(count))
    sentences = (f"Now he sees the {word} there." for word in chance.choices([*frequencies], k=300))
    held_out = "\n".join(sentences)
    pairs = made(tmp_path, train, held_out)
    ranges = {"seen 000": (0, 0), "seen 001": (1, 1), "seen 002-003": (2, 3), "seen 004-007": (4, 7)}
    for pair in pairs:
        low, high = ranges.get(pair["UID"], (8, 15))
        assert all(low <= frequencies[word] <= high for word in pair["words"])
        assert Counter(pair["sentence_good"].split()) == Counter(pair["sentence_bad"].split())
        first, second = pair["words"]
        swapped = pair["sentence_bad"].replace(second, "1").replace(first, second).replace("1", first)
        assert swapped == pair["sentence_good"]
    uses = Counter(word for pair in pairs for word in pair["words"])
    assert len(pairs) > 40 and {*ranges} < {pair["UID"] for pair in pairs} and set(uses.values()) == {1}
    few = made(tmp_path, train, held_out, "--pairs", "3")
    assert set(Counter(pair["UID"] for pair in few).values()) == {3}
    assert few != made(tmp_path, train, held_out, "--pairs", "3", "--seed", "2")
    assert few == made(tmp_path, train, held_out, "--pairs", "3")
