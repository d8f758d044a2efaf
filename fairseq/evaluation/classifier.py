"""Classification of new text with a fine-tuned encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq import checkpoint
from fairseq.checkpoint.manager import DICTIONARY, find_checkpoint
from fairseq.distributed.world import chosen_device
from fairseq.errors import UserError
from fairseq.inference.loading import load_models
from fairseq.models.sentence import SentenceModel
from fairseq.tasks.sentence_prediction import SentencePredictionTask

Text = str | tuple[str, str]
"""A sentence, or a pair of sentences."""


@dataclass(frozen=True)
class Prediction:
    """The prediction for one text.

    Attributes:
        label: the most probable class; None in regression.
        score: its probability; in regression the predicted score.
        probabilities: of every class; empty in regression.
    """

    label: str | None
    score: float
    probabilities: Mapping[str, float]


class SentenceClassifier:
    """A fine-tuned encoder that predicts classes or scores of text, encoded as in fine-tuning.

    Args:
        model: in evaluation mode.
        task: its task, with tokenizer, dictionary and labels.
    """

    def __init__(self, model: SentenceModel, task: SentencePredictionTask) -> None:
        self.model = model
        self.task = task

    @classmethod
    def from_pretrained(
        cls,
        checkpoint_path: str | Path,
        data: str | Path | None = None,
        *,
        device: torch.device | str = "cpu",
        state: Mapping[str, Any] | None = None,
    ) -> SentenceClassifier:
        """Load a checkpoint of ``fairseq-finetune`` or of ``--task sentence_prediction``.

        Args:
            checkpoint_path: the file, or a folder with the best or else the last one of a run.
            data: folder of the dictionary and the tokenizer, or a ``dict.txt``; None: the folder of the checkpoint.
            device: where the model runs; ``auto``: on a GPU if there is one.
            state: the content of the checkpoint where it has been read already.

        Raises:
            UserError: a file is missing or invalid, or the model is no classifier.
        """
        path = find_checkpoint(checkpoint_path)
        folder = path.parent if data is None else Path(data)
        dictionary = folder / DICTIONARY if folder.is_dir() else folder
        state = checkpoint.load(path) if state is None else state
        if state["args"].get("task") != "sentence_prediction":
            raise UserError(f"{path}: not a fine-tuned classifier; give a checkpoint of fairseq-finetune")
        if not dictionary.is_file():
            raise UserError(f"{dictionary}: file not found; give the data folder of pre-training with `data`")
        # The checkpoint names the folder on the machine it was trained on.
        [model], task, _ = load_models([path], dictionary.parent, {"data_bin": str(dictionary)}, states=[state])
        if not isinstance(model, SentenceModel) or not isinstance(task, SentencePredictionTask):
            raise UserError(f"{path}: {type(model).__name__} is not a classifier of this package")
        return cls(model.to(chosen_device(device)), task)

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes by number; empty in regression."""
        return self.task.layout.labels

    @property
    def takes_pairs(self) -> bool:
        """Whether a text is a pair of sentences."""
        return len(self.task.layout.sentences) == 2

    @torch.inference_mode()
    def logits(self, texts: Sequence[Text], batch_size: int = 32) -> Tensor:
        """Logits of the classes, or scores, of *texts*: float32 [texts, outputs], on the CPU.

        Args:
            texts: sentences, or pairs of them where :attr:`takes_pairs`; too long ones are truncated.
            batch_size: texts at once; texts of similar length go together.

        Raises:
            ValueError: a text is a pair where one sentence is expected, or the other way round.
        """
        sentences = [self._sentences(text) for text in texts]
        rows = self.task.rows(sentences, [None] * len(sentences), "input")
        logits = torch.empty(len(rows), self.task.layout.outputs)
        device = next(self.model.parameters()).device
        # By length: rows of a batch are padded to the longest.
        for indices in torch.from_numpy(rows.sizes).argsort(stable=True).split(batch_size):
            net_input = rows.batch(indices.numpy())["net_input"]
            moved = {name: value.to(device) for name, value in net_input.items()}
            logits[indices] = self.model(**moved)[0].float().cpu()
        return logits

    def classify(self, texts: Sequence[Text], batch_size: int = 32) -> list[Prediction]:
        """Predict the class, or the score, of each of *texts*; see :meth:`logits`."""
        if not texts:
            return []
        # In float64, so that probabilities of many classes sum to 1 in what is printed.
        logits = self.logits(texts, batch_size).double()
        if self.task.layout.is_regression:
            return [Prediction(None, score, {}) for score in logits.squeeze(1).tolist()]
        predictions = []
        for row in logits.softmax(1).tolist():
            probabilities = dict(zip(self.labels, row, strict=True))
            label = max(probabilities, key=probabilities.__getitem__)
            predictions.append(Prediction(label, probabilities[label], probabilities))
        return predictions

    def _sentences(self, text: Text) -> tuple[str, ...]:
        sentences = (text,) if isinstance(text, str) else tuple(text)
        if len(sentences) != len(self.task.layout.sentences):
            expected = "pairs of sentences" if self.takes_pairs else "single sentences"
            raise ValueError(f"{text!r:.80}: the model reads {expected}")
        return sentences
