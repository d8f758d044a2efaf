"""The border at which a model becomes what scoring and generation use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq.errors import UserError
from fairseq.hub import LanguageModel
from fairseq.models import BaseFairseqModel, FairseqLanguageModel
from fairseq.models.language_model import language_model
from fairseq.text.dictionary import Dictionary


class Logits(nn.Module):
    """A decoder that returns logits and nothing beside them."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, words)

    def forward(self, src_tokens: Tensor) -> tuple[Tensor, Any]:
        return self.words(src_tokens), None

    def max_positions(self) -> int:
        return 7


class Plugin(FairseqLanguageModel):
    """A plug-in's model with a method of fairseq's that has the name of an output layer."""

    def output_layer(self, features: Tensor) -> Tensor:  # type: ignore[override]
        return features


@pytest.mark.parametrize("kind", [FairseqLanguageModel, Plugin])
def test_a_model_that_returns_logits_is_given_an_output_layer(kind: type[FairseqLanguageModel]) -> None:
    dictionary = Dictionary()
    for word in "abc":
        dictionary.add_symbol(word)
    decoder = Logits(len(dictionary))
    model = kind(decoder)
    used = language_model(model)
    assert (used.memory_length, used.max_positions(), used.can_generate) == (0, 7, False)
    tokens = torch.tensor([[2, 4, 5, 6, 4], [2, 6, 6, 5, 2]])
    losses = LanguageModel(model, dictionary, 4).score_tokens(tokens, 3)
    expected = F.cross_entropy(decoder(tokens[:, :-1])[0].transpose(1, 2), tokens[:, 1:], reduction="none")
    torch.testing.assert_close(losses, expected.detach())


def test_what_is_no_language_model_is_refused_in_one_line() -> None:
    class Encoder(BaseFairseqModel):
        predicts_next_token = False

    with pytest.raises(UserError, match=r"^c\.pt: Encoder is an encoder, which does not predict [^\n]*$"):
        language_model(Encoder(), "c.pt")
    with pytest.raises(UserError, match=r"^Linear is not a language model; extend [^\n]*$"):
        language_model(nn.Linear(2, 2))
