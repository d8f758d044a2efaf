"""The synthetic corpus of entities: a name tells the words of its type, and nothing else in a line does."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path

from scripts import entity_corpus


def test_each_name_has_one_hidden_type_in_all_its_lines_and_splits(tmp_path: Path) -> None:
    entity_corpus.write(tmp_path, entities=40, occurrences=6)
    types: dict[str, set[str]] = defaultdict(set)
    lines: dict[str, Counter[str]] = {}
    for split in ("train", "valid"):
        lines[split] = Counter()
        for line in (tmp_path / split).read_text().splitlines():
            (name,) = re.findall(r"e\d+@@ e\d+", line)
            (kind,) = re.findall(r"\bis t(\d+)x\d+", line)
            types[name].add(kind)
            lines[split][name] += 1
    assert len(types) == 40 and all(len(kinds) == 1 for kinds in types.values())
    assert len({kind for kinds in types.values() for kind in kinds}) > 5
    assert set(lines["train"].values()) == {6} and set(lines["valid"].values()) == {2}


def test_lines_follow_the_seed_and_types_do_not(tmp_path: Path) -> None:
    assert entity_corpus.lines(5, 3, 1) == entity_corpus.lines(5, 3, 1) != entity_corpus.lines(5, 3, 2)
    for name in ("a", "b"):
        entity_corpus.write(tmp_path / name, entities=5, occurrences=2)
    assert (tmp_path / "a" / "train").read_bytes() == (tmp_path / "b" / "train").read_bytes()
