"""fairseq-preprocess on raw text: complete folders, the same bytes for any number of processes,
one-line errors."""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mistakes import user_error

from fairseq import preprocessing
from fairseq.data.indexed_dataset import IndexedCorpus
from fairseq.errors import UserError
from fairseq.interop.hugging_face.tokenizer_files import fast_tokenizer
from fairseq.notes.spans import NoteSpans
from fairseq.text import raw_text
from fairseq.text.dictionary import Dictionary
from fairseq.text.tokenizers import Tokenizer, find_tokenizer
from fairseq.text.tokenizers.subword_nmt import SubwordNMT
from fairseq_cli import preprocess

PIECES = ["the", "lower", "riverbed", "don't", "well-known", "Mr. Smith", '"Yes,"', "3,000", "ñandú", "(newest)"]
KINDS = {
    "moses": {"tokenizer": "moses"},
    "space": {"tokenizer": "space"},
    "subword_nmt": {"tokenizer": "moses", "bpe": "subword_nmt", "learn_bpe": 30},
    "subword_nmt_alone": {"bpe": "subword_nmt", "learn_bpe": 30},
    "sentencepiece": {"bpe": "sentencepiece", "learn_bpe": 38},
    "gpt2": {"bpe": "gpt2"},
    "hf": {"tokenizer": "moses", "bpe": "hf"},
    "hf_learned": {"bpe": "hf", "learn_bpe": 300},
}


def text_file(folder: Path, lines: int = 60, name: str = "text.txt", seed: int = 0) -> str:
    rng = np.random.RandomState(seed)
    found = [" ".join(rng.choice(PIECES, rng.randint(0, 9))) for _ in range(lines)]
    (folder / name).write_text("\n".join(["the lower", *found]) + "\n", encoding="utf-8")
    return str(folder / name)


def run(destdir: Path, **flags: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preprocessing, "useful_workers", lambda workers, sources: workers)
        preprocess.main(argparse.Namespace(only_source=True, destdir=str(destdir), **flags))


