"""What the decoders of transformers share: the length of memory is an argument, not state."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fairseq.models.decoder import Decoder
from fairseq.models.transformer_lm import TransformerDecoder, TransformerLanguageModel
from fairseq.models.transformer_lm_settings import TransformerLMConfig
from fairseq.models.transformer_xl import TransformerXL, TransformerXLDecoder
from fairseq.models.transformer_xl_settings import TransformerXLConfig

LM = TransformerLMConfig(
    decoder_embed_dim=8,
    decoder_ffn_embed_dim=12,
    decoder_layers=2,
    decoder_attention_heads=2,
    tokens_per_sample=4,
    tokens_from_prev=6,
)
XL = TransformerXLConfig(n_layer=2, n_head=2, d_model=8, d_inner=12, tokens_per_sample=4, mem_len=6)
KINDS = {
    "shortformer": LM,
    "transformer-xl": XL,
    "same length": replace(XL, same_length=True),
    "zeros": replace(XL, memory_start="zeros"),
}


def decoder(cfg: TransformerLMConfig | TransformerXLConfig, length: int) -> Decoder:
    torch.manual_seed(1)
    if isinstance(cfg, TransformerLMConfig):
        return TransformerDecoder(replace(cfg, tokens_from_prev=length), 20, padding_idx=1).eval()
    return TransformerXLDecoder(replace(cfg, mem_len=length), 20).eval()


@pytest.mark.parametrize(
    ("kind", "length"), [(kind, length) for kind in KINDS for length in (0, 3, 9) if length or kind != "same length"]
)
def test_the_memory_length_of_a_call_gives_what_a_model_of_that_length_gives(kind: str, length: int) -> None:
    told, made = decoder(KINDS[kind], 6), decoder(KINDS[kind], length)
    before = {name: value for name, value in vars(told).items() if not name.startswith("_")}
    tokens = torch.randint(4, 20, (2, 16), generator=torch.Generator().manual_seed(2))
    memories = None, None
    for segment in tokens.split(4, dim=1):
        hidden, extra = told(segment, memory=memories[0], memory_length=length)
        expected, wanted = made(segment, memory=memories[1])
        assert torch.equal(hidden, expected)
        memories = extra["memory"], wanted["memory"]
        assert (memories[0] is None) == (length == 0)
    if length:
        assert [layer.shape for layer in memories[0]] == [(2, length, 8)] * 2
    assert before == {name: value for name, value in vars(told).items() if not name.startswith("_")}


def test_a_model_says_which_lengths_of_memory_it_takes() -> None:
    for cfg in (replace(XL, mem_len=0), XL):
        TransformerXL(TransformerXLDecoder(cfg, 20)).check_memory_length(5)
    TransformerLanguageModel(decoder(LM, 6)).check_memory_length(0)  # type: ignore[arg-type]
    absolute = TransformerXL(TransformerXLDecoder(replace(XL, mem_len=0, position_encoding="absolute"), 20))
    absolute.check_memory_length(0)
    for model in (absolute, TransformerLanguageModel(decoder(LM, 0))):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="memory_length 5: the model has no memory; use 0"):
            model.check_memory_length(5)
    same = TransformerXL(TransformerXLDecoder(replace(XL, same_length=True), 20))
    with pytest.raises(ValueError, match="memory_length 0: the model's same_length needs memory; use at least 1"):
        same.check_memory_length(0)
