"""Tokenizers of imported models: the ids and texts of their libraries, in every way in and out."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import preprocessing
import pytest
import torch
from exports import exported, keep_code_in
from foreign_decoders import CASES, LLAMA, WORDS, byte_pieces, folder_of, random_model
from hypothesis import given, settings
from hypothesis import strategies as st
from subword_encodings import TEXT

from fairseq.config import options
from fairseq.data.indexed_dataset import IndexedCorpus
from fairseq.errors import UserError
from fairseq.hub import LanguageModel
from fairseq.interop.harness.requests import Requests
from fairseq.text.dictionary import Dictionary
from fairseq.text.text_corpus import TextReader
from fairseq_cli import import_model
from fairseq_cli.import_model import get_import_parser

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
KINDS = ("llama", "pythia", "sentencepiece")
PARTS = [
    "the",
    "cat",
    " ",
    "  ",
    "    ",
    "\n",
    "\r\n",
    "\r",
    "\t",
    "\xa0",
    "\u3000",
    "\u2028",
    "世",
    "🙂",
    "<unk>",
    ".",
]
TWO_LINES = "the  cat\nthe <unk> quick\r\n\u3000cat"


def imported(source: Path, out: Path, *more: str) -> Path:
    argv = [str(source), "--from", "hf", "--out", str(out), *more]
    import_model.main(options.parse_args_and_arch(get_import_parser(), argv))
    return out


def pieces() -> bytes:
    """A SentencePiece model with the structure of Llama's."""
    library, model = pytest.importorskip("sentencepiece"), io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()), model_writer=model, vocab_size=300, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
        user_defined_symbols=["\r", "\xa0", "\u3000"],
    )  # fmt: skip
    return model.getvalue()


def source(kind: str, folder: Path) -> tuple[Path, Any, Any]:
    """A folder of transformers, its model, and the library's function from a text to its ids."""
    if kind == "pythia":
        theirs, model = folder_of(folder, *CASES["pythia"])
    else:
        theirs, model = folder / "theirs", random_model("Llama", {**LLAMA, "bos_token_id": 1, "eos_token_id": 2})
        model.save_pretrained(theirs)
    if kind == "sentencepiece":
        (theirs / "tokenizer.model").write_bytes(pieces())
        library = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_proto=pieces())
        return theirs, model, library
    if kind == "llama":
        (theirs / "tokenizer.json").write_text(json.dumps(byte_pieces()))
    return theirs, model, tokenizers.Tokenizer.from_file(str(theirs / "tokenizer.json"))


def ids_of(library: Any, text: str) -> list[int]:
    encoding = library.encode(text)
    begin = [1] if encoding.__class__ is not list and encoding.ids[:1] == [1] else []
    return list(getattr(encoding, "ids", encoding))[len(begin) :]


