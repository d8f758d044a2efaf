"""``fairseq.sequence_generator`` over this package's search."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fairseq.errors import UserError
from fairseq.inference.reader import Reader
from fairseq.inference.search import Search, generate
from fairseq.models.language_model import language_model
from fairseq.models.views import plain
from fairseq.modules.output_layer import OutputLayer
from fairseq.text.dictionary import Dictionary


class BeamSearch:
    """The search that :class:`SequenceGenerator` makes by default; ``fairseq.search`` has it and
    :class:`Sampling`."""

    sampling: tuple[int, float] | None = None

    def __init__(self, tgt_dict: Sized) -> None:
        self.vocab_size = len(tgt_dict)


class Sampling(BeamSearch):
    """Tokens are drawn, of the *sampling_topk* most probable, or the fewest of probability
    *sampling_topp*."""

    def __init__(self, tgt_dict: Sized, sampling_topk: int = -1, sampling_topp: float = -1.0) -> None:
        super().__init__(tgt_dict)
        self.sampling = max(sampling_topk, 0), sampling_topp if sampling_topp > 0 else 1.0


class SequenceGenerator:
    """Hypotheses of language models, in fairseq's form.

    Limits and rates are as ``fairseq-generate --help`` says; *len_penalty* is ``--lenpen``.

    Args:
        models: of this package, or a plug-in's with a key-value cache;
            None, as before fairseq 0.10: those that :meth:`generate` is given.
        search_strategy: :class:`BeamSearch` or :class:`Sampling` (None: with *sampling* the
            latter).

    Raises:
        UserError: another search is asked for.
    """

    def __init__(
        self,
        models: Sequence[object] | None = None,
        tgt_dict: Any = None,
        beam_size: int = 1,
        max_len_a: float = 0,
        max_len_b: int = 200,
        max_len: int = 0,
        min_len: int = 1,
        normalize_scores: bool = True,
        len_penalty: float = 1.0,
        unk_penalty: float = 0.0,
        temperature: float = 1.0,
        match_source_len: bool = False,
        no_repeat_ngram_size: int = 0,
        search_strategy: object = None,
        eos: int | None = None,
        sampling: bool = False,
        sampling_topk: int = -1,
        sampling_topp: float = -1.0,
        seed: int | None = None,
    ) -> None:
        default = Sampling(tgt_dict, sampling_topk, sampling_topp) if sampling else BeamSearch(tgt_dict)
        strategy = search_strategy or default
        if not isinstance(strategy, BeamSearch):
            kind = type(strategy).__name__
            raise UserError(f"SequenceGenerator: search {kind} is not implemented; use BeamSearch or Sampling")
        for name, value in (("unk_penalty", unk_penalty), ("match_source_len", match_source_len)):
            if value:
                raise UserError(f"SequenceGenerator: `{name}` {value}: not implemented; leave it out")
        self.models = [] if models is None else _generating(models)
        self.tgt_dict, self.eos = tgt_dict, tgt_dict.eos() if eos is None else eos
        self.max_len_a, self.max_len_b = max_len_a, max_len or max_len_b
        top_k, top_p = strategy.sampling or (0, 1.0)
        self.search = Search(
            temperature=0.0 if strategy.sampling is None else temperature,
            top_k=top_k,
            top_p=top_p,
            beam=beam_size,
            eos=self.eos,
            min_tokens=min_len,
            # Scores are divided by length ** penalty; an exponent of 0 divides by 1.
            lenpen=len_penalty if normalize_scores else 0.0,
            no_repeat_ngram=no_repeat_ngram_size,
        )
        self.generator = torch.Generator().manual_seed(seed) if seed is not None else None

    def generate(
        self,
        models: Sequence[object],
        sample: Any,
        prefix_tokens: Tensor | None = None,
        bos_token: int | None = None,
        constraints: object = None,
    ) -> list[list[dict[str, Any]]]:
        """For each row of ``sample["net_input"]["src_tokens"]`` its hypotheses, the best first.

        They begin with *prefix_tokens* [B, T] (default: the row itself) and have ``tokens``,
        ``positional_scores`` (natural logarithms) and their mean, ``score``.
        """
        if constraints is not None:
            raise UserError("SequenceGenerator: `constraints`: not implemented; leave it out")
        self.models = self.models or _generating(models)
        rows = sample["net_input"]["src_tokens"] if prefix_tokens is None else prefix_tokens
        return [self._of_row(row, bos_token) for row in rows]

    def _of_row(self, row: Tensor, bos_token: int | None) -> list[dict[str, Any]]:
        pad, bos = self.tgt_dict.pad(), self.tgt_dict.bos()
        tokens = [token for token in row.tolist() if token != pad]
        # Rows come with and without `<s>` and `</s>`, and with padding on either side; the search
        # wants plain tokens and puts its own start before them.
        while tokens and tokens[0] in (bos, self.eos):
            tokens = tokens[1:]
        tokens = tokens[:-1] if tokens and tokens[-1] == self.eos else tokens
        first = self.eos if bos_token is None else bos_token
        start = [first] if getattr(self.models[0], "begin", None) is None else []
        ((_, results),) = generate(
            self.models,
            [[*start, *tokens]],
            replace(self.search, max_tokens=int(self.max_len_a * len(tokens)) + self.max_len_b),
            generators=lambda _: self.generator,
            batch_size=self.search.beam,
            forbidden=[pad] if pad >= 0 else [],
        )
        return [
            {
                "tokens": torch.tensor(hypothesis.tokens),
                "score": torch.tensor(hypothesis.score),
                "positional_scores": torch.tensor(hypothesis.lprobs),
                **dict.fromkeys(("attention", "alignment"), torch.empty(0)),
            }
            for hypothesis in results
        ]


def _generating(models: Sequence[object]) -> list[Any]:
    """*models* in the form that the search reads; UserError for one without a key-value cache."""
    readers: list[Any] = [one if isinstance(one, Reader) else language_model(plain(one)) for one in models]
    for model in readers:
        if not isinstance(model, Reader) and not model.can_generate:
            raise UserError(f"SequenceGenerator: {type(model).__name__} has no key-value cache and cannot generate")
    return readers


class SequenceScorer:
    """Log-probabilities of the targets of batches, in the form of :class:`SequenceGenerator`'s
    hypotheses.

    *softmax_batch* positions have their logits computed at once; None: as many as fit.
    """

    def __init__(self, tgt_dict: Dictionary, softmax_batch: int | None = None, **unused: object) -> None:
        self.pad, self.chunk = tgt_dict.pad(), softmax_batch

    @torch.no_grad()
    def generate(self, models: Sequence[Any], sample: Any, **unused: object) -> list[list[dict[str, Any]]]:
        """For each row of ``sample["target"]`` one hypothesis, with the mean probability of several
        models."""
        target, inputs = sample["target"], sample["net_input"]
        each = []
        for model in map(plain, models):
            model.eval()
            if isinstance(getattr(model, "output_layer", None), OutputLayer):
                scored = language_model(model)
                hidden = scored(src_tokens=inputs["src_tokens"])[0].flatten(0, 1)
                each.append(scored.output_layer.target_log_probs(hidden, target.flatten(), self.chunk))
            else:  # a plug-in's, which gives probabilities itself
                lprobs = model.get_normalized_probs(model(**inputs), log_probs=True, sample=sample)
                each.append(lprobs.gather(-1, target[..., None]).flatten())
        # The mean of the probabilities, not of their logarithms, as in fairseq's ensembles.
        lprobs = (torch.stack(each).logsumexp(0) - math.log(len(each))).view_as(target)
        rows = zip(target, lprobs, target.ne(self.pad), strict=True)
        return [
            [{"tokens": row[real], "score": scores[real].mean(), "positional_scores": scores[real], "attention": None}]
            for row, scores, real in rows
        ]


# Settings of fairseq's generation, with arguments of the generator that have other names.
GENERATION = """
    beam=beam_size lenpen=len_penalty max_len_a max_len_b min_len temperature no_repeat_ngram_size sampling
    sampling_topk sampling_topp unkpen=unk_penalty match_source_len
