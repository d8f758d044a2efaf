"""A synthetic corpus in which rare words decide what stands beside them: ``python -m scripts.entity_corpus DIR``.

Each line is a name of two subwords between two words, its properties. All names share the same subwords, and the
properties of each are drawn at random: only other lines with the name tell them. Who knows the properties of a name
predicts them with 0 bits, who does not with log2(VALUES). It is the case that notes of rare words are made for (Wu et
al. 2021, section 1), at a size for two cores.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

VALUES = 16
"""Values of each of the two properties."""


def lines(entities: int, occurrences: int, seed: int, subwords: int = 64) -> list[str]:
    """Return *occurrences* lines about each of *entities* names, in random order.

    Args:
        entities: names, at most *subwords* squared.
        occurrences: lines of each.
        seed: of the order; names and properties do not depend on it.
        subwords: first, and last, subwords of names.
    """
    fixed = random.Random(0)
    names = fixed.sample([f"e{first}@@ e{last}" for first in range(subwords) for last in range(subwords)], entities)
    about = [f"p{fixed.randrange(VALUES)} {name} q{fixed.randrange(VALUES)}" for name in names]
    result = [line for line in about for _ in range(occurrences)]
    random.Random(seed).shuffle(result)
    return result


def write(folder: Path, entities: int = 1500, occurrences: int = 16, subwords: int = 64) -> None:
    """Write ``train`` with *occurrences* lines a name, and ``valid`` with two, into *folder*."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count, seed in (("train", occurrences, 1), ("valid", 2, 2)):
        text = "".join(f"{line}\n" for line in lines(entities, count, seed, subwords))
        (folder / split).write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for train and valid")
    parser.add_argument("--entities", type=int, default=1500, help="names (default: 1500)")
    parser.add_argument("--occurrences", type=int, default=16, help="training lines of each (default: 16)")
    parser.add_argument("--subwords", type=int, default=64, help="first, and last, subwords of names (default: 64)")
    args = parser.parse_args()
    write(args.folder, args.entities, args.occurrences, args.subwords)


if __name__ == "__main__":
    main()
