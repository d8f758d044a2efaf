"""Prediction of a training step's time on a GPU, kernel by kernel, from shapes: no GPU is needed
and none is used.

    python -m benchmarks.roofline [ARCH ...] [--gpu H100 ...] [--precision bf16] \
        [--compile] [--top N] [--json FILE]

One step of each architecture runs on a fake GPU (``benchmarks/fake_gpu.py``). A kernel takes the
longest of its operations at 70% of the GPU's peak, its bytes at 80% of the bandwidth, and 2.5 µs.
What this leaves out: caches between kernels, sums of many rows into one, communication, and the
host, which is assumed to be ahead of the GPU.

With ``--compile`` layers are counted as torch.compile would fuse them, too
(``benchmarks/compiled.py``). The third step is counted, in which a memory is full. The ceiling is
the matrix products and attention at the peak.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from benchmarks import encoders, fake_gpu, language_model
from benchmarks.gpu import MODELS, PRECISIONS, SMALL
from benchmarks.launches import PARTS, Launches
from fairseq.config import options
from fairseq.config.settings import training_settings
from fairseq.distributed import World
from fairseq.errors import UserError
from fairseq.models.loading import layers_of
from fairseq.system import provenance
from fairseq.tasks import setup_task
from fairseq.training.state import TrainingState
from fairseq.training.update import update
from fairseq.training.utilisation import peak_flops
from fairseq_cli.common import get_training_parser

GPUS = {
    # Name of the device as its driver gives it, and bytes per second of its memory, from the
    # vendor's data sheets.
    "H200": ("NVIDIA H200", 4.8e12),
    "H100": ("NVIDIA H100 80GB HBM3", 3.35e12),
    "H100-PCIe": ("NVIDIA H100 PCIe", 2.0e12),
    "A100": ("NVIDIA A100-SXM4-80GB", 2.039e12),
    "L40S": ("NVIDIA L40S", 0.864e12),
    "A10": ("NVIDIA A10", 0.6e12),
    "L4": ("NVIDIA L4", 0.3e12),
    "V100": ("Tesla V100-SXM2-32GB", 0.9e12),
    "T4": ("Tesla T4", 0.32e12),
}
WORDS, ENCODER_WORDS = 267_744, 30_522


def trace_step(args: argparse.Namespace, compiled: bool = False, steps: int = 3) -> tuple[Launches, int]:
    """The launches of the last of *steps* updates of a run with the settings *args*, and the tokens
    it reads.

    Args:
        compiled: count layers as ``--compile`` compiles them.
    """
    settings = training_settings(args)
    device = fake_gpu.device()
    task = setup_task(settings)
    with fake_gpu.shapes_only():
        model, criterion = task.build_model(settings), task.build_criterion(settings)
        for module in (model, criterion):
            fake_gpu.move(module)
    # On the host, with values: how many tokens fall into each band depends on them.
    iterator = iter(task.iterator("train", model, criterion, training=True, device=torch.device("cpu")))
    samples = [next(iterator) for _ in range(steps)]
    with fake_gpu.shapes_only():
        trainer = TrainingState(settings, task, model, criterion, World(device=device))
        layers = _compiled(model) if compiled else None
        for sample in samples:
            on_gpu: Any = tree_map_only(Tensor, lambda tensor: tensor.to(device), sample)
            with Launches() as launches, fake_gpu.autocast_cache():
                if layers is not None:
                    layers.launches = launches
                _mark_parts(trainer, launches)
                update(trainer, [on_gpu])
    assert sample is not None
    return launches, int(sample["ntokens"])


def _compiled(model: Any) -> Any:
    from benchmarks.compiled import CompiledLayers  # loads torch's compiler, for a second or two

    return CompiledLayers(layers_of(model))


def _mark_parts(trainer: TrainingState, launches: Launches) -> None:
    """Let *launches* know which part of an update of *trainer* runs."""
    loss_of, train, reduce = trainer.criterion.compute_loss, trainer.graph.train, trainer.reducer.reduce

    def enter(part: str) -> Callable[..., None]:
        return lambda *_: setattr(launches, "part", part)

    def compute_loss(model: Any, net_output: Any, sample: Any) -> Any:
        enter("loss")()
        hidden = net_output[0] if isinstance(net_output, tuple) else net_output
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(enter("layers"))  # the backward pass has left the loss
        result = loss_of(model, net_output, sample)
        result[0].register_hook(enter("loss"))
        return result

    def begin(mode: bool = True) -> Any:
        enter("layers")()
        return train(mode)

    def end() -> None:
        reduce()
        enter("optimizer")()

    marked: Any = trainer
    marked.criterion.compute_loss, marked.graph.train, marked.reducer.reduce = compute_loss, begin, end


def predict(launches: Launches, tokens: int, gpu: str, precision: str) -> dict[str, Any]:
    """Milliseconds by part, the share of the ceiling, and tokens per second on *gpu*."""
    peak, bandwidth = speeds(gpu, precision)
    operators: dict[str, dict[str, list[float]]] = {part: defaultdict(lambda: [0, 0.0, 0.0, 0.0]) for part in PARTS}
    for kernel in launches.kernels:
        of_kernel = (1, kernel.flops, kernel.bytes, 1e3 * kernel.seconds(peak, bandwidth))
        sums = operators[kernel.part][kernel.name]
        sums[:] = [a + b for a, b in zip(sums, of_kernel, strict=True)]
    milliseconds = {part: sum(sums[3] for sums in members.values()) for part, members in operators.items()}
    total = sum(milliseconds.values())
    return {
        "gpu": gpu,
        "precision": precision,
        "milliseconds": milliseconds,
        "total": total,
        "share": 1e3 * sum(k.flops for k in launches.kernels) / peak / total,
        "tokens_per_second": 1e3 * tokens / total,
        "tokens": tokens,
        "kernels": len(launches.kernels),
        "waits": launches.waits,
        "operators": operators,  # launches, operations, bytes, milliseconds
    }


def speeds(gpu: str, precision: str) -> tuple[float, float]:
    """Operations and bytes per second of *gpu*.

    Raises:
        UserError: it does not have the *precision*.
    """
    name, bandwidth = GPUS[gpu]
    peak = peak_flops(name, precision)
    if peak is None:
        raise UserError(f"`precision` {precision}: {gpu} does not have it")
    return peak, bandwidth


def command(arch: str, data: Path, precision: str) -> argparse.Namespace:
    """The training command of *arch*, as ``benchmarks.gpu`` measures it; of others, with the
    Shortformer's settings."""
    flags = [
        str(data),
        "--arch",
        arch,
        *{**MODELS, **SMALL}.get(arch, MODELS["shortformer_wiki103"]).split(),
        "--lr",
        "1e-4",
    ]
    flags += ["--clip-norm", "0.1", "--required-batch-size-multiple", "1", "--seed", "1", *PRECISIONS[precision]]
    return options.parse_args_and_arch(get_training_parser(), flags)


