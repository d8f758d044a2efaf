"""Speed of inference at published size on a CPU: a token at a time through a cache or memory,
compared with a window that is read again for each token.

    python -m benchmarks.inference [--bf16] [--only Shortformer] [--json FILE]
    python -m benchmarks.inference --small  # tiny models, to see that it runs

Press et al. 2021, tables 1 and 3, and Dai et al. 2019, table 9, with random weights and one row.
The scorer of ``fairseq-eval-lm`` and the search of ``fairseq-interactive`` read random words or
bytes. Each case runs in a separate process. Memories and windows are full before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import machine
from benchmarks.apart import ceiling, digits, measure_apart, report
from benchmarks.language_model import make_corpus
from fairseq.config import options
from fairseq.config.settings import training_settings
from fairseq.evaluation.scorer import Scorer, Scoring
from fairseq.inference import Search, stream
from fairseq.inference.reader import Reader
from fairseq.modules.precision import Precision
from fairseq.system.allocator import keep_freed_memory
from fairseq.tasks import setup_task
from fairseq.text.dictionary import Dictionary
from fairseq_cli.common import get_training_parser

WORDS = "--criterion adaptive_loss --optimizer nag --lr 0.01 --clip-norm 0.1 --arch"
BYTES = "--criterion cross_entropy --optimizer adam --lr 0.00025 --clip-norm 0.25 --arch transformer_xl_enwik8_large"
SMALL = {
    WORDS: """--decoder-layers 2 --decoder-embed-dim 32 --decoder-attention-heads 2 --decoder-ffn-embed-dim 64
        --adaptive-input-cutoff 100,400 --adaptive-softmax-cutoff 100,400""",
    BYTES: "--n-layer 2 --d-model 32 --n-head 2 --d-head 16 --d-inner 64",
}
VOCABULARIES = {"Shortformer": 267_744, "Transformer-XL": 208}  # of WikiText-103 and enwik8
BASELINE = "baseline, 3,072 tokens, window for each token"


@dataclass
class Case:
    """One line of a table.

    Attributes:
        paper: table of the paper, ``Shortformer`` or ``Transformer-XL``.
        model: flags of training.
        length: tokens that the model reads at once.
        new: those of them that are scored; the others are context.
        mode: blocks, token by token, or generation.
        before: blocks that fill the memory and warm up.
        blocks: measured ones; of generation, tokens.
        than: case that this one is compared with.
        published: times as fast as that case, on the paper's GPU.
    """

    name: str
    paper: str
    model: str
    length: int
    new: int
    mode: str = "blocks"
    before: int = 1
    blocks: int = 3
    than: str = ""
    published: float | None = None


def cases(small: bool) -> list[Case]:
    """The lines of both tables; *small*: with tiny models and lengths."""
    scale = 64 if small else 1

    def words(name: str, arch: str, length: int, new: int, published: float | None, **others: Any) -> Case:
        length, new = length // scale, max(1, new // scale)
        model = f"{WORDS} {arch} --tokens-per-sample {length} --max-tokens {length} {SMALL[WORDS] if small else ''}"
        return Case(name, "Shortformer", model, length, new, than=BASELINE, published=published, **others)

    baseline, shortformer = "transformer_lm_wiki103", "shortformer_wiki103"
    found = [
        words(BASELINE, baseline, 3072, 1, 1),
        words("baseline, 3,072 tokens, window for each 512 tokens", baseline, 3072, 512, 2500 / 5, blocks=2),
        words("baseline, 3,072 tokens, without overlap", baseline, 3072, 3072, 14700 / 5, blocks=2),
        words("baseline, 3,072 tokens, generation", baseline, 3072, 1, None, mode="generation", blocks=1536 // scale),
        words("baseline, 512 tokens, window for each token", baseline, 512, 1, 37 / 5, blocks=9),
        words("baseline, 512 tokens, without overlap", baseline, 512, 512, 18100 / 5, blocks=9),
        words("baseline, 512 tokens, generation", baseline, 512, 1, None, mode="generation", blocks=256 // scale),
        words("Shortformer, token by token", shortformer, 512, 512, 46 / 5, mode="token by token", blocks=1),
        words("Shortformer, without overlap", shortformer, 512, 512, 14500 / 5, before=2, blocks=9),
        words("Shortformer, generation", shortformer, 512, 1, None, mode="generation", before=2, blocks=256 // scale),
    ]
    segment = 128 // scale
    for tokens, published in ((800, 363), (1800, 773), (2800, 1409), (3800, 1874)):
        length = tokens // scale
        name, tiny = f"window of {tokens:,} for each token", SMALL[BYTES] if small else ""
        vanilla = f"{BYTES} --position-encoding learned --mem-len 0 --tokens-per-sample {length} {tiny}"
        recurrent = f"{BYTES} --tokens-per-sample {segment} --mem-len {length} --clamp-len 1000 --same-length {tiny}"
        found += [
            Case(name, "Transformer-XL", vanilla, length, 1),
            Case(
                f"memory of {tokens:,}", "Transformer-XL", recurrent, segment, segment,
                before=-(-length // segment), than=name, published=published,
            ),
        ]  # fmt: skip
    return found


@dataclass(frozen=True)
class Text:
    """A corpus of one line."""

    tokens: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        return np.array([len(self.tokens)], dtype=np.int32)

    @property
    def offsets(self) -> np.ndarray:
        return np.array([0, len(self.tokens)], dtype=np.int64)


def measure(case: Case, folder: Path, bf16: bool) -> dict[str, Any]:
    """Tokens per second of *case*, whose corpora are in *folder*, and its peak memory."""
    flags = [str(folder / case.paper), *case.model.split(), "--cpu", *(["--bf16"] if bf16 else [])]
    settings = training_settings(options.parse_args_and_arch(get_training_parser(), flags))
    torch.manual_seed(1)
    task: Any = setup_task(settings)
    model, tokens = task.build_model(settings).eval(), np.asarray(task.corpus("valid").tokens)
    precision = Precision(settings.common)
    if case.mode == "generation":
        prompt = tokens[: case.before * case.length].tolist()
        text = stream([Reader(model, precision.dtype)], prompt, Search(1 + case.blocks, top_k=40))
        next(text)  # has read the prompt
        start = time.perf_counter()
        count = sum(1 for _ in text)
        speeds = [count / (time.perf_counter() - start)]
    else:
        speeds = [case.new / seconds for seconds in _seconds(case, model, task.source_dictionary, tokens, precision)]
    return {"median": statistics.median(speeds), "speeds": speeds, "rss_mib": machine.peak_rss()}


def _seconds(case: Case, model: Any, dictionary: Dictionary, tokens: np.ndarray, precision: Precision) -> list[float]:
    """Times of the measured blocks."""
    count = case.before + case.blocks
    # With a window, the last part of the corpus, whose windows are full.
    parts = 1 if case.new == case.length else 1 + -(-case.length // (count * case.new))
    scoring = Scoring(
        case.length,
        context_window=case.length - case.new,
        token_by_token=case.mode == "token by token",
        batch_size=1,
        shard=parts - 1,
        shards=parts,
    )
    seconds: list[float] = []

    def timed(blocks: Iterable[Any], total: int) -> Iterator[Any]:
        assert total == count
        for block in blocks:
            start = time.perf_counter()
            yield block
            seconds.append(time.perf_counter() - start)

    Scorer([model], dictionary, scoring, precision).score(Text(tokens[: parts * count * case.new]), timed)
    return seconds[case.before :]


def table(results: list[dict[str, Any]], paper: str) -> str:
    """The results of a *paper* as Markdown."""
    lines = [f"| {paper} | tokens/s | times as fast | in the paper, on a GPU | peak memory |"]
    lines.append("|---|---:|---:|---:|---:|")
    speeds = {result["case"]["name"]: result["median"] for result in results}
    for result in results:
        case, speed = Case(**result["case"]), result["median"]
        if case.paper == paper:
            ratios = (speed / speeds[case.than] if case.than in speeds else None, case.published)
            times = (digits(ratio) if ratio else "" for ratio in ratios)
            lines.append(f"| {case.name} | {digits(speed)} | {' | '.join(times)} | {result['rss_mib']:,.0f} MiB |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bf16", action="store_true", help="weights and matrix products in bfloat16")
    parser.add_argument("--only", choices=tuple(VOCABULARIES), help="only the table of this paper")
    parser.add_argument("--small", action="store_true", help="tiny models and lengths, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.case:
        keep_freed_memory()
        print(json.dumps(measure(Case(**json.loads(args.case)), args.folder, args.bf16)))
        return
    device = torch.device("cpu")
    papers = [args.only] if args.only else list(VOCABULARIES)
    with tempfile.TemporaryDirectory() as folder:
        for paper in papers:
            (Path(folder) / paper).mkdir()
            make_corpus(Path(folder) / paper, min(VOCABULARIES[paper], 1000 if args.small else 10**6))
        chosen = [case for case in cases(args.small) if case.paper in papers]
        flags = ["--bf16"] if args.bf16 else []
        results = measure_apart("benchmarks.inference", chosen, Path(folder), flags)
    for paper in papers:
        print("\n" + table(results, paper))
    report(results, ceiling(device), device, args.json)


if __name__ == "__main__":
    main()
