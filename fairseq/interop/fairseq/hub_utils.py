"""``fairseq.hub_utils``: language models for scripts, in the form that fairseq's
``from_pretrained`` returned."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fairseq.config import fields
from fairseq.config.command_settings import GenerationConfig
from fairseq.errors import UserError
from fairseq.hub import LanguageModel
from fairseq.inference.loading import load_language_models
from fairseq.interop.fairseq import encoders
from fairseq.interop.fairseq.checkpoint_utils import OF_COMMANDS
from fairseq.interop.fairseq.dataclass import convert_namespace_to_omegaconf
from fairseq.interop.fairseq.defaults import OF_SEARCHES
from fairseq.interop.fairseq.namespaces import namespace_of
from fairseq.interop.fairseq.utils import resolve_max_positions
from fairseq.interop.fairseq.views import logits_model, plain
from fairseq.system.plugins import import_user_module

CODES = {  # files in a model's folder, and the settings that name them
    "code": "bpe_codes",
    "bpecodes": "bpe_codes",
    "sentencepiece.bpe.model": "sentencepiece_model",
}
NUMBERS = ("beam", "lenpen", "max_len_a", "max_len_b", "min_len", "temperature", "no_repeat_ngram_size")
GENERATION = (*NUMBERS, "sampling", "sampling_topk", "sampling_topp", "score_reference")  # what searches read
OF_GENERATION = {*GENERATION, *OF_SEARCHES}


class GeneratorHubInterface(nn.Module):
    """A language model under the names of fairseq's hub; *lm* is the first model in this package's
    interface.

    *cfg* are settings, flat or in groups; ``tokenizer`` and ``bpe`` say how text is split.
    """

    def __init__(self, cfg: Any, task: Any, models: Sequence[Any]) -> None:
        super().__init__()
        self.cfg: Any = convert_namespace_to_omegaconf(cfg)
        self.args, self.task = self.cfg, task
        self.models = nn.ModuleList(logits_model(plain(model)) for model in models)
        self.src_dict, self.tgt_dict = task.source_dictionary, task.target_dictionary
        self.tokenizer, self.bpe = encoders.build_tokenizer(self.cfg.tokenizer), encoders.build_bpe(self.cfg.bpe)
        self.align_dict = None  # of translations
        limits: list[Any] = [model.max_positions() for model in list[Any](self.models)]
        self.max_positions = resolve_max_positions(task.max_positions(), *limits)
        self.lm = self._language_model(plain(models[0]))

    def _language_model(self, model: Any) -> LanguageModel:
        cfg = self.task.cfg
        return LanguageModel(model, self.src_dict, cfg.tokens_per_sample, cfg.add_bos_token)

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

    def score(self, sentences: str | list[str], replace_newline_with_eos: bool = False, **settings: object) -> Any:
        """``{"tokens", "positional_scores", "score"}`` of a text, or a list of them:
        log-probabilities, their mean.

        As in fairseq, ``</s>`` is scored between lines only, never at the end, a model trained with
        ``<s>`` reads it in place of the ``</s>`` before a text, and *settings* have no effect. With
        *replace_newline_with_eos* line feeds are ``</s>``.

        Raises:
            ValueError: a text has no symbol.
        """
        if not isinstance(sentences, str):
            return [self.score(sentence, replace_newline_with_eos) for sentence in sentences]
        lines = sentences.splitlines() if replace_newline_with_eos else [sentences]
        return self._scored(torch.cat([self.encode(line) for line in lines] or [torch.empty(0, dtype=torch.long)]))

    def sample(self, sentences: str | list[str], beam: int = 1, verbose: bool = False, **settings: Any) -> Any:
        """The best text of :meth:`generate` that begins with each of *sentences*."""
        if isinstance(sentences, str):
            return self.sample([sentences], beam, verbose, **settings)[0]
        lines = [self.encode(sentence) for sentence in sentences]
        return [self.decode(best["tokens"]) for best, *_ in self.generate(lines, beam, verbose, **settings)]

    def translate(self, sentences: str | list[str], beam: int = 5, verbose: bool = False, **settings: Any) -> Any:
        """:meth:`sample` with a wider beam."""
        return self.sample(sentences, beam, verbose, **settings)

    def generate(
        self,
        tokenized_sentences: Any,
        beam: int = 5,
        verbose: bool = False,
        skip_invalid_size_inputs: bool = False,
        inference_step_args: Mapping[str, Any] | None = None,
        prefix_allowed_tokens_fn: Callable[..., object] | None = None,
        **settings: Any,
    ) -> Any:
        """The hypotheses of a line of tokens [T], or of each of several lines, that begin with it.

        Args:
            verbose: print lines and hypotheses.
            inference_step_args: further arguments of the task's ``inference_step``.
            settings: others of fairseq's generation, such as ``max_len_b``, ``lenpen`` and
                ``sampling``; with ``score_reference`` lines are scored. Unknown ones have no
                effect, as in fairseq.

        Raises:
            UserError: a setting that changes the result is not implemented.
        """
        if torch.is_tensor(tokenized_sentences) and tokenized_sentences.dim() == 1:
            arguments = (beam, verbose, skip_invalid_size_inputs, inference_step_args, prefix_allowed_tokens_fn)
            return self.generate([tokenized_sentences], *arguments, **settings)[0]
        settings = {**chosen(vars(self.cfg.generation), OF_GENERATION), "beam": beam, **settings}
        lines = list(tokenized_sentences)
        check_generation({**settings, "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn})
        if settings.get("score_reference"):
            results = [[self._scored(line)] for line in lines]
        else:
            results = self._searched(lines, settings, dict(inference_step_args or {}))
        if verbose:
            for line, hypotheses in zip(lines, results, strict=True):
                print(f"S\t{self.string(line)}")
                for each in hypotheses:
                    scores = " ".join(f"{score:.4f}" for score in each["positional_scores"].tolist())
                    print(f"H\t{float(each['score'])}\t{self.decode(each['tokens'])}\nP\t{scores}")
        return results

    def _searched(self, lines: Sequence[Tensor], settings: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        seed = {"seed": settings["seed"]} if settings.get("seed") is not None else {}
        cfg = argparse.Namespace(**settings)
        generator = self.task.build_generator(self.models, cfg, extra_gen_cls_kwargs=seed)
        samples = ({"net_input": {"src_tokens": line[None]}} for line in lines)
        return [self.task.inference_step(generator, self.models, sample, **options)[0] for sample in samples]

    def _scored(self, encoded: Tensor) -> dict[str, Any]:
        encoded = encoded[encoded != self.src_dict.pad()]
        words = (encoded != self.src_dict.eos()).nonzero()
        if not len(words):
            raise ValueError("score: a text has no symbol to score")
        tokens = encoded[int(words[0]) : int(words[-1]) + 1]
        start = self.src_dict.begin() if self.lm.add_bos_token else self.src_dict.eos()
        # The start is read and not scored: as many log-probabilities as tokens.
        row = torch.cat([tokens.new_tensor([start]), tokens])[None]
        each = [
            -lm.score_tokens(row, lm.tokens_per_sample, lm.model.memory_length)[0]
            for lm in (self._language_model(plain(model)) for model in self.models)
        ]
        # The mean of the probabilities, as in a search.
        lprobs = torch.stack(each).logsumexp(0) - math.log(len(each))
        return {"tokens": tokens, "positional_scores": lprobs, "score": lprobs.mean(), "attention": None}


def check_generation(settings: Mapping[str, Any]) -> None:
    """Raise UserError if one of fairseq's settings of generation is set that nothing here reads, or
    has an impossible value."""
    fields.checked(GenerationConfig, chosen(settings, NUMBERS))
    without = {**OF_SEARCHES, "prefix_allowed_tokens_fn": None}
    for name in without.keys() & settings.keys() - set(GENERATION):
        if settings[name] != without[name]:
            raise UserError(f"`{name}`: is not implemented; leave it out")


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
    checkpoint's, or a search's. Text is split by ``tokenizer`` and ``bpe`` if they are
    given; their files may be in the model's folder. *user_dir* is imported first.

    Raises:
        UserError: the model, its dictionary or a file is missing, or a setting does not exist or
            has an unknown value.
    """
    if user_dir is not None:
        import_user_module(user_dir)
    paths, data = located(model_name_or_path, checkpoint_file, data_name_or_path)
    splitting = splitting_of(model_name_or_path, settings)
    check_generation(settings)
    generation = chosen(settings, OF_GENERATION)
    of_command = chosen(settings, OF_COMMANDS)
    overrides = {k: v for k, v in settings.items() if k not in splitting | generation | of_command}
    models, task, used = load_language_models(paths, data, overrides)
    folder = data.parent if os.path.isfile(data) else data
    cfg = argparse.Namespace(
        **{**vars(namespace_of(used)), **of_command, **generation, **splitting, "data": str(folder)}
    )
    return GeneratorHubInterface(cfg, task, models)


def chosen(settings: Mapping[str, Any], names: Any) -> dict[str, Any]:
    """The entries of *settings* whose names are in *names*."""
    return {name: value for name, value in settings.items() if name in names}


def splitting_of(folder: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """How text is split: by *settings*, and with files in the model's *folder* unless they name
    others."""
    explicit = chosen(settings, encoders.SETTINGS)
    return explicit if explicit.keys() & set(CODES.values()) else {**_files_of(folder), **explicit}


def _files_of(folder: str) -> dict[str, str]:
    return {setting: str(path) for name, setting in CODES.items() if os.path.isfile(path := Path(folder) / name)}


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
