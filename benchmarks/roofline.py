"""Prediction of a training step's time on a GPU, kernel by kernel, from shapes: no GPU is needed and none is used.

    python -m benchmarks.roofline [ARCH ...] [--gpu H100 ...] [--precision bf16] [--top N] [--json FILE]

One step of each architecture runs on a fake GPU (``benchmarks/fake_gpu.py``). A kernel takes the longest of its
operations at 70% of the GPU's peak, its bytes at 80% of the bandwidth, and 2.5 µs. What this leaves out: caches between
kernels, sums of many rows into one, communication, and the host, which is assumed to be ahead of the GPU.

The third step is counted, in which a memory is full. The ceiling is the matrix products and attention at the peak.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from benchmarks import encoders, fake_gpu, language_model
from benchmarks.gpu import MODELS, PRECISIONS, SMALL
from fairseq.config import options
from fairseq.config.settings import training_settings
from fairseq.distributed import World
from fairseq.errors import UserError
from fairseq.system import provenance
from fairseq.tasks import setup_task
from fairseq.training.trainer import Trainer
from fairseq.training.utilisation import peak_flops
from fairseq_cli.common import get_training_parser

GPUS = {
    # Name of the device as its driver gives it, and bytes per second of its memory, from the vendor's data sheets.
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
PARTS = ("matmul", "attention", "layers", "loss", "optimizer")
OF_PEAK, OF_BANDWIDTH, SHORTEST = 0.7, 0.8, 2.5e-6
WORDS, ENCODER_WORDS = 267_744, 30_522

_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh"}
_NO_KERNEL |= {"_unsafe_view", "_reshape_alias", "set_", "resize_", "device", "_local_scalar_dense"}
_NOT_READ = {"fill_", "zero_", "copy_", "uniform_", "normal_", "bernoulli_"}  # their first argument
_ROWS = {"embedding", "index_select", "gather", "index"}
_ADDED_ROWS = {"scatter_add_", "scatter_add", "index_add_", "index_add", "index_put_", "_index_put_impl_"}


@dataclass(frozen=True)
class Kernel:
    """One launch.

    Attributes:
        name: the operator.
        part: one of :data:`PARTS`.
        flops, bytes: what it computes, and what it reads and writes.
    """

    name: str
    part: str
    flops: float
    bytes: float

    def seconds(self, flops: float, bandwidth: float) -> float:
        """The predicted time at a peak of *flops* and a *bandwidth* in bytes per second."""
        return max(self.flops / (OF_PEAK * flops), self.bytes / (OF_BANDWIDTH * bandwidth), SHORTEST)


class Launches(TorchDispatchMode):
    """The kernels of what runs inside, the part they belong to, and how often the host waits for the device."""

    def __init__(self, device: str = fake_gpu.NAME) -> None:
        super().__init__()
        self.device = device
        self.part = "layers"
        self.kernels: list[Kernel] = []
        self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if name == "_local_scalar_dense" and args[0].device.type == self.device:
            self.waits += 1
        out = func(*args, **kwargs)
        tensors = _tensors([*args, *kwargs.values(), out])
        on_gpu = [tensor.device.type == self.device for tensor in tensors]
        copies = name in ("_to_copy", "copy_") and not all(on_gpu)  # by the copy engine
        if any(on_gpu) and not copies and name not in _NO_KERNEL and not func.is_view:
            part = _part(name, func)
            self.kernels += [Kernel(name, part or self.part, *cost) for cost in _costs(name, func, args, kwargs, out)]
        return out


def _part(name: str, func: Any) -> str | None:
    if "attention" in name:
        return "attention"
    return "matmul" if func.overloadpacket in flop_registry else None


def _costs(name: str, func: Any, args: Any, kwargs: Any, out: Any) -> Iterator[tuple[float, float]]:
    """Operations and bytes of each kernel of an operator; CUDA's operators are one kernel, but for those named here."""
    read, written = _traffic(name, func, args, kwargs, out)
    flops = 0.0
    if func.overloadpacket in flop_registry:
        flops = flop_registry[func.overloadpacket](*args, **kwargs, out_val=out) * _visible(name, func, args, kwargs)
    first = _size(args[0]) if args and isinstance(args[0], Tensor) else 0.0
    if name == "logsumexp":  # maximum, difference, exponential, sum; then the logarithm and the maximum again
        yield from ((0.0, factor * first) for factor in (1, 2, 2, 1))
        yield from ((0.0, 3 * written) for _ in range(2))
    elif name == "native_layer_norm_backward":  # for the input, then for gain and bias
        yield 0.0, read + _size(out[0])
        yield 0.0, read
    elif name == "embedding_dense_backward":  # zeros, a sort of the indices in some six passes, sums of rows
        yield 0.0, written
        yield from ((0.0, 4 * _size(args[1])) for _ in range(6))
        yield 0.0, 2 * first
    elif name in _ROWS:
        yield 0.0, 2 * written
    elif name in _ADDED_ROWS:
        yield 0.0, 3 * sum(_size(x) for x in _tensors(args[1:]))
    else:
        yield flops, read + written


