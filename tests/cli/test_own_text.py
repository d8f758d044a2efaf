"""Plain text through every command: preprocessed, trained on, evaluated, continued, and what was
written read again."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import noted
import numpy as np
import pytest
import runs
from mistakes import user_error

from fairseq.config import options
from fairseq.errors import UserError
from fairseq.hub import LanguageModel, load_model
from fairseq.text.tokenization import load_counts
from fairseq_cli import eval_lm, generate, interactive, preprocess
from fairseq_cli.eval_lm import get_eval_lm_parser
from fairseq_cli.generate import get_generation_parser
from fairseq_cli.interactive import get_interactive_generation_parser
from fairseq_cli.preprocess import get_preprocessing_parser

LINES = [
    "The old river isn't wide.",
    '"Don\'t go," said Mr. Smith, "it\'s a well-known river (of 1839)."',
    "The wide river is old: they don't go near it.",
]
TRAINING = f"{runs.SMALL} --arch transformer_lm_tiny --train-subset train --valid-subset valid --max-update 2"
TRAINING += " --adaptive-input-cutoff 12,24 --adaptive-softmax-cutoff 12,24"
KINDS = {
    "moses": ["--tokenizer", "moses", "--thresholdsrc", "2"],
    "subword_nmt": ["--tokenizer", "moses", "--bpe", "subword_nmt", "--learn-bpe", "20"],
    "sentencepiece": ["--bpe", "sentencepiece", "--learn-bpe", "45"],
}


def arguments(parser: Any, *words: Any) -> Any:
    return options.parse_args_and_arch(parser, [*map(str, words)])


def command(module: Any, parser: Any, folder: Path, *flags: Any) -> Any:
    words = [folder, "--path", folder / "checkpoint_last.pt", "--cpu", *flags]
    return module.main(arguments(parser, *words))


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A data folder of raw text and the folder of a checkpoint of a model trained on it."""
    if request.param == "sentencepiece":
        pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("own")
    (folder / "train.txt").write_text("\n".join(LINES * 30) + "\n")
    (folder / "valid.txt").write_text("\n".join([*LINES, "", "A novel zebra!", *LINES * 4]) + "\n")
    words = ["--only-source", "--destdir", folder / "data", *KINDS[request.param]]
    words += ["--trainpref", folder / "train.txt", "--validpref", folder / "valid.txt"]
    preprocess.main(arguments(get_preprocessing_parser(), *words))
    # Long enough to learn which symbols follow one another: side by side, others are read as <unk>.
    updates = 20 if request.param == "moses" else 80
    runs.train(folder / "model", TRAINING, f"--optimizer adam --lr 0.01 --max-update {updates}", data=folder / "data")
    return folder / "data", folder / "model"


