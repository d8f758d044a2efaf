"""Errors of the tokenizers' libraries, and of text they cannot encode, are one line that names the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from fairseq.errors import UserError
from fairseq.tokenizers.hf import HuggingFace
from fairseq.tokenizers.moses import Moses
from fairseq.tokenizers.tokenizer import Tokenizer

MODELS = {
    "WordLevel": tokenizers.models.WordLevel({"ax": 1}, unk_token="<none>"),
    "WordPiece": tokenizers.models.WordPiece({"a": 1, "##x": 2}, unk_token="<none>"),
    "Unigram": tokenizers.models.Unigram([("a", -1.0), ("x", -2.0)], None, False),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_without_its_unknown_symbol_cannot_encode_what_it_does_not_know(kind: str, capfd) -> None:
    content = tokenizers.Tokenizer(MODELS[kind]).to_str().encode()
    with pytest.raises(UserError, match="codes.json: cannot be read"):
        subwords = HuggingFace(content, "codes.json")
        subwords.check()
        subwords.encode(["zzz"])
    assert "panicked" not in capfd.readouterr().err


@pytest.mark.parametrize("normalizer", [{"type": "Precompiled", "precompiled_charsmap": "AAAA"}, [1], {"type": []}])
def test_damaged_parts_are_one_line(normalizer: object, capfd) -> None:
    values = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    values["normalizer"] = normalizer
    with pytest.raises(UserError, match="codes.json: cannot be read"):
        HuggingFace(json.dumps(values).encode(), "codes.json").check()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("language", ["xx", "", "../../etc/passwd", "e\0n"])
def test_moses_has_no_such_language(language: str) -> None:
    with pytest.raises(UserError, match="Moses has .*en, es"):
        Moses(language).check()


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_tokenization_in_another_encoding_is_rejected(encoding: str, tmp_path: Path) -> None:
    Tokenizer(Moses()).save(tmp_path, ["a"])
    path = tmp_path / "tokenization.json"
    path.write_text(path.read_text(), encoding=encoding)
    with pytest.raises(UserError, match="tokenization.json: damaged: not JSON in UTF-8"):
        Tokenizer.load(path)
