"""A synthetic corpus in which rare words decide what stands beside them:
``python -m scripts.entity_corpus DIR``.

Each line is a name of two subwords between two words. All names share the same subwords, and what
stands beside each is drawn at random: only other lines with the name tell. It is the case that
notes of rare words are made for (Wu et al. 2021, section 1), at a size for two cores.

With ``--types 0`` both words are properties of the name, the same in all its lines. Who knows them
predicts a word with 0 bits, who does not with log2(VALUES), 4.

With ``--types N`` a name has one of N hidden types. The word before it is one of the WORDS of its
type, drawn anew in each line, and the word after it one of VALUES, whatever the name (so that one
word does not tell the other). Who knows the type predicts a word with (log2(WORDS) + log2(VALUES))
/ 2 bits, who does not with half of log2(N) more: 3 and 5 with 16 types.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

VALUES = 16
"""Values of a property, and words that stand after a name of any type."""

WORDS = 4
"""Words of a type."""


def lines(entities: int, occurrences: int, seed: int, subwords: int = 64, types: int = 0) -> list[str]:
    """Return *occurrences* lines about each of *entities* names, in random order.

    Args:
        entities: names, at most *subwords* squared.
        occurrences: lines of each.
        seed: of the order, and of words drawn by type; names, properties and types do not depend on
            it.
        subwords: first, and last, subwords of names.
        types: hidden types of names; 0 gives each its own properties.
    """
    fixed = random.Random(0)
    drawn = random.Random(seed)
    names = fixed.sample([f"e{first}@@ e{last}" for first in range(subwords) for last in range(subwords)], entities)
    result = []
    for name in names:
        before, after = fixed.randrange(types or VALUES), fixed.randrange(VALUES)
        for _ in range(occurrences):
            if types:
                result.append(f"p{before * WORDS + drawn.randrange(WORDS)} {name} q{drawn.randrange(VALUES)}")
            else:
                result.append(f"p{before} {name} q{after}")
    drawn.shuffle(result)
    return result


def write(folder: Path, entities: int = 1500, occurrences: int = 16, subwords: int = 64, types: int = 0) -> None:
    """Write ``train`` with *occurrences* lines a name, and ``valid`` with two, into *folder*."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count, seed in (("train", occurrences, 1), ("valid", 2, 2)):
        text = "".join(f"{line}\n" for line in lines(entities, count, seed, subwords, types))
        (folder / split).write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for train and valid")
    parser.add_argument("--entities", type=int, default=1500, help="names (default: 1500)")
    parser.add_argument("--occurrences", type=int, default=16, help="training lines of each (default: 16)")
    parser.add_argument("--subwords", type=int, default=64, help="first, and last, subwords of names (default: 64)")
    parser.add_argument("--types", type=int, default=0, help="hidden types of names (default: 0, own properties)")
    args = parser.parse_args()
    write(args.folder, args.entities, args.occurrences, args.subwords, args.types)


if __name__ == "__main__":
    main()