"""
NOT_IMPLEMENTED = {  # settings of other searches: values at which there is none
    "diverse_beam_groups": (-1, 0),
    "diversity_rate": (-1, -1.0),
    "constraints": (False, ""),
    "print_alignment": (False, ""),
    "prefix_allowed_tokens_fn": (),
}


def build_generator(
    task: Any,
    models: Sequence[object],
    cfg: object,
    seq_gen_cls: Callable[..., SequenceGenerator] | None = None,
    extra_gen_cls_kwargs: Mapping[str, Any] | None = None,
    prefix_allowed_tokens_fn: object = None,
) -> Any:
    """The generator with the settings *cfg* of fairseq's generation, by their names; with
    ``score_reference`` the scorer.

    Raises:
        UserError: *cfg* asks for a search that is not implemented.
    """
    for name, neutral in NOT_IMPLEMENTED.items():
        if (value := getattr(cfg, name, None)) not in (None, *neutral):
            raise UserError(f"`{name}` {value}: not implemented; leave it out")
    if getattr(cfg, "score_reference", False):
        return SequenceScorer(task.target_dictionary)
    for name in ("sampling_topk", "sampling_topp"):
        if (getattr(cfg, name, None) or -1) > 0 and not getattr(cfg, "sampling", False):
            raise UserError(f"`{name}` {getattr(cfg, name)}: needs `sampling`; add it")
    pairs = (entry.partition("=") for entry in GENERATION.split())
    values = {argument or name: getattr(cfg, name, None) for name, _, argument in pairs}
    given = {name: value for name, value in values.items() if value is not None}
    # Settings that name no width search with fairseq's.
    options = {"beam_size": 5, **given, **(extra_gen_cls_kwargs or {})}
    if prefix_allowed_tokens_fn is not None:
        raise UserError("`prefix_allowed_tokens_fn`: not implemented; leave it out")
    options["normalize_scores"] = not getattr(cfg, "unnormalized", False)
    if getattr(task.cfg, "add_bos_token", False):  # readers put <s> before every row
        models = [Reader(plain(model), begin=task.target_dictionary.begin()) for model in models]
    return (seq_gen_cls or SequenceGenerator)(models, task.target_dictionary, **options)
