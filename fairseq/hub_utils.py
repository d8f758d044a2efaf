"""``fairseq.hub_utils``: language models for scripts, in the form that fairseq's
``from_pretrained`` returned."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fairseq.checkpoint_utils import OF_COMMANDS
from fairseq.config.namespaces import namespace_of
from fairseq.data import encoders
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.errors import UserError
from fairseq.hub import LanguageModel
from fairseq.inference.loading import load_language_models
from fairseq.models.views import logits_model, plain
from fairseq.system.plugins import import_user_module
from fairseq.utils import resolve_max_positions

CODES = {  # files in a model's folder, and the settings that name them
    "code": "bpe_codes",
    "bpecodes": "bpe_codes",
    "sentencepiece.bpe.model": "sentencepiece_model",
}


class GeneratorHubInterface(nn.Module):
    """A language model, or several, under the names of fairseq's hub.

    *cfg* are settings, flat or in groups; ``tokenizer`` and ``bpe`` say how text is split.
    """

    def __init__(self, cfg: Any, task: Any, models: Sequence[Any]) -> None:
        super().__init__()
        self.cfg: Any = convert_namespace_to_omegaconf(cfg)
        self.args, self.task = self.cfg, task
        self.models = nn.ModuleList(logits_model(plain(model)) for model in models)
        self.src_dict, self.tgt_dict = task.source_dictionary, task.target_dictionary
        self.tokenizer, self.bpe = encoders.build_tokenizer(self.cfg.tokenizer), encoders.build_bpe(self.cfg.bpe)
        limits: list[Any] = [model.max_positions() for model in list[Any](self.models)]
        self.max_positions = resolve_max_positions(task.max_positions(), *limits)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def tokenize(self, sentence: str) -> str:
        """The words of *sentence*, separated by blanks."""
        return sentence if self.tokenizer is None else self.tokenizer.encode(sentence)

    def detokenize(self, sentence: str) -> str:
        return sentence if self.tokenizer is None else self.tokenizer.decode(sentence)

    def apply_bpe(self, sentence: str) -> str:
        """The subwords of the words *sentence*."""
        return sentence if self.bpe is None else self.bpe.encode(sentence)

    def remove_bpe(self, sentence: str) -> str:
        return sentence if self.bpe is None else self.bpe.decode(sentence)

    def binarize(self, sentence: str) -> Tensor:
        """The ids of symbols separated by blanks, and an end: int64 [T]."""
        return torch.from_numpy(self.src_dict.encode(sentence)).long()

    def string(self, tokens: Tensor) -> str:
        """The symbols of ids [T]."""
        return str(self.tgt_dict.string(tokens))

    def encode(self, sentence: str) -> Tensor:
        """The ids of a line of text, its end included: int64 [T]."""
        return self.binarize(self.apply_bpe(self.tokenize(sentence)))

    def decode(self, tokens: Tensor) -> str:
        """The text of ids [T]."""
        return self.detokenize(self.remove_bpe(self.string(tokens)))

    def score(self, sentences: str | list[str]) -> Any:
        """``{"tokens", "positional_scores", "score"}`` of a text, or a list of them:
        log-probabilities by the first model, their mean.

        As in fairseq, ``</s>`` is not scored at the end, and a model trained with ``<s>`` reads it
        in place of the ``</s>`` before a text.

        Raises:
            ValueError: a text has no symbol.
        """
        if not isinstance(sentences, str):
            return [self.score(sentence) for sentence in sentences]
        tokens = self.encode(sentences)[:-1]
        if not len(tokens):
            raise ValueError("score: a text has no symbol to score")
        cfg, model = self.task.cfg, plain(self.models[0])
        lm = LanguageModel(model, self.src_dict, cfg.tokens_per_sample, cfg.add_bos_token)
        start = self.src_dict.begin() if cfg.add_bos_token else self.src_dict.eos()
        # The start is read and not scored: as many log-probabilities as tokens.
        row = torch.cat([tokens.new_tensor([start]), tokens])[None]
        lprobs = -lm.score_tokens(row, lm.tokens_per_sample, model.memory_length)[0]
        return {"tokens": tokens, "positional_scores": lprobs, "score": lprobs.mean()}

    def sample(self, sentences: str | list[str], beam: int = 1, verbose: bool = False, **settings: Any) -> Any:
        """The best text of :meth:`generate` that begins with each of *sentences*."""
        if isinstance(sentences, str):
            return self.sample([sentences], beam, **settings)[0]
        lines = [self.encode(sentence) for sentence in sentences]
        return [self.decode(best["tokens"]) for best, *_ in self.generate(lines, beam, **settings)]

    def generate(
        self,
        tokenized_sentences: Any,
        beam: int = 5,
        verbose: bool = False,
        skip_invalid_size_inputs: bool = False,
        inference_step_args: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Any:
        """The hypotheses of a line of tokens [T], or of each of several lines, that begin with it.

        *settings* are others of fairseq's generation, such as ``max_len_b``, ``lenpen`` and
        ``sampling``, and ``seed``; *inference_step_args* go to the task's ``inference_step``.
        Nothing is printed.

        Raises:
            UserError: a setting that changes the result is not implemented.
        """
        if torch.is_tensor(tokenized_sentences) and tokenized_sentences.dim() == 1:
            return self.generate([tokenized_sentences], beam, inference_step_args=inference_step_args, **settings)[0]
        seed = {"seed": settings["seed"]} if settings.get("seed") is not None else {}
        cfg = argparse.Namespace(**{**settings, "beam": beam})
        generator = self.task.build_generator(self.models, cfg, extra_gen_cls_kwargs=seed)
        samples = ({"net_input": {"src_tokens": line[None]}} for line in tokenized_sentences)
        options = inference_step_args or {}
        return [self.task.inference_step(generator, self.models, sample, **options)[0] for sample in samples]


def from_pretrained(
    model_name_or_path: str,
    checkpoint_file: str = "model.pt",
    data_name_or_path: str = ".",
    user_dir: str | None = None,
    **settings: Any,
) -> GeneratorHubInterface:
    """The language model in the folder *model_name_or_path*; names of several checkpoints are
    joined by colons.

    The folder with ``dict.txt`` is inside the model's or anywhere. *settings* change the
    checkpoint's. Text is split by ``tokenizer`` and ``bpe`` if they are given; their files may be
    in the model's folder. *user_dir* is imported first.

    Raises:
        UserError: the model, its dictionary or a file is missing, or a setting does not exist or
            has an unknown value.
    """
    if user_dir is not None:
        import_user_module(user_dir)
    paths, data = located(model_name_or_path, checkpoint_file, data_name_or_path)
    splitting = splitting_of(model_name_or_path, settings)
    of_command = {name: value for name, value in settings.items() if name in OF_COMMANDS}
    overrides = {name: value for name, value in settings.items() if name not in splitting | of_command}
    models, task, used = load_language_models(paths, data, overrides)
    folder = data.parent if os.path.isfile(data) else data
    cfg = argparse.Namespace(**{**vars(namespace_of(used)), **of_command, **splitting, "data": str(folder)})
    return GeneratorHubInterface(cfg, task, models)


def splitting_of(folder: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """How text is split: by *settings*, and with files in the model's *folder* unless they name
    others."""
    explicit = {name: value for name, value in settings.items() if name in encoders.SETTINGS}
    if explicit.keys() & set(CODES.values()):
        return explicit
    files = {setting: Path(folder, name) for name, setting in CODES.items()}
    return {setting: str(path) for setting, path in files.items() if os.path.isfile(path)} | explicit


def located(model_name_or_path: str, checkpoint_file: str, data_name_or_path: str) -> tuple[list[Path], Path]:
    """Paths of the checkpoints, and of the dictionary or its folder; see :func:`from_pretrained`.

    Raises:
        UserError: there is no folder *model_name_or_path*.
    """
    folder = Path(model_name_or_path)
    if not os.path.isdir(folder):
        raise UserError(f"{folder}: folder not found; models are not downloaded, give the folder of a checkpoint")
    data = folder / data_name_or_path
    # fairseq takes the name relative to the model's folder first, and as any path otherwise.
    data = data if os.path.exists(data) else Path(data_name_or_path)
    if os.path.isfile(data / "dict.txt"):
        data = data / "dict.txt"
    return [folder / name for name in checkpoint_file.split(":")], data
