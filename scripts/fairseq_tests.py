"""fairseq 0.12.2's own tests against this package: ``python -m scripts.fairseq_tests CHECKOUT``.

*CHECKOUT* is fairseq's repository at the tag v0.12.2. Its ``tests`` are copied to a temporary
folder and run unmodified, with ``fairseq`` this package. A table of what is in scope (language
models, encoders, data, iterators, metrics, checkpoints, optimizers) ends with the counts; the
reason of a failure is its last line.
"""

from __future__ import annotations

import argparse
import os
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


def run(checkout: Path, names: list[str]) -> list[tuple[str, str, str]]:
    """Name, outcome and reason of each test in *names*, files of the folder ``tests`` of
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
    name = f"{case.get('classname', '')}::{case.get('name', '')}".removeprefix("tests.")
    for kind, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (element := case.find(kind)) is not None:
            lines = (element.get("message") or element.text or "").strip().splitlines()
            return name, outcome, lines[-1][:150] if lines else ""
    return name, "passed", ""


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
    print("| test | outcome | reason |", "| --- | --- | --- |", sep="\n")
    for name, outcome, reason in results:
        print(f"| {name} | {outcome} | {reason.replace('|', '/')} |")
    counts = Counter(outcome for _, outcome, _ in results)
    print(f"\n{len(results)} tests: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))


if __name__ == "__main__":
    main()
