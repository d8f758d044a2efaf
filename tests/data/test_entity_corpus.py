"""The synthetic corpus of entities: a name tells its properties, and nothing else in a line does."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path

from scripts import entity_corpus


def test_each_name_has_the_same_properties_in_all_its_lines_and_splits(tmp_path: Path) -> None:
    entity_corpus.write(tmp_path, entities=200, occurrences=6, subwords=20)
    properties: dict[str, set[tuple[str, str]]] = defaultdict(set)
    lines: dict[str, Counter[str]] = {}
    for split in ("train", "valid"):
        lines[split] = Counter()
        for line in (tmp_path / split).read_text().splitlines():
            before, name, after = re.fullmatch(r"(p\d+) (e\d+@@ e\d+) (q\d+)", line).groups()
            properties[name].add((before, after))
            lines[split][name] += 1
    assert len(properties) == 200 and all(len(values) == 1 for values in properties.values())
    pairs = {pair for values in properties.values() for pair in values}
    assert len(pairs) > 100, "one property does not tell the other"
    assert set(lines["train"].values()) == {6} and set(lines["valid"].values()) == {2}


def test_lines_follow_the_seed_and_properties_do_not() -> None:
    first, second = entity_corpus.lines(5, 3, 1), entity_corpus.lines(5, 3, 2)
    assert first == entity_corpus.lines(5, 3, 1) != second and sorted(first) == sorted(second)
