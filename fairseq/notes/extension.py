"""Notes as an extension of tasks: rare words in their batches,
models that read notes, and a task with them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fairseq.config import fields
from fairseq.config.settings import Settings
from fairseq.data.dataset import Dataset
from fairseq.data.folders import corpus_prefixes, data_folders
from fairseq.data.masking import MaskedBlocks, word_parts
from fairseq.data.token_blocks import TokenBlocks
from fairseq.errors import UserError
from fairseq.models.base import BaseFairseqModel
from fairseq.notes.blocks import SUBSETS, NotedBlocks, NotedStream
from fairseq.notes.dictionary import CausalNoteDictionary, NoteDictionary
from fairseq.notes.settings import NAME, CausalNoteConfig, NoteConfig, TNFMaskedLMConfig
from fairseq.notes.spans import NoteSpans
from fairseq.notes.state import NoteState, dictionary_of
from fairseq.notes.words import NOTES, NoteWords, note_rule
from fairseq.tasks.carried import CarriedState
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.tasks.masked_lm import MaskedLMTask
from fairseq.text.dictionary import Dictionary

KEEP = "keep_notes"
"""Name of the setting that keeps notes in a model that is loaded."""
PREFIXES = ("notes.", "note_projection.")
"""Prefixes of parameter and buffer names that belong to notes."""


def dictionary_settings(cfg: NoteConfig) -> dict[str, Any]:
    """The keyword arguments of a note dictionary that *cfg* gives."""
    return {
        "note_lambda": cfg.note_lambda,
        "note_gamma": cfg.note_gamma,
        "note_half_window": cfg.note_half_window,
        "context": cfg.note_context,
        "form": cfg.note_form,
        "until": cfg.note_until,
    }


def notes_of(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The *parameters* that belong to notes."""
    return {name: value for name, value in parameters.items() if name.startswith(PREFIXES)}