def test_evaluation_writes_a_sample_that_can_be_evaluated(
    made: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, model = made
    parser, sample = get_eval_lm_parser(), tmp_path / "sample.txt"
    command(eval_lm, parser, model, "--text", model.parent / "valid.txt", "--sample", sample)
    written = sample.read_text()
    lm = LanguageModel.from_pretrained(model / "checkpoint_last.pt")
    assert written == lm.sample("", max_tokens=100, seed=1) + "\n" != "\n"
    assert capsys.readouterr().out.endswith(f"Sample, saved to {sample}:\n{written}")
    figures = command(eval_lm, parser, model, "--text", sample)
    assert figures["unknown_share"] < 0.1 and figures["bits_per_byte"] > 0
    with user_error("--sample .*: cannot be written"):
        command(eval_lm, parser, model, "--text", sample, "--sample", tmp_path)


def test_a_checkpoint_folder_is_complete(made: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    data, folder = made
    with caplog.at_level(logging.INFO):
        lm = LanguageModel.from_pretrained(folder)
    assert not caplog.records
    assert lm.tokenizer is not None
    text = "\n".join(LINES)
    tokens, lprobs = lm.score(text)
    lines = " ".join("\n" if token == "</s>" else token for token in tokens).split("\n")
    assert [lm.tokenizer.decode(line.split()) for line in lines[:3]] == LINES
    assert lm.perplexity(text) == pytest.approx(math.exp(-lprobs.double().mean()))
    both = LanguageModel.from_pretrained(folder, data)
    assert both.tokenizer == lm.tokenizer and both.perplexity(text) == lm.perplexity(text)


def test_what_is_sampled_is_raw_text_that_can_be_scored(made: tuple[Path, Path]) -> None:
    lm = LanguageModel.from_pretrained(made[1])
    text = lm.sample("\"Don't go", max_tokens=60, temperature=0.5, seed=1)
    tokens, _ = lm.score(text)
    assert text.startswith("\"Don't go") and "@@" not in text and "▁" not in text and "<unk>" not in text
    assert tokens.count("<unk>") < 0.1 * len(tokens), "but for symbols that a small model puts side by side"


def test_unknown_symbols_are_reported_as_a_share(made: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    lm = LanguageModel.from_pretrained(made[1])
    with caplog.at_level(logging.WARNING):
        tokens, _ = lm.score("The 世")
    [record] = caplog.records
    share = 100 * tokens.count("<unk>") / (len(tokens) - 1)
    assert f"{share:.3g} % of {len(tokens) - 1} tokens" in record.getMessage() and share > 0


def test_a_file_is_evaluated_as_the_split_made_of_it(
    made: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, folder = made
    parser = get_eval_lm_parser
    scores = tmp_path / "scores.npz"
    shutil.copy(folder / "checkpoint_last.pt", data)
    split = command(eval_lm, parser(), data, "--gen-subset", "valid", "--save-token-scores", scores)
    first = capsys.readouterr().out.splitlines()
    source = data.parent / "valid.txt"
    text = command(eval_lm, parser(), folder, "--text", source)
    second = capsys.readouterr().out.splitlines()
    assert first[1:-1] == second[1:-1]
    clocks = {"seconds", "tokens_per_second", "peak_rss_mb"}
    assert {k: v for k, v in split.items() if k not in clocks} == {k: v for k, v in text.items() if k not in clocks}
    content = source.read_text()
    with np.load(scores) as found:
        bits = -float(found["lprobs"].astype(np.float64).sum()) / math.log(2)
        known = found["tokens"] != 3
        others = math.exp(-found["lprobs"][known].astype(np.float64).mean())
    assert split["bits_per_byte"] == pytest.approx(bits / len(content.encode()))
    assert split["bits_per_raw_word"] == pytest.approx(bits / len(content.split()))
    assert split["unknown_share"] == pytest.approx(1 - known.mean()) and (known.mean() < 1 or "moses" not in str(data))
    assert split["perplexity_without_unknown"] == pytest.approx(others)
    assert f"{bits / len(content.encode()):.4f} bits per byte of {len(content.encode())}" in "\n".join(first)


def test_prompts_are_raw_text(made: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, folder = made
    (tmp_path / "prompts").write_text('"Don\'t go," said Mr. Smith\n')
    flags = ["--input", tmp_path / "prompts", "--sampling", "--max-new-tokens", 30, "--json"]
    command(interactive, get_interactive_generation_parser(), folder, *flags)
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == '"Don\'t go," said Mr. Smith'
    lm = LanguageModel.from_pretrained(folder)
    assert lm.tokenizer is not None
    command(interactive, get_interactive_generation_parser(), folder, *flags[:-1])
    assert capsys.readouterr().out == f"{found['text']}{found['continuation']}\n"


def test_hypotheses_are_symbols_and_plain_text(
    made: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = made
    (tmp_path / "prompts").write_text('"Don\'t go," said Mr. Smith\n')
    flags = ["--input", tmp_path / "prompts", "--results-format", "fairseq", "--max-len-b", 60]
    command(interactive, get_interactive_generation_parser(), folder, *flags)
    lines = dict(line.split("\t", 1) for line in capsys.readouterr().out.splitlines())
    (score, symbols), (same, plain) = lines["H-0"].split("\t"), lines["D-0"].split("\t")
    tokenizer = LanguageModel.from_pretrained(folder).tokenizer
    assert tokenizer is not None and symbols.startswith(lines["S-0"]) and same == score
    assert plain == tokenizer.decode(symbols.split())
    assert plain.startswith('"Don\'t go," said Mr. Smith')


def test_contexts_come_from_a_file_and_what_is_written_can_be_read_again(
    made: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, folder = made
    flags = ["--text", data.parent / "train.txt", "--context-tokens", 20, "--max-new-tokens", 40, "--sampling"]
    [passage] = command(generate, get_generation_parser(), folder, *flags)
    assert "train.txt" in capsys.readouterr().out
    written = passage.context.text + passage.continuation.text
    (tmp_path / "written.txt").write_text(written)
    figures = command(eval_lm, get_eval_lm_parser(), folder, "--text", tmp_path / "written.txt")
    assert figures["unknown_share"] < 0.1, "but for symbols that a small model puts side by side"
    assert figures["raw_bytes"] == len(written.encode()) + (not written.endswith("\n"))


def test_data_without_a_tokenizer_says_so_once_and_takes_tokens(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("gres shouth\n")
    flags = [runs.DATA, "--path", trained, "--text", tmp_path / "text.txt"]
    found = []
    for parser, command, more in (
        (get_eval_lm_parser(), eval_lm, ""),
        (get_generation_parser(), generate, "--context-tokens 1 --max-new-tokens 1"),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            found.append(command.main(arguments(parser, *flags, *more.split())))
        said = [record.getMessage() for record in caplog.records if "no tokenizer" in record.getMessage()]
        assert said == [f"no tokenizer next to {runs.DATA}/dict.txt: text is read as tokens between white space"]
    assert found[0]["tokens"] == 3 and "bits_per_byte" not in found[0]


def test_a_tokenizer_of_other_data_is_refused(made: tuple[Path, Path], tmp_path: Path) -> None:
    data, folder = made
    other = shutil.copytree(folder, tmp_path / "other")
    values = json.loads((other / "tokenization.json").read_text())
    (other / "tokenization.json").write_text(json.dumps({**values, "dictionary": "0" * 64}))
    with pytest.raises(UserError, match="tokenization.json: made for another dict.txt"):
        LanguageModel.from_pretrained(other)


def test_a_causal_model_reads_the_note_of_a_word_when_the_next_token_has_shown_its_end(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    (tmp_path / "train.txt").write_text("\n".join(LINES * 9) + "\n")
    words = ["--trainpref", tmp_path / "train.txt", "--destdir", tmp_path / "data", *KINDS["sentencepiece"]]
    words += ["--only-source", "--notes", "--note-min-count", 2, "--note-max-count", 99]
    preprocess.main(arguments(get_preprocessing_parser(), *words))
    runs.train(tmp_path / "model", TRAINING, "--notes --disable-validation", data=tmp_path / "data")
    model, task = load_model(tmp_path / "model/checkpoint_last.pt", tmp_path / "data", overrides={"keep_notes": True})
    sample = noted.examples(task).batch(np.arange(1))["net_input"]
    spans = sample["spans"][model.notes.taken[sample["spans"][:, 3]] > 0]
    rows = [(int(end), span[None]) for span in spans for _, first, end, _ in [span] if end - first > 1]
    rows = [(end, span) for end, span in rows if end < sample["src_tokens"].size(1)]
    assert rows, "words of several subwords, followed by another"
    plain = model(sample["src_tokens"])[0]
    for end, span in rows:
        differs = (model(sample["src_tokens"], spans=span)[0] != plain).any(-1)[0]
        assert not differs[:end].any() and differs[end]


def test_a_run_on_tokens_leaves_no_tokenizer_of_a_former_run(made: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(made[1], tmp_path / "model")
    for path in folder.glob("*.pt"):
        path.unlink()
    runs.train(folder, runs.SHORT, "--disable-validation")
    assert not (folder / "tokenization.json").exists()
    assert (folder / "dict.txt").read_bytes() == (runs.DATA / "dict.txt").read_bytes()


SIZES = [
    "",
    "{",
    "[1]",
    '{"bytes": 1}',
    '{"bytes": "a", "words": 1, "lines": 1}',
    '{"bytes": 1, "words": 0, "lines": 1}',
]


@pytest.mark.parametrize("content", SIZES)
def test_damaged_sizes_of_raw_text_are_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "valid.raw.json").write_text(content)
    with pytest.raises(UserError, match="valid.raw.json: damaged"):
        load_counts(tmp_path / "valid")
