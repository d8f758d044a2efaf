"""The validation loop, the same in training and in ``fairseq-validate``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from fairseq.criterions.fairseq_criterion import Sample
from fairseq.data.folders import data_folders
from fairseq.data.iterator import EpochIterator
from fairseq.distributed import World
from fairseq.inference import Search, generator_of, stream
from fairseq.inference.reader import Reader
from fairseq.inference.text import never_written
from fairseq.logging.figures import Figure, NamedSums, RunningSums
from fairseq.modules.precision import Precision
from fairseq.tasks.carried import Carried
from fairseq.tasks.dictionary_digest import dictionary_of
from fairseq.tasks.fairseq_task import FairseqTask, LossGraph
from fairseq.text.text_corpus import TextReader
from fairseq.text.tokenization import load_counts
from fairseq.training.state import TrainingState

SAMPLING = Search(30, top_k=40)
"""The text that a model writes after a validation."""


def evaluate(state: TrainingState, batches: Iterable[Sample | None]) -> RunningSums:
    """Return the sums over *batches* for the weights
    that a run validates and saves; see :func:`validate`."""
    with state.averaged():
        meter = validate(state.graph, state.task, batches, state.precision, state.world)
        # Without a backward pass sharded layers stay gathered.
        state.reducer.reset()
    return meter


@torch.no_grad()
def validate(
    graph: LossGraph, task: FairseqTask, batches: Iterable[Sample | None], precision: Precision, world: World
) -> RunningSums:
    """Return the sums over *batches* of one split, reduced over ranks.

    The state that training steps carry stays as it is: a validation begins with its own and drops
    it at the end.

    Args:
        graph: model and criterion; left in evaluation mode.
        batches: this rank's batches, None for an empty one; equally many on every rank.
    """
    graph.eval()
    meter = RunningSums(world.device)
    carried: Carried = {}
    for sample in batches:
        with precision.autocast(world.device):
            (_, sample_size, log), carried = task.step(graph, sample, carried, world.device)
        # Gathered: metrics such as F1 are computed from all predictions, not from sums.
        meter.add(NamedSums.of(log, sample_size, world.device, gather=True))
    meter.reduce(world)
    return meter


def raw_sizes(validation: Mapping[str, EpochIterator], data_path: str) -> dict[str, tuple[int, int]]:
    """Return, for each split of *validation* that was made from raw text, its tokens and the bytes
    of the text.

    Raises:
        UserError: a file of counts is damaged.
    """
    found = {}
    for split, batches in validation.items():
        corpus = getattr(batches.dataset, "corpus", None)
        counts = load_counts(data_folders(data_path)[0] / split) if corpus is not None else None
        # A split that was made again by another program has other lines than its counts.
        if corpus is not None and counts is not None and counts.lines == len(corpus.sizes):
            found[split] = len(corpus.tokens), counts.bytes
    return found


def report_of(meter: RunningSums, figures: Mapping[str, Figure], raw_size: tuple[int, int] | None) -> dict[str, float]:
    """Return the *figures* of a validation; where all tokens of a split of raw text were read, also
    bits per byte, ``bpb``."""
    report = meter.report(figures)
    if raw_size is not None and meter.tokens == raw_size[0] and "nll_loss" in report:
        report["bpb"] = report["nll_loss"] * meter.tokens / raw_size[1]
    return report


def text_writer(state: TrainingState) -> TextReader | None:
    """Return what turns the model's tokens into text; None where it writes none.

    The first process writes for a decoder of raw text, unless its weights are shared among
    processes, or a compiler would compile it once more for single tokens.

    Raises:
        UserError: the tokenizer is damaged or belongs to another dictionary.
    """
    settings, dictionary = state.settings, dictionary_of(state.task)
    is_plain = not settings.common.compile and settings.distributed.ddp_backend != "fully_sharded"
    if settings.checkpoint.no_sample or not state.world.is_first or not state.model.can_generate or not is_plain:
        return None
    reader = TextReader.of(settings.data_path, dictionary) if dictionary is not None else None
    return reader if reader is not None and reader.tokenizer is not None else None


def sample(state: TrainingState, writer: TextReader) -> str:
    """Return a text that the model writes, on one line; training's random numbers are not drawn."""
    dictionary = writer.dictionary
    begin = dictionary.begin() if getattr(state.settings.task, "add_bos_token", False) else None
    with state.averaged(), state.precision.autocast(state.world.device):
        # Without kernels, which pack the weights, and are compiled at first use.
        reader = Reader(state.model, kernels=False, begin=begin)
        tokens = stream(
            [reader],
            [dictionary.eos()],
            SAMPLING,
            generator=generator_of(state.settings.common.seed),
            forbidden=never_written(dictionary),
            stop=dictionary.stop(),
        )
        return " ".join(writer.text(list(tokens)).split())
