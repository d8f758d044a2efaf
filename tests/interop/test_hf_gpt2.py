"""GPT-2 from Hugging Face folders: the numbers of transformers, its tokens, one-line errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from subword_encodings import MERGES

from fairseq.config import options
from fairseq.errors import UserError
from fairseq.hub import LanguageModel
from fairseq.text import raw_text
from fairseq.text.raw_text import TextFormat
from fairseq.text.text_corpus import TextReader
from fairseq.text.tokenizers.hf import GPT2
from fairseq_cli import export_model, import_model
from fairseq_cli.export_model import get_export_parser
from fairseq_cli.import_model import get_import_parser

SIZES = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 12}
END = "<|endoftext|>"


def symbols() -> list[str]:
    return [*GPT2(MERGES)._symbols, END]


def folder_of(tmp_path: Path, **settings: Any) -> tuple[Path, Any]:
    """A folder that transformers wrote, and its model."""
    transformers = pytest.importorskip("transformers")
    words = symbols()
    config = transformers.GPT2Config(**SIZES, vocab_size=len(words) + 2, eos_token_id=len(words) - 1, **settings)
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    folder = tmp_path / "gpt2"
    model.save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
    (folder / "merges.txt").write_bytes(MERGES)
    return folder, model


def imported(source: Path, out: Path) -> Path:
    argv = [str(source), "--from", "hf", "--out", str(out)]
    import_model.main(options.parse_args_and_arch(get_import_parser(), argv))
    return out


@torch.no_grad()
@pytest.mark.parametrize("settings", [{}, {"activation_function": "relu", "n_inner": 24, "tie_word_embeddings": False}])
def test_gpt2_gives_the_numbers_of_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    folder, model = folder_of(tmp_path, **settings)
    ours = LanguageModel.from_pretrained(imported(folder, tmp_path / "in"))
    text = torch.randint(0, len(ours.dictionary), (3, 12), generator=torch.Generator().manual_seed(2))
    lprobs = ours.model.output_layer.log_probs(ours.model(text)[0])  # type: ignore[union-attr]
    torch.testing.assert_close(lprobs, model(text).logits.log_softmax(-1), atol=1e-5, rtol=1e-6)
    assert ours.dictionary.symbols[: len(symbols())] == symbols() and ours.dictionary[ours.dictionary.eos()] == END


@torch.no_grad()
def test_gpt2_reads_raw_text_and_is_exported_again(tmp_path: Path) -> None:
    folder, model = folder_of(tmp_path)
    from fairseq.interop.hugging_face.exported.tokenization_fairseq import FairseqTokenizer

    source = imported(folder, tmp_path / "in")
    tokens, lprobs = LanguageModel.from_pretrained(source).score("the low lot")
    assert tokens == ["th", "e", "Ġlow", "Ġ", "lo", "t", END]
    ids = torch.tensor([[symbols().index(token) for token in [END, *tokens]]])
    want = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[0, :, 0]
    torch.testing.assert_close(lprobs, want, atol=1e-5, rtol=1e-6)
    argv = [str(source / "checkpoint.pt"), "--to", "hf", "--out", str(tmp_path / "again")]
    export_model.main(options.parse_args_and_arch(get_export_parser(), argv))
    again = FairseqTokenizer(str(tmp_path / "again" / "dict.txt"), str(tmp_path / "again" / "tokenization.json"), True)
    found = again("the low\nlot")["input_ids"]
    assert [again.symbols[index] for index in found] == ["th", "e", "Ġlow", "Ċ", "lo", "t"]
    assert again.decode(found) == "the low\nlot"
    fast = pytest.importorskip("transformers").PreTrainedTokenizerFast.from_pretrained(tmp_path / "again")
    assert fast("the low\nlot")["input_ids"] == found and fast.decode(found) == "the low\nlot"


def test_gpt2_reads_the_line_feeds_of_a_file_as_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LanguageModel.from_pretrained(imported(folder_of(tmp_path)[0], tmp_path / "in"))
    text = "the low\n\n lower lot\nthe newest river\n"
    path, rows = tmp_path / "text.txt", tmp_path / "text.jsonl"
    path.write_text(text)
    rows.write_text("".join(json.dumps({"text": row}) + "\n" for row in ("the low\nlot", "lot")))
    for name in ("LONGEST_LINE", "BLOCK_BYTES"):
        monkeypatch.setattr(raw_text, name, 10)

    def shown(source: Path, form: TextFormat, documents: bool) -> tuple[str, list[int], int]:
        corpus = TextReader.of(tmp_path / "in", model.dictionary).read(str(source), form, documents)
        assert corpus.counts is not None
        words = "".join(model.dictionary[token] for token in corpus.tokens)
        return words.replace("Ġ", " ").replace(END, "|"), corpus.sizes.tolist(), corpus.counts.bytes

    whole = "the lowĊĊ lower lotĊthe newest river|"
    tokens = model.score(text.removesuffix("\n"))[0]
    assert shown(path, TextFormat(), False) == (whole, [len(tokens)], len(text))
    lines, sizes, size = shown(path, TextFormat(), True)  # each line is a document of its own
    assert lines == whole.replace("Ċ", "|") and len(sizes) == 4 and size == len(text)
    corpus = TextReader.of(tmp_path / "in", model.dictionary).read(str(path), TextFormat(), lines_apart=True)
    assert len(corpus.sizes) == 4
    path.write_text("\n\n")
    with pytest.raises(UserError, match="the text is empty"):
        shown(path, TextFormat(), False)
    both, sizes, _ = shown(rows, TextFormat("text"), True)
    assert both == "the lowĊlot|lot|" and len(sizes) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True; only False"),
        ({"activation_function": "mish"}, "activation_function is 'mish'; known: gelu"),
        ({"n_layer": 3}, "h.2.* is missing"),
        ({"n_layer": "many"}, "n_layer is 'many'; expected a positive whole number"),
        ({"n_embd": 32}, "the configuration says"),
        ({"eos_token_id": 10**6}, "eos_token_id is 1000000"),
        ({"resid_pdrop": 2}, "resid_pdrop is 2"),
    ],
)
def test_other_gpt2_folders_are_refused_in_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UserError, match=message) as error:
        imported(folder, tmp_path / "in")
    assert "\n" not in str(error.value) and not (tmp_path / "in").exists()
