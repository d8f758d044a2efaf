"""``fairseq.hub_utils``: language models for scripts, in the form that fairseq's
``from_pretrained`` returned."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fairseq.errors import UserError
from fairseq.hub import LanguageModel
from fairseq.inference.loading import load_language_models
from fairseq.interop.fairseq.namespaces import namespace_of
from fairseq.system.lookup import exists, is_file, is_folder

SPLITTERS = {  # settings of fairseq's hub: their values
    "tokenizer": "moses nltk space",
    "bpe": "bert byte_bpe bytes characters fastbpe gpt2 hf_byte_bpe sentencepiece subword_nmt",
}


class GeneratorHubInterface(nn.Module):
    """A language model under the method names of fairseq's hub; *lm* is the first model in this
    package's interface."""

    def __init__(self, args: argparse.Namespace, task: Any, models: list[Any]) -> None:
        super().__init__()
        self.args, self.cfg, self.task, self.models = args, args, task, nn.ModuleList(models)
        self.lm = LanguageModel(models[0], task.source_dictionary, task.cfg.tokens_per_sample, task.cfg.add_bos_token)

    def encode(self, sentence: str) -> Tensor:
        """The ids of a tokenised line, its end included: int64 [T]."""
        return torch.from_numpy(self.task.source_dictionary.encode(sentence)).long()

    binarize = encode

    def decode(self, tokens: Tensor) -> str:
        return self.task.source_dictionary.string(tokens)

    def score(self, sentences: str | list[str], replace_newline_with_eos: bool = False) -> Any:
        """``{"tokens", "positional_scores", "score"}`` of a text, or a list of them:
        log-probabilities, their mean.

        As in fairseq, ``</s>`` is scored between lines only, never at the end, and a model trained
        with ``<s>`` reads it in place of the ``</s>`` before a text. With
        *replace_newline_with_eos* line feeds are ``</s>``.

        Raises:
            ValueError: a text has no symbol.
        """
        if not isinstance(sentences, str):
            return [self.score(sentence, replace_newline_with_eos) for sentence in sentences]
        dictionary = self.task.source_dictionary
        lines = sentences.splitlines() if replace_newline_with_eos else [sentences]
        encoded = torch.cat([self.encode(line) for line in lines] or [torch.empty(0, dtype=torch.long)])
        words = (encoded != dictionary.eos()).nonzero()
        if not len(words):
            raise ValueError(f"score: {sentences!r} has no symbol to score")
        tokens = encoded[int(words[0]) : int(words[-1]) + 1]
        start = dictionary.begin() if self.lm.add_bos_token else dictionary.eos()
        # The start is read and not scored: as many log-probabilities as tokens.
        row = torch.cat([tokens.new_tensor([start]), tokens])[None]
        lprobs = -self.lm.score_tokens(row, self.lm.tokens_per_sample, self.lm.model.memory_length)[0]
        return {"tokens": tokens, "positional_scores": lprobs, "score": lprobs.mean()}

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
        """Each text and a continuation of up to *max_len_b* tokens; without *sampling* the most
        probable one.

        With *beam* the search ends texts at ``</s>``, as :meth:`generate` does.
        """
        if not isinstance(sentences, str):
            arguments = (beam, sampling, sampling_topk, sampling_topp, temperature, max_len_b, seed)
            return [self.sample(sentence, *arguments) for sentence in sentences]
        if beam > 1 and not sampling:
            return self.decode(self.generate(self.encode(sentences), beam=beam, max_len_b=max_len_b)[0]["tokens"])
        top_k = max(sampling_topk, 0) if sampling else 1
        top_p = sampling_topp if sampling and sampling_topp > 0 else 1.0
        return self.lm.sample(sentences, max_len_b, temperature, top_k, top_p, seed)

    def generate(self, tokenized_sentences: Any, beam: int = 5, **settings: Any) -> Any:
        """The hypotheses of a line of tokens [T], or of each of a list of lines, that begin with
        it.

        *settings* are others of fairseq's generation, such as ``max_len_b``, ``lenpen``,
        ``sampling``.
        """
        if torch.is_tensor(tokenized_sentences):
            return self.generate([tokenized_sentences], beam, **settings)[0]
        generator = self.task.build_generator(self.models, argparse.Namespace(beam=beam, **settings))
        samples = ({"net_input": {"src_tokens": line[None]}} for line in tokenized_sentences)
        return [self.task.inference_step(generator, self.models, sample)[0] for sample in samples]


def from_pretrained(
    model_name_or_path: str, checkpoint_file: str = "model.pt", data_name_or_path: str = ".", **settings: object
) -> GeneratorHubInterface:
    """The language model in the folder *model_name_or_path*; names of several checkpoints are
    joined by colons.

    The folder with ``dict.txt`` is inside the model's or anywhere. *settings* change the
    checkpoint's; ``tokenizer`` and ``bpe`` come with the data.

    Raises:
        UserError: the model or its dictionary is missing, or a setting does not exist or has an
            unknown value.
    """
    check_splitters(settings)
    paths, data = located(model_name_or_path, checkpoint_file, data_name_or_path)
    overrides = {name: value for name, value in settings.items() if name not in ("tokenizer", "bpe", "bpe_codes")}
    models, task, used = load_language_models(paths, data, overrides)
    return GeneratorHubInterface(namespace_of(used), task, models)


def check_splitters(settings: Mapping[str, object]) -> None:
    """Check that tokenizer and subwords in *settings* are names of fairseq's.

    Raises:
        UserError: one is not.
    """
    for name, known in SPLITTERS.items():
        if settings.get(name) not in (None, *known.split()):
            raise UserError(f"`{name}` {settings[name]}: unknown; choose from {', '.join(known.split())}")


def located(model_name_or_path: str, checkpoint_file: str, data_name_or_path: str) -> tuple[list[Path], Path]:
    """Paths of the checkpoints, and of the dictionary or its folder; see :func:`from_pretrained`.

    Raises:
        UserError: there is no folder *model_name_or_path*.
    """
    folder = Path(model_name_or_path)
    if not is_folder(folder):
        raise UserError(f"{folder}: folder not found; models are not downloaded, give the folder of a checkpoint")
    data = folder / data_name_or_path
    # fairseq takes the name relative to the model's folder first, and as any path otherwise.
    data = data if exists(data) else Path(data_name_or_path)
    if is_file(data / "dict.txt"):
        data = data / "dict.txt"
    return [folder / name for name in checkpoint_file.split(":")], data
