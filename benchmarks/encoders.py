"""Pre-training speed of encoders, compared with Hugging Face's of equal shape.

    python -m benchmarks.encoders [--arch bert_base] [--layers 12] [--bf16] [--seconds 60] \
        [--profile] [--json FILE]

Both models train in one process on the same batches, with alternating steps of forward, backward,
clipping and Adam. The result is the median ratio of pairs of steps. Hugging Face's model (needs
transformers) is trained by a plain loop with torch's fused AdamW: BertForMaskedLM, or for ELECTRA
ElectraForMaskedLM and ElectraForPreTraining with shared embeddings, trained jointly.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import machine
from fairseq.config import options
from fairseq.config.settings import training_settings
from fairseq.data.indexed_dataset import IndexedWriter, token_dtype
from fairseq.distributed import World
from fairseq.models.encoder import TransformerEncoder
from fairseq.system.allocator import keep_freed_memory
from fairseq.tasks import setup_task
from fairseq.text.dictionary import Dictionary
from fairseq.training.state import TrainingState
from fairseq.training.update import update
from fairseq_cli.common import get_training_parser

TOKENS = 1 << 18
IGNORED = -100  # transformers' label of positions without a target


def make_corpus(folder: Path, vocabulary: int, seed: int = 1) -> None:
    """Write random text with Zipfian frequencies."""
    rng = np.random.default_rng(seed)
    dictionary = Dictionary()
    for i in range(vocabulary - 4):
        dictionary.add_symbol(f"w{i}", max(1, 10**7 // (i + 1)))
    dictionary.save(str(folder / "dict.txt"))
    frequencies = 1 / np.arange(1, vocabulary - 3)
    tokens = (rng.choice(vocabulary - 4, TOKENS, p=frequencies / frequencies.sum()) + 4).astype(np.int64)
    with IndexedWriter(str(folder / "train"), token_dtype(len(dictionary))) as writer:
        writer.add(tokens, np.full(TOKENS // 32, 32, dtype=np.int32))


def trainer_of(args: argparse.Namespace, folder: Path, device: torch.device) -> TrainingState:
    """Our trainer with random weights."""
    criterion = "electra" if "electra" in args.arch else "masked_lm"
    flags = [str(folder), "--arch", args.arch, "--task", "masked_lm", "--criterion", criterion, "--seed", "1"]
    flags += ["--sample-break-mode", "none", "--optimizer", "adam", "--lr", "1e-4", "--clip-norm", "1"]
    flags += ["--tokens-per-sample", str(args.length), "--batch-size", str(args.rows)]
    flags += ["--required-batch-size-multiple", "1"]
    flags += ["--encoder-layers", str(args.layers)] if args.layers else []
    flags += ["--bf16"] if args.bf16 else []
    flags += ["--cpu"] if device.type == "cpu" else []
    settings = training_settings(options.parse_args_and_arch(get_training_parser(), flags))
    torch.manual_seed(1)
    task = setup_task(settings)
    return TrainingState(
        settings, task, task.build_model(settings), task.build_criterion(settings), World(device=device)
    )


def theirs(trainer: TrainingState, args: argparse.Namespace, device: torch.device) -> Callable[[Any], None]:
    """A training step of Hugging Face's model of equal shape."""
    model: nn.Module = _Electra(trainer.model) if "electra" in args.arch else _Bert(trainer.model)
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(sample: Any) -> None:
        tokens, target = sample["net_input"]["src_tokens"], sample["target"]
        labels = target.masked_fill(target.eq(trainer.criterion.padding_idx), IGNORED)
        autocast = torch.autocast(device.type, torch.bfloat16) if args.bf16 else contextlib.nullcontext()
        with autocast:
            loss = model(tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


class _Bert(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        from transformers import BertConfig, BertForMaskedLM

        self.model = BertForMaskedLM(BertConfig(**_config(model.encoder.sentence_encoder)))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.model(tokens, labels=labels).loss


class _Electra(nn.Module):
    """Both halves with shared embeddings; the generator's tokens are drawn with Gumbel noise (Clark
    et al. 2020)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

        def config(encoder: TransformerEncoder) -> ElectraConfig:
            return ElectraConfig(**_config(encoder), embedding_size=encoder.cfg.embedding_dim)

        self.generator = ElectraForMaskedLM(config(model.generator.sentence_encoder))
        self.discriminator = ElectraForPreTraining(config(model.encoder.sentence_encoder))
        self.discriminator.electra.embeddings = self.generator.electra.embeddings

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        output = self.generator(tokens, labels=labels)
        chosen = labels.ne(IGNORED)
        with torch.no_grad():
            logits = output.logits[chosen].float()
            written = (logits - torch.empty_like(logits).exponential_().log()).argmax(-1)
            original = torch.where(chosen, labels, tokens)
            corrupted = original.masked_scatter(chosen, written)
        replaced = corrupted.ne(original).float()
        logits = self.discriminator(corrupted).logits
        return output.loss + 50 * F.binary_cross_entropy_with_logits(logits.float(), replaced)


def _config(encoder: TransformerEncoder) -> dict[str, Any]:
    cfg = encoder.cfg
    return {
        "vocab_size": encoder.embed_tokens.num_embeddings,
        "hidden_size": cfg.encoder_embed_dim,
        "num_hidden_layers": cfg.encoder_layers,
        "num_attention_heads": cfg.encoder_attention_heads,
        "intermediate_size": cfg.encoder_ffn_embed_dim,
        "max_position_embeddings": cfg.max_positions,
        "type_vocab_size": max(1, cfg.token_types),
        "hidden_dropout_prob": cfg.dropout,
        "attention_probs_dropout_prob": cfg.attention_dropout,
        "pad_token_id": encoder.padding_idx,
    }


def measure(args: argparse.Namespace, folder: Path, device: torch.device) -> dict[str, Any]:
    """Milliseconds per step of both, and the ratio of pairs."""
    trainer = trainer_of(args, folder, device)
    iterator = trainer.task.iterator("train", trainer.model, trainer.criterion, training=True, device=device)
    samples = [sample for _, sample in zip(range(8), iterator, strict=False)]
    steps = (lambda sample: update(trainer, [sample]), theirs(trainer, args, device))
    times: list[list[float]] = [[], []]
    started, number = time.perf_counter(), 0
    while time.perf_counter() - started < args.seconds or number < 5:
        for which in (0, 1) if number % 2 else (1, 0):
            machine.synchronize(device)
            start = time.perf_counter()
            steps[which](samples[number % len(samples)])
            machine.synchronize(device)
            times[which].append(1000 * (time.perf_counter() - start))
        number += 1
    if args.profile:
        _profile(steps[0], samples[0])
    ours, other = (one[2:] for one in times)
    tokens = args.rows * args.length
    return {
        "ms": statistics.median(ours),
        "hugging_face_ms": statistics.median(other),
        "tokens_per_second": 1000 * tokens / statistics.median(ours),
        "ratio": statistics.median(b / a for a, b in zip(ours, other, strict=True)),
        "steps": len(ours),
    }


def _profile(step: Callable[[Any], Any], sample: Any) -> None:
    """Print a profile of our step."""
    with torch.profiler.profile() as profile:
        for _ in range(3):
            step(sample)
    print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=48))


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    args = _parser().parse_args(argv)
    keep_freed_memory()
    device = torch.device("cuda" if torch.cuda.is_available() and not args.cpu else "cpu")
    with tempfile.TemporaryDirectory() as name:
        make_corpus(Path(name), args.vocabulary)
        results = measure(args, Path(name), device)
    precision = "bf16" if args.bf16 else "fp32"
    print("| model | tokens/s | ms a step | Hugging Face, ms | ratio |")
    print("|---|---|---|---|---|")
    print(
        f"| {args.arch}, {precision}, {args.rows} × {args.length} | {results['tokens_per_second']:,.0f} | "
        f"{results['ms']:.0f} | {results['hugging_face_ms']:.0f} | {results['ratio']:.2f} |"
    )
    settings = {key: value for key, value in vars(args).items() if isinstance(value, bool | int | float | str)}
    report = {"machine": machine.describe(device), "settings": settings, "results": results}
    print(f"\n{json.dumps(report)}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="bert_base", help="our architecture (default: %(default)s)")
    parser.add_argument("--layers", type=int, help="number of layers (default: the architecture's)")
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch (default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row (default: %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=32768, help="symbols (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60, help="duration in seconds (default: %(default)s)")
    parser.add_argument("--bf16", action="store_true", help="train in bfloat16")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU even if a GPU is available")
    parser.add_argument("--profile", action="store_true", help="print a profile of our step")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    return parser


if __name__ == "__main__":
    main()
