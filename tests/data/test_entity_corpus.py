"""The synthetic corpus of entities: a name tells its properties, and nothing else in a line
does."""

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


def test_the_type_of_a_name_tells_the_word_before_it_and_nothing_tells_the_word_after_it() -> None:
    before: dict[str, set[int]] = defaultdict(set)
    after: dict[str, set[str]] = defaultdict(set)
    # Of two seeds: types do not depend on it, words do.
    first, second = (entity_corpus.lines(200, 20, seed, types=8) for seed in (1, 2))
    assert sorted(first) != sorted(second)
    for line in first + second:
        word, name, last = re.fullmatch(r"p(\d+) (e\d+@@ e\d+) q(\d+)", line).groups()
        before[name].add(int(word))
        after[name].add(last)
    types = Counter(frozenset(words) for words in before.values())
    assert set(types) == {frozenset(range(4 * kind, 4 * kind + 4)) for kind in range(8)}
    assert min(types.values()) > 10, "types have about as many names"
    assert all(len(words) > 10 for words in after.values())
