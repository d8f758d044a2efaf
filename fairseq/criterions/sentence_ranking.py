"""Cross-entropy of the right one of several sentences, each scored by a head with one output."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fairseq.criterions.fairseq_criterion import FairseqCriterion, Loss, Sample, logging_output
from fairseq.criterions.settings import HEAD, SentenceRankingCriterionConfig
from fairseq.errors import UserError
from fairseq.logging.figures import SIZE, Figure, ratio
from fairseq.models.base import BaseFairseqModel
from fairseq.models.views import plain


class SentenceRankingCriterion(FairseqCriterion):
    """Cross-entropy of the right one among the candidates ``net_input1``, ``net_input2``, … of each
    row.

    In evaluation, rows of *save_predictions* are id, chosen number and right number, the numbers
    from 0.

    Raises:
        UserError: the file cannot be written, at the first validation.
    """

    config_class = SentenceRankingCriterionConfig
    carries_state = False

    def __init__(
        self, task: Any, ranking_head_name: str = HEAD, save_predictions: str | None = None, *unused: object
    ) -> None:
        super().__init__(task)
        self.ranking_head_name, self.file = ranking_head_name, save_predictions
        self.mode = "w"  # of the first write, which replaces an earlier run's file

    def check(self, model: BaseFairseqModel) -> None:
        if self.ranking_head_name not in getattr(model, "classification_heads", ()):
            raise UserError(
                f"`criterion` sentence_ranking: {type(model).__name__} has no head {self.ranking_head_name}; "
                "use `task` sentence_ranking, or register_classification_head with num_classes=1"
            )

    def step(self, model: Any, sample: Sample, inputs: Any) -> tuple[Loss, dict[str, Any]]:
        return self(model, sample), {}

    def forward(self, model: Any, sample: Sample, reduce: bool = True) -> Loss:
        model = plain(model)
        size = sample["nsentences"]
        # A dummy sample has rows, no candidates, and no targets: its loss is 0.
        names = [f"net_input{number}" for number in range(1, self.task.args.num_classes + 1)] if size else ["net_input"]
        scores = [
            model(**model.net_input(sample[name]), classification_head_name=self.ranking_head_name)[0] for name in names
        ]
        logits = torch.cat(scores, 1).float()  # (B, candidates)
        chosen = logits.argmax(1)
        target = sample["target"].flatten() if size and "target" in sample else None
        if self.file is not None and not self.training:
            columns = [sample["id"], chosen] + ([target] if target is not None else []) if size else []
            self._write(torch.stack(columns, 1).tolist() if columns else [])
        loss = logits.sum() * 0 if target is None else F.cross_entropy(logits, target, reduction="sum")
        correct = (chosen == target).sum() if target is not None else torch.zeros_like(chosen).sum()
        return loss, size, {**logging_output(loss, sample, size), "ncorrect": correct}

    def _write(self, rows: list[list[int]]) -> None:
        """Write the *rows* of all processes: each validates a batch, or a dummy one, at a time."""
        if dist.is_available() and dist.is_initialized():
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, rows)
            if dist.get_rank() > 0:
                return
            rows = [row for part in gathered for row in part]
        try:
            with open(str(self.file), self.mode, encoding="utf-8") as file:
                file.writelines("\t".join(map(str, row)) + "\n" for row in rows)
        except OSError as error:
            raise UserError(f"`save_predictions` {self.file}: cannot be written ({error.strerror})") from None
        self.mode = "a"

    def figures(self) -> dict[str, Figure]:
        """``loss`` in bits a row, and ``accuracy`` in percent."""
        return {"loss": ratio("loss", SIZE, 1 / math.log(2)), "accuracy": ratio("ncorrect", SIZE, 100)}
