"""A synthetic corpus in which rare words decide what stands beside them: ``python -m scripts.entity_corpus DIR``.

Each line is about one entity, a name of two subwords that says nothing by itself: all names share the same subwords. An
entity has a hidden type, and one word of each of its lines is drawn from the words of that type. Who knows the type
predicts that word with log2(WORDS) bits, who does not with log2(TYPES · WORDS); only other lines with it tell the type.
It is the case that notes of rare words are made for (Wu et al. 2021, section 1), at a size for two cores.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

TYPES, WORDS = 16, 4
"""Hidden types, and words of each type."""

FILLERS = 60
SUBWORDS = 64
"""First and last subwords of names: 64 · 64 names."""


def lines(entities: int, occurrences: int, seed: int) -> list[str]:
    """Return *occurrences* lines about each of *entities* entities, in random order.

    The hidden type of an entity does not depend on *occurrences*, nor on *seed*, which draws the lines.
    """
    names = [f"{first}@@ {last}" for first in range(SUBWORDS) for last in range(SUBWORDS)]
    fixed = random.Random(0)
    chosen = [(name.replace(" ", " e"), fixed.randrange(TYPES)) for name in fixed.sample(names, entities)]
    chance = random.Random(seed)
    result = [_line(f"e{name}", kind, chance) for name, kind in chosen for _ in range(occurrences)]
    chance.shuffle(result)
    return result


def _line(name: str, kind: int, chance: random.Random) -> str:
    words = [f"w{chance.randrange(FILLERS)}" for _ in range(chance.randint(4, 8))]
    first, second = sorted(chance.sample(range(len(words) + 1), 2))
    about = [name, f"is t{kind}x{chance.randrange(WORDS)}"]
    chance.shuffle(about)
    return " ".join([*words[:first], about[0], *words[first:second], about[1], *words[second:]])


def write(folder: Path, entities: int = 1500, occurrences: int = 16) -> None:
    """Write ``train`` with *occurrences* lines an entity, and ``valid`` with two others an entity, into *folder*."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count, seed in (("train", occurrences, 1), ("valid", 2, 2)):
        text = "".join(f"{line}\n" for line in lines(entities, count, seed))
        (folder / split).write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for train and valid")
    parser.add_argument("--entities", type=int, default=1500, help="names, of at most 4096 (default: 1500)")
    parser.add_argument("--occurrences", type=int, default=16, help="training lines of each (default: 16)")
    args = parser.parse_args()
    write(args.folder, args.entities, args.occurrences)


if __name__ == "__main__":
    main()
