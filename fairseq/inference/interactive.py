"""Continue prompts with a language model: lines of stdin one by one, or the lines of a file in
batches."""

from __future__ import annotations

import io
import itertools
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fairseq.config.command_settings import InteractiveConfig
from fairseq.config.settings import CommonConfig
from fairseq.errors import UserError
from fairseq.inference.loading import data_and_models
from fairseq.inference.writer import Writer, check_samples
from fairseq.logging import show_progress
from fairseq.system.opening import read_errors
from fairseq.system.terminal import printable
from fairseq.text.raw_text import LONGEST_ROW, STDIN, decode_line, lines_as_they_arrive, text_line
from fairseq.text.text_corpus import report_unknown

logger = logging.getLogger(__name__)

LARGEST_INPUT = LONGEST_ROW  # bytes of prompts, which are encoded together


def continue_prompts(source: str, cfg: InteractiveConfig, common: CommonConfig, flat: Mapping[str, Any]) -> None:
    """Print the prompts of ``cfg.input`` with their continuations.

    Each line is a prompt; an empty line starts a new text. A sample depends on the seed and the
    number of its prompt, not on how prompts are read. Texts are separated by a line of dashes.

    Args:
        source: the data, or a model; see :func:`~fairseq.inference.loading.data_and_models`.
        flat: settings that the checkpoint's are changed by.
    """
    is_session = cfg.input == STDIN and sys.stdin.isatty()
    check_samples(cfg, cfg.num_samples)
    lines = None if cfg.input == STDIN else _read_file(Path(cfg.input))
    data, paths = data_and_models(cfg, source)
    writer = Writer.load(cfg, common, paths, data, flat)
    if is_session:
        print(_banner(cfg, writer, paths), file=sys.stderr)
    # Lines of stdin are answered one by one, as they arrive; the lines of a file are all there.
    if cfg.finds_hypotheses:
        _print_hypotheses(lines, writer, cfg)
    elif lines is None:
        _answer(_stdin_lines(), writer, cfg)
    else:
        _answer_together(lines, writer, cfg, common)


def _banner(cfg: InteractiveConfig, writer: Writer, paths: list[str]) -> str:
    """What a session begins with: the model, how it chooses tokens, and how to end."""
    arch = writer.task.settings.chosen.arch
    if cfg.samples:
        candidates = f"the {cfg.sampling_topk} most probable tokens" if cfg.sampling_topk else "all tokens"
        choice = f"Samples from {candidates}, temperature {cfg.temperature:g}"
    else:
        choice = f"Beam of {cfg.beam}" if (cfg.beam or 1) > 1 else "The most probable tokens"
    return (
        f"{printable(':'.join(paths))}: {arch}\n{choice}, up to {cfg.max_new_tokens} tokens.\n"
        "Type the beginning of a text and Enter; Ctrl-D ends.\nfairseq-interactive --help lists the flags."
    )


def _print_hypotheses(lines: list[str] | None, writer: Writer, cfg: InteractiveConfig) -> None:
    """Print fairseq's lines for each of *lines*, or of stdin's."""
    sources: dict[int, list[int]] = {}

    def encoded() -> Iterator[tuple[int, list[int]]]:
        for number, line in enumerate(_stdin_lines() if lines is None else lines):
            [prompt] = _encode([line], writer, number)
            sources[number] = prompt[1:]
            yield number, sources[number]

    for number, texts in writer.hypotheses(cfg, encoded(), together=1 if lines is None else None):
        print(*writer.lines_of(cfg, number, sources.pop(number), texts, target=False), sep="\n", flush=True)


def _answer(lines: Iterable[str], writer: Writer, cfg: InteractiveConfig) -> None:
    """Continue each of *lines* as soon as it is read, printing token by token."""
    for number, line in enumerate(lines):
        [prompt] = _encode([line], writer, number)
        for sample in range(cfg.num_samples):
            _print(cfg, writer, number, sample, prompt, writer.continue_one(prompt, number, sample))


