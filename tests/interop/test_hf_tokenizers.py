"""Exported tokenizers in transformers: offsets, pairs, truncation and padding, for decoders and
encoders."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import MODELS, exported, keep_code_in, made, saved
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import DATA, arguments, model_of
from subword_encodings import complete, encodings

from fairseq import checkpoint
from fairseq.config import options
from fairseq.hub import load_model, load_scorer
from fairseq.interop.hugging_face.tokenizer_files import tokenizer_files
from fairseq.text.dictionary import Dictionary
from fairseq.text.tokenizers import Tokenizer
from fairseq.text.tokenizers.base import Space
from fairseq.text.tokenizers.moses import Moses
from fairseq.text.tokenizers.rules import BYTES, LINE_END
from fairseq_cli import import_model
from fairseq_cli.import_model import get_import_parser

transformers = pytest.importorskip("transformers")
TEXT = "The  café\tlow-lying 🙂 世界,\nthe <unk> lower river isn't </s> new"
TEXT_OF_MASK = "the low <mask>, the lower river"
ENCODER = "--task masked_lm --criterion masked_lm --arch bert_tiny --encoder-embed-dim 32 --encoder-ffn-embed-dim 64"
ENCODER += " --encoder-attention-heads 2 --max-positions 20 --token-types 2"


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers keeps code in a folder of the test."""
    keep_code_in(tmp_path / "modules", monkeypatch)


@functools.cache
def tokenizers() -> dict[str, Tokenizer | None]:
    kinds: dict[str, Tokenizer | None] = {name: Tokenizer(None, subwords) for name, subwords in encodings().items()}
    return {**kinds, "moses": Tokenizer(Moses()), "moses and gpt2": Tokenizer(Moses(), encodings()["gpt2"]), "": None}


def written(folder: Path, tokenizer: Tokenizer | None) -> Any:
    """The exported tokenizer of a dictionary with the symbols of the text."""
    from fairseq.interop.hugging_face.exported.tokenization_fairseq import FairseqTokenizer

    dictionary = Dictionary()
    for line in TEXT.splitlines():
        for symbol in (tokenizer.encode(line) if tokenizer is not None else line).split():
            dictionary.add_symbol(symbol)
    folder.mkdir()
    dictionary.save(folder / "dict.txt")
    if tokenizer is not None:
        tokenizer.save(folder, dictionary.symbols)
    return FairseqTokenizer(str(folder / "dict.txt"), str(folder / "tokenization.json"))


def test_offsets_are_those_of_the_symbols_in_the_text(tmp_path: Path) -> None:
    for name, tokenizer in tokenizers().items():
        other = written(tmp_path / f"x{name}", tokenizer)
        encoding = other(TEXT, return_offsets_mapping=True)
        ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
        assert ids == other(TEXT)["input_ids"] and len(ids) == len(offsets), name
        symbols = dict(zip(offsets, other.convert_ids_to_tokens(ids), strict=True))
        assert symbols[(TEXT.index("<unk>"), TEXT.index("<unk>") + 5)] == "<unk>", name
        assert {TEXT[slice(*ends)] for ends, symbol in symbols.items() if symbol == "</s>"} == {"\n", "</s>"}, name
        covered = set().union(*(range(*ends) for ends in offsets))
        assert all(place in covered for place, letter in enumerate(TEXT) if not letter.isspace()), name


PARTS = [
    "the",
    "low",
    "er",
    "café",
    "e\u0301",
    "🙂",
    "👩\u200d👧",
    "世界",
    "\t",
    "  ",
    " ",
    "-",
    "isn't",
    ".",
    "(",
]
ODD = [
    "<unk>",
    "Mr.",
    "No. 5",
    "U.S.A.",
    "...",
    "'s",
    "&amp;",
    "@-@",
    "a@@",
    "\0",
    "\x1c",
    "\xa0",
    "\u3000",
    "\ufb01",
    "½",
]
ODD += ["\n", "\r\n", "1,000.5", "http://a.b/c?d=e", "▁", "##x", "\u00ad", "Lowest", "newest"]
MARKS = {"subword_nmt": "@@", "sentencepiece": "▁", "metaspace": "▁", "wordpiece": "##"}


@pytest.fixture(scope="module")
def exported_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tokenizers")
    kinds = tokenizers()
    found = {name: written(folder / f"x{name}", tokenizer) for name, tokenizer in kinds.items()}
    for name in ("gpt2", "byte"):
        tokenizer: Any = kinds[name]
        files = tokenizer_files(tokenizer, complete(tokenizer), 100)
        (folder / name).mkdir()
        for file, text in files.items():
            (folder / name / file).write_text(text)
        found[f"fast {name}"] = transformers.AutoTokenizer.from_pretrained(folder / name)
    return found


