"""Files of exported tokenizers: ``tokenizer.json`` of byte-level encodings, where it gives exactly
our ids, or code.

The ids are the dictionary's, so that it must have every symbol which merges make: a symbol that it
lacks is the unknown one here, but has no id there. No ``tokenizer.json`` equals other encodings (a
test has examples): the normaliser of SentencePiece models loses the second accent of a letter
there; and of the symbols that subword-nmt's merges make on the way to a word, the dictionary has
only those that are left in some text. transformers reads these with the file
``tokenization_fairseq.py`` of :mod:`fairseq.interop.hugging_face.exported`.

As in GPT-2, a decoder's tokenizer adds no symbol to a text, and ``</s>`` is its symbol for the
beginning: tools that want a beginning, as for the first token of a text, put it there themselves,
and would have two otherwise. Line feeds are ``</s>``, see
:attr:`~fairseq.text.text_corpus.TextReader.keeps_lines`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairseq.errors import UserError
from fairseq.text.dictionary import Dictionary
from fairseq.text.text_corpus import TextReader
from fairseq.text.tokenizers import Tokenizer
from fairseq.text.tokenizers.hf import PROBES, LibrarySubwords, import_tokenizers
from fairseq.text.tokenizers.rules import BYTES, LINE_END

CONFIG, FAST, CODE = "tokenizer_config.json", "tokenizer.json", "tokenization_fairseq.py"
TEXTS = (*PROBES, "a\tb\n\nc  d ", "e\u0301 naïve 世界 🙂\r\n\u00a0x", " 12345.678 don't — “q”")


def code(name: str) -> str:
    """The file *name* of code that exports have: it needs transformers, not this package."""
    return (Path(__file__).parent / "exported" / name).read_text(encoding="utf-8")


def tokenizer_files(
    tokenizer: Tokenizer | None,
    dictionary: Dictionary,
    longest: int,  # most tokens of a row
    token_types: int | None = None,  # of an encoder; None for a decoder
    separator: int | None = None,  # id of a symbol before the second text of a pair
) -> dict[str, str]:
    """Return the texts of the files of *tokenizer* by name, but for ``tokenization.json`` and
    *dictionary*; UserError for a plug-in."""
    config: dict[str, Any] = {"model_max_length": longest, **_names(dictionary, token_types is not None)}
    content = fast_tokenizer(tokenizer, dictionary, token_types, separator)
    if content is not None:
        inputs = ["input_ids", *["token_type_ids"] * (token_types is not None), "attention_mask"]
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": inputs}
        # A decoder goes on from the last token of each row; padding at the end would stand between
        # it and the new ones.
        config["padding_side"] = "left" if token_types is None else "right"
        return {CONFIG: json_text(config), FAST: content}
    _check_no_plugin(tokenizer)
    kind = "FairseqTokenizer" if token_types is None else "FairseqEncoderTokenizer"
    config |= {"tokenizer_class": kind, "auto_map": {"AutoTokenizer": [f"{Path(CODE).stem}.{kind}", None]}}
    config["keeps_lines"] = TextReader(dictionary, tokenizer).keeps_lines
    if token_types is not None:
        config["token_types"] = token_types
        config["pair_separator"] = None if separator is None else dictionary[separator]
    return {CONFIG: json_text(config), CODE: code(CODE)}


def _check_no_plugin(tokenizer: Tokenizer | None) -> None:
    steps = [step for step in (tokenizer.words, tokenizer.subwords) if step is not None] if tokenizer else []
    if any(type(step).__module__.split(".")[0] != "fairseq" for step in steps):
        raise UserError(f"{tokenizer}: the tokenizer is a plug-in, which cannot be exported")


def _names(dictionary: Dictionary, encoder: bool) -> dict[str, str]:
    """The special symbols by the names of transformers; a decoder's texts begin after the
    end-of-line symbol."""
    ids = {"eos": dictionary.eos(), "unk": dictionary.unk(), "pad": dictionary.pad()}
    ids["bos"] = dictionary.bos() if encoder else dictionary.eos()
    if encoder:
        ids |= {"cls": dictionary.bos(), "sep": dictionary.eos(), "mask": dictionary.mask()}
    # GPT-2's dictionary has no padding, but transformers needs a symbol to make batches; the mask
    # hides it.
    elif ids["pad"] < 0:
        ids["pad"] = dictionary.eos()
    if dictionary.stop() >= 0:
        ids["eos"] = dictionary.stop()
    return {f"{role}_token": dictionary[index] for role, index in ids.items() if index >= 0}


def json_text(values: Mapping[str, object]) -> str:
    """Return the content of a JSON file, indented."""
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def fast_tokenizer(
    tokenizer: Tokenizer | None, dictionary: Dictionary, token_types: int | None, separator: int | None = None
) -> str | None:
    """Return the content of ``tokenizer.json``; None where no fast tokenizer gives the ids of
    *tokenizer*.

    With *token_types*, of an encoder, rows are ``<s> a </s>`` and ``<s> a </s> b </s>``.
    """
    subwords = tokenizer.subwords if tokenizer is not None and tokenizer.words is None else None
    if not (isinstance(subwords, LibrarySubwords) and subwords.byte_level):
        return None
    reader = TextReader(dictionary, tokenizer)
    values = json.loads(subwords.library_json())
    model, added = values["model"], {token["content"]: token for token in values["added_tokens"]}
    model["vocab"].pop(model.pop("unk_token", None), None)  # no text is unknown to bytes
    ids = {symbol: dictionary.indices.get(subwords.written(symbol)) for symbol in (*BYTES, *model["vocab"], *added)}
    # A subword without an id here is unknown and so has no equal there; a normaliser changes text,
    # which `decode` could not give back.
    if model["type"] != "BPE" or values["normalizer"] is not None or None in ids.values():
        return None
    special = _special(dictionary, token_types is not None)
    model["vocab"] = {**ids, **special}
    ours = {word: _added(word, index) for word, index in special.items()}
    if token_types is not None and dictionary.mask() >= 0:
        # The blank before a masked word is part of the word.
        ours[dictionary[dictionary.mask()]]["lstrip"] = True
    values["added_tokens"] = [*({**token, "id": ids[word]} for word, token in added.items() if word not in ours)]
    values["added_tokens"] += ours.values()
    values["post_processor"] = _rows(dictionary, token_types, separator)
    values["decoder"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    if not reader.keeps_lines:
        _lines_as_symbols(values, ours[dictionary[dictionary.eos()]])
    content = json.dumps(values, ensure_ascii=False)
    # The last word is a trial on hard texts: what the conditions above overlook, such as an odd
    # setting of the pre-tokenizer, ends in the slower but equal tokenizer.
    library = import_tokenizers("hf").Tokenizer.from_str(content)
    for text in TEXTS:
        if library.encode(text, add_special_tokens=False).ids != reader.ids(text):
            return None
    return content


def _lines_as_symbols(values: dict[str, object], end: dict[str, object]) -> None:
    """Let line feeds become the symbol *end* in a ``tokenizer.json``, and that symbol a line feed
    where it is decoded.

    Where special symbols are left out, transformers leaves out this one, too.
    """
    # Replaced in the text, and found there as the symbol afterwards: `normalized` symbols are
    # looked for in this order.
    values["normalizer"] = {"type": "Replace", "pattern": {"Regex": LINE_END.pattern}, "content": end["content"]}
    end["normalized"] = True
    feeds = {"type": "Replace", "pattern": {"String": end["content"]}, "content": "\n"}
    values["decoder"] = {"type": "Sequence", "decoders": [feeds, values["decoder"]]}


def _special(dictionary: Dictionary, encoder: bool) -> dict[str, int]:
    """The symbols that stand for themselves in a text."""
    ids = [dictionary.eos(), dictionary.unk(), dictionary.pad()]
    ids += [dictionary.bos(), dictionary.mask()] if encoder else []
    return {dictionary[index]: index for index in sorted(set(ids)) if index >= 0}


def _added(word: str, index: int) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": word, **flags, "special": True}


def _rows(dictionary: Dictionary, token_types: int | None, separator: int | None) -> Mapping[str, object]:
    """The template of rows; a decoder's are the text alone."""

    def word(index: int, kind: int) -> dict[str, object]:
        return {"SpecialToken": {"id": dictionary[index], "type_id": kind}}

    # RoBERTa has one token type only: the second text of a pair has type 0 there.
    last = min(1, (token_types or 1) - 1)
    first, second = ({"Sequence": {"id": name, "type_id": kind}} for name, kind in (("A", 0), ("B", last)))
    begin, end = dictionary.bos(), dictionary.eos()
    if token_types is None:
        return {"type": "TemplateProcessing", "single": [first], "pair": [first, second], "special_tokens": {}}
    single = [word(begin, 0), first, word(end, 0)]
    between = [] if separator is None else [word(separator, last)]
    pair = [*single, *between, second, word(end, last)]
    used = {dictionary[index]: index for index in (begin, end, separator) if index is not None}
    tokens = {name: {"id": name, "ids": [index], "tokens": [name]} for name, index in used.items()}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}
