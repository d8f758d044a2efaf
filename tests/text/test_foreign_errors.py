"""Errors of the tokenizers' libraries are one line that names the file, or the text that they
cannot encode."""

from __future__ import annotations

import json

import pytest
import tokenizers
from mistakes import user_error

from fairseq.config.command_settings import TextConfig
from fairseq.errors import UserError
from fairseq.text.tokenizers.base import Space
from fairseq.text.tokenizers.hf import HuggingFace
from fairseq.text.tokenizers.moses import Moses
from fairseq.text.tokenizers.subword_nmt import SubwordNMT
from fairseq.text.tokenizers.tokenizer import chosen_words

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


def test_an_invalid_setting_names_the_flag_of_its_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(words: Space) -> None:
        raise UserError("width 0: expected 1 or more")

    monkeypatch.setattr(Space, "check", check)
    with user_error(r"^--tokenizer space: width 0: expected 1 or more$"):
        chosen_words(TextConfig(tokenizer="space"))
    with user_error(r"^--moses-source-lang: language 'xx': Moses has"):
        chosen_words(TextConfig(tokenizer="moses", moses_source_lang="xx"))


@pytest.mark.parametrize("content", [b"\xff a\n", b"#version: x\na b\n", b"#version:\na b\n", b"a\n", b"a b c\n"])
def test_codes_that_subword_nmt_cannot_read_are_one_line(content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="^codes: cannot be read"):
        SubwordNMT(content, "codes").check()
    assert capsys.readouterr() == ("", "")