@settings(deadline=None, max_examples=40)
@given(text=st.lists(st.sampled_from(PARTS), max_size=8).map("".join))
def test_offsets_are_of_the_characters_that_each_symbol_writes(text: str, exported_tokenizers: dict[str, Any]) -> None:
    for name, tokenizer in exported_tokenizers.items():
        offsets = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
        for symbol, (start, end) in zip(tokenizer.tokenize(text), offsets, strict=True):
            if symbol in ("<unk>", "@-@", "▁") or (name == "moses and gpt2" and symbol in "@Ġ"):
                continue
            is_bytes = name.endswith(("byte", "gpt2"))
            letters = bytes(map(BYTES.__getitem__, symbol)) if is_bytes else symbol.strip(MARKS.get(name)).encode()
            part = unicodedata.normalize("NFKC", text[start:end]) if name == "sentencepiece" else text[start:end]
            several = offsets.count((start, end)) > 1  # bytes of one character, or letters of one
            assert letters in part.encode() if several else letters.strip() == part.strip().encode(), (name, symbol)
        covered = set().union(*(range(*ends) for ends in offsets))
        assert all(place in covered for place, letter in enumerate(text) if not letter.isspace()), name


@settings(deadline=None, max_examples=60)
@given(text=st.lists(st.sampled_from(PARTS + ODD), max_size=9).map("".join))
def test_exported_tokenizers_read_and_write_as_this_package(text: str, exported_tokenizers: dict[str, Any]) -> None:
    for name, tokenizer in tokenizers().items():
        other, ours = exported_tokenizers[name], tokenizer or Tokenizer(Space())
        lines = LINE_END.split(text)
        for line in lines:
            assert other.coder.spans(line) == ours.spans(line), name
            assert other.coder.spans_after(line) == ours.spans_after(line), name
        symbols = [ours.encode(line).split() for line in lines]
        ids = [other.ids.get(symbol, 3) for line in symbols for symbol in [*line, "</s>"]][:-1]
        assert other(text)["input_ids"] == ids, name
        known = [[other.symbols[other.ids.get(symbol, 3)] for symbol in line] for line in symbols]
        assert other.decode(ids) == "\n".join(map(ours.decode, known)), name


@settings(deadline=None, max_examples=100)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=30))
def test_fast_tokenizers_know_every_text_and_give_it_back(text: str, exported_tokenizers: dict[str, Any]) -> None:
    for name in ("fast gpt2", "fast byte"):
        tokenizer = exported_tokenizers[name]
        ids = tokenizer(text)["input_ids"]
        # Every end of a line is a line feed.
        lines = text.replace("\r\n", "\n").replace("\r", "\n")
        assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == lines
        assert ids.count(tokenizer.eos_token_id) == lines.count("\n")


def test_offsets_follow_truncation_padding_and_pairs(tmp_path: Path) -> None:
    other = written(tmp_path / "x", tokenizers()["gpt2"])
    whole = [other(text, return_offsets_mapping=True)["offset_mapping"] for text in (TEXT, "the river")]
    for side in ("left", "right"):
        batch = other(
            [TEXT, "the river"], padding=True, truncation=True, max_length=20, padding_side=side,
            return_offsets_mapping=True, return_tensors="pt",
        )  # fmt: skip
        missing = 20 - len(whole[1])
        short = [(0, 0)] * missing * (side == "left") + whole[1] + [(0, 0)] * missing * (side == "right")
        assert batch["offset_mapping"].tolist() == [[list(ends) for ends in row] for row in (whole[0][:20], short)]
        assert batch["attention_mask"].sum(1).tolist() == [20, len(whole[1])]
    pair = other("the river", TEXT, truncation="only_second", max_length=25, return_offsets_mapping=True)
    assert pair["offset_mapping"] == (whole[1] + whole[0])[:25]
    pairs = other([("the river", TEXT)], truncation="only_second", max_length=25, return_offsets_mapping=True)
    assert pairs["offset_mapping"] == [pair["offset_mapping"]] and pairs["input_ids"] == [pair["input_ids"]]
    with pytest.raises(ValueError, match="return_offsets_mapping: give texts"):
        other(["the", "river"], is_split_into_words=True, return_offsets_mapping=True)


