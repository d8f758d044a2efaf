"""Metrics of scores: loss and perplexity of tokens
and of words joined from subwords, and their output."""

from __future__ import annotations

import functools
import itertools
import math
import resource
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fairseq.evaluation.scorer import Scores
from fairseq.logging.figures import safe_power
from fairseq.modules import devices
from fairseq.text.dictionary import NONE, Dictionary
from fairseq.text.raw_text import RawCounts
from fairseq.text.symbols import BYTES
from fairseq.text.tokenizers.rules import BeginMarks, SubwordMarks
from fairseq.text.tokenizers.tokenizer import chosen_rule, readable_symbols


@dataclass(frozen=True)
class Words:
    """Words and their log-probabilities in the corpus's order; subwords are joined, their
    log-probabilities summed."""

    scores: Scores  # of the tokens
    dictionary: Dictionary
    first: np.ndarray  # int64 [words]: index of each word's first token
    lprobs: np.ndarray  # float64 [words], natural logarithms
    lines: np.ndarray  # int64 [lines + 1]: line i is words ``lines[i]`` … ``lines[i + 1] − 1``
    rule: SubwordMarks | BeginMarks | None = None  # by which subwords are joined, None if tokens are words

    def __len__(self) -> int:
        return len(self.first)

    @functools.cached_property
    def symbols(self) -> list[str]:
        """The symbols of the dictionary as people read them."""
        return readable_symbols(self.dictionary)

    def word(self, number: int) -> str:
        end = self.first[number + 1] if number + 1 < len(self.first) else len(self.scores)
        pieces = [self.symbols[token] for token in self.scores.tokens[self.first[number] : end]]
        if isinstance(self.rule, BeginMarks):
            return "".join(pieces).replace(self.rule.mark, "") or self.rule.mark
        mark = self.rule.mark if self.rule is not None else ""
        return "".join(piece.removesuffix(mark) for piece in pieces[:-1]) + pieces[-1]


def join_words(scores: Scores, dictionary: Dictionary, remove_bpe: str | None = None) -> Words:
    """The words of *scores*: its tokens, or with *remove_bpe* its joined subwords.

    Raises:
        UserError: see :func:`~fairseq.text.tokenizers.tokenizer.chosen_rule`.
    """
    lprobs = scores.lprobs.astype(np.float64)
    if remove_bpe is None:
        return Words(scores, dictionary, np.arange(len(scores)), lprobs, scores.lines)
    rule = chosen_rule(remove_bpe, dictionary)
    begins = np.ones(len(scores), dtype=bool)
    if isinstance(rule, BeginMarks):
        is_begin = np.array([symbol.startswith(rule.mark) for symbol in dictionary.symbols])
        is_begin[dictionary.eos()] = True
        # A word goes on neither from one line to the next nor from `</s>`.
        begins[1:] = is_begin[scores.tokens[1:]] | (scores.tokens[:-1] == dictionary.eos())
    else:
        begins[1:] = ~np.array([symbol.endswith(rule.mark) for symbol in dictionary.symbols])[scores.tokens[:-1]]
    first = np.flatnonzero(begins)
    lines = np.concatenate([[0], np.cumsum(begins)])[scores.lines]
    return Words(scores, dictionary, first, np.add.reduceat(lprobs, first), lines, rule)


def metrics(words: Words, seconds: float) -> dict[str, Any]:
    """The metrics of an evaluation that took *seconds*.

    ``loss_base2`` and ``perplexity`` are per token. With joined subwords, ``word_loss_base2`` and
    ``word_perplexity`` divide the same sum by the number of words, as fairseq does.
    ``bits_per_character`` is added for corpora of characters or bytes, ``unknown_share`` and
    ``perplexity_without_unknown`` for dictionaries with an unknown symbol.
    """
    total, tokens = float(words.lprobs.sum()), len(words.scores)
    loss = -total / tokens / math.log(2)
    report: dict[str, object] = {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / max(seconds, 1e-9),
        "loss_base2": loss,
        "perplexity": safe_power(loss),
    }
    if words.rule is not None:
        # The whole loss, ends of lines included, by the number of words: fairseq's definition.
        word_loss = -total / len(words) / math.log(2)
        report |= {"words": len(words), "word_loss_base2": word_loss, "word_perplexity": safe_power(word_loss)}
    if is_of_characters(words.dictionary):
        report["bits_per_character"] = loss
    known = words.scores.tokens != words.dictionary.unk()
    if words.dictionary.unk() != NONE:
        report["unknown_share"] = 1 - float(known.mean())
        if known.any():
            loss_of_known = -float(words.scores.lprobs[known].astype(np.float64).mean()) / math.log(2)
            report["perplexity_without_unknown"] = safe_power(loss_of_known)
    return report