def make_data(folder: Path) -> None:
    """Corpora with WikiText-103's frequencies, and of WordPieces, in *folder*.

    Words follow Mandelbrot's law with the exponent and the shift that give WikiText-103's most
    frequent word its share of 6.3%, and its rarest word 3 occurrences in 103 million.
    """
    for name in ("causal", "encoder"):
        (folder / name).mkdir()
    language_model.make_corpus(folder / "causal", WORDS, (np.arange(1, WORDS - 3) + 4.5) ** -1.35)
    encoders.make_corpus(folder / "encoder", ENCODER_WORDS)


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown, in milliseconds a step."""
    lines = [f"| | GPU | {' | '.join(PARTS)} | total | of the ceiling | tokens/s | kernels | waits |"]
    lines.append("|---" * (len(PARTS) + 7) + "|")
    for result in results:
        parts = " | ".join(f"{result['milliseconds'][part]:.1f}" for part in PARTS)
        rest = f"{result['total']:.1f} | {result['share']:.0%} | {result['tokens_per_second']:,.0f}"
        counts = f"{result['kernels']:,} | {result['waits']}"
        name = f"{result['arch']}, {result['tokens']:,} tokens{', compiled' * result['compile']}"
        lines.append(f"| {name} | {result['gpu']} | {parts} | {rest} | {counts} |")
    return "\n".join(lines)


def predictions(
    cases: Sequence[tuple[str, str]], gpus: Sequence[str], data: Path | None, modes: Sequence[bool] = (False,)
) -> list[dict[str, Any]]:
    """The predictions of *cases*, architectures with a precision, on *gpus*, in each of *modes*:
    whether compiled.

    *data* as ``--data``.
    """
    results = []
    with tempfile.TemporaryDirectory() as folder:
        if data is None:
            make_data(Path(folder))
        for arch, precision in cases:
            corpus = data or Path(folder) / ("encoder" if "bert" in arch else "causal")
            for compiled in modes:
                launches, tokens = trace_step(command(arch, corpus, precision), compiled)
                about = {"arch": arch, "compile": compiled}
                results += [{**about, **predict(launches, tokens, gpu, precision)} for gpu in gpus]
    return results


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", nargs="*", default=list(MODELS), help="architectures (default: the published models)")
    parser.add_argument("--gpu", nargs="+", choices=GPUS, default=["H100"], help="GPUs (default: H100)")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16", help="of the step (default: bf16)")
    parser.add_argument("--compile", action="store_true", help="also predict compiled layers, as of --compile")
    parser.add_argument("--data", type=Path, metavar="DATA-BIN", help="corpus (default: words as in WikiText-103)")
    parser.add_argument("--top", type=int, default=0, metavar="N", help="also list the N operators with most time")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="print the results of benchmarks.gpu beside")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    args = parser.parse_args(argv)
    try:
        if args.top < 0:
            raise UserError(f"`top` {args.top}: must be at least 0")
        if args.json and not args.json.parent.is_dir():
            raise UserError(f"`json` {args.json}: there is no folder {args.json.parent}")
        if args.measured:
            compare(args.measured)
            return
        for gpu in args.gpu:
            speeds(gpu, args.precision)
        modes = (False, True) if args.compile else (False,)
        results = predictions([(arch, args.precision) for arch in args.arch], args.gpu, args.data, modes)
    except (UserError, OSError) as error:
        print(f"python -m benchmarks.roofline: {getattr(error, 'with_flags', error)}", file=sys.stderr)
        sys.exit(2)
    print(f"Predicted, not measured: {args.precision}, torch {torch.__version__}, commit {provenance.commit()}\n")
    print(table(results))
    for result in results if args.top else ():
        print(f"\n{result['arch']} on {result['gpu']}\n{longest(result, args.top)}", end="")
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


def longest(result: dict[str, Any], count: int) -> str:
    """The *count* operators of a *result* with most time, a line each."""
    rows = [(sums, part, name) for part, members in result["operators"].items() for name, sums in members.items()]
    rows.sort(key=lambda row: -row[0][3])
    return "".join(f"{sums[3]:8.2f} ms {sums[0]:6} × {part}, {name}\n" for sums, part, name in rows[:count])


def beside(results: Sequence[dict[str, Any]], measured: dict[str, float]) -> str:
    """Predicted and *measured* tokens per second, by architecture and precision, as Markdown."""
    lines = ["| | predicted tokens/s | measured | measured / predicted |", "|---|---|---|---|"]
    for result in results:
        name, predicted = f"{result['arch']}, {result['precision']}", result["tokens_per_second"]
        lines.append(f"| {name} | {predicted:,.0f} | {measured[name]:,.0f} | {measured[name] / predicted:.2f} |")
    return "\n".join(lines)


def compare(path: Path) -> None:
    """Print the measurement of ``benchmarks.gpu --json`` in *path* beside the prediction for its
    GPU.

    Raises:
        UserError: *path* is no such file.
    """
    try:
        report = json.loads(path.read_text())
        device = report["machine"]["device"]
        runs = [r for r in report["results"] if not r["case"]["streams"] and not r["case"]["compile"]]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"`measured` {path}: not a file of benchmarks.gpu; give one that its --json wrote") from None
    gpu = next((gpu for gpu, (name, _) in GPUS.items() if name == device), None)
    if gpu is None:
        print(f"No prediction for {device}; there are predictions for {', '.join(name for name, _ in GPUS.values())}")
        return
    cases = [(r["case"]["arch"], r["case"]["precision"]) for r in runs]
    results = predictions([c for c in cases if peak_flops(device, c[1])], [gpu], None)
    print(beside(results, {", ".join(case): run["median"] for case, run in zip(cases, runs, strict=True)}))


if __name__ == "__main__":
    main()
