"""Language models in Python: load a checkpoint, score text, generate text."""

from __future__ import annotations

import itertools
import math
import os
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from fairseq.checkpoint.manager import DICTIONARY, find_checkpoint
from fairseq.errors import UserError
from fairseq.evaluation import Scorer, Scores, Scoring
from fairseq.evaluation.classifier import SentenceClassifier as SentenceClassifier
from fairseq.evaluation.pseudo_likelihood import PseudoScorer
from fairseq.evaluation.surprisal import WordSurprisal, surprisals, warn_of_blocks
from fairseq.inference import Search, generate, generator_of
from fairseq.inference.loading import load_language_models, load_models
from fairseq.inference.reader import Reader
from fairseq.inference.text import never_written
from fairseq.models.base import BaseFairseqModel
from fairseq.modules import devices
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.text.dictionary import Dictionary
from fairseq.text.text_corpus import TextReader, log_tokens, report_unknown
from fairseq.text.tokenizers import Tokenizer

BATCH_SIZE = 16  # texts that are read or generated at once
MOST = (1 << 31) - 1  # tokens of a segment or a memory

Scored = tuple[list[str], Tensor]


class LanguageModel:
    """A trained language model, its dictionary and its tokenizer.

    Text is raw where the model has a tokenizer, else a sequence of tokens between white space. A
    line ends in ``</s>``; a symbol that the dictionary does not have is ``<unk>``, and the log
    gives the share of such symbols.

    Args:
        model: in evaluation mode.
        dictionary: its symbols.
        tokens_per_sample: tokens of the segments that it reads.
        add_bos_token: whether every segment begins with ``<s>``.
        tokenizer: of the training data; None: text is tokens.

    Attributes:
        never_sampled: ids that never occur in text.
    """

    def __init__(
        self,
        model: BaseFairseqModel,
        dictionary: Dictionary,
        tokens_per_sample: int,
        add_bos_token: bool = False,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.add_bos_token = add_bos_token
        self.tokenizer = tokenizer
        self.model = model
        self._reader: tuple[object, Reader] | None = None
        self.dictionary = dictionary
        self._text = TextReader(dictionary, tokenizer)
        self.tokens_per_sample = tokens_per_sample
        self.never_sampled = never_written(dictionary)

    def __getstate__(self) -> dict[str, Any]:
        # The reader holds locks and compiled kernels, and is made again when it is needed.
        return {**vars(self), "_reader": None}

    @classmethod
    def from_pretrained(
        cls,
        checkpoint: str | Path,
        data: str | Path | None = None,
        *,
        device: torch.device | str = "auto",
        overrides: Mapping[str, object] | None = None,
    ) -> LanguageModel:
        """Load a checkpoint of this project or of fairseq.

        Args:
            checkpoint: a file, or a folder with ``checkpoint_best.pt``,
                ``checkpoint.pt`` or ``checkpoint_last.pt``.
            data: a ``fairseq-preprocess`` folder, or a ``dict.txt``;
                None: the ``dict.txt`` next to the checkpoint.
            device: where the model runs; ``auto``, the default of every command, is a GPU if
                there is one.
            overrides: settings of the checkpoint to change, e.g. ``{"tokens_per_sample": 256}``.

        Raises:
            UserError: a file is missing or invalid, or the dictionary is not the checkpoint's.
        """
        paths, folder = _paths(checkpoint, data)
        models, task, _ = load_language_models(paths, folder, overrides)
        cfg, dictionary = task.cfg, task.source_dictionary
        tokenizer = TextReader.of(folder, dictionary).tokenizer
        if tokenizer is None:
            log_tokens(dictionary)
        model = models[0].to(devices.chosen(device))
        return cls(model, dictionary, cfg.tokens_per_sample, cfg.add_bos_token, tokenizer)

    def encode(self, text: str) -> Tensor:
        """Return the ids of a text, each line with its ``</s>``: int64 [T]."""
        return torch.from_numpy(self._text.corpus(text).tokens).long()

    def decode(self, tokens: Tensor | Sequence[int]) -> str:
        """Return the text of ids; the inverse of :meth:`encode`
        but for what the tokenizer does not preserve."""
        ids = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
        return self.text(ids[:-1] if ids and ids[-1] == self.dictionary.eos() else ids)

    @overload
    def score(self, text: str, batch_size: int = BATCH_SIZE) -> Scored: ...
    @overload
    def score(self, text: list[str], batch_size: int = BATCH_SIZE) -> list[Scored]: ...
    def score(self, text: str | list[str], batch_size: int = BATCH_SIZE) -> Scored | list[Scored]:
        """Return the tokens of a text and the natural
        logarithms of their probabilities, float32 [tokens].

        A list of texts gives a list; texts are independent, and up to *batch_size* are read at
        once. A text longer than the model's segment is read as ``fairseq-eval-lm`` reads a corpus,
        in non-overlapping segments.

        Raises:
            ValueError: *batch_size* is not a whole number of at least 1.
        """
        if isinstance(text, str):
            return self.score([text], batch_size)[0]
        if not text:
            return []
        scores = self._scores(text, batch_size)
        parts = [slice(start, end) for start, end in itertools.pairwise(scores.lines.tolist())]
        symbols, lprobs = [self.dictionary[token] for token in scores.tokens], torch.from_numpy(scores.lprobs)
        return [(symbols[part], lprobs[part]) for part in parts]

    @overload
    def surprisal(self, text: str, batch_size: int = BATCH_SIZE) -> list[WordSurprisal]: ...
    @overload
    def surprisal(self, text: list[str], batch_size: int = BATCH_SIZE) -> list[list[WordSurprisal]]: ...
    def surprisal(
        self, text: str | list[str], batch_size: int = BATCH_SIZE
    ) -> list[WordSurprisal] | list[list[WordSurprisal]]:
        """Return the surprisal of each word of a text in bits, with its characters in the text; the
        same numbers as ``fairseq-eval-lm --surprisal``.

        Words are separated by white space, and their surprisal is the sum over their tokens. A list
        of texts gives a list; each text is read alone, as by :meth:`score`. See
        :func:`fairseq.evaluation.surprisal.surprisals`.

        Raises:
            ValueError: *batch_size* is not a whole number of at least 1.
        """
        if isinstance(text, str):
            return self.surprisal([text], batch_size)[0]
        if not text:
            return []
        scores = self._scores(text, batch_size)
        warn_of_blocks(np.diff(scores.lines), self.tokens_per_sample, self.model.memory_length)
        return list(surprisals(self._text, text, scores))

    def perplexity(self, text: str | list[str], batch_size: int = BATCH_SIZE) -> float:
        """Return the perplexity, exp of the mean loss in nats per token, of one text or several.

        Raises:
            ValueError: *text* is an empty list,
                or *batch_size* is not a whole number of at least 1.
        """
        texts = [text] if isinstance(text, str) else text
        if not texts:
            raise ValueError("perplexity: no text; give at least one")
        # In fp64: the mean of millions of fp32 numbers would lose digits.
        return math.exp(-float(self._scores(texts, batch_size).lprobs.astype(np.float64).mean()))

    @torch.inference_mode()
    def score_tokens(self, tokens: Tensor, segment_length: int, memory_length: int = 0) -> Tensor:
        """Return the loss in nats of each token after the first: float32 [B, T], on the CPU.

        Rows are independent. Each is read in segments, of which the last may be shorter, and the
        memory of a segment is passed to the next one. They are read as they are: no ``<s>`` or
        ``</s>`` is put before them.

        Args:
            tokens: ids, int64 [B, T + 1].
            segment_length: tokens read at once.
            memory_length: tokens remembered from segment
                to segment, whatever the model was trained with.

        Raises:
            ValueError: *tokens* are not ids of the dictionary, a length is not a whole number or
                out of range, or *memory_length* is not 0 for a model without memory.
        """
        self._check_tokens(tokens)
        _check_length("segment_length", segment_length, 1)
        _check_length("memory_length", memory_length, 0)
        self.model.check_memory_length(memory_length)
        model = self.reader().model
        tokens, scored = tokens.to(next(self.model.parameters()).device), []
        # The argument is passed only where it differs: not every model takes it.
        state: dict[str, Any] = {} if memory_length == model.memory_length else {"memory_length": memory_length}
        for start in range(0, tokens.size(1) - 1, segment_length):
            segment = tokens[:, start : start + segment_length + 1]
            hidden, extra = model(segment[:, :-1], **state)
            # A model without memory need not take the argument.
            if extra.get("memory") is not None:
                state["memory"] = extra["memory"]
            lprobs = model.output_layer.target_log_probs(hidden.flatten(0, 1), segment[:, 1:].flatten())
            scored.append(lprobs.view(tokens.size(0), -1))
        return -torch.cat(scored, dim=1).float().cpu()

    def _check_tokens(self, tokens: Tensor) -> None:
        if not isinstance(tokens, Tensor):
            raise ValueError(f"tokens: expected a tensor, int64 [B, T + 1], found {type(tokens).__name__}")
        if tokens.dim() != 2 or tokens.size(0) < 1 or tokens.size(1) < 2 or tokens.dtype != torch.int64:
            raise ValueError(
                f"tokens {list(tokens.shape)} {tokens.dtype}: expected int64 [B, T + 1], T and B 1 or more"
            )
        # An id out of range would be a device-side assertion on a GPU, after which the process
        # cannot go on.
        least, most = int(tokens.min()), int(tokens.max())
        if least < 0 or most >= len(self.dictionary):
            raise ValueError(f"tokens from {least} to {most}: ids go from 0 to {len(self.dictionary) - 1}")

    @overload
    def sample(
        self,
        prompt: str = "",
        max_tokens: int = 100,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> str: ...
    @overload
    def sample(
        self,
        prompt: list[str],
        max_tokens: int = 100,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> list[str]: ...
    def sample(
        self,
        prompt: str | list[str] = "",
        max_tokens: int = 100,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> str | list[str]:
        """Return the prompt and up to *max_tokens* generated tokens, an end of line counted as one.

        A text ends before the symbol with which an imported model ends texts, if texts begin with
        another one, as Llama's.

        A list of prompts gives a list of texts; up to *batch_size* are generated at once.

        Args:
            prompt: beginning of the text; empty: generate from the start of a text.
            max_tokens: most tokens to generate.
            temperature, top_k, top_p: see :class:`fairseq.inference.search.Search`.
            seed: the same seed gives the same text, whatever the other prompts, up to rounding of
                the probabilities; None: another text each time.
            batch_size: most texts generated at once.

        Raises:
            ValueError: a number is out of range.
        """
        if isinstance(prompt, str):
            return self.sample([prompt], max_tokens, temperature, top_k, top_p, seed, batch_size)[0]
        _check_length("batch_size", batch_size, 1)
        search = Search(max_tokens, temperature, top_k, top_p)
        texts = [self._text.ids(one) for one in prompt]
        generated = generate(
            [self.reader()],
            [[self.dictionary.eos(), *text] for text in texts],
            search,
            # By torch's global generator, so that torch.manual_seed
            # decides on samples without a seed, too.
            generators=lambda index: generator_of(int(torch.randint(1 << 62, ())) if seed is None else seed),
            batch_size=batch_size,
            forbidden=self.never_sampled,
            stop=self.dictionary.stop(),
        )
        for number, [one] in generated:
            texts[number] += one.tokens
        return [self.text(text) for text in texts]

    def reader(self) -> Reader:
        """The reader of the model, cached between texts until the weights change."""
        # `_version` counts changes in place, as by an optimizer or `load_state_dict`; inference
        # tensors have no count.
        weights = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in self.model.parameters()]
        begin = self.dictionary.begin() if self.add_bos_token else None
        key = id(self.model), begin, weights
        cached = self._reader  # read once: another thread may replace it
        if cached is None or cached[0] != key:
            cached = self._reader = key, Reader(self.model, begin=begin)
        return cached[1]

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of *tokens*; the symbol at the end of a line is a line feed."""
        return self._text.text(tokens)

    def _scores(self, texts: Sequence[str], batch_size: int) -> Scores:
        """The scores of independent *texts*, each of which is a line."""
        _check_length("batch_size", batch_size, 1)
        corpus = self._text.documents(texts)
        begins = self.add_bos_token
        scoring = Scoring(self.tokens_per_sample, batch_size=batch_size, add_bos_token=begins, texts=True)
        # The model may have been moved since it was loaded.
        device = next(self.model.parameters()).device
        return Scorer([self.model], self.dictionary, scoring, device=device).score(corpus)


class MaskedLanguageModel:
    """BERT or ELECTRA, its dictionary and its tokenizer, for pseudo-log-likelihoods of text.

    Args:
        model: in evaluation mode.
        dictionary: its symbols, with the mask.
        tokenizer: of the training data; None: text is tokens between white space.

    Raises:
        UserError: the model does not predict masked tokens.
    """

    def __init__(self, model: BaseFairseqModel, dictionary: Dictionary, tokenizer: Tokenizer | None = None) -> None:
        self._encoder = PseudoScorer(model, dictionary).encoder
        self.model, self.reader = model, TextReader(dictionary, tokenizer)

    @classmethod
    def from_pretrained(
        cls, checkpoint: str | Path, data: str | Path | None = None, *, device: torch.device | str = "auto"
    ) -> MaskedLanguageModel:
        """Load a checkpoint; arguments and errors as in :meth:`LanguageModel.from_pretrained`."""
        model, task = load_model(checkpoint, data, device=device)
        dictionary = task.source_dictionary
        folder = _paths(checkpoint, data)[1]
        return cls(model, dictionary, TextReader.of(folder, dictionary).tokenizer)

    @overload
    def score(self, text: str, batch_size: int = BATCH_SIZE, *, within_words: bool = False) -> Scored: ...
    @overload
    def score(self, text: list[str], batch_size: int = BATCH_SIZE, *, within_words: bool = False) -> list[Scored]: ...
    def score(
        self, text: str | list[str], batch_size: int = BATCH_SIZE, *, within_words: bool = False
    ) -> Scored | list[Scored]:
        """Return the tokens of a text and the natural logarithms of their probabilities given the
        others of their line.

        A list of texts gives a list. Ends of lines are not scored.
        The sum is the pseudo-log-likelihood.

        Args:
            text: one or several.
            batch_size: masked rows, one for each token, that are read at once.
            within_words: mask the rest of a token's word, too; see :class:`PseudoScorer`.

        Raises:
            ValueError: *batch_size* is not a whole number of at least 1.
        """
        _check_length("batch_size", batch_size, 1)
        texts = [text] if isinstance(text, str) else text
        dictionary = self.reader.dictionary
        corpora = [self.reader.corpus(one) for one in texts]
        lines = [ids.tolist()[:-1] for one in corpora for ids in np.split(one.tokens, one.offsets[1:-1])]
        scored = PseudoScorer(self.model, dictionary, within_words, batch_size).score(lines)
        results, first = [], 0
        for one in corpora:
            part = slice(first, first + len(one.sizes))
            symbols = [dictionary[token] for line in lines[part] for token in line]
            results.append((symbols, torch.cat(scored[part])))
            first = part.stop
        return results[0] if isinstance(text, str) else results

    @torch.inference_mode()
    def fill(self, text: str, count: int = 5) -> list[tuple[str, float, str]]:
        """Return the *count* most probable symbols in place
        of the mask symbol of *text*, such as ``<mask>``.

        Returns:
            For each, the text with it, its probability, and the text of the symbol alone.

        Raises:
            ValueError: *text* does not have one mask symbol,
                or *count* is not a whole number of at least 1.
        """
        _check_length("count", count, 1)
        dictionary, encoder = self.reader.dictionary, self._encoder
        mask = dictionary[dictionary.mask()]
        if text.count(mask) != 1:
            raise ValueError(f"{reprlib.repr(text)}: expected one {mask}, found {text.count(mask)}")
        ids, place = self.reader.ids_around(text, mask)
        report_unknown(ids, dictionary, ())
        row = torch.tensor([[dictionary.bos(), *ids, dictionary.eos()]], device=encoder.lm_head.weight.device)
        hidden = encoder.sentence_encoder(row)  # (1, T, C)
        probabilities = encoder.lm_head(hidden[0, place + 1]).float().softmax(-1)  # (V)
        best = probabilities.topk(min(count, len(dictionary)))
        return [
            (self.reader.text([*ids[:place], token, *ids[place + 1 :]]), probability, self.reader.text([token]))
            for probability, token in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]


def load_scorer(
    checkpoint: str | Path, data: str | Path | None = None, *, device: torch.device | str = "auto"
) -> LanguageModel | MaskedLanguageModel:
    """Load a decoder or an encoder for ``score``; see :meth:`LanguageModel.from_pretrained`."""
    model, task = load_model(checkpoint, data, device=device)
    dictionary, cfg = task.source_dictionary, task.cfg
    tokenizer = TextReader.of(_paths(checkpoint, data)[1], dictionary).tokenizer
    if tokenizer is None:
        log_tokens(dictionary)
    if not model.predicts_next_token:
        return MaskedLanguageModel(model, dictionary, tokenizer)
    return LanguageModel(model, dictionary, cfg.tokens_per_sample, cfg.add_bos_token, tokenizer)


def load_model(
    checkpoint: str | Path,
    data: str | Path | None = None,
    *,
    device: torch.device | str = "auto",
    overrides: Mapping[str, object] | None = None,
    state: Mapping[str, object] | None = None,
) -> tuple[BaseFairseqModel, FairseqTask]:
    """Load any model in evaluation mode, and its task with the dictionary.

    ``model(src_tokens)[0]`` is the output for every token: logits [B, T, V] of BERT, [B, T] of
    ELECTRA's discriminator; with ``features_only=True`` the hidden states of the last layer,
    [B, T, C].

    Args:
        checkpoint, data, device, overrides: see :meth:`LanguageModel.from_pretrained`.
        state: the content of the checkpoint where it has been read already.

    Raises:
        UserError: a file is missing or invalid, or the dictionary is not the checkpoint's.
    """
    states = None if state is None else [state]
    models, task, _ = load_models(*_paths(checkpoint, data), overrides, states=states)
    return models[0].to(devices.chosen(device)), task


def _paths(checkpoint: str | Path, data: str | Path | None) -> tuple[list[Path], str | Path]:
    """Paths of the checkpoint, and of the data or the dictionary in its folder."""
    path = find_checkpoint(Path(checkpoint))
    if not os.path.exists(path):
        raise UserError(f"{path}: file not found; check the path")
    if data is None:
        data = path.parent / DICTIONARY
        if not os.path.exists(data):
            raise UserError(f"{data}: file not found; give the data folder or its dict.txt as data")
    if not os.path.exists(data):
        raise UserError(f"{data}: folder or file not found; give a data-bin folder or its dict.txt")
    return [path], data


def _check_length(name: str, value: object, least: int) -> None:
    """Raise ValueError unless *value* is a whole number from *least* to :data:`MOST`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= MOST:
        raise ValueError(f"{name} {reprlib.repr(value)}: expected a whole number from {least} to {MOST}")
