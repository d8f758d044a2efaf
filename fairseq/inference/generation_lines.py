"""fairseq's lines of generation: source, hypotheses with scores, and the score of every token (base
2)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fairseq.config.command_settings import LONGEST_TEXT, GenerationConfig
from fairseq.inference.search import Search, generate, generator_of
from fairseq.inference.writer import Writer
from fairseq.text.dictionary import Dictionary


def lines_of(writer: Writer, cfg: GenerationConfig, number: int, line: Sequence[int], target: bool) -> Iterator[str]:
    """The lines of text *number*: ``S-``, with *target* ``T-``, then ``H-``, ``D-`` and ``P-`` of
    each hypothesis.

    ``D-`` has plain text where the data has a tokenizer; the others have symbols. Sampling depends
    on *number*. Of *line*, tokens without ``</s>``, ``--prefix-size`` begin every hypothesis (0:
    all).
    """
    dictionary: Dictionary = writer.task.source_dictionary
    prefix = list(line[: cfg.prefix_size or len(line)])
    # fairseq limits the new tokens by a · (tokens of the source) + b; its default is 0 · x + 200.
    max_len = int((cfg.max_len_a or 0) * len(line)) + (LONGEST_TEXT if cfg.max_len_b is None else cfg.max_len_b)
    search = Search(
        max_len,
        temperature=cfg.temperature if cfg.sampling else 0.0,
        top_k=cfg.sampling_topk,
        top_p=cfg.sampling_topp,
        beam=cfg.beam or 1,
        eos=dictionary.eos() if dictionary.stop() < 0 else dictionary.stop(),
        min_tokens=1 if cfg.min_len is None else cfg.min_len,
        lenpen=1.0 if cfg.lenpen is None else cfg.lenpen,
        no_repeat_ngram=cfg.no_repeat_ngram_size or 0,
    )
    yield f"S-{number}\t{dictionary.string(line)}"
    if target:
        yield f"T-{number}\t{dictionary.string(line)}"
    # fairseq reads `<s>` in place of `</s>`, not before it.
    start = [dictionary.eos()] if writer.models[0].begin is None else []
    ((_, results),) = generate(
        writer.models,
        [[*start, *prefix]],
        search,
        generators=lambda _: generator_of(writer.seed, number, 0),
        batch_size=search.beam,
        # A dictionary without padding, such as GPT-2's, has the index -1, which would be the last
        # word.
        forbidden=[dictionary.pad()] if dictionary.pad() >= 0 else [],
    )
    # Scores are natural logarithms here and to base 2 in fairseq's lines.
    for hypothesis in results[: cfg.nbest or 1]:
        text = dictionary.string(hypothesis.tokens, cfg.remove_bpe)
        scores = " ".join(f"{lprob / math.log(2):.4f}" for lprob in hypothesis.lprobs)
        yield f"H-{number}\t{hypothesis.score / math.log(2)}\t{text}"
        if writer.detokenizer.tokenizer is not None:
            text = writer.detokenizer.decode(hypothesis.tokens[:-1])  # without </s>
        yield f"D-{number}\t{hypothesis.score / math.log(2)}\t{text}"
        yield f"P-{number}\t{scores}"
