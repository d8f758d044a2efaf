"""Cost of an update against its parts, and a model that predicts throughput and memory on more
processes.

    python -m benchmarks.scaling measure --processes 2        # on this machine, gloo, a small model
    python -m benchmarks.scaling predict    # the table of benchmarks/results/scaling.md

Measured in one job: every round has an update of each kind (alone, replicated, sharded), so that
load from elsewhere meets all of them; the ratios of medians are reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import machine
from fairseq import checkpoint, distributed
from fairseq.checkpoint import CheckpointManager
from fairseq.checkpoint.manager import SavePoint
from fairseq.config import options
from fairseq.config.settings import CommonConfig, DistributedConfig, TrainingSettings, training_settings
from fairseq.distributed import Job, World
from fairseq.distributed.sharding import build_device
from fairseq.tasks import setup_task
from fairseq.training.saving import Saver
from fairseq.training.state import TrainingState
from fairseq.training.update import update
from fairseq.training.utilisation import OPERATIONS
from fairseq_cli import preprocess
from fairseq_cli.common import get_training_parser
from fairseq_cli.preprocess import get_preprocessing_parser

KINDS = {"alone": "no_c10d", "replicated": "c10d", "sharded": "fully_sharded"}
STATE = 16  # bytes a parameter: float32 weight, gradient and Adam's two moments
SAVED = 12  # bytes a parameter in a checkpoint: weight and moments


@dataclass(frozen=True)
class Model:
    """A transformer language model, as far as its cost depends on it.

    Attributes:
        parameters: of the whole model; *embedding* of them in embeddings and output, the root's
            group when sharded.
        rows, length, memory: of a batch on one process, in rows and tokens.
    """

    name: str
    parameters: float
    embedding: float
    layers: int
    width: int
    rows: int
    length: int
    memory: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of a batch on one process."""
        return self.rows * self.length