def text_of(library: Any, ids: list[int]) -> str:
    return str(library.decode(ids) if isinstance(library.encode(""), list) else library.decode(ids, False))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[LanguageModel, Any, Any]]:
    made = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        theirs, model, library = source(kind, folder)
        made[kind] = LanguageModel.from_pretrained(imported(theirs, folder / "in")), model, library
    return made


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(text=st.lists(st.sampled_from(PARTS), max_size=8).map("".join))
def test_texts_have_the_ids_of_the_library_and_come_back_as_it_writes_them(
    kind: str, text: str, models: dict[str, tuple[LanguageModel, Any, Any]]
) -> None:
    ours, _, library = models[kind]
    ids = ids_of(library, text)
    assert ours.encode(text).tolist() == [*ids, ours.dictionary.eos()]
    assert ours.decode(ours.encode(text)) == text_of(library, ids)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_of_two_lines_has_the_probability_of_transformers(
    kind: str, models: dict[str, tuple[LanguageModel, Any, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    ours, model, library = models[kind]
    row = torch.tensor([[ours.dictionary.eos(), *ids_of(library, TWO_LINES), ours.dictionary.eos()]])
    lprobs = model(row).logits[0, :-1].log_softmax(-1).gather(-1, row[0, 1:, None])[:, 0]
    torch.testing.assert_close(ours.score(TWO_LINES)[1], lprobs, atol=1e-5, rtol=1e-5)
    with caplog.at_level("WARNING"):
        requests = Requests(ours)
    assert "vocabulary is closed" not in caplog.text
    [(found, _)] = requests.log_likelihoods([("", TWO_LINES)])
    assert found == pytest.approx(float(lprobs[:-1].double().sum()), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_an_imported_tokenizer_is_exported_with_its_ids(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_code_in(tmp_path / "modules", monkeypatch)
    theirs, _, library = source(kind, tmp_path)
    out = exported(imported(theirs, tmp_path / "in"), tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    text = TWO_LINES.replace("<unk> ", "")
    ids = tokenizer(text)["input_ids"]
    assert ids == ids_of(library, text) and tokenizer.decode(ids) == text_of(library, ids)
    assert (out / "tokenizer.json").exists() == (kind == "pythia")
    again = LanguageModel.from_pretrained(imported(out, tmp_path / "again"))
    assert again.encode(text).tolist()[:-1] == ids


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "sentencepiece"])
def test_texts_end_where_those_of_transformers_do(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_code_in(tmp_path / "modules", monkeypatch)
    theirs, model, library = source(kind, tmp_path)
    # The harness gives a context without `<s>`.
    prompts = [torch.tensor([[*begin, *ids_of(library, "the cat")]]) for begin in ([1], [])]
    # `</s>` becomes the most probable symbol after three others.
    before = [model.generate(prompt, do_sample=False, max_new_tokens=3, eos_token_id=None) for prompt in prompts]
    ends = [model.model(text).last_hidden_state[0, -1] for text in before]
    model.lm_head.weight[2] = 9 * sum(end / end.square().sum() * model.lm_head(end).max() for end in ends)
    model.save_pretrained(theirs)
    found, contextual = (model.generate(each, do_sample=False, max_new_tokens=9)[0].tolist() for each in prompts)
    assert found[-1] == contextual[-1] == 2 and max(len(found), len(contextual)) < prompts[0].size(1) + 8
    ours = LanguageModel.from_pretrained(imported(theirs, tmp_path / "in"))
    texts = ours.sample(["the cat", "cat"], 9, top_k=1)
    assert texts[0] == ours.decode(found[1:-1]) and texts[0] == ours.sample("the cat", 9, top_k=1)
    [more] = Requests(ours).generations([("the cat", {"max_gen_toks": 9})])
    assert "the cat" + more == ours.decode(contextual[:-1])
    out = exported(tmp_path / "in", tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert again.generate(prompts[0], do_sample=False, max_new_tokens=9)[0].tolist() == found
    tokenizer = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert Dictionary.load(imported(out, tmp_path / "again") / "dict.txt").stop() == 2


def test_rows_beyond_the_vocabulary_are_never_sampled(models: dict[str, tuple[LanguageModel, Any, Any]]) -> None:
    for ours, model, library in models.values():
        size = library.get_vocab_size() if hasattr(library, "get_vocab_size") else len(library)
        assert size < WORDS == len(ours.dictionary) == model.config.vocab_size
        assert set(range(size, WORDS)) <= set(ours.never_sampled)
        assert set(ours.never_sampled) - set(range(size, WORDS)) <= {ours.dictionary.unk()}


def test_prompts_and_preprocessed_lines_have_the_symbols_of_the_library(
    models: dict[str, tuple[LanguageModel, Any, Any]], tmp_path: Path
) -> None:
    for kind, (ours, _, library) in models.items():
        folder = tmp_path / kind
        folder.mkdir()
        ours.dictionary.save(folder / "dict.txt")
        (folder / "codes").write_bytes(ours.tokenizer.subwords.content)  # type: ignore[union-attr]
        lines = ["the  cat", "quick\u3000the", "cat.", "the <unk> cat"]
        preprocessing.run(
            folder / "data-bin", trainpref=preprocessing.text_file(folder, "\n".join(lines) + "\n", "train.txt"),
            srcdict=folder / "dict.txt", bpe="sentencepiece" if kind == "sentencepiece" else "hf",
            bpe_codes=folder / "codes",
        )  # fmt: skip
        reader = TextReader.of(folder / "data-bin", Dictionary.load(folder / "data-bin" / "dict.txt"))
        want = [ids_of(library, line) for line in lines]
        assert [reader(line).tolist() for line in lines] == want
        tokens = IndexedCorpus(str(folder / "data-bin" / "train")).tokens.tolist()
        assert tokens == [index for line in want for index in [*line, ours.dictionary.eos()]]


@pytest.mark.parametrize("name", ["spiece.model", "tokenizer.model.v3"])
def test_a_tokenizer_that_is_not_read_is_an_error_unless_it_is_left_out(name: str, tmp_path: Path) -> None:
    theirs, _ = folder_of(tmp_path, *CASES["pythia"])
    (theirs / "tokenizer.json").unlink()
    (theirs / name).write_bytes(pieces())
    with pytest.raises(UserError, match=rf"{name}: a tokenizer that is not read; save it as tokenizer.json"):
        imported(theirs, tmp_path / "in")
    assert not (tmp_path / "in").exists()
    ours = LanguageModel.from_pretrained(imported(theirs, tmp_path / "in", "--no-tokenizer"))
    assert ours.tokenizer is None and ours.dictionary.symbols[:2] == ["token0", "token1"]
