"""Training and generation of the published models on a GPU: speed, share of the peak, memory,
attention kernels.

    python -m benchmarks.gpu [--json FILE]      # on a GPU
    python -m benchmarks.gpu --small            # the same program with small models, on the CPU

``benchmarks/gpu.sh`` runs it with the tests that need a GPU and writes one report. Each case is a
separate process. FLOPs are those of the log's ``mfu``; the peak is the best 2048 × 1024 × 4096
matrix product in the same type.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import encoders, generation, language_model, machine
from benchmarks.apart import measure_apart
from fairseq.config import options
from fairseq.config.settings import training_settings
from fairseq.distributed import World
from fairseq.tasks import setup_task
from fairseq.training.state import TrainingState
from fairseq.training.update import update
from fairseq.training.utilisation import count_flops
from fairseq_cli.common import get_training_parser

CAUSAL, ENCODER = "--criterion adaptive_loss --optimizer nag", "--task masked_lm --criterion masked_lm --optimizer adam"
MODELS = {
    "shortformer_wiki103": f"{CAUSAL} --tokens-per-sample 512 --max-tokens 9216",
    "transformer_xl_wiki103_base": "--criterion cross_entropy --optimizer adam --batch-size 30",
    "transformer_xl_wiki103_large": "--criterion cross_entropy --optimizer adam --batch-size 8",
    "bert_base": f"{ENCODER} --sample-break-mode none --tokens-per-sample 512 --max-positions 512 --batch-size 32",
}
SMALL = {
    "shortformer_tiny": f"{CAUSAL} --tokens-per-sample 32 --max-tokens 128",
    "transformer_xl_tiny": "--criterion cross_entropy --optimizer adam --batch-size 4 --cutoffs 200,600",
    "bert_tiny": f"{ENCODER} --sample-break-mode none --tokens-per-sample 32 --max-positions 32 --batch-size 4",
}
PRECISIONS = {"fp32": (), "tf32": ("--tf32",), "bf16": ("--bf16",), "fp16": ("--fp16",)}
KERNELS = re.compile(r"flash|fmha|attention|cudnn_.*sdp", re.IGNORECASE)


@dataclass(frozen=True)
class Case:
    """One line of the table: training of a model, or generation with it."""

    name: str
    arch: str
    precision: str = "fp32"
    compile: bool = False
    streams: int = 0  # of generation; 0: training


def precisions_of(small: bool) -> tuple[str, ...]:
    """The precisions that are measured; a CPU has no TF32 and hardly float16."""
    return ("fp32", "bf16") if small else tuple(PRECISIONS)


def cases(small: bool) -> list[Case]:
    """Every model in every precision, eager; in bf16 compiled, too; generation on 1 and 64
    streams."""
    precisions = precisions_of(small)
    models = SMALL if small else MODELS
    found = [Case(f"{arch}, {p}", arch, p) for arch in models for p in precisions]
    found += [] if small else [Case(f"{arch}, bf16, compiled", arch, "bf16", True) for arch in models]
    causal = next(iter(models))
    return found + [Case(f"{causal}, {n} streams", causal, streams=n) for n in ((1, 4) if small else (1, 64))]


def measure(case: Case, folder: Path, small: bool, seconds: float) -> dict[str, Any]:
    """The figures of *case*; ``median`` is tokens per second."""
    device = torch.device("cpu" if small else "cuda")
    data = folder / ("encoder" if "bert" in case.arch else "causal")
    flags = [str(data), "--arch", case.arch, *(SMALL if small else MODELS)[case.arch].split(), "--lr", "1e-4"]
    flags += ["--clip-norm", "0.1", "--required-batch-size-multiple", "1", "--seed", "1", *PRECISIONS[case.precision]]
    flags += ["--cpu"] * small + ["--compile"] * case.compile
    args = options.parse_args_and_arch(get_training_parser(), flags)
    torch.manual_seed(1)
    task = setup_task(args)
    model = task.build_model(args)
    if case.streams:
        words = len(task.source_dictionary)
        found = generation.measure(model.to(device).eval(), words, device, seconds, (case.streams,))
        return {"median": found["lines"][0]["median"], "generation": found}
    speeds = sorted(language_model.training_speeds(args, task, model, device, seconds)[0])
    return {
        "median": speeds[len(speeds) // 2],
        "mib": machine.peak_gpu(device) or machine.peak_rss(),
        **({} if case.compile else _one_step(args, device)),
    }


def _one_step(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """FLOPs per token of a training step, and the attention kernels that ran."""
    settings = training_settings(args)
    task = setup_task(settings)
    model, criterion = task.build_model(settings), task.build_criterion(settings)
    trainer = TrainingState(settings, task, model, criterion, World(device=device))
    batches = iter(task.iterator("train", model, criterion, training=True, device=device))
    first = next(batches)
    assert first is not None
    _, flops = count_flops(lambda: update(trainer, [first]))
    activities = [torch.profiler.ProfilerActivity.CPU if device.type == "cpu" else torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        update(trainer, [next(batches)])
        machine.synchronize(device)
    names = {event.key for event in profile.key_averages() if KERNELS.search(event.key)}
    return {"flops": flops / first["ntokens"], "kernels": sorted(name[:90] for name in names)}


def table(results: Sequence[dict[str, Any]], peaks: dict[str, float]) -> str:
    """Markdown of the *results*; *peaks* in GFLOP/s by precision."""
    lines = ["| | tokens/s | share of the peak | MiB | attention |", "|---|---|---|---|---|"]
    flops = {r["case"]["arch"]: r["flops"] for r in results if "flops" in r}
    texts = []
    for result in results:
        case = Case(**result["case"])
        if case.streams:
            texts.append(generation.table(result["generation"]))
            continue
        share = result["median"] * flops[case.arch] / peaks[case.precision] / 1e9
        kernels = "; ".join(result.get("kernels", ())) or "–"
        lines.append(f"| {case.name} | {result['median']:,.0f} | {share:.0%} | {result['mib']:,.0f} | {kernels} |")
    return "\n\n".join(["\n".join(lines), *texts])


def peaks_of(device: torch.device, precisions: Sequence[str]) -> dict[str, float]:
    """Speed of the matrix product in GFLOP/s, by precision."""
    types = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    found = {}
    for name in precisions:
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        found[name] = machine.matrix_product(device, types[name])
    torch.backends.cuda.matmul.allow_tf32 = False
    return found


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="small models on the CPU")
    parser.add_argument("--seconds", type=float, default=6, help="time for each case in seconds (default: 6)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.case:
        print(json.dumps(measure(Case(**json.loads(args.case)), args.folder, args.small, args.seconds)))
        return
    if not args.small and not torch.cuda.is_available():
        sys.exit("python -m benchmarks.gpu: there is no GPU; --small runs small models on the CPU")
    device = torch.device("cpu" if args.small else "cuda")
    peaks = peaks_of(device, precisions_of(args.small))
    with tempfile.TemporaryDirectory() as folder:
        for name, make, words in (
            ("causal", language_model.make_corpus, 2_000 if args.small else 267_744),
            ("encoder", encoders.make_corpus, 2_000 if args.small else 30_522),
        ):
            (Path(folder) / name).mkdir()
            make(Path(folder) / name, words)
        flags = ["--seconds", str(args.seconds), *(["--small"] if args.small else [])]
        results = measure_apart("benchmarks.gpu", cases(args.small), Path(folder), flags)
    about = machine.describe(device)
    speeds = ", ".join(f"{name} {speed / 1e3:.1f}" for name, speed in peaks.items())
    print(f"\n{about['device']}, torch {about['torch']}, commit {about['commit']}, {about['date']}")
    print(f"matrix product in TFLOP/s: {speeds}\n")
    print(table(results, peaks))
    if args.json:
        args.json.write_text(json.dumps({"machine": about, "gflops": peaks, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