@dataclass(frozen=True)
class Cluster:
    """Speeds of a process, its links and the disk, all a second.

    Attributes:
        flops: matrix products that a training step reaches.
        inside: bytes of one process over the links of its node.
        between: bytes of a whole node over the network.
        node: processes of a node.
        latency: seconds of a collective operation per process that it passes.
        disk: bytes to the shared disk, all processes together.
    """

    name: str
    flops: float
    inside: float
    between: float
    node: int = 8
    latency: float = 1e-5
    disk: float = 2e9

    def summed(self, size: float, processes: int) -> float:
        """Seconds of summing *size* bytes over *processes*: a ring in each node, then one over the
        nodes."""
        group, nodes = min(processes, self.node), -(-processes // self.node)
        ring = 2 * (group - 1) / group * size / self.inside + 2 * (nodes - 1) / nodes * size / self.between
        return ring + 2 * (group + nodes) * self.latency


@dataclass(frozen=True)
class Prediction:
    """Seconds of an update, and bytes on one process.

    Attributes:
        compute: forward and backward pass; *exposed*: communication that they do not hide.
        state: parameters, gradients and optimizer state; *activations*: kept for the backward pass.
        gathered: bytes of carried memory that rank 0 holds on its host while it saves.
        saving: seconds of writing a checkpoint with that memory; ``--async-save`` hides it but for
            the copy.
    """

    compute: float
    exposed: float
    state: float
    activations: float
    gathered: float
    saving: float
    tokens_per_second: float

    @property
    def efficiency(self) -> float:
        """Share of the time in which a process computes."""
        return self.compute / (self.compute + self.exposed)


def predict(model: Model, cluster: Cluster, processes: int, backend: str, recompute: bool = False) -> Prediction:
    """Return the cost of an update on *processes*, replicated (``c10d``) or ``fully_sharded``
    within nodes.

    A parameter costs 6 operations a token (Kaplan et al. 2020, §2.1), 8 if activations are
    recomputed; a layer keeps 34 bytes a token and channel (Korthikanti et al. 2022, §4.1; fused
    attention keeps no scores). DistributedDataParallel hides reductions behind the backward pass,
    two thirds of the computation. A sharded layer is gathered twice in two bytes and its gradient
    reduced in four, hidden behind all computation; the root's group, in four bytes, is not.
    """
    compute = (OPERATIONS + (2 if recompute else 0)) * model.parameters * model.tokens / cluster.flops
    if processes == 1:
        exposed, state = 0.0, float(STATE * model.parameters)
    elif backend == "c10d":
        exposed = max(0.0, cluster.summed(4 * model.parameters, processes) - compute * 2 / 3)
        state = (STATE + 4) * model.parameters  # DistributedDataParallel's buckets
    else:
        group = min(processes, cluster.node)
        part = (group - 1) / group
        layers = model.parameters - model.embedding
        hidden = part * (2 * 2 + 4) * layers / cluster.inside + 3 * model.layers * group * cluster.latency
        if processes > group:  # the nodes' copies are summed
            hidden += cluster.summed(4 * model.parameters, processes) - cluster.summed(4 * model.parameters, group)
        root = part * (4 + 4) * model.embedding / cluster.inside
        exposed = max(0.0, hidden - compute) + root
        whole = 2 * 2 * layers / model.layers + 8 * model.embedding  # two layers, and the root with its gradient
        state = STATE * model.parameters / group + whole
    kept = (2 if recompute else 34) * model.width
    gathered = 4.0 * processes * model.rows * model.memory * model.width * model.layers
    return Prediction(
        compute=compute,
        exposed=exposed,
        state=state,
        activations=kept * model.tokens * model.layers,
        gathered=gathered,
        saving=(SAVED * model.parameters + gathered) / cluster.disk,
        tokens_per_second=processes * model.tokens / (compute + exposed),
    )


MODELS = (  # parameters counted in the architectures with the words of WikiText-103; rows of a GPU assumed
    Model("shortformer_wiki103", 246.9e6, 45.5e6, 16, 1024, 8, 512, 512),
    Model("transformer_xl_wiki103_large", 285.2e6, 39.7e6, 18, 1024, 16, 384, 384),
    Model("1.5B, 48 layers", 1.5e9, 80e6, 48, 1600, 8, 1024),
)
CLUSTERS = (  # assumed, not measured
    Cluster("8 × 400 Gb/s", 2.5e14, 3e11, 4e11),
    Cluster("25 Gb/s", 2.5e14, 3e11, 3e9),
)


def table() -> list[str]:
    """Predictions for 1 to 1,024 GPUs, as a Markdown table."""
    lines = ["| model | network | GPUs | tokens/s replicated | sharded | state GB | sharded | memory gathered GB |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for model in MODELS:
        for cluster in CLUSTERS:
            for count in (1, 8, 64, 1024):
                whole = predict(model, cluster, count, "c10d")
                parts = predict(model, cluster, count, "fully_sharded")
                lines.append(
                    f"| {model.name} | {cluster.name} | {count:,} | {_speed(whole)} | {_speed(parts)} | "
                    f"{whole.state / 1e9:.1f} | {parts.state / 1e9:.1f} | {whole.gathered / 1e9:.1f} |"
                )
    return lines


def _speed(found: Prediction) -> str:
    return f"{found.tokens_per_second / 1e3:,.0f}k ({found.efficiency:.0%})"


def measure(args: argparse.Namespace, world: World) -> None:
    """Measure on the processes of *world*, and print the result on the first."""
    trainers = {kind: _trainer(args, backend, world if kind != "alone" else World()) for kind, backend in KINDS.items()}
    task = trainers["alone"].task
    batches = list(
        task.iterator(
            "train", trainers["alone"].model, trainers["alone"].criterion, training=True, rank=world.rank,
            world_size=world.size,
        )
    )  # fmt: skip
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for round_number in range(args.rounds + 1):
        for kind, trainer in trainers.items():
            world.barrier()
            start = time.perf_counter()
            update(trainer, [batches[round_number % len(batches)]])
            if round_number:  # the first one allocates
                seconds[kind].append(time.perf_counter() - start)
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    count = sum(p.numel() for p in trainers["alone"].model.parameters())
    gradient = torch.zeros(count)
    parts = {
        "reduction": _median(lambda: dist.all_reduce(gradient), world),
        "data": _data_seconds(trainers["alone"], world),
        **_saving_seconds(args, trainers, world),
    }
    if world.is_first:
        about = {**machine.describe(world.device), "processes": world.size, "parameters": count, **vars(args)}
        ratios = {kind: medians[kind] / medians["alone"] for kind in KINDS}
        print(json.dumps({"about": about, "update": medians, "ratio": ratios, "parts": parts}, indent=1, default=str))


def _trainer(args: argparse.Namespace, backend: str, world: World) -> TrainingState:
    words = f"""{args.data} --cpu --arch transformer_lm --decoder-layers {args.layers} --decoder-embed-dim {args.width}
        --decoder-ffn-embed-dim {4 * args.width} --decoder-attention-heads 4 --tokens-per-sample 128 --batch-size
        {args.rows} --required-batch-size-multiple 1 --optimizer adam --lr 1e-4 --criterion cross_entropy --ddp-backend
        {backend} --share-decoder-input-output-embed --decoder-normalize-before --decoder-input-dim {args.width}
        --decoder-output-dim {args.width} --save-dir {args.data}/saved""".split()
    settings = training_settings(options.parse_args_and_arch(get_training_parser(), words))
    task = setup_task(settings)
    with build_device(settings.distributed, world):
        model = task.build_model(settings)
    return TrainingState(settings, task, model, task.build_criterion(settings), world)


def _median(work: Callable[[], object], world: World, repeats: int = 5) -> float:
    values = []
    for _ in range(repeats):
        world.barrier()
        start = time.perf_counter()
        work()
        values.append(time.perf_counter() - start)
    return statistics.median(values)


def _data_seconds(trainer: TrainingState, world: World) -> float:
    """Seconds of preparing one batch."""
    batches = iter(trainer.task.iterator("train", trainer.model, trainer.criterion, training=True))
    return _median(lambda: next(batches), world)


def _saving_seconds(args: argparse.Namespace, trainers: dict[str, TrainingState], world: World) -> dict[str, float]:
    """Median seconds that training waits for a checkpoint, one file and sharded; of reading one
    with its checksums.

    Every round has each kind once, as in the measurement of updates.
    """
    savers: dict[str, tuple[TrainingState, Saver]] = {}
    for kind in ("replicated", "sharded"):
        for name, background in (("blocking", False), ("background", True)):
            trainer = trainers[kind]
            settings = trainer.task.settings
            assert isinstance(settings, TrainingSettings)
            cfg = replace(settings.checkpoint, async_save=background, save_interval_updates=1, keep_interval_updates=1)
            saver = Saver(cfg, settings.distributed, world, CheckpointManager(cfg) if world.is_first else None)
            savers[f"{kind} checkpoint, {name}"] = trainer, saver
    seconds: dict[str, list[float]] = {name: [] for name in savers}
    for number in range(args.saves * len(savers)):
        name = list(savers)[number % len(savers)]
        trainer, saver = savers[name]
        world.barrier()
        start = time.perf_counter()
        saver.save(trainer.state_dict(), SavePoint(epoch=1, updates=number + 1, end_of_epoch=False, is_best=False))
        world.barrier()
        seconds[name].append(time.perf_counter() - start)
        saver.wait()
        world.barrier()
    state = trainers["replicated"].state_dict()
    if world.is_first:
        path = Path(args.data) / "read.pt"
        checkpoint.save(path, state)
        seconds |= _reading_seconds(path, args.saves)
    world.barrier()
    return {name: statistics.median(values) for name, values in seconds.items()}


def _reading_seconds(path: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds of reading the checkpoint at *path*, mapped or copied, and its checksums, in turn."""
    readers: dict[str, Callable[[], object]] = {
        "comparing checksums": lambda: checkpoint.verify(path),
        "reading": lambda: checkpoint.load(path),
        "reading a copy": lambda: torch.load(path, weights_only=True, mmap=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(repeats):
        for name, read in readers.items():
            start = time.perf_counter()
            read()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def _corpus(folder: Path, words: int = 8000, tokens: int = 200_000) -> None:
    """Write a data folder of random words."""
    drawn = torch.randint(words, (tokens // 20, 20), generator=torch.Generator().manual_seed(1)).tolist()
    (folder / "text").write_text("".join(" ".join(f"w{number}" for number in line) + "\n" for line in drawn))
    flags = ["--only-source", "--trainpref", str(folder / "text"), "--destdir", str(folder)]
    preprocess.main(get_preprocessing_parser().parse_args(flags))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "predict"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--saves", type=int, default=5, help="checkpoints of each kind")
    args = parser.parse_args()
    if args.what == "predict":
        print(*table(), sep="\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        _corpus(Path(folder))
        args.data = folder
        run_measurement(args)


def run_measurement(args: Any) -> None:
    """Start the processes; a function of this module under its own name, which they can import."""
    from benchmarks import scaling

    cfg = DistributedConfig(distributed_world_size=args.processes)
    distributed.run(Job(scaling.measure, args, CommonConfig(cpu=True), cfg))


if __name__ == "__main__":
    main()
