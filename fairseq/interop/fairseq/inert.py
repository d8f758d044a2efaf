"""Names of translation, and of parts that are not implemented, which stand in files beside language
models.

They can be imported and extended; making one is refused by name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from fairseq.criterions.fairseq_criterion import FairseqCriterion
from fairseq.errors import UserError
from fairseq.interop.fairseq.datasets import FairseqDataset
from fairseq.models.base import BaseFairseqModel

_TRANSLATION = "encoders with decoders, and translation, are not implemented"
_EXPERTS = "mixtures of experts are not implemented"
_MODELS = """
    FairseqEncoderDecoderModel FairseqMultiModel TransformerModel TransformerModelBase LSTMModel BARTModel FConvModel
"""
_PAIRS = "LanguagePairDataset BacktranslationDataset TransformEosDataset RoundRobinZipDatasets"
_SEARCHES = """
    DiverseBeamSearch DiverseSiblingsSearch LengthConstrainedBeamSearch PrefixConstrainedBeamSearch
    LexicallyConstrainedBeamSearch SequenceGeneratorWithAlignment
"""
_INERT: dict[str, tuple[type, str]] = {  # name: base, reason
    **dict.fromkeys(_MODELS.split(), (BaseFairseqModel, _TRANSLATION)),
    **dict.fromkeys(_PAIRS.split(), (FairseqDataset, _TRANSLATION)),
    **dict.fromkeys(("CompositeEncoder", "FConvEncoder", "FConvDecoder"), (nn.Module, _TRANSLATION)),
    **dict.fromkeys(_SEARCHES.split(), (nn.Module, "not implemented; use beam search or sampling")),
    "IndexedRawTextDataset": (FairseqDataset, "raw text is not read in training; use fairseq-preprocess"),
    "BaseLayer": (nn.Module, _EXPERTS),
    "MoECriterion": (FairseqCriterion, _EXPERTS),
    "CharacterTokenEmbedder": (nn.Module, "--character-embeddings: not implemented; leave it out"),
    "DynamicConv": (nn.Module, "convolutions are not implemented"),
    "LightweightConv": (nn.Module, "convolutions are not implemented"),
    "EnsembleModel": (nn.Module, "generators of plug-ins are not supported; use fairseq.hub.LanguageModel"),
    "NGramRepeatBlock": (nn.Module, "generators of plug-ins are not supported; use `no_repeat_ngram_size`"),
    "FairseqIterableDataset": (FairseqDataset, "data sets without a length are not implemented"),
    "SQuADHead": (nn.Module, "questions about spans of text are not implemented"),
}


class EncoderOut(NamedTuple):
    """An encoder's output in fairseq up to 0.10."""

    encoder_out: Any
    encoder_padding_mask: Any
    encoder_embedding: Any
    encoder_states: Any
    src_tokens: Any
    src_lengths: Any


def collate(samples: object, pad_idx: int, eos_idx: int, **options: object) -> Any:
    """Refused: batches of pairs."""
    raise UserError(f"collate: {_TRANSLATION}")


def _made(name: str, base: type, reason: str) -> type:
    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise UserError(f"{name}: {reason}")

    return type(name, (base,), {"__init__": refuse, "__module__": __name__, "__doc__": f"Refused: {reason}."})


globals().update({name: _made(name, base, reason) for name, (base, reason) in _INERT.items()})