def without_notes(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The *parameters* that do not belong to notes."""
    return {name: value for name, value in parameters.items() if not name.startswith(PREFIXES)}


class NotedModel(BaseFairseqModel):
    """A model that reads notes and takes new ones;
    :func:`give_notes` mixes it into the class of a model.

    Parameters, optimizer state and checkpoints differ from those without notes only by the names
    ``notes.…`` and ``note_projection.…``.

    Attributes:
        notes: note dictionary of width C.
        note_projection: projection of notes to the width of embeddings, if that is another; dropped
            with the notes.
        readers: arguments of ``forward`` that say which networks of the model read notes.
        padding_idx: id of the padding behind the rows of an encoder; −1: rows are full.
    """

    notes: NoteDictionary
    note_projection: nn.Linear | None
    readers: Mapping[str, object]
    padding_idx: int

    def forward(
        self,
        src_tokens: Tensor,
        *args: object,
        spans: Tensor | None = None,
        longest_span: int | None = None,
        **inputs: object,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Run the model with notes at rare words.

        Args:
            src_tokens: int64 [B, T], padded on the right.
            spans: occurrences of rare words that may read their notes, in a causal model those that
                are complete in *src_tokens*; int64 [S, 4] (row, first token, end, word). None: no
                notes are read or taken.
            longest_span: most tokens of a span; None:
                computed from the spans, which synchronises a GPU.
            args, inputs: further arguments of the model.

        Returns:
            The output of the model, with ``notes`` in its extra: sums and counts of
            :meth:`~fairseq.notes.dictionary.NoteDictionary.take`.
        """
        if spans is None:
            if self.note_projection is None:
                return super().forward(src_tokens, *args, **inputs)
            # A rank without a batch must reduce the projection's gradient, too: the graph is as
            # without rare words.
            spans = src_tokens.new_empty(0, 4)

        def infuse(x: Tensor) -> Tensor:
            return self.notes.read(x, spans, longest_span, self.note_projection)

        output, extra = super().forward(src_tokens, *args, infuse=infuse, **self.readers, **inputs)
        # The last token that is not padding, not their number:
        # the text itself may contain the padding symbol.
        end = torch.arange(1, src_tokens.size(1) + 1, device=src_tokens.device)
        lengths = (src_tokens.ne(self.padding_idx) * end).amax(1)
        # The output of a causal model is its last hidden states.
        hidden = extra.get("hidden", output)  # (B, T, C)
        return output, {**extra, "notes": self.notes.take(hidden, spans, lengths, longest_span)}

    def upgrade_state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename the parameters of the model without notes; keep the notes'."""
        return {**notes_of(state), **super().upgrade_state_dict(without_notes(state))}

    def check_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        super().check_parameters(parameters)
        if self._of_other_words(parameters):
            raise UserError(
                f"{NOTES}: differs from the words of the notes in the checkpoint; "
                "use the data folder it was trained with"
            )

    def data_specific(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {**super().data_specific(parameters), **self._of_other_words(parameters)}

    def _of_other_words(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        stored = parameters.get("notes.digest")
        return {} if stored is None or torch.equal(stored.cpu(), self.notes.digest.cpu()) else notes_of(parameters)


def give_notes(
    model: BaseFairseqModel,
    notes: NoteDictionary,
    kind: type[NotedModel] = NotedModel,
    *,
    projection: nn.Linear | None = None,
    readers: Mapping[str, object] = MappingProxyType({}),
    padding_idx: int = -1,
) -> None:
    """Let *model*, whose ``forward`` takes ``infuse``, read *notes* and take new ones.

    It becomes a *kind* of model with notes that is also of its own class, rather than part of one:
    parameters keep their names, and what reads its memory and caches knows that class.
    """
    cls = type(model)
    # Messages name the class of the model, unless the kind is a registered model itself.
    shown = cls if kind is NotedModel else kind
    names = {"__module__": shown.__module__, "__doc__": shown.__doc__}
    model.__class__ = type(shown.__name__, (kind, cls), names)
    assert isinstance(model, NotedModel)
    model.notes, model.note_projection = notes, projection
    model.readers, model.padding_idx = dict(readers), padding_idx


class Notes:
    """The rare words in the data of a task, and the notes that its updates write.

    Language modelling has it with ``--notes``; ``tnf_masked_lm`` always.

    Attributes:
        words: the rare words; None if the task has only a dictionary.
        distances: whether samples mark the :data:`~fairseq.notes.blocks.DISTANCES` to written
            notes.

    Raises:
        UserError: ``notes.txt`` cannot be read,
            or rows begin with a symbol that is not in the corpus.
    """

    config_class = CausalNoteConfig
    decisive_settings: ClassVar[tuple[str, ...]] = ("note_lambda", "note_form")
    loading_settings: ClassVar[tuple[str, ...]] = (KEEP, "rare_words")
    kinds: ClassVar[tuple[CarriedState, ...]] = (NoteState(),)
    subsets: ClassVar[tuple[str, ...]] = SUBSETS

    def __init__(self, task: FairseqTask) -> None:
        if getattr(task.settings.task, "add_bos_token", False):
            raise UserError("`notes`: cannot be used with `add_bos_token`; leave one of them out")
        self.task = task
        folder = data_folders(task.settings.data_path)[0]
        self.words = None if os.path.isfile(folder) else NoteWords.load(folder)
        self.distances = False

    @staticmethod
    def extend_model(model: BaseFairseqModel, cfg: CausalNoteConfig, task: Any) -> None:
        """Give *model* notes for the rare words of *task*.

        Raises:
            UserError: the task has no rare words, or the model cannot read notes.
        """
        dim = model.infused_dim
        if dim is None:
            raise UserError(f"`notes`: {type(model).__name__} cannot read notes; use a transformer architecture")
        if getattr(model.decoder, "project_out_dim", None) is not None:
            raise UserError(f"`notes`: need an output as wide as the embeddings; use `decoder_output_dim` {dim}")
        words = words_of(task, "`notes`")
        # Where only the next token shows that a word has ended, reading at its last one would
        # reveal that it does.
        delay = 0 if note_rule(task.source_dictionary).ends_known else 1
        notes = CausalNoteDictionary(len(words), dim, **dictionary_settings(cfg), delay=delay)
        give_notes(model, notes.name_words(words.words))

    @staticmethod
    def strip_for_inference(
        args: Mapping[str, object], parameters: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
        if args.get(KEEP):
            return args, parameters
        names = fields.defaults(CausalNoteConfig)
        settings = {name: value for name, value in args.items() if name not in names}
        return settings, without_notes(parameters)

    @staticmethod
    def eval_overrides(args: Mapping[str, object]) -> Mapping[str, Any]:
        """*args* with a task that measures losses over rare words, also of models without notes, if
        they ask for it.

        Raises:
            UserError: the model does not predict words.
        """
        if not args.get("rare_words"):
            return args
        changes: dict[str, dict[str, object]] = {
            "masked_lm": {"task": "tnf_masked_lm"},
            "tnf_masked_lm": {},
            "language_modeling": {NAME: True},
        }
        if args["task"] not in changes:
            raise UserError(f"`rare_words`: `task` {args['task']} does not predict words; leave the flag out")
        return {**args, **changes[args["task"]]}

    def extend_dataset(
        self, dataset: Dataset, model: BaseFairseqModel, split: str, folder: Path, *, training: bool
    ) -> Dataset:
        """*dataset* with its rare words: as subsets of tokens,
        and as spans if *model* has notes."""
        combine = self.task.combines(split, training)
        spans = NoteSpans(corpus_prefixes(folder, split, combine=combine), notes=self.words)
        notes = dictionary_of(model)
        written = self._written(notes) if self.distances else None
        if isinstance(dataset, MaskedBlocks):
            mask = dataset.masking.mask
            return NotedBlocks(dataset, spans, read=notes is not None, written=written, mask=mask)
        if not isinstance(dataset, TokenBlocks):
            return dataset  # of another kind, which has no notes
        dictionary = self.task.source_dictionary
        rule = note_rule(dictionary)
        joins = word_parts(dictionary, rule)[1]
        # A vocabulary of bytes may have no unknown symbol.
        unknown = dictionary.unk() if dictionary.unk() >= 0 else dictionary.eos()
        if dictionary.unk() >= 0:
            # The text of the unknown symbol is not visible,
            # nor whether the next token continues it.
            joins[unknown] = joins.any()
        delay = 0 if rule.ends_known else 1
        return NotedStream(dataset, spans, joins, delay=delay, read=notes is not None, written=written, mask=unknown)

    def _written(self, notes: NoteDictionary | None) -> np.ndarray:
        """The words with a written note, bool [N];
        of a model without notes all, so that the same tokens compare."""
        return np.ones(len(self.words or ()), bool) if notes is None else (notes.taken > 0).cpu().numpy()


def words_of(task: Any, flag: str) -> NoteWords:
    """The rare words of *task*.

    Raises:
        UserError: the task has none; the message names *flag*.
    """
    notes = task.extensions.get(NAME)
    if notes is None or notes.words is None:
        raise UserError(
            f"{flag}: needs {NOTES} from fairseq-preprocess --notes in the data folder, and `task` tnf_masked_lm "
            "for an encoder"
        )
    return notes.words


class TNFMaskedLMTask(MaskedLMTask):
    """Prediction of chosen tokens by an encoder that reads notes of rare words, and takes new ones.

    The data folder was made with ``fairseq-preprocess --notes``. Batches and chosen tokens are as
    in ``masked_lm``; models without notes can be trained and validated on this task, too.
    """

    config_class = TNFMaskedLMConfig

    def __init__(self, args: Settings, dictionary: Dictionary) -> None:
        super().__init__(args, dictionary)
        self.extend(NAME, Notes(self))