def encoder(folder: Path, tokenizer: Tokenizer | None = None, symbols: Sequence[str] = ()) -> Path:
    """A checkpoint of an encoder, with its dictionary, whose first words are *symbols*, and a
    tokenizer."""
    folder.mkdir()
    words = [line.split()[0] for line in (DATA / "dict.txt").read_text().splitlines()]
    words = [*dict.fromkeys(symbols), *(word for word in words if word not in symbols)][: len(words)]
    (folder / "dict.txt").write_text("".join(f"{word} 1\n" for word in words))
    (tokenizer or Tokenizer(Moses())).save(folder, Dictionary.load(folder / "dict.txt").symbols)
    model = model_of(ENCODER)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    args = {**vars(arguments(ENCODER)), "optimizer_overrides": "{}"}
    state = {"args": args, "model": model.state_dict(), "optimizer_history": [], "extra_state": {}}
    checkpoint.save(folder / "checkpoint.pt", state)
    return folder / "checkpoint.pt"


@torch.no_grad()
def test_encoders_load_with_their_tokenizer_for_every_task(tmp_path: Path) -> None:
    source = encoder(tmp_path / "in")
    folder = exported(source, tmp_path / "hf", "--data", tmp_path / "in")
    words = Dictionary.load(DATA / "dict.txt").symbols
    first, second = f"{words[10]}, {words[11]}", f"{words[12]} nowhere"
    for auto in (transformers.AutoTokenizer, transformers.AutoProcessor):
        tokenizer = auto.from_pretrained(folder, trust_remote_code=True)
        row = tokenizer(first, second, return_offsets_mapping=True)
        comma = words.index(",") if "," in words else 3
        assert row["input_ids"] == [0, 10, comma, 11, 2, 12, 3, 2]
        assert row["token_type_ids"] == [0, 0, 0, 0, 0, 1, 1, 1]
        texts = zip([first] * 5 + [second] * 3, row["offset_mapping"], strict=True)
        assert [text[slice(*ends)] for text, ends in texts] == [
            "",
            words[10],
            ",",
            words[11],
            "",
            words[12],
            "nowhere",
            "",
        ]
        assert tokenizer.mask_token_id == len(words) and tokenizer.pad_token_id == 1
        assert tokenizer.decode(row["input_ids"], skip_special_tokens=True).startswith(f"{words[10]}, {words[11]}"[:-1])
    batch = tokenizer([first, second], padding=True, return_tensors="pt")
    model, _ = load_model(source)
    logits = transformers.AutoModelForMaskedLM.from_pretrained(folder)(**batch).logits
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(logits[real], model.eval()(batch["input_ids"])[0][real], atol=1e-5, rtol=1e-6)
    for task in ("SequenceClassification", "TokenClassification"):
        kind = getattr(transformers, f"AutoModelFor{task}")
        found, report = kind.from_pretrained(folder, num_labels=3, output_loading_info=True)
        assert all(name.startswith(("classifier", "bert.pooler")) for name in report["missing_keys"])
        assert found(**batch).logits.size(-1) == 3


def test_lines_of_an_exported_encoder_end_as_before_once_it_is_imported(tmp_path: Path) -> None:
    # SentencePiece itself would read a line feed as a space.
    source = encoder(tmp_path / "in", Tokenizer(None, encodings()["sentencepiece"]))
    folder = exported(source, tmp_path / "hf", "--data", tmp_path / "in")
    back = tmp_path / "back"
    import_model.main(
        options.parse_args_and_arch(get_import_parser(), [str(folder), "--from", "hf", "--out", str(back)])
    )
    readers = [load_scorer(path).reader for path in (source, back / "checkpoint.pt")]  # type: ignore[union-attr]
    before, after = (reader.ids("the low\nriver <mask>") for reader in readers)  # type: ignore[operator]
    assert before == after and before.count(2) == 1


def test_text_behind_a_mask_goes_on_without_a_space_here_and_in_transformers(tmp_path: Path) -> None:
    tokenizer = Tokenizer(None, encodings()["sentencepiece"])
    source = encoder(tmp_path / "in", tokenizer, tokenizer.encode(TEXT_OF_MASK.replace("<mask>", "wide")).split())
    folder = exported(source, tmp_path / "hf", "--data", tmp_path / "in")
    theirs = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = load_scorer(source)
    symbols = tokenizer.encode(TEXT_OF_MASK.replace("<mask>", "wide")).split()
    at = symbols.index("▁wide")
    want = ["<mask>" if number == at else symbol for number, symbol in enumerate(symbols)]
    assert theirs.convert_ids_to_tokens(theirs(TEXT_OF_MASK)["input_ids"])[1:-1] == want
    ids, place = model.reader.ids_around(TEXT_OF_MASK, "<mask>")  # type: ignore[operator,union-attr]
    assert ids == theirs(TEXT_OF_MASK)["input_ids"][1:-1] and place == at
    texts = {text for text, _, _ in model.fill(TEXT_OF_MASK, 200)}  # type: ignore[union-attr]
    assert TEXT_OF_MASK.replace("<mask>", "wide") in texts