def raw_metrics(words: Words, counts: RawCounts) -> dict[str, object]:
    """The metrics that compare tokenizers: the whole loss
    in bits by the bytes and the words of the raw text."""
    bits = -float(words.lprobs.sum()) / math.log(2)
    per_word = bits / counts.words
    return {
        "raw_bytes": counts.bytes,
        "raw_words": counts.words,
        "bits_per_byte": bits / counts.bytes,
        "bits_per_raw_word": per_word,
        "raw_word_perplexity": safe_power(per_word),
    }


def is_of_characters(dictionary: Dictionary) -> bool:
    """Return whether all symbols of *dictionary* but the special ones are characters, or all are
    bytes as numbers."""
    symbols = dictionary.words()
    return bool(symbols) and (all(len(word) == 1 for word in symbols) or BYTES.issuperset(symbols))


def peak_memory(device: torch.device) -> dict[str, float]:
    """Peak memory of this process in MiB: resident, and allocated on a GPU."""
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    memory = {"peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20}
    if (peak := devices.peak_memory(device)) is not None:
        memory["peak_gpu_mb"] = peak / 2**20
    return memory


def summary(report: Mapping[str, Any], name: str = "Perplexity") -> list[str]:
    """The metrics in fairseq's output format, the perplexity as *name*; with joined subwords the
    loss is per word."""
    lines = [
        f"Evaluated {report['tokens']} tokens in {report['seconds']:.1f} s ({report['tokens_per_second']:.2f} tokens/s)"
    ]
    token = f"Loss (base 2): {report['loss_base2']:.4f}, {name}: {format_perplexity(report['perplexity'])}"
    if "left_out_tokens" in report:
        reason = "in lines between documents, or in blocks that are longer than the model reads"
        lines.append(f"Left out: {report['left_out_tokens']} tokens, {reason}")
    if "words" in report:
        word = f"Loss (base 2): {report['word_loss_base2']:.4f}, {name}: {format_perplexity(report['word_perplexity'])}"
        lines += [f"{word} per word, of {report['words']} words", f"{token} per subword"]
    else:
        lines.append(token)
    if "bits_per_character" in report:
        lines.append(f"Bits per character: {report['bits_per_character']:.4f}")
    if "unknown_share" in report:
        line = f"Unknown: {100 * report['unknown_share']:.3g} % of the tokens"
        others = report.get("perplexity_without_unknown")
        lines.append(line if others is None else f"{line}, {name} of the others: {format_perplexity(others)}")
    if "raw_bytes" in report:
        lines += [
            f"Raw text: {report['bits_per_byte']:.4f} bits per byte of {report['raw_bytes']}, "
            f"{report['bits_per_raw_word']:.4f} per word of {report['raw_words']}",
            f"Perplexity per word of raw text: {format_perplexity(report['raw_word_perplexity'])}",
        ]
    if "perplexity_without_int8" in report:
        exact = report["perplexity_without_int8"]
        cost = 100 * (report["perplexity"] / exact - 1)
        lines.append(f"Perplexity of a token without int8: {exact:.2f}; cost of int8: {cost:+.2f} %")
    gpu = f", {report['peak_gpu_mb']:.0f} MB on the GPU" if "peak_gpu_mb" in report else ""
    lines.append(f"Peak memory: {report['peak_rss_mb']:.0f} MB{gpu}")
    return lines


def format_perplexity(perplexity: float) -> str:
    """A perplexity with two decimals; with an exponent
    where it says little, e.g. per word of text without spaces."""
    return f"{perplexity:.2f}" if perplexity < 1e9 else f"{perplexity:.2e}"


def word_table(words: Words) -> Iterator[str]:
    """A tab-separated table of distinct words: word,
    count, mean and summed natural-log probability."""
    counts, sums = Counter[str](), defaultdict[str, float](float)
    for number, lprob in enumerate(words.lprobs.tolist()):
        word = words.word(number)
        counts[word] += 1
        sums[word] += lprob
    yield "word\tcount\tmean log-probability\tsum"
    for word in sorted(counts, key=lambda w: (-counts[w], w)):
        yield f"{word}\t{counts[word]}\t{sums[word] / counts[word]:.6f}\t{sums[word]:.6f}"


def document_scores(scores: Scores) -> Iterator[dict[str, object]]:
    """Return for each document, a line of *scores*, its number
    from 1, tokens, log-probability (nats), perplexity."""
    for number, (start, end) in enumerate(itertools.pairwise(scores.lines.tolist()), 1):
        total = float(scores.lprobs[start:end].sum(dtype=np.float64))
        # exp(710) overflows a float64.
        perplexity = math.exp(min(-total / max(1, end - start), 700))
        yield {"document": number, "tokens": end - start, "log_probability": total, "perplexity": perplexity}
