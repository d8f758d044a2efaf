"""Decoders of transformers with random weights, for the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq.text.tokenizers.hf import HuggingFace

WORDS = 320
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": WORDS}
NEOX = {**SIZES, "max_position_embeddings": 64, "vocab_size": WORDS, "bos_token_id": 3, "eos_token_id": 3}
OPT = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": WORDS}
OPT |= {"max_position_embeddings": 64, "word_embed_proj_dim": 32}
ROPE3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE3["original_max_position_embeddings"] = 32
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**LLAMA, "bos_token_id": 3, "eos_token_id": 3}),
    "llama, tied": ("Llama", {**LLAMA, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama, scaled as Llama 3": ("Llama", {**LLAMA, "rope_parameters": ROPE3}),
    "llama, scaled": (
        "Llama",
        {**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 99.0, "factor": 4.0}},
    ),
    "mistral": ("Mistral", {**LLAMA, "sliding_window": None}),
    "mistral with a window": ("Mistral", {**LLAMA, "sliding_window": 5}),
    "qwen 2": ("Qwen2", {**LLAMA, "tie_word_embeddings": True, "eos_token_id": 3, "bos_token_id": 3}),
    "pythia": ("GPTNeoX", NEOX),
    "pythia, one after the other": ("GPTNeoX", {**NEOX, "use_parallel_residual": False, "tie_word_embeddings": True}),
    "opt": ("OPT", OPT),
    "opt, post-norm and narrow": ("OPT", {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 16}),
}


def random_model(kind: str, settings: dict[str, Any]) -> Any:
    """A model of transformers with random weights, larger than initial ones."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    causal = {"GPTNeoX": "GPTNeoXForCausalLM"}.get(kind, f"{kind}ForCausalLM")
    model = getattr(transformers, causal)(getattr(transformers, f"{kind}Config")(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def special(index: int, content: str, **flags: bool) -> dict[str, Any]:
    """An entry of the added symbols of a ``tokenizer.json``."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": content, **plain, "special": True, **flags}


def byte_pieces() -> dict[str, Any]:
    """A ``tokenizer.json`` with the structure of Llama 2's and Mistral's: pieces with a mark for
    spaces, pieces of bytes, pieces that are white space, and ``<s>`` before a text."""
    symbols = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    symbols += [*"▁theca.d\r\xa0\u3000", "▁▁", "th", "▁t", "▁th", "▁the", "at", "▁c", "▁cat"]
    merges = ["▁ ▁", "t h", "▁ t", "▁t h", "▁th e", "a t", "▁ c", "▁c at"]
    marks = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    ends = [{"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "version": "1.0",
        "added_tokens": [special(index, symbol) for index, symbol in enumerate(symbols[:3])],
        "normalizer": {"type": "Sequence", "normalizers": marks},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, first],
            "pair": [begin, first, begin, second],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [spaces, *ends]},
        "model": {
            "type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True,
            "vocab": {symbol: index for index, symbol in enumerate(symbols)}, "merges": merges,
        },
    }  # fmt: skip


def folder_of(tmp_path: Path, kind: str, settings: dict[str, Any], **saving: Any) -> tuple[Path, Any]:
    """A folder that transformers wrote, with a byte-level tokenizer, and its model."""
    model, folder = random_model(kind, settings), tmp_path / "theirs"
    model.save_pretrained(folder, **saving)
    lines = [["the cat sat on the mat, the other cat sat there", "lower lowest 12 123"] * 9]
    values = json.loads(HuggingFace.learn_lines(lines, 300))
    first = len(values["model"]["vocab"])
    # As Pythia's and Qwen's, which have added symbols after those of the vocabulary; Pythia's are
    # spaces, too.
    spaces = [special(first + n, " " * (n + 1), normalized=True, special=False) for n in range(1, 5)]
    values["added_tokens"] = [special(first, "<|end|>"), *spaces]
    (folder / "tokenizer.json").write_text(json.dumps(values))
    return folder, model
