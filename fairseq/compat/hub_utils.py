"""``fairseq.hub_utils``: language models for scripts, in the form that fairseq's ``from_pretrained`` returned."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq.errors import UserError
from fairseq.hub import LanguageModel
from fairseq.tasks.loading import load_language_models


class GeneratorHubInterface:
    """A language model under the method names of fairseq's hub.

    Attributes:
        models: the loaded models.
        task: with the dictionary.
        args: the settings of the first model.
        lm: the model in this package's interface.
    """

    def __init__(self, args: argparse.Namespace, task: Any, models: list[Any]) -> None:
        self.args, self.cfg, self.task, self.models = args, args, task, models
        self.lm = LanguageModel(models[0], task.source_dictionary, task.cfg.tokens_per_sample, task.cfg.add_bos_token)

    def eval(self) -> GeneratorHubInterface:
        """Return the interface: its models are in evaluation mode."""
        return self

    def to(self, device: Any) -> GeneratorHubInterface:
        """Move the models to *device*."""
        for model in self.models:
            model.to(device)
        return self

    def cuda(self) -> GeneratorHubInterface:
        """Move the models to the GPU."""
        return self.to("cuda")

    def encode(self, sentence: str) -> Tensor:
        """The ids of a tokenised line, its end included: int64 [T]."""
        return torch.from_numpy(self.task.source_dictionary.encode_line(sentence)).long()

    def decode(self, tokens: Tensor) -> str:
        """The words of *tokens*."""
        return self.task.source_dictionary.string(tokens)

    def score(self, sentences: str | list[str]) -> Any:
        """``{"tokens", "positional_scores", "score"}`` of a text, or a list of them: log-probabilities, their mean."""
        if not isinstance(sentences, str):
            return [self.score(sentence) for sentence in sentences]
        _, lprobs = self.lm.score(sentences)
        return {"tokens": self.encode(sentences), "positional_scores": lprobs, "score": lprobs.mean()}

    def sample(
        self,
        sentences: str | list[str],
        beam: int = 1,
        sampling: bool = False,
        sampling_topk: int = -1,
        sampling_topp: float = -1.0,
        temperature: float = 1.0,
        max_len_b: int = 200,
        seed: int | None = None,
    ) -> Any:
        """Each text and a continuation of up to *max_len_b* tokens; without *sampling* the most probable one.

        Raises:
            UserError: *beam* is above 1; ``fairseq-interactive --beam`` searches.
        """
        if beam > 1 and not sampling:
            raise UserError(f"beam={beam}: sample() takes the most probable token; fairseq-interactive --beam searches")
        if not isinstance(sentences, str):
            given = (beam, sampling, sampling_topk, sampling_topp, temperature, max_len_b, seed)
            return [self.sample(sentence, *given) for sentence in sentences]
        top_k = max(sampling_topk, 0) if sampling else 1
        top_p = sampling_topp if sampling and sampling_topp > 0 else 1.0
        return self.lm.sample(sentences, max_len_b, temperature, top_k, top_p, seed)


def from_pretrained(
    model_name_or_path: str, checkpoint_file: str = "model.pt", data_name_or_path: str = ".", **settings: Any
) -> GeneratorHubInterface:
    """The language model in the folder *model_name_or_path*.

    Args:
        model_name_or_path: folder of the checkpoint.
        checkpoint_file: its name in the folder; several are joined by colons.
        data_name_or_path: folder with ``dict.txt``, inside the model's folder or anywhere.
        settings: settings of the checkpoint to change; ``tokenizer`` and ``bpe`` are those of the data.

    Raises:
        UserError: the model or its dictionary is missing, or a setting does not exist.
    """
    folder = Path(model_name_or_path)
    if not folder.is_dir():
        raise UserError(f"{folder}: folder not found; models are not downloaded, give the folder of a checkpoint")
    data = folder / data_name_or_path
    data = data if data.exists() else Path(data_name_or_path)
    if (data / "dict.txt").is_file():
        data = data / "dict.txt"
    overrides = {name: value for name, value in settings.items() if name not in ("tokenizer", "bpe", "bpe_codes")}
    paths = [folder / name for name in checkpoint_file.split(":")]
    models, task, used = load_language_models(paths, data, overrides)
    return GeneratorHubInterface(used.namespace, task, models)
