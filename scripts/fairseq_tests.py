"""fairseq 0.12.2's own tests against this package: ``python -m scripts.fairseq_tests CHECKOUT``.

*CHECKOUT* is fairseq's repository at the tag v0.12.2. Its ``tests`` are copied to a temporary
folder and run unmodified: they import this package as ``fairseq``. In scope are tests of language
models, encoders, data, iterators, metrics, checkpoints and optimizers. What does not pass is listed
with its reason, and with the last line of the error where no reason is known.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = """
activation_checkpointing amp_optimizer average_checkpoints binarizer character_token_embedder checkpoint_utils
concat_dataset data_utils dataclass_utils dataset dictionary ema export file_chunker_utils file_io fp16_optimizer
inference_dropout iopath iterators label_smoothing lm_context_window lstm_jitable memory_efficient_fp16 metrics
multi_corpus_dataset multi_corpus_sampled_dataset multihead_attention plasma_utils positional_encoding reproducibility
resampling_dataset roberta sequence_generator sequence_scorer token_block_dataset train transformer utils
valid_subset_checks
"""
OTHERS = ("tasks", "distributed")  # folders
BINARIES = ("TestLanguageModeling", "TestMaskedLanguageModel", "TestOptimizers", "TestActivationCheckpointing")


REASONS = {  # of what does not pass, by a pattern in its name and error
    "fails with fairseq, too: today's Python or packages, 32 GiB, or a Plasma server": "mutable default|transfo_xl"
    "|Unable to allocate|test_plasma",
    "needs a GPU": "requires a GPU|requires gpu|requires 2 GPUs|CUDA not available|RepeatNgramBlocking",
    "kernels of xformers": "xformers",
    "heads and layers that are pruned": "prun",
    "encoders with decoders, and translation": "encoders with decoders|roberta_enc_dec|translation|cross_lingual_lm"
    "|(reproducibility|iopath|ActivationCheckpointing).*no logs|LSTMModel|ngram_repeat|(test|export)_transformer"
    "|get_args|test_inference_dropout|test_ensemble_sequence_generator",
    "TorchScript": "test_export",
    "private methods of fairseq": "attribute '_",
    "networks, data sets and layers that are not implemented": "character.embeddings|fconv_lm|lightconv_lm|scale-fc"
    "|spectral-norm|multi_corpus|RelPositionalEncoding",
    "fairseq's own code for float16, timeouts, EMA and asynchronous writing": "fp16_optimizer|TimeoutWrapper"
    "|persistent_save_async|load_ema_from_checkpoint|models.ema",
    "binarizers and data sets that draw their examples anew": "binarizer|resampling",
    "tasks for fairseq's benchmarks": "dummy",
    "fairseq's trainer, on pairs of texts": "TestLoadCheckpoint",
}


def run(checkout: Path, names: list[str]) -> list[tuple[str, str, str]]:
    """Name, outcome and error of each test in *names*, files of the folder ``tests`` of
    *checkout*."""
    with tempfile.TemporaryDirectory() as folder:
        for part in ("tests", "examples"):
            shutil.copytree(checkout / part, Path(folder, part), symlinks=True)
        report = Path(folder, "report.xml")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(ROOT)])}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
        command += ["--tb=line", f"--junitxml={report}", *names]
        subprocess.run(command, cwd=folder, env=environment, check=False, stdout=subprocess.DEVNULL)
        cases = ElementTree.parse(report).iter("testcase")
        return [_outcome(case) for case in cases]


def _outcome(case: ElementTree.Element) -> tuple[str, str, str]:
    name = f"{case.get('classname', '')}::{case.get('name', '')}".removeprefix("::").removeprefix("tests.")
    for kind, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (element := case.find(kind)) is not None:
            message = element.get("message") or ""
            lines = ((element.text or "") if message in ("", "collection failure") else message).strip().splitlines()
            return name, outcome, lines[-1].removeprefix("E").strip()[:150] if lines else ""
    return name, "passed", ""


def table(results: list[tuple[str, str, str]]) -> str:
    """A Markdown table: tests that do not pass by reason, cases of one test in one row."""
    rows: dict[tuple[str, str, str], int] = Counter()
    for name, outcome, error in results:
        if outcome != "passed":
            found = (reason for reason, pattern in REASONS.items() if re.search(pattern, f"{name} {error}"))
            reason = next(found, f"unknown: {error}".replace("|", "/"))
            rows[reason, name.partition("[")[0], outcome] += 1
    lines = [f"| {name} | {count} {outcome} | {reason} |" for (reason, name, outcome), count in sorted(rows.items())]
    return "\n".join(["| test | outcome | reason |", "| --- | --- | --- |", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="fairseq's repository at v0.12.2")
    parser.add_argument("tests", nargs="*", help="files or tests (default: all in scope)")
    args = parser.parse_args()
    names = args.tests or [
        *(f"tests/test_{name}.py" for name in FILES.split()),
        *(f"tests/{name}" for name in OTHERS),
        *(f"tests/test_binaries.py::{name}" for name in BINARIES),
    ]
    results = run(args.checkout, names)
    counts = Counter(outcome for _, outcome, _ in results)
    print(f"{len(results)} tests: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    print(f"\n{table(results)}")


if __name__ == "__main__":
    main()
