"""The runs of ``benchmarks.time_to_quality``: sizes, grid of the baseline, and levers as flags of
``fairseq-train``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

RATES = ("3e-3", "5e-3", "8e-3", "1.2e-2")
COMMON = """--cpu --task language_modeling --criterion adaptive_loss --adam-betas 0.9,0.98 --clip-norm 0.25
    --dropout 0 --required-batch-size-multiple 1 --validate-interval 1000000 --no-save
    --log-format json --log-interval 50"""
DEFAULTS = "--optimizer adam --lr-scheduler cosine --warmup-updates {5%} --max-update {100%}"


@dataclass(frozen=True)
class Size:
    """A model and the length of its training.

    Attributes:
        flags: of the model, and the tokens of an update and of a validation.
        length: tokens of a block.
        tokens: of an update.
        updates: of the baseline.
        validations: of a run of so many updates.
        stacked: share of the updates that the stack needs (docs/results.md says how it was chosen).
    """

    flags: str
    length: int
    tokens: int
    updates: int
    validations: int = 25
    stacked: float = 0.58


WITHOUT_DROPOUT = "--attention-dropout 0 --activation-dropout 0 --adaptive-softmax-dropout 0"
# The published design, with its initial values, in the sizes of the demo's architectures.
PUBLISHED = (
    "--arch transformer_lm_wiki103 --decoder-attention-heads 4"
    " --adaptive-input-cutoff 1000,4000 --adaptive-softmax-cutoff 1000,4000"
)
TWO_LAYERS = (
    f"{WITHOUT_DROPOUT} --max-valid-steps 8"
    f" {PUBLISHED} --decoder-layers 2 --decoder-embed-dim 128 --decoder-ffn-embed-dim 512"
)
FOUR_LAYERS = (
    f"{WITHOUT_DROPOUT} --max-valid-steps 4"
    f" {PUBLISHED} --decoder-layers 4 --decoder-embed-dim 256 --decoder-ffn-embed-dim 1024"
)
SIZES = {
    "medium": Size(FOUR_LAYERS, 256, 1024, 700, 10, 0.7),  # the same epoch, by a model whose time is in its products
    "small": Size(TWO_LAYERS, 256, 512, 1400, 10),  # one epoch of the demo's corpus
    "quick": Size(TWO_LAYERS, 256, 512, 400, 8),
    "tiny": Size(f"{WITHOUT_DROPOUT} --arch transformer_lm_tiny --decoder-layers 1 --max-valid-steps 2", 16, 64, 12, 6),
}


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        name: of the row.
        flags: that change the baseline's; ``{40%}`` is that share of the updates, ``{T}`` the
            length of a block, ``{T/4}`` a quarter of it, ``{B}`` the tokens of an update.
        share: updates of the run in those of the baseline, since schedules end with a run.
    """

    name: str
    flags: str
    share: float = 1.0

    def plus(self, other: Row) -> Row:
        """Return the row of this one's levers and the *other*'s, whose flags win."""
        return replace(self.under(other), name=f"+{other.name}")

    def under(self, other: Row) -> Row:
        """Return the *other* row on top of this one's settings."""
        return Row(other.name, f"{self.flags} {other.flags}".strip(), self.share * other.share)


WSD = "--lr-scheduler wsd --warmup-updates {5%} --decay-updates {70%} --decay-shape linear"
GRID = (
    Row("cosine", ""),
    Row("wsd", WSD),
    Row("wsd, half the batch", f"{WSD} --max-tokens {{B/2}}", 2.0),
    Row("wsd, twice the batch", f"{WSD} --max-tokens {{2B}}", 0.5),
)
"""What the baseline is chosen from, at every rate."""

BASELINE = Row("baseline", "")
LEVERS = (
    Row("short blocks", "--tokens-per-sample {T/4}", 0.7),
    Row("token shift", "--token-shift 2", 0.7),
    Row("zero residual", "--zero-init-residual", 0.95),
    Row("beta2", "--adam-betas 0.9,0.99", 0.95),
    Row("relu_squared", "--activation-fn relu_squared", 0.95),
    Row("qk-norm", "--qk-norm", 0.95),
    Row("muon", "--optimizer muon --muon-iterations 3", 0.75),
    Row("ema", "--ema-decay 0.98", 0.95),
    Row("stages", "--stages {T/4}:{60%},{T}:{100%}"),
    Row("stages, batch", "--stages {T/4}:{60%}:{B/2},{T}:{100%}:{B}"),
    Row("position-infused, cache", "--tokens-from-prev {T/2} --tokens-per-sample {T/2}"),
    Row("bf16", "--bf16"),
)
XL = (
    "--arch transformer_xl --n-layer 2 --n-head 4 --d-model 128 --d-head 32 --d-embed 128 --d-inner 512 --dropatt 0"
    " --cutoffs 1000,4000 --div-val 4 --max-valid-steps 8 --tokens-per-sample {T/4} --lr 2e-3"
)
MEMORY = (
    Row("Transformer-XL without memory", f"{XL} --mem-len 0"),
    Row("Transformer-XL", f"{XL} --mem-len {{T/4}}"),
)
"""Models of their own: a row with an architecture has none of the size's flags of the model."""


def rows(size: Size) -> list[Row]:
    """Return the baseline, every lever alone, and the first of them one after another, then with
    bf16."""
    stack = [LEVERS[0]]
    for lever in LEVERS[1:5]:
        stack.append(replace(stack[-1].plus(lever), share=size.stacked))
    return [BASELINE, *LEVERS, *stack[1:], stack[-1].plus(LEVERS[-1]), *MEMORY]


def flags_of(row: Row, size: Size, rate: str, seed: int, split: str) -> list[str]:
    """Return the flags of ``fairseq-train`` of a run of *row*."""
    updates = max(1, round(size.updates * row.share))
    lengths = f"--tokens-per-sample {size.length} --max-tokens {size.tokens} --max-tokens-valid {2 * size.tokens}"
    every = f"--validate-interval-updates {max(1, updates // size.validations)}"
    run = f"--lr {rate} --seed {seed} --valid-subset {split}"
    model = "" if "--arch" in row.flags else size.flags
    text = f"{COMMON} {model} {lengths} {DEFAULTS} {every} {run} {row.flags}"
    numbers = {"T": size.length, "B": size.tokens}
    text = re.sub(r"\{(\d+)%\}", lambda match: str(max(1, updates * int(match[1]) // 100)), text)
    text = re.sub(
        r"\{(\d*)([TB])(?:/(\d+))?\}",
        lambda match: str(int(match[1] or 1) * numbers[match[2]] // int(match[3] or 1)),
        text,
    )
    return shlex.split(text)


def stage_ends(flags: Sequence[str]) -> list[int]:
    """Return the last update of each stage of a run with *flags*; a run without stages has one."""
    last = dict(zip(flags, flags[1:], strict=False))
    if "--stages" not in last:
        return [int(last["--max-update"])]
    return [int(stage.split(":")[1]) for stage in last["--stages"].split(",")]