def settings_of(kind: str, folder: Path) -> dict[str, Any]:
    """The flags of a kind, with its codes where they are not learned."""
    flags: dict[str, Any] = dict(KINDS[kind])
    if kind == "gpt2":
        pytest.importorskip("tokenizers")
        (folder / "merges.txt").write_text("#version: 0.2\nt h\nth e\nĠ the\n", encoding="utf-8")
        flags["bpe_codes"] = str(folder / "merges.txt")
    elif kind == "hf":
        library = pytest.importorskip("tokenizers")
        tokenizer = library.Tokenizer(library.models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
        tokenizer.decoder = library.decoders.WordPiece()
        trainer = library.trainers.WordPieceTrainer(vocab_size=70, special_tokens=["[UNK]"], show_progress=False)
        tokenizer.train_from_iterator([*PIECES, "@-@", ","], trainer)
        tokenizer.save(str(folder / "tokenizer.json"))
        flags["bpe_codes"] = str(folder / "tokenizer.json")
    elif kind == "sentencepiece":
        pytest.importorskip("sentencepiece")
    return flags


def files(folder: Path) -> dict[str, bytes]:
    """The content of the files of *folder*, but for their checksums."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.name not in ("checksums.txt", "preprocess.log")
    }


def lines_of(folder: Path, split: str = "train") -> list[list[str]]:
    """The symbols of each line of a corpus."""
    dictionary = Dictionary.load(folder / "dict.txt")
    corpus = IndexedCorpus(str(folder / split))
    symbols = [dictionary[token] for token in corpus.tokens]
    ends = np.cumsum(corpus.sizes)
    return [symbols[end - size : end - 1] for end, size in zip(ends, corpus.sizes, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_complete_and_its_text_comes_back(kind: str, tmp_path: Path) -> None:
    path = text_file(tmp_path)
    flags = settings_of(kind, tmp_path)
    run(tmp_path / "out", trainpref=path, validpref=path, **flags)
    if "bpe_codes" in flags:
        Path(flags["bpe_codes"]).unlink()
    tokenizer = find_tokenizer(tmp_path / "out", Dictionary.load(tmp_path / "out" / "dict.txt").symbols)
    assert tokenizer is not None
    raw = Path(path).read_text(encoding="utf-8").removesuffix("\n").split("\n")
    for symbols, line in zip(lines_of(tmp_path / "out", "valid"), raw, strict=True):
        assert symbols == tokenizer.encode(line).split()
        assert tokenizer.decode(symbols).split() == line.split()
    counts = json.loads((tmp_path / "out" / "valid.raw.json").read_text())
    size = Path(path).stat().st_size
    assert counts == {"bytes": size, "words": sum(len(line.split()) for line in raw), "lines": len(raw)}


def test_a_learned_byte_level_dictionary_is_complete(tmp_path: Path) -> None:
    path = text_file(tmp_path)
    (tmp_path / "valid.txt").write_text("never seen: 世界 🙂 Ω\t\x00 ~\n", encoding="utf-8")
    run(tmp_path / "out", trainpref=path, validpref=str(tmp_path / "valid.txt"), bpe="hf", learn_bpe=300)
    dictionary = Dictionary.load(tmp_path / "out" / "dict.txt")
    tokenizer = find_tokenizer(tmp_path / "out", dictionary.symbols)
    assert tokenizer is not None and tokenizer.subwords is not None
    assert set(tokenizer.subwords.symbols) <= set(dictionary.symbols) and len(tokenizer.subwords.symbols) == 300
    assert "<unk>" not in lines_of(tmp_path / "out", "valid")[0]
    assert fast_tokenizer(tokenizer, dictionary, None) is not None


def test_any_number_of_processes_writes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, flags = text_file(tmp_path, 200), settings_of("subword_nmt", tmp_path)
    monkeypatch.setattr(raw_text, "BLOCK_BYTES", 500)
    for workers in (1, 2):
        run(tmp_path / str(workers), trainpref=path, workers=workers, **flags)
    assert files(tmp_path / "1") == files(tmp_path / "2")


@pytest.mark.parametrize("kind", KINDS)
def test_notes_are_of_the_words_before_subwords(kind: str, tmp_path: Path) -> None:
    path, flags = text_file(tmp_path), settings_of(kind, tmp_path)
    run(tmp_path / "out", trainpref=path, notes=True, note_min_count=1, note_max_count=10**6, **flags)
    dictionary = Dictionary.load(tmp_path / "out" / "dict.txt")
    tokenizer = find_tokenizer(tmp_path / "out", dictionary.symbols)
    assert tokenizer is not None
    words = [
        Tokenizer(tokenizer.words).encode(line).split() if tokenizer.words else line.split()
        for line in Path(path).read_text(encoding="utf-8").removesuffix("\n").split("\n")
    ]
    spans = NoteSpans(tmp_path / "out" / "train")
    expected = Counter(word for line in words for word in line)
    assert dict(zip(spans.notes.words, spans.notes.counts, strict=True)) == expected
    tokens = len(IndexedCorpus(str(tmp_path / "out" / "train")).tokens)
    found = spans.spans(np.array([0]), np.array([tokens]))
    assert [spans.notes.words[number] for number in found[:, 3]] == [word for line in words for word in line]


def test_compressed_text_and_json_lines_need_no_tokenizer(tmp_path: Path) -> None:
    import gzip

    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a b\nb\n"))
    (tmp_path / "b.jsonl").write_text('{"t": "b a\\nb"}\n')
    run(tmp_path / "out", trainpref=f"{tmp_path}/a.txt.gz,{tmp_path}/b.jsonl", text_field="t")
    assert lines_of(tmp_path / "out") == [["a", "b"], ["b"]]
    assert lines_of(tmp_path / "out", "train1") == [["b", "a"], ["b"]]
    assert sorted(files(tmp_path / "out")) == ["dict.txt", "train.bin", "train.idx", "train1.bin", "train1.idx"]


def test_hard_wrapped_lines_are_joined(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a b\nc\n\nd\n")
    run(tmp_path / "out", trainpref=str(tmp_path / "a.txt"), tokenizer="space", join_lines=True)
    assert lines_of(tmp_path / "out") == [["a", "b", "c"], ["d"]]


def test_a_dictionary_brings_its_tokenizer(tmp_path: Path) -> None:
    path = text_file(tmp_path)
    run(tmp_path / "first", trainpref=path, **KINDS["subword_nmt"])
    other = text_file(tmp_path, 20, "other.txt", seed=1)
    run(tmp_path / "second", srcdict=str(tmp_path / "first" / "dict.txt"), testpref=other)
    run(tmp_path / "whole", trainpref=path, testpref=other, **KINDS["subword_nmt"])
    assert lines_of(tmp_path / "second", "test") == lines_of(tmp_path / "whole", "test")
    assert files(tmp_path / "second")["tokenization.json"] == files(tmp_path / "first")["tokenization.json"]
    with user_error(r"--srcdict .*: has a tokenizer \(moses, subword_nmt\), which the flags differ"):
        run(tmp_path / "third", srcdict=str(tmp_path / "first" / "dict.txt"), testpref=other, tokenizer="moses")


def test_tokens_written_over_raw_text_leave_no_tokenizer_of_it(tmp_path: Path) -> None:
    path = text_file(tmp_path)
    run(tmp_path / "out", trainpref=path, validpref=path, tokenizer="moses")
    (tmp_path / "tokens.txt").write_text("some other words\n")
    tokens = str(tmp_path / "tokens.txt")
    run(tmp_path / "out", trainpref=tokens, validpref=tokens, overwrite=True)
    assert not {"tokenization.json", "valid.raw.json"} & files(tmp_path / "out").keys()


def test_parts_of_plug_ins_are_found_by_name(tmp_path: Path) -> None:
    with user_error("--tokenizer mose: no such word tokenizer; did you mean moses?"):
        run(tmp_path / "out", trainpref=text_file(tmp_path), tokenizer="mose")
    with user_error("--bpe subwordnmt: no such subword encoding; did you mean subword_nmt"):
        run(tmp_path / "out", trainpref=text_file(tmp_path), bpe="subwordnmt", learn_bpe=4)


CODES = SubwordNMT.learn({"".join(word): 2 for word in itertools.product("abcde", "fghij", "klmno")}, 120)
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "codes without kind": ({"bpe_codes": "x"}, "--bpe-codes: needs the kind"),
    "too few to learn": ({"learn_bpe": 9}, "--learn-bpe 9: byte-level symbols include 256 bytes"),
    "no codes": ({"bpe": "hf"}, "--bpe hf: give either --bpe-codes FILE, or --learn-bpe N"),
    "both": ({"bpe": "subword_nmt", "bpe_codes": "x", "learn_bpe": 4}, "give either --bpe-codes"),
    "missing": ({"bpe": "subword_nmt", "bpe_codes": "nowhere"}, "--bpe-codes nowhere: file not found"),
    "folder": ({"bpe": "subword_nmt", "bpe_codes": "."}, "--bpe-codes .: cannot be read"),
    "empty": ({"bpe": "subword_nmt", "bpe_codes": "EMPTY"}, "empty.txt: is empty"),
    "language": ({"tokenizer": "space", "moses_source_lang": "de"}, "--moses-source-lang: has an effect with"),
    "not learned": ({"bpe": "gpt2", "learn_bpe": 4}, "--learn-bpe: only hf, subword_nmt and sentencepiece"),
    "alphabet": ({"bpe": "subword_nmt", "bpe_codes": "CODES", "trainpref": "GREEK"}, "learned on another alphabet"),
    "encoding": ({"tokenizer": "moses", "trainpref": "LATIN"}, "latin.txt: line 2: 0xe9 is not UTF-8"),
    "blank": ({"tokenizer": "moses", "trainpref": "BLANK"}, "blank.txt: the text is empty"),
    "no text": ({"tokenizer": "moses", "trainpref": "EMPTY"}, "empty.txt: the text is empty"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line_and_leave_nothing(mistake: str, tmp_path: Path) -> None:
    made = {
        "EMPTY": ("empty.txt", b""), "CODES": ("codes", CODES), "BLANK": ("blank.txt", b"\n \n"),
        "GREEK": ("greek.txt", "ἄνδρα μοι ἔννεπε\n".encode()), "LATIN": ("latin.txt", b"good\ncaf\xe9\n"),
    }  # fmt: skip
    for name, content in made.values():
        (tmp_path / name).write_bytes(content)
    flags, message = MISTAKES[mistake]
    given = {key: str(tmp_path / made[value][0]) if value in made else value for key, value in flags.items()}
    with pytest.raises(UserError) as caught:
        run(tmp_path / "out", **{"trainpref": text_file(tmp_path), **given})
    assert message in caught.value.with_flags and "\n" not in caught.value.with_flags
    assert not (tmp_path / "out").exists()