def _answer_together(lines: list[str], writer: Writer, cfg: InteractiveConfig, common: CommonConfig) -> None:
    """Continue *lines* in batches; print the texts in their order, each as early as possible."""
    prompts = _encode(lines, writer)
    order = iter([(number, sample) for number in range(len(prompts)) for sample in range(cfg.num_samples)])
    # Batches end in another order than the prompts have; early texts wait for those before them.
    awaited, outputs = next(order), {}
    for key, tokens in writer.continue_all(prompts, cfg.num_samples, show_progress(common, "tokens")):
        outputs[key] = tokens
        while awaited in outputs:
            number, sample = awaited
            _print(cfg, writer, number, sample, prompts[number], outputs.pop(awaited))
            # No prompt has this number: after the last text none is awaited.
            awaited = next(order, (-1, -1))


def _encode(lines: list[str], writer: Writer, first: int = 0) -> list[list[int]]:
    """The tokens of prompts, each after ``</s>``; report unknown words and too long prompts."""
    eos = writer.task.source_dictionary.eos()
    prompts, unknown = [], list[str]()
    for line in lines:
        tokens, strange = writer.detokenizer.encode(line)
        prompts.append([eos, *tokens])
        unknown += strange
    report_unknown(itertools.chain.from_iterable(prompts), writer.task.source_dictionary, unknown)
    writer.warn_of_length({f"prompt {first + i + 1}": len(prompt) for i, prompt in enumerate(prompts)})
    return prompts


def _print(
    cfg: InteractiveConfig, writer: Writer, number: int, sample: int, prompt: list[int], tokens: Iterable[int]
) -> None:
    """Print the prompt and its continuation, with ``--json`` as an object, else each token as soon
    as it is chosen."""
    text = writer.detokenizer.stream()
    before = text.add(prompt[1:]) + text.pause()
    if cfg.json:
        ids = list(tokens)
        values = {"prompt": number, "sample": sample, "text": before, "continuation": text.add(ids) + text.end()}
        print(json.dumps({**values, "tokens": ids}, ensure_ascii=False), flush=True)
        return
    # On a terminal the prompt is there already, and the next one separates texts.
    if cfg.input == STDIN and sys.stdin.isatty():
        before = ""
    elif number or sample:
        print("-" * 8)
    print(before, end="", flush=True)
    for token in tokens:
        print(text.add([token]), end="", flush=True)
    print(text.end(), flush=True)


def _read_file(path: Path) -> list[str]:
    """The lines of a file of prompts.

    Raises:
        UserError: the file cannot be read, is empty or is not UTF-8.
    """
    with read_errors(f"`input` {path}", "give another file, or - for stdin"), open(path, "rb") as file:
        # One byte more than the limit shows that there
        # are more, without reading a file of any size.
        content = file.read(LARGEST_INPUT + 1)
    if len(content) > LARGEST_INPUT:
        raise UserError(f"`input` {path}: larger than {LARGEST_INPUT >> 20} MiB; split it")
    if not content:
        raise UserError(f"`input` {path}: is empty; give a file with one prompt per line")
    lines = content.replace(b"\r\n", b"\n").removesuffix(b"\n").split(b"\n")
    return [text_line(line, number, f"`input` {path}") for number, line in enumerate(lines, 1)]


def _stdin_lines() -> Iterator[str]:
    """The lines of stdin as they arrive, with a prompt sign
    on a terminal; bytes that are not UTF-8 become U+FFFD."""
    asked = sys.stdin.isatty()
    # A script may have put a text in its place.
    stdin = sys.stdin.buffer if hasattr(sys.stdin, "buffer") else io.BytesIO(sys.stdin.read().encode())
    lines = lines_as_they_arrive("stdin", stdin)
    for number in itertools.count(1):
        if asked:
            print("> ", end="", file=sys.stderr, flush=True)
        line = next(lines, b"")
        if not line:
            break
        text = line.rstrip(b"\r\n")
        try:
            yield decode_line(text, number)
        except UnicodeDecodeError as error:  # not the end of a session
            logger.warning("stdin: line %d, byte %d: not UTF-8, read as U+FFFD", number, error.start + 1)
            yield decode_line(text, number, "replace")
    if asked:
        print(file=sys.stderr)