def _traffic(name: str, func: Any, args: Any, kwargs: Any, out: Any) -> tuple[float, float]:
    """Bytes that are read and written."""
    skip_first = name in _NOT_READ or name.startswith("new_") or name.endswith("_like") or kwargs.get("beta") == 0
    read = written = 0.0
    for number, argument in enumerate(func._schema.arguments):
        value = kwargs.get(argument.name) if argument.kwarg_only or number >= len(args) else args[number]
        size = sum(map(_size, _tensors(value)))
        changed = argument.alias_info is not None and argument.alias_info.is_write
        if name.startswith("_fused_") and argument.name == "grads":
            changed = kwargs.get("grad_scale") is not None
        written += size if changed else 0
        read += 0 if argument.is_out or (number == 0 and skip_first) else size
    fresh = [value for value, r in zip(_listed(out), func._schema.returns, strict=False) if r.alias_info is None]
    return read, written + sum(map(_size, _tensors(fresh)))


def _visible(name: str, func: Any, args: Any, kwargs: Any) -> float:
    """The share of the scores that causal attention computes; the last query stands at the last key."""
    named = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    if "attention" not in name or not named.get("is_causal"):
        return 1.0
    queries, keys = named["query"].size(2), named["key"].size(2)
    return (keys - queries + (queries + 1) / 2) / keys


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if isinstance(value, Tensor) else []


def _size(tensor: Tensor) -> float:
    """Bytes of *tensor* in memory; what is broadcast counts once."""
    shape = zip(tensor.shape, tensor.stride(), strict=True)
    return float(np.prod([n for n, stride in shape if stride] or [min(tensor.numel(), 1)])) * tensor.element_size()


def trace_step(args: argparse.Namespace, steps: int = 3) -> tuple[Launches, int]:
    """The launches of the last of *steps* updates of a run with the settings *args*, and the tokens it reads."""
    settings = training_settings(args)
    device = fake_gpu.device()
    task = setup_task(settings)
    with fake_gpu.shapes_only() as mode:
        model, criterion = task.build_model(settings), task.build_criterion(settings)
        for module in (model, criterion):
            fake_gpu.move(module)
    # On the host, with values: how many tokens fall into each band depends on them.
    iterator = iter(task.iterator("train", model, criterion, training=True, device=torch.device("cpu")))
    samples = [next(iterator) for _ in range(steps)]
    with fake_gpu.shapes_only(mode):
        trainer = Trainer.from_settings(settings, task, model, criterion, World(device=device))
        for sample in samples:
            on_gpu: Any = tree_map_only(Tensor, lambda tensor: tensor.to(device), sample)
            with Launches() as launches, fake_gpu.autocast_cache():
                _mark_parts(trainer, launches)
                trainer.train_step([on_gpu])
    assert sample is not None
    return launches, int(sample["ntokens"])


def _mark_parts(trainer: Trainer, launches: Launches) -> None:
    """Let *launches* know which part of an update of *trainer* runs."""
    if not hasattr(trainer, "forward_backward"):
        trainer.forward_backward = trainer._forward_backward  # type: ignore[attr-defined]
        trainer.criterion.loss_of = trainer.criterion.compute_loss  # type: ignore[assignment]

    def enter(part: str) -> Callable[..., None]:
        return lambda *_: setattr(launches, "part", part)

    def compute_loss(model: Any, net_output: Any, sample: Any) -> Any:
        enter("loss")()
        hidden = net_output[0] if isinstance(net_output, tuple) else net_output
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(enter("layers"))  # the backward pass has left the loss
        result = trainer.criterion.loss_of(model, net_output, sample)  # type: ignore[operator]
        result[0].register_hook(enter("loss"))
        return result

    def forward_backward(samples: Any) -> Any:
        enter("layers")()
        result = trainer.forward_backward(samples)  # type: ignore[attr-defined]
        enter("optimizer")()
        return result

    trainer.criterion.compute_loss = compute_loss  # type: ignore[method-assign]
    trainer._forward_backward = forward_backward  # type: ignore[method-assign]


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
    """The training command of *arch*, as ``benchmarks.gpu`` measures it; of others, with the Shortformer's settings."""
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

    Words follow Mandelbrot's law with the exponent and the shift that give WikiText-103's most frequent word its share
    of 6.3%, and its rarest word 3 occurrences in 103 million.
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
        lines.append(
            f"| {result['arch']}, {result['tokens']:,} tokens | {result['gpu']} | {parts} | {rest} | {counts} |"
        )
    return "\n".join(lines)


def predictions(cases: Sequence[tuple[str, str]], gpus: Sequence[str], data: Path | None) -> list[dict[str, Any]]:
    """The predictions of *cases*, architectures with a precision, on *gpus*; *data* as ``--data``."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        if data is None:
            make_data(Path(folder))
        for arch, precision in cases:
            corpus = data or Path(folder) / ("encoder" if "bert" in arch else "causal")
            launches, tokens = trace_step(command(arch, corpus, precision))
            results += [{"arch": arch, **predict(launches, tokens, gpu, precision)} for gpu in gpus]
    return results


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", nargs="*", default=list(MODELS), help="architectures (default: the published models)")
    parser.add_argument("--gpu", nargs="+", choices=GPUS, default=["H100"], help="GPUs (default: H100)")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16", help="of the step (default: bf16)")
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
        results = predictions([(arch, args.precision) for arch in args.arch], args.gpu, args.data)
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
    """Print the measurement of ``benchmarks.gpu --json`` in *path* beside the prediction for its GPU.

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
