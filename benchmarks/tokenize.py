"""Speed of tokenisation against the commands of sacremoses and subword-nmt, one after the other.

    python -m benchmarks.tokenize TEXT --merges 4000 --processes 1,2 --rounds 3

Learns codes on the text, then tokenises it with ``sacremoses tokenize`` and
``subword-nmt apply-bpe``, and with ``fairseq-tokenize --tokenizer moses --bpe subword_nmt`` (which
writes the same symbols, but for XML escapes, which sacremoses' command cannot leave out),
alternating, with as many processes each. The same for SentencePiece and Hugging Face's tokenizers,
against a loop around each library on one process. Prints a line of JSON a comparison.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from fairseq.text.tokenizers.hf import import_tokenizers
from fairseq.text.tokenizers.moses import Moses
from fairseq.text.tokenizers.sentencepiece import SentencePiece
from fairseq.text.tokenizers.subword_nmt import SubwordNMT

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = {
    "sentencepiece": """
import sentencepiece
model = sentencepiece.SentencePieceProcessor(model_file={codes!r})
encode = lambda lines: model.encode(lines, out_type=str)""",
    "hf": """
import tokenizers
model = tokenizers.Tokenizer.from_file({codes!r})
encode = lambda lines: [found.tokens for found in model.encode_batch(lines, add_special_tokens=False)]""",
}
LOOP = """
with open({text!r}, encoding="utf-8") as file, open({out!r}, "w", encoding="utf-8") as out:
    while lines := [line.rstrip("\\n") for line in file.readlines(1 << 20)]:
        out.writelines(" ".join(symbols) + "\\n" for symbols in encode(lines))
"""


def run(command: Sequence[object], stdin: Path | None = None, stdout: Path | None = None) -> None:
    """Run a command to its end; libraries with threads of their own use one."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    with open(stdin or os.devnull, "rb") as source, open(stdout or os.devnull, "wb") as target:
        words = [str(word) for word in command]
        subprocess.run(words, stdin=source, stdout=target, stderr=subprocess.DEVNULL, check=True, env=environment)


def two_commands(text: Path, codes: Path, out: Path, processes: int) -> None:
    """Tokenise with sacremoses' command, then subword-nmt's."""
    programs, words = Path(sys.executable).parent, out.with_suffix(".words")
    run([programs / "sacremoses", "-l", "en", "-j", processes, "-q", "tokenize", "-a"], text, words)
    command = [programs / "subword-nmt", "apply-bpe", "-c", codes, "-i", words, "-o", out]
    run([*command, "--num-workers", processes])


def library(kind: str, text: Path, codes: Path, out: Path) -> None:
    """Tokenise with a loop around a library."""
    names = {"codes": str(codes), "text": str(text), "out": str(out)}
    run([sys.executable, "-c", (LIBRARIES[kind] + LOOP).format(**names)])


def ours(text: Path, codes: Path, out: Path, processes: int, *flags: str) -> None:
    """Tokenise with ``fairseq-tokenize``."""
    command = [sys.executable, "-m", "fairseq_cli.tokenize", text, *flags, "--bpe-codes", codes]
    run([*command, "--workers", processes, "--output", out])


def compare(theirs: Callable[[], None], own: Callable[[], None], rounds: int, size: int) -> dict[str, float]:
    """Alternate both; return median speeds in MB/s of raw text, and median ratios of elapsed and of
    CPU time."""
    times: list[tuple[float, float, float, float]] = []
    for _ in range(rounds):
        times.append((*_timed(theirs), *_timed(own)))
    slow, _, fast, _ = (statistics.median(values) for values in zip(*times, strict=True))
    return {
        "theirs_mb_per_second": size / slow / 1e6,
        "ours_mb_per_second": size / fast / 1e6,
        "ratio": statistics.median(slow / fast for slow, _, fast, _ in times),
        "cpu_seconds_theirs": statistics.median(cpu for _, cpu, _, _ in times),
        "cpu_seconds_ours": statistics.median(cpu for _, _, _, cpu in times),
    }


def _timed(work: Callable[[], None]) -> tuple[float, float]:
    """Elapsed seconds and CPU seconds of the processes that *work* starts."""
    before, start = os.times(), time.perf_counter()
    work()
    elapsed, after = time.perf_counter() - start, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return elapsed, used


def learn(text: Path, folder: Path, merges: int) -> dict[str, Path]:
    """Write codes of each kind, learned on the text."""
    counts: collections.Counter[str] = collections.Counter()
    words = Moses()
    with open(text, encoding="utf-8") as file:
        for line in file:
            counts.update(words.split(line))
    tokenizers: Any = import_tokenizers("hf")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=merges, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(counts, trainer)
    contents = {
        "subword_nmt": SubwordNMT.learn(counts, merges),
        "sentencepiece": SentencePiece.learn(counts, merges),
        "hf": tokenizer.to_str().encode(),
    }
    for kind, content in contents.items():
        (folder / kind).write_bytes(content)
    return {kind: folder / kind for kind in contents}


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, metavar="TEXT", help="plain text, a paragraph a line")
    parser.add_argument("--merges", type=int, default=4000, metavar="N", help="merges or pieces (default: 4000)")
    parser.add_argument("--processes", default="1,2", metavar="N,…", help="numbers of processes (default: 1,2)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds of each comparison (default: 3)")
    args = parser.parse_args(argv)
    size = args.text.stat().st_size
    print(json.dumps({**machine.describe(torch.device("cpu")), "bytes": size, "merges": args.merges}))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        codes, out = learn(args.text, folder, args.merges), folder / "out"
        for processes in map(int, args.processes.split(",")):
            files = (args.text, codes["subword_nmt"], out, processes)
            own = partial(ours, *files, "--tokenizer", "moses", "--bpe", "subword_nmt")
            found = compare(partial(two_commands, *files), own, args.rounds, size)
            print(json.dumps({"kind": "moses, subword_nmt", "processes": processes, **found}), flush=True)
        for kind in LIBRARIES:
            own = partial(ours, args.text, codes[kind], out, 1, "--bpe", kind)
            found = compare(partial(library, kind, args.text, codes[kind], out), own, args.rounds, size)
            print(json.dumps({"kind": kind, "processes": 1, **found}), flush=True)


if __name__ == "__main__":
    main()
