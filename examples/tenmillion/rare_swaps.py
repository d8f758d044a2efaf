"""Minimal pairs of rare words for fairseq-harness --pairs, from a training text and held-out texts.

python rare_swaps.py train.txt valid.txt test.txt --out swaps.jsonl
fairseq-harness own --pairs swaps.jsonl

The good text of a pair is two held-out sentences, each with a word that is as rare in the training
text as the other's. In the bad text, the two words have changed places. Both texts have the same
words, so that how probable a word is by itself decides nothing. The two words have the same ending;
words without one, and words after "a" or "an", also follow the same word. A paradigm is a range of
frequencies: words that the training text never has, has once, two or three times, and so on.

The idea is WordSwap's in LongTail-Swap (Algayres et al. 2025, arXiv:2510.04268). This is not that
test: its sentences come from a language model, which also judges that the bad ones are worse.
Nothing judges them here, so that no reader could be right on all pairs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
SENTENCE = re.compile(r"[“‘\"']?[A-Z][^.!?]*[.!?]+[”’\"']*(?=\s|$)")
LENGTHS = range(5, 23)  # words of a sentence: two have some 64 subwords at most, a short block
ENDINGS = ("ness", "tion", "ment", "ity", "ous", "ful", "less", "able", "ing", "est", "ly", "ed", "er", "s", "")
RANGES = 10  # 0, 1, 2 to 3, 4 to 7, … occurrences


class Place(NamedTuple):
    """A word in a sentence that has it once, and the word before it."""

    sentence: str
    start: int
    word: str
    before: str

    def with_word(self, word: str) -> str:
        return self.sentence[: self.start] + word + self.sentence[self.start + len(self.word) :]

    def shape(self) -> tuple[str, str]:
        """What the words of a pair have in common."""
        ending = next(ending for ending in ENDINGS if self.word.endswith(ending))
        return ending, "" if ending and self.before not in ("a", "an") else self.before


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def places(texts: Sequence[str]) -> Iterator[Place]:
    """Lower-case words of at least four letters, right after another word."""
    for sentence in dict.fromkeys(match[0] for text in texts for match in SENTENCE.finditer(text)):
        found = Counter(words(sentence))
        if found.total() in LENGTHS:
            for left, right in itertools.pairwise(WORD.finditer(sentence)):
                follows = sentence[left.end() : right.start()] == " " and found[right[0]] == 1
                if follows and re.fullmatch("[a-z]{4,}", right[0]):
                    yield Place(sentence, right.start(), right[0], left[0].lower())


def swaps(
    candidates: Sequence[Place], counts: Mapping[str, int], number: int, seed: int
) -> Iterator[tuple[str, Place, Place]]:
    """At most *number* pairs of places of each range, with its name; a word is in one pair."""
    chance = random.Random(seed)
    for bits in range(RANGES):
        rare = [place for place in candidates if counts.get(place.word, 0).bit_length() == bits]
        low, high = (1 << bits) >> 1, (1 << bits) - 1
        name = f"seen {low:03}" if low == high else f"seen {low:03}-{high:03}"
        waiting: dict[tuple[str, str], list[Place]] = defaultdict(list)
        used: set[str] = set()
        for place in chance.sample(rare, len(rare)):
            others = waiting[place.shape()]
            partner = next((other for other in others if _are_apart(place, other) and other.word not in used), None)
            if place.word in used or len(used) == 2 * number:
                continue
            if partner is None:
                others.append(place)
            else:
                others.remove(partner)
                used |= {place.word, partner.word}
                yield name, partner, place


def _are_apart(one: Place, other: Place) -> bool:
    """Whether neither sentence has the other's word."""
    return one.word not in words(other.sentence) and other.word not in words(one.sentence)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("train", type=Path, help="text that the model was trained on")
    parser.add_argument("texts", type=Path, nargs="+", help="texts that it has not seen, one paragraph a line")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines in BLiMP's format")
    parser.add_argument("--pairs", type=int, default=500, help="most pairs of a range of frequencies (default: 500)")
    parser.add_argument("--seed", type=int, default=1, help="(default: 1)")
    args = parser.parse_args()
    made: Counter[str] = Counter()
    try:
        with args.train.open(encoding="utf-8") as lines:
            counts = Counter(word for line in lines for word in words(line))
        candidates = list(places([line for path in args.texts for line in path.read_text("utf-8").split("\n")]))
        with args.out.open("w", encoding="utf-8") as out:
            for name, one, other in swaps(candidates, counts, args.pairs, args.seed):
                good = f"{one.sentence} {other.sentence}"
                bad = f"{one.with_word(other.word)} {other.with_word(one.word)}"
                row = {"sentence_good": good, "sentence_bad": bad, "UID": name, "pairID": str(made[name])}
                out.write(json.dumps({**row, "words": [one.word, other.word]}, ensure_ascii=False) + "\n")
                made[name] += 1
    except OSError as error:
        parser.exit(2, f"rare_swaps.py: error: {error.filename}: {error.strerror}\n")
    print(*(f"{name}: {number} pairs" for name, number in made.items()), sep="\n")


if __name__ == "__main__":
    main()