def test_a_saved_tokenizer_of_a_decoder_is_loaded_again_with_its_offsets(tmp_path: Path) -> None:
    folder = exported(saved(made("baseline"), tmp_path / "in", MODELS["baseline"]), tmp_path / "hf")
    for auto in (transformers.AutoTokenizer, transformers.AutoProcessor):
        tokenizer = auto.from_pretrained(folder, trust_remote_code=True)
        tokenizer.save_pretrained(tmp_path / auto.__name__)
        again = auto.from_pretrained(tmp_path / auto.__name__, trust_remote_code=True)
        assert again("a  b\nc", return_offsets_mapping=True)["offset_mapping"] == [(0, 1), (3, 4), (4, 5), (5, 6)]


@pytest.mark.parametrize("name", ["gpt2", "byte"])
@pytest.mark.parametrize(("token_types", "separator"), [(None, None), (1, None), (2, None), (2, 2)])
def test_fast_tokenizers_give_the_ids_and_offsets_of_ours(
    name: str, token_types: int | None, separator: int | None, tmp_path: Path
) -> None:
    from fairseq.interop.hugging_face.exported import tokenization_fairseq

    tokenizer = Tokenizer(None, encodings()[name])
    dictionary = complete(tokenizer)
    if token_types is not None:
        dictionary.add_mask()
    files = tokenizer_files(tokenizer, dictionary, 100, token_types, separator)
    assert files.keys() == {"tokenizer.json", "tokenizer_config.json"}
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert fast.is_fast and fast.pad_token_id == dictionary.pad()
    dictionary.save(tmp_path / "dict.txt")
    (tmp_path / "vocab.txt").write_text("".join(f"{symbol}\n" for symbol in dictionary.symbols))
    tokenizer.save(tmp_path, dictionary.symbols)
    if token_types is None:
        ours = tokenization_fairseq.FairseqTokenizer(str(tmp_path / "dict.txt"), str(tmp_path / "tokenization.json"))
    else:
        names = {f"{role}_token": fast.special_tokens_map[f"{role}_token"] for role in ("bos", "eos", "unk", "pad")}
        paths = str(tmp_path / "vocab.txt"), str(tmp_path / "tokenization.json")
        ours = tokenization_fairseq.FairseqEncoderTokenizer(
            *paths,
            token_types,
            "</s>" if separator else None,
            **names,
            mask_token="<mask>",
            cls_token="<s>",
            sep_token="</s>",
        )
    texts = [TEXT, "", " a\t b\r\n\n  c<mask>", "e\u0301\u200d🙂🙂 世\u00a0界  "]
    for text in texts:
        for pair in (None, "the lower"):
            want, found = (each(text, pair, return_offsets_mapping=True) for each in (ours, fast))
            if separator and pair:
                first = [*fast(text)["input_ids"], *fast(pair)["input_ids"][1:]]
                assert [id for id in found["input_ids"] if id != 2] == [id for id in first if id != 2]
                assert found["input_ids"].count(2) == first.count(2) + 1
            assert {key: found[key] for key in want} == dict(want), (text, pair)
    assert fast(texts, padding=True)["input_ids"] == ours(texts, padding=True)["input_ids"]
    if token_types is not None:  # the blank before a masked word is part of the word
        assert fast("the <mask> low")["input_ids"] == fast("the<mask> low")["input_ids"]
    for text in (texts[1], texts[3]):
        assert fast.decode(fast(text)["input_ids"], skip_special_tokens=True) == text


def test_a_tokenizer_whose_symbols_the_dictionary_lacks_is_exported_as_code(tmp_path: Path) -> None:
    tokenizer = Tokenizer(None, encodings()["byte"])
    dictionary = complete(tokenizer)
    del dictionary.symbols[-1]
    dictionary = Dictionary.of_listed(dictionary.symbols, {"eos": "</s>", "unk": "<unk>"})
    for other, words in ((tokenizer, dictionary), (Tokenizer(Moses(), tokenizer.subwords), complete(tokenizer))):
        assert "tokenization_fairseq.py" in tokenizer_files(other, words, 100)
